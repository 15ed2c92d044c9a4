"""A recorded program: the operations that an unfolder called, and the nodes and values that they stand for.

An unfolder's calls are recorded as a *program*: a flat int32 array of operations over value ids, in order. Equal
programs are equal graphs. Which words an operation and an input have is said in ``WORDS`` and ``WORDS_OF_INPUT``, and
nowhere else: ``read_program`` reads them into a ``Draft`` for what compiles templates (``template.py``), ``operations``
(``program_operations.py``) one by one for all others; ``node_graphs.py`` knows those of graphs of nodes alone. A node,
a chain, a loop or a member of one is a *unit* there.

Operations (value ids count up from 0 in order of creation; an operation's outputs take the next ids)::

    EXTERNAL kind count                   count values that come with the request
    CONSTANT kind row                     one value in a permanent row
    NODE     cell_type input*             one node
    CHAIN    cell_type length input*      ``length`` steps, each reading the carried state of the one before
    LOOP     cell_type limit stop input*  steps until output ``stop`` is true, or ``limit`` of them
    MEMBER   cell_type limit stop left cell_type* input*
                                          one cell of a loop of several, its *body*: the ``left`` operations that
                                          follow are the body's others. One of them, or none, has an output that says
                                          stop. ``left`` below 0: there are no others; -left types follow, of each step
    RESULT   base stride count            count values are results
    RESULT_STEPS value limit              an output of a loop is a result, of every step
    RESULT_LAST value                     an output of a loop is a result, of the last step
    STATE kind start                      one value: a state of the request's session before the request. In a new
                                          session it is value ``start``, or zeros for -1
    PAGES kind page_size keeps            a growing state; ``keeps``: it is a state of the request's session
    KEEP value base stride count          STATE value ``value`` is after step k what value ``base + k * stride`` is.
                                          Count 0: what value ``base`` is, once the whole request is done
    TREE     leaf_type inner_type nodes leaves count read* read* value* parent*
                                          a NODE for each node of a tree, by arrays (``node_sets.py``)
    DAG      cell_type nodes sources count read* value* offset* source*
                                          a NODE for each node of an acyclic graph of one cell
    RESULTS  count value*                 a RESULT for each of these values

    input = FIXED value | STEP base stride | EACH count value* | CARRY base
          | LIST count value* | RANGE base stride count | NEXT base output | PAGED state | NOTHING 0
          | EMITTED value limit | SAME value | LAST base value | LEADS base stride count output

STEP gives the i-th step of a chain value ``base + i * stride``, EACH the i-th of the values listed. CARRY gives the
first step ``base`` and each later one the output that the input port is carried from. LIST and RANGE are for ragged
inputs: RANGE is ``count`` values from ``base`` on. NEXT is as CARRY, for a cell that declares no carried input: from
output ``output``. EMITTED, for a ragged input, is a loop's output at every step that it took, of at most ``limit``: a
RESULT_STEPS of it follows. PAGED is the PAGES operation of that number; NOTHING is for inputs that the scheduler fills.
SAME and LAST are outputs of the own body: SAME of an earlier member at the same step, LAST of any at the step before,
at the first step ``base``. LEADS is as NEXT, for a cell with spans: the first step of the loop reads ``count`` rows,
from value ``base`` on, and its outputs are those of the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import CellType, PortInfo
from cellrt.core.templates.sums import Sums, steps_of
from cellrt.native.jit import compiled, make_rows, making
from cellrt.native.row_types import Row, Rows, dtype_of, i4

OP_EXTERNAL, OP_CONSTANT, OP_NODE, OP_CHAIN, OP_LOOP, OP_RESULT, OP_RESULT_STEPS, OP_RESULT_LAST, OP_STATE, OP_KEEP = (
    range(1, 11)
)
OP_PAGES, OP_MEMBER = 11, 12
NUM_OPS = 13
OP_TREE, OP_DAG, OP_RESULTS = 13, 14, 15
"""Many NODEs or RESULTs each: who reads a program has them written out first."""
FIXED, STEP, CARRY, LIST = range(4)
RANGE, EACH, NEXT, PAGED, NOTHING, EMITTED, SAME, LAST, LEADS = range(5, 14)  # 4 is ``node_sets.PICK``
NUM_MODES = 14

UNIT, SOURCE, RESULT, KEEP, PAGES = range(5)
"""The kinds of operations, each with a table of a draft; UNIT and SOURCE make values, a source without a cell."""

WORDS: Mapping[int, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        OP_EXTERNAL: (SOURCE, ("kind", "length")),
        OP_CONSTANT: (SOURCE, ("kind", "row")),
        OP_NODE: (UNIT, ("cell_type",)),
        OP_CHAIN: (UNIT, ("cell_type", "length")),
        OP_LOOP: (UNIT, ("cell_type", "length", "stop")),
        OP_MEMBER: (UNIT, ("cell_type", "length", "stop", "left")),
        OP_RESULT: (RESULT, ("first", "stride", "length")),
        OP_RESULT_STEPS: (RESULT, ("first", "length")),
        OP_RESULT_LAST: (RESULT, ("first",)),
        OP_STATE: (SOURCE, ("kind", "start")),
        OP_PAGES: (PAGES, ("kind", "page_size", "keeps")),
        OP_KEEP: (KEEP, ("state", "first", "stride", "length")),
    }
)
"""The kind of each operation, and its words after the number, by the names of ``Operation``."""
WORDS_OF_INPUT: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        FIXED: ("first",),
        STEP: ("first", "stride"),
        EACH: ("count",),
        CARRY: ("first",),
        LIST: ("count",),
        RANGE: ("first", "stride", "count"),
        NEXT: ("first", "output"),
        PAGED: ("state",),
        NOTHING: ("unused",),
        EMITTED: ("value", "count"),
        SAME: ("value",),
        LAST: ("first", "value"),
        LEADS: ("first", "stride", "count", "output"),
    }
)
"""The words of an input after its mode, by the names of ``Input``; the values of LIST and EACH come after these."""


def read_only(program: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a program that may not be written to, as one that comes as bytes may not.

    Numba compiles anew for each kind of array, and every function that reads programs is compiled for this one alone.
    """
    if program.flags.writeable:
        program = program.view()
        program.flags.writeable = False
    return program


class OperationRow(Row):
    """An operation in a draft, by the names of ``Operation``."""

    op: i4
    cell_type: i4
    length: i4
    stop: i4
    left: i4
    kind: i4
    row: i4
    start: i4
    page_size: i4
    keeps: i4
    first: i4
    stride: i4
    state: i4
    value: i4
    input: i4  # its first in ``Draft.inputs``
    layer: i4  # its first in ``Draft.layers``


class InputRow(Row):
    """An input in a draft, by the names of ``Input``."""

    mode: i4
    first: i4
    stride: i4
    count: i4
    output: i4
    state: i4
    value: i4
    listed: i4  # the first in ``Draft.listed``, or -1
    is_whole: i4  # 1 if it names steps of one sequence (``uses.py``)


OPERATION, INPUT = dtype_of(OperationRow), dtype_of(InputRow)


def _columns(words: Iterable[tuple[int, tuple[str, ...]]], size: int, dtype: np.dtype[np.void]) -> NDArray[np.int64]:
    """Return ``[size, 1 + most words]``: the number of words, then the place of each in a row, -1 without one."""
    names, columns = dtype.names or (), np.full((size, 6), -1, np.int64)
    for number, row in words:
        columns[number, 0] = len(row)
        columns[number, 1 : 1 + len(row)] = [names.index(name) if name in names else -1 for name in row]
    return columns


OPERATION_WORDS, INPUT_WORDS = OPERATION.itemsize // 4, INPUT.itemsize // 4
COLUMNS = _columns(((op, names) for op, (_, names) in WORDS.items()), NUM_OPS, OPERATION)
INPUT_COLUMNS = _columns(WORDS_OF_INPUT.items(), NUM_MODES, INPUT)
TABLES = np.array([WORDS[op][0] if op in WORDS else -1 for op in range(NUM_OPS)])
NUM_TABLES = 5
COUNT, LENGTH = list(INPUT.names or ()).index("count"), list(OPERATION.names or ()).index("length")
LEFT = 1 + WORDS[OP_MEMBER][1].index("left")


class Draft(NamedTuple):
    """A program by operation, with its cell types; the operations of a table are in order of creation.

    Tables are of OPERATION and INPUT. A length in them is a number, or -1 minus the number of a length (``sums.py``).
    """

    types: Rows[CellType]
    ports: Rows[PortInfo]
    units: Rows[OperationRow]
    sources: Rows[OperationRow]
    results: Rows[OperationRow]
    keeps: Rows[OperationRow]
    pages: Rows[OperationRow]
    inputs: Rows[InputRow]
    listed: NDArray[np.int32]  # values
    layers: NDArray[np.int32]  # cell types
    makers: NDArray[np.int32]  # of each value: its unit, or -1 - its source
    lengths: NDArray[np.int64]  # sums, of each unit: steps; a loop's at most with those that lead it; 0 for a node
    sums: Sums


@compiled
def _num_others(program: NDArray[np.int32], at: int) -> int:
    """Return how many layers the operation at ``at`` has."""
    return max(0, -program[at + LEFT]) if program[at] == OP_MEMBER else 0


@compiled
def _num_listed(program: NDArray[np.int32], at: int) -> int:
    """Return how many values the input at ``at`` lists."""
    return program[at + 1] if program[at] in (LIST, EACH) else 0


@compiled
def end_of(program: NDArray[np.int32], at: int, types: Rows[CellType]) -> int:
    """Return where the operation at ``at`` ends; it is no TREE, DAG or RESULTS."""
    op = program[at]
    num_ports = types[program[at + 1]].num_inputs if TABLES[op] == UNIT else 0
    at += 1 + COLUMNS[op, 0] + _num_others(program, at)
    for _ in range(num_ports):
        at += 1 + INPUT_COLUMNS[program[at], 0] + _num_listed(program, at)
    return int(at)


@compiled
def _count(program: NDArray[np.int32], types: Rows[CellType], counts: NDArray[np.int64]) -> tuple[int, int, int]:
    """Count the operations of each table; return how many inputs, listed values and layers there are."""
    at = num_inputs = num_listed = num_layers = 0
    while at < program.size:
        op, others = program[at], _num_others(program, at)
        counts[TABLES[op]] += 1
        num_layers += others
        num_ports = types[program[at + 1]].num_inputs if TABLES[op] == UNIT else 0
        at += 1 + COLUMNS[op, 0] + others
        for _ in range(num_ports):
            listed = _num_listed(program, at)
            at += 1 + INPUT_COLUMNS[program[at], 0] + listed
            num_listed += listed
        num_inputs += num_ports
    return num_inputs, num_listed, num_layers


@compiled
def _read(program: NDArray[np.int32], at: int, columns: NDArray[np.int64], rows: NDArray[np.int32], row: int) -> int:
    """Read the words of an operation or input at ``at`` into its row; return where they end."""
    number = program[at]
    rows[row] = number
    for k in range(1, columns[number, 0] + 1):
        if columns[number, k] >= 0:
            rows[row + columns[number, k]] = program[at + k]
    return int(at + 1 + columns[number, 0])


@compiled
def num_values(operation: OperationRow, types: Rows[CellType]) -> int:
    """Return how many values an operation makes."""
    if TABLES[operation.op] == SOURCE:
        return int(steps_of(operation.length))
    if TABLES[operation.op] != UNIT:
        return 0
    steps = steps_of(operation.length) if operation.op == OP_CHAIN else 1
    return int(types[operation.cell_type].num_outputs * steps)


@making
def find_makers(units: NDArray[np.void], sources: NDArray[np.void], types: Rows[CellType]) -> NDArray[np.int32]:
    """Return the maker of each value: a unit, or -1 - a source."""
    size = 0
    for k in range(-sources.size, units.size):
        size += num_values(units[k] if k >= 0 else sources[-1 - k], types)
    makers = np.empty(size, np.int32)
    for k in range(-sources.size, units.size):
        made = units[k] if k >= 0 else sources[-1 - k]
        for value in range(made.value, made.value + num_values(made, types)):
            makers[value] = k
    return makers


@making
def read_program(program: NDArray[np.int32], types: Rows[CellType], ports: Rows[PortInfo]) -> Draft:
    """Read a program without TREE, DAG and RESULTS into a draft, with the cell types and ports of the tables."""
    ends = np.zeros(NUM_TABLES, np.int64)
    num_inputs, num_listed, num_layers = _count(program, types, ends)
    operations, inputs = make_rows(ends.sum(), OPERATION), make_rows(num_inputs, INPUT)
    listed, layers = np.empty(num_listed, np.int32), np.empty(num_layers, np.int32)
    words, words_of_inputs = operations.view(np.int32), inputs.view(np.int32)
    words[:] = words_of_inputs[:] = -1
    words[LENGTH::OPERATION_WORDS] = words_of_inputs[COUNT::INPUT_WORDS] = 1
    ends = np.cumsum(ends)
    tables = ends.copy()
    ends[1:] = ends[:-1].copy()
    ends[0] = at = value = num_inputs = num_listed = num_layers = 0
    # Read the operations, each with its inputs, to the next row of its table.
    while at < program.size:
        table, others = TABLES[program[at]], _num_others(program, at)
        row = operations[ends[table]]
        at = _read(program, at, COLUMNS, words, OPERATION_WORDS * ends[table])
        ends[table] += 1
        row.value, row.input, row.layer = value if table <= SOURCE else -1, num_inputs, num_layers
        for k in range(others):
            layers[num_layers + k] = program[at + k]
        at, num_layers = at + others, num_layers + others
        for _ in range(types[row.cell_type].num_inputs if table == UNIT else 0):
            count, put = _num_listed(program, at), inputs[num_inputs]
            at = _read(program, at, INPUT_COLUMNS, words_of_inputs, INPUT_WORDS * num_inputs)
            if put.mode in (LIST, EACH):
                put.listed = num_listed
                for k in range(count):
                    listed[num_listed + k] = program[at + k]
                at, num_listed = at + count, num_listed + count
            elif put.mode == STEP:
                put.count = row.length
            elif put.count == 0:
                put.first = -1  # as it names no value
            num_inputs += 1
        value += num_values(row, types)
    units, sources = operations[: tables[0]], operations[tables[0] : tables[1]]
    results, keeps, pages = (
        operations[tables[1] : tables[2]],
        operations[tables[2] : tables[3]],
        operations[tables[3] : tables[4]],
    )
    makers, lengths = find_makers(units, sources, types), np.zeros(units.size, np.int64)
    sums = lengths[:0]
    return Draft(types, ports, units, sources, results, keeps, pages, inputs, listed, layers, makers, lengths, sums)


@compiled
def is_chain(draft: Draft, unit: int) -> bool:
    """Return whether a unit has steps whose number is known."""
    return draft.lengths[unit] > 0 and draft.units[unit].op not in (OP_LOOP, OP_MEMBER)


@compiled
def num_steps(draft: Draft, unit: int) -> int:
    """Return how many steps of a unit have values."""
    return steps_of(draft.units[unit].length) if draft.units[unit].op == OP_CHAIN else 1


@compiled
def num_named(given: InputRow) -> int:
    """Return how many values an input names that have ids."""
    return steps_of(given.count) if given.first >= 0 or given.listed >= 0 else 0


@compiled
def named(draft: Draft, given: InputRow, k: int) -> int:
    """Return value ``k`` of those that an input names."""
    return int(draft.listed[given.listed + k] if given.listed >= 0 else given.first + k * given.stride)


@compiled
def last_member(draft: Draft, unit: int) -> int:
    """Return the last unit of a unit's body, which ends when all of it does; for a unit outside of bodies, itself."""
    return int(unit + max(0, draft.units[unit].left))


@compiled
def is_behind_member(draft: Draft, unit: int) -> bool:
    """Return whether the unit before is a member of the same body."""
    return unit > 0 and last_member(draft, unit - 1) == last_member(draft, unit)
