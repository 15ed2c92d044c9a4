"""The shape of a task, in integers: all that its plan depends on.

A shape has the task's numbers of rows, steps and positions, rounded up where the form of its cell allows it, and for
each input and output the place and the number of its rows, rounded up, too. Numbers that are not rounded up are in the
shape as they are. Compiled code finds it, so that a task with new numbers costs the host little: its shape was there
before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import config, typeof
from numpy.typing import NDArray

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import MIXED
from cellrt.definition.cell import Cell
from cellrt.native.jit import compiled, short_entry
from cellrt.worker.span_rows import most_pages_of

LEAST_ROWS = 16
"""The least rows of a span: a kernel's programs have no fewer, so fewer cost it as much."""
MOST_TIMES = 4
"""The most rows of a padded ragged input of a plain form, as a multiple of its own; with more it is not padded."""

PLAIN, FUSED, SPANS, RUN, NODES, LOOP, RAGGED = range(7)
"""The ways to read a task.

PLAIN: for the plain form of its cell. FUSED: for a form that reads and writes arena rows, whose number the host knows.
SPANS: for such a form that reads their number on the device. RUN: a run, step by step in a plain or fused form. NODES:
for the plain form of a cell that gets the rows of each node. LOOP: a loop's, for a form that reads the number of rows
on the device. RAGGED: with ragged inputs, for a plain form, with padding nodes that have rows.
"""

# Rules: what a shape depends on besides the task; behind them the numbers of rows that the cell takes, if it names
# them, and for each input whether it has pages. MOST_ROWS: a row a node; MOST_IN_PIECES: of nodes with more of them.
FORM, PADS, MOST_ROWS, MOST_IN_PIECES, NUM_INPUTS, NUM_OUTPUTS, NUM_SIZES, RULES = range(8)

# A shape; behind it a record for each input, one for each output, and the rows of each step where they are as they are.
ROWS, STEPS, POSITIONS, IS_LOOP, STOP, IS_COMPUTED, NUM_NODES, HAS_FLAGS, SHAPE = range(9)
"""Numbers of a shape.

IS_COMPUTED: whether rows of an input lie at several places. NUM_NODES: of cells that get the rows of each node, else 0.
HAS_FLAGS: whether some rows are of loops that may have stopped in a task before.
"""
SHAPE_INPUT, SHAPE_OUTPUT = 3, 4


class InputShape(NamedTuple):
    """The place of an input's rows, their number with padding, and the number of offsets, or -1.

    ``num_rows`` is the most pages of a node for an input with pages, and -1 for a ragged one that cannot be padded.
    """

    source: int
    num_rows: int
    num_offsets: int


class OutputShape(NamedTuple):
    """The numbers of rows that are stored and shown, with padding.

    ``is_whole``: whether one is stored for each position (of a loop: row). ``every_step``: whether some row shows every
    step.
    """

    stores: int
    is_whole: bool
    results: int
    every_step: bool


class Shape(NamedTuple):
    """A shape by the names of its parts; ``sizes`` are those of the steps, where they are not rounded up."""

    rows: int
    steps: int
    positions: int
    is_loop: bool
    stop: int
    is_computed: bool
    nodes: int
    has_flags: bool
    inputs: list[InputShape]
    outputs: list[OutputShape]
    sizes: tuple[int, ...]


def rules_of(cell: Cell, form: int, pads: bool) -> NDArray[np.int64]:
    """Return the rules for tasks of a cell.

    Args:
        cell: the cell of the tasks.
        form: in which they run.
        pads: whether numbers are rounded up, else only as the cell requires. With ragged inputs that takes a form that
            reads the number of rows on the device, or one with padding nodes.
    """
    pads = pads and (form in (SPANS, LOOP, RAGGED) or not any(spec.ragged for spec in cell.inputs.values()))
    sizes, has_pages = list(cell.batch_sizes), [spec.page_size > 0 for spec in cell.inputs.values()]
    numbers = form, pads, cell.max_batch, cell.max_batch_rows, len(cell.inputs), len(cell.outputs), len(sizes)
    return np.array([*numbers, *sizes, *has_pages], np.int64)


def next_size(count: int) -> int:
    """Return the next of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: at most half more than ``count`` above 2."""
    return int(_next_size(count))


def shape_of(found: NDArray[np.int64], rules: NDArray[np.int64]) -> Shape:
    """Return the shape that ``find_shape`` wrote."""
    words: list[int] = found.tolist()
    ends = SHAPE, SHAPE + SHAPE_INPUT * int(rules[NUM_INPUTS])
    outputs_end = ends[1] + SHAPE_OUTPUT * int(rules[NUM_OUTPUTS])
    return Shape(
        words[ROWS],
        words[STEPS],
        words[POSITIONS],
        bool(words[IS_LOOP]),
        words[STOP],
        bool(words[IS_COMPUTED]),
        words[NUM_NODES],
        bool(words[HAS_FLAGS]),
        [InputShape(*words[at : at + SHAPE_INPUT]) for at in range(*ends, SHAPE_INPUT)],
        [_output_shape(*words[at : at + SHAPE_OUTPUT]) for at in range(ends[1], outputs_end, SHAPE_OUTPUT)],
        tuple(words[outputs_end:]),
    )


def _output_shape(stores: int, is_whole: int, results: int, every_step: int) -> OutputShape:
    return OutputShape(stores, bool(is_whole), results, bool(every_step))


@compiled
def _power_of_two(count):  # type: ignore[no-untyped-def]
    """Return the least power of two that is not below ``count``."""
    power = 1
    while power < count:
        power *= 2
    return power


@compiled
def _padded_size(count):  # type: ignore[no-untyped-def]
    power = _power_of_two(count)
    smaller = 3 * power // 4
    return smaller if power >= 4 and smaller >= count else power


@short_entry
def _next_size(count):  # type: ignore[no-untyped-def]
    return _padded_size(count)


@compiled
def _pad_rows(rules, rows):  # type: ignore[no-untyped-def]
    for k in range(rules[NUM_SIZES]):
        if rules[RULES + k] >= rows:
            return rules[RULES + k]
    return min(_padded_size(rows), max(rows, rules[MOST_ROWS])) if rules[PADS] else rows


@compiled
def _pad_pieces(rules, rows, nodes):  # type: ignore[no-untyped-def]
    """Return the numbers of rows and nodes with padding, where nodes have several rows each.

    Each padding node has a row, as no node has none, and no row is of no node.
    """
    further = min(_padded_size(nodes + 1), max(rules[MOST_ROWS], nodes)) - nodes
    if further == 0:
        return rows, nodes
    padded = min(_padded_size(rows + further), max(rules[MOST_IN_PIECES], rows))
    return padded, nodes + min(further, padded - rows)


@compiled
def _find_numbers(buffer, rules, shape):  # type: ignore[no-untyped-def]
    """Write the numbers of rows, steps and positions."""
    rows, steps, positions = buffer[layout.H_ROWS], buffer[layout.H_STEPS], buffer[layout.H_POSITIONS]
    is_packed, num_nodes = steps > 1 and buffer[layout.H_IS_LOOP] == 0, buffer[layout.H_NUM_SPANS]
    if (rules[FORM] == SPANS or rules[FORM] == LOOP) and rules[PADS]:
        rows = min(max(LEAST_ROWS, _power_of_two(rows)), max(rows, rules[MOST_ROWS]))
        steps = steps if rules[FORM] == LOOP else _padded_size(steps)
        positions = max(rows, _padded_size(positions) if is_packed else 0)
    elif rules[FORM] == NODES:
        if num_nodes == rows:
            num_nodes = rows = _pad_rows(rules, rows)
        elif rules[PADS]:
            rows, num_nodes = _pad_pieces(rules, rows, num_nodes)
        positions = rows
    elif rules[FORM] == RAGGED:
        rows = positions = _pad_rows(rules, rows + 1) if rows < rules[MOST_ROWS] else rows
    elif rules[FORM] == RUN:
        rows, steps, positions = _pad_rows(rules, rows), 0, _padded_size(positions)
    elif not is_packed:
        rows = positions = _pad_rows(rules, rows)
    shape[ROWS], shape[STEPS], shape[POSITIONS], shape[NUM_NODES] = rows, steps, positions, num_nodes


@compiled
def _count(rules, shape, count):  # type: ignore[no-untyped-def]
    """Return the padded number of rows that are stored or shown, where ``count`` are needed."""
    if count == 0 or not rules[PADS]:
        return count
    least = min(LEAST_ROWS, shape[POSITIONS]) if rules[FORM] == SPANS or rules[FORM] == LOOP else 0
    return max(least, _padded_size(count))


@compiled
def _pad_ragged(buffer, shape, offsets_at, count):  # type: ignore[no-untyped-def]
    """Return the rows of a ragged input of a plain form with those of padding nodes.

    Each padding node has as many as the last node, as its other inputs may require no fewer, and the last of them all
    that are left over. -1: the input would have too many, or there can be no padding node.
    """
    rows = buffer[layout.H_ROWS]
    further = shape[ROWS] - rows
    if further <= 0:
        return -1
    of_last = buffer[offsets_at + rows] - buffer[offsets_at + rows - 1]
    padded = max(LEAST_ROWS, _padded_size(count + further * of_last))
    return padded if padded <= max(LEAST_ROWS, MOST_TIMES * count) else -1


@compiled
def _find_input(buffer, rules, shape, number, at):  # type: ignore[no-untyped-def]
    record = layout.HEADER + layout.INPUT * number
    source, count, offsets_at = (
        buffer[record + layout.IN_SOURCE],
        buffer[record + layout.IN_COUNT],
        buffer[record + layout.IN_OFFSETS],
    )
    rows, padded, num_offsets = buffer[layout.H_ROWS], count, -1
    if rules[RULES + rules[NUM_SIZES] + number]:
        padded = _power_of_two(most_pages_of(buffer, number))
    elif offsets_at >= 0:
        num_offsets = buffer[record + layout.IN_ROWS] - offsets_at
        if num_offsets == rows + 1:
            num_offsets = shape[ROWS] + 1
        if rules[FORM] == RAGGED and count > 0:
            padded = _pad_ragged(buffer, shape, offsets_at, count)
        elif rules[PADS] and count > 0:
            padded = max(LEAST_ROWS, _padded_size(count))
    elif count == rows:
        padded = shape[ROWS]
    elif count == buffer[layout.H_POSITIONS]:
        padded = shape[POSITIONS]
    shape[at], shape[at + 1], shape[at + 2] = source, padded, num_offsets
    shape[IS_COMPUTED] |= source == MIXED


@compiled
def _find_output(buffer, rules, shape, record, at):  # type: ignore[no-untyped-def]
    stores, results = buffer[record + layout.OUT_STORES], buffer[record + layout.OUT_RESULTS]
    is_loop = buffer[layout.H_IS_LOOP] != 0
    is_whole = stores == buffer[layout.H_ROWS if is_loop else layout.H_POSITIONS]
    padded = 0
    if rules[FORM] == PLAIN or rules[FORM] == NODES or rules[FORM] == LOOP or rules[FORM] == RAGGED:
        padded = (shape[ROWS] if is_loop else shape[POSITIONS]) if is_whole else _count(rules, shape, stores)
    if rules[FORM] == RUN:
        padded, is_whole = stores > 0, False
    shape[at], shape[at + 1], shape[at + 2] = padded, is_whole, _count(rules, shape, results)
    shape[at + 3] = buffer[record + layout.OUT_RESULT_STEPS]


@short_entry
def find_shape(buffer, rules, shape):  # type: ignore[no-untyped-def]
    """Write a task's shape; return the number of its numbers. There must be room for all steps."""
    _find_numbers(buffer, rules, shape)
    shape[IS_LOOP], shape[STOP], shape[IS_COMPUTED] = buffer[layout.H_IS_LOOP], buffer[layout.H_STOP_OUTPUT], 0
    shape[HAS_FLAGS] = buffer[layout.H_FLAGS] > 0
    at = SHAPE
    for number in range(rules[NUM_INPUTS]):
        _find_input(buffer, rules, shape, number, at)
        at += SHAPE_INPUT
    record = layout.HEADER + layout.INPUT * rules[NUM_INPUTS]
    for _ in range(rules[NUM_OUTPUTS]):
        _find_output(buffer, rules, shape, record, at)
        record, at = record + layout.OUTPUT, at + SHAPE_OUTPUT
    is_exact = rules[FORM] != RUN and not (rules[FORM] == SPANS and rules[PADS])
    if buffer[layout.H_STEPS] > 1 and not shape[IS_LOOP] and is_exact:
        for step in range(buffer[layout.H_STEPS]):
            shape[at + step] = buffer[buffer[layout.H_BATCH_SIZES] + step]
        at += buffer[layout.H_STEPS]
    return at


def room_for(rules: NDArray[np.int64]) -> int:
    """Return the number of a shape's numbers, without the sizes of its steps."""
    return SHAPE + SHAPE_INPUT * int(rules[NUM_INPUTS]) + SHAPE_OUTPUT * int(rules[NUM_OUTPUTS])


def compile_shapes(buffer: NDArray[np.int32]) -> None:
    """Compile ``find_shape`` for buffers like this one, or load it."""
    numbers = np.zeros(1, np.int64)
    if not config.DISABLE_JIT:
        find_shape.compile(tuple(map(typeof, (buffer, numbers, numbers))))
