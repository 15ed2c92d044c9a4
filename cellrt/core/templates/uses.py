"""The reads of a graph: which values get a row in the tables, which are read as sequences, what must be reserved.

A tensor of the request that a chain reads step by step is a *sequence*, and so is an output of a chain that another
chain or a ragged input reads whole: a run of places, one a step. Only an output that is read by itself is a value: so a
chain has no values for its steps, however many there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import BORROWED, EXTERNAL, MAX_READERS, NO_ROW, PERMANENT, STARTS, STEPS, VALUE, Value
from cellrt.core.templates.program import (
    EMITTED,
    LEADS,
    NOTHING,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_STEPS,
    PAGED,
    RANGE,
    STEP,
    Draft,
    OperationRow,
    is_chain,
    named,
    num_named,
    num_steps,
)
from cellrt.core.templates.sums import Sum, give_up, position_of, steps_of, sum_of, word_of
from cellrt.native.jit import compiled, make_rows, making
from cellrt.native.row_types import Rows

Ints = NDArray[np.int32]


class Uses(NamedTuple):
    """The reads of a program.

    Sequences are numbered: each source has one, then each output of each chain. Places and counts are sums.
    """

    rows: Ints  # of each value of the program: its row in ``values``, or -1
    values: Rows[Value]
    first_sequences: Ints  # of each unit: the sequence of its first output, -1 if it is no chain
    is_read: NDArray[np.uint8]  # of each sequence
    places: NDArray[np.int64]  # of each sequence: the place of its first step, or -1 if it is not read
    results: NDArray[np.int64]  # of each sequence: the place of its first step's result, or -1
    result_strides: Ints
    lists: NDArray[np.int64]  # [list, (kind, count)]: the lists in the places, results first
    externals: NDArray[np.int64]  # [tensor, (count, place or -1, first value or -1)]
    kept_unit: int  # the chain or loop whose state a session keeps step by step, or -1


@compiled
def is_inside(draft: Draft, base: int, stride: int, count: int) -> bool:
    """Return whether values are steps of one tensor of the request or of one output of a chain.

    They are the ``count`` values from ``base`` on, ``stride`` apart.
    """
    if count < 1:
        return False
    maker = draft.makers[base]
    if maker != draft.makers[base + (count - 1) * stride]:
        return False
    if maker < 0:
        return bool(draft.sources[-1 - maker].op == OP_EXTERNAL)
    return is_chain(draft, maker) and (
        count == 1 or stride % draft.types[draft.units[maker].cell_type].num_outputs == 0
    )


@compiled
def place_of(draft: Draft, first_sequences: Ints, value: int) -> tuple[int, Sum]:
    """Return the sequence of a value that is a step of one, and the position of its step."""
    maker = draft.makers[value]
    if maker < 0:
        source = draft.sources[-1 - maker]
        return -1 - maker, position_of(source.length, value - source.value)
    unit = draft.units[maker]
    num_outputs, at = draft.types[unit.cell_type].num_outputs, value - unit.value
    return first_sequences[maker] + at % num_outputs, position_of(unit.length, at // num_outputs)


@compiled
def _measure(draft: Draft) -> None:
    """Set the length of each unit, and mark the inputs that are steps of one sequence.

    A node with an input that is a whole sequence, a growing state or a span becomes a chain of one step.
    """
    for unit in range(draft.units.size):
        operation, is_record, lead = draft.units[unit], int(draft.units[unit].op != OP_NODE), 0
        for k in range(operation.input, operation.input + draft.types[operation.cell_type].num_inputs):
            given, count = draft.inputs[k], num_named(draft.inputs[k])
            is_run = given.mode in (STEP, RANGE, LEADS)
            given.is_whole = int(is_run and is_inside(draft, given.first, given.stride, count))
            is_record |= int(given.mode in (PAGED, NOTHING, EMITTED) or (given.mode == RANGE and given.is_whole > 0))
            if given.mode == LEADS:
                lead = sum_of(given.count) - 1
        draft.lengths[unit] = sum_of(operation.length) + lead if is_record > 0 else 0


@making
def _number_sequences(draft: Draft) -> tuple[Ints, int]:
    """Return the first sequence of each unit, and how many sequences there are."""
    first, count = np.full(draft.units.size, -1, np.int32), draft.sources.size
    for unit in range(first.size):
        if is_chain(draft, unit):
            first[unit] = count
            count += draft.types[draft.units[unit].cell_type].num_outputs
    return first, count


@compiled
def _mark_inputs(draft: Draft, uses: Uses, singles: NDArray[np.uint8]) -> None:
    """Mark the sequences and the single values that units read."""
    for at in range(draft.inputs.size):
        given = draft.inputs[at]
        if given.is_whole:
            uses.is_read[place_of(draft, uses.first_sequences, given.first)[0]] = 1
        else:
            for k in range(num_named(given)):
                singles[named(draft, given, k)] = 1


@compiled
def kind_of(draft: Draft, value: int) -> int:
    """Return the kind of an output's rows."""
    operation = draft.units[draft.makers[value]]
    cell_type = draft.types[operation.cell_type]
    output = (value - operation.value) % cell_type.num_outputs
    return int(draft.ports[cell_type.first_port + cell_type.num_inputs + output].kind)


@compiled
def _is_sequence(draft: Draft, result: OperationRow) -> bool:
    """Return whether a result is all steps of a chain of several, in order or backwards."""
    maker, count = draft.makers[result.first], steps_of(result.length)
    if result.op != OP_RESULT or count < 2 or sum_of(result.length) != draft.lengths[maker]:
        return False
    num_outputs = draft.types[draft.units[maker].cell_type].num_outputs
    return bool(abs(result.stride) == num_outputs and is_inside(draft, result.first, result.stride, count))


@compiled
def _place_results(draft: Draft, uses: Uses, singles: NDArray[np.uint8]) -> Sum:
    """Give each result its places; return how many there are. Each value of a result that is no sequence is single."""
    end = 0
    for k in range(draft.results.size):
        result, is_whole = draft.results[k], _is_sequence(draft, draft.results[k])
        if is_whole:
            sequence, position = place_of(draft, uses.first_sequences, result.first)
            is_whole = uses.results[sequence] < 0
            if is_whole:
                uses.result_strides[sequence] = 1 if result.stride > 0 else -1
                uses.results[sequence] = end - position * uses.result_strides[sequence]
        if not is_whole and result.op == OP_RESULT:
            if result.length < 0:
                give_up(draft.sums)
            for j in range(steps_of(result.length)):
                singles[result.first + j * result.stride] = 1
        uses.lists[k, 0], uses.lists[k, 1] = kind_of(draft, result.first), sum_of(result.length)
        end += uses.lists[k, 1]
    return end


@compiled
def _note_results(draft: Draft, uses: Uses) -> None:
    """Write to the values that are results their places."""
    place = sum_of(0)
    for k in range(draft.results.size):
        result, is_whole = draft.results[k], _is_sequence(draft, draft.results[k])
        if is_whole:
            sequence, position = place_of(draft, uses.first_sequences, result.first)
            is_whole = uses.results[sequence] == place + (position if result.stride < 0 else -position)
        for j in range(0 if is_whole else steps_of(result.length) if result.op == OP_RESULT else 1):
            value = uses.values[uses.rows[result.first + j * result.stride]]
            value.result = word_of(draft.sums, place + j)
            if result.op == OP_RESULT_STEPS:
                value.bits |= STEPS
        place += sum_of(result.length)


@compiled
def _mark_always(draft: Draft, uses: Uses, singles: NDArray[np.uint8]) -> None:
    """Mark the values that have a row however they are read.

    These are outputs of nodes and loops, constants and states. If any row of a tensor that is no sequence is marked,
    all of its rows are.
    """
    for k in range(draft.keeps.size):
        singles[value_after(draft.keeps[k])] = 1
    for unit in range(draft.units.size):
        if not is_chain(draft, unit):
            for k in range(draft.types[draft.units[unit].cell_type].num_outputs):
                singles[draft.units[unit].value + k] = 1
    for k in range(draft.sources.size):
        if draft.sources[k].start >= 0:
            singles[draft.sources[k].start] = 1
    for k in range(draft.sources.size):
        source, is_any = draft.sources[k], draft.sources[k].op != OP_EXTERNAL
        if not uses.is_read[k]:
            for value in range(source.value, source.value + steps_of(source.length)):
                is_any |= singles[value] > 0
            if is_any and source.length < 0:
                give_up(draft.sums)
            for value in range(source.value, source.value + steps_of(source.length)):
                singles[value] |= is_any


@making
def _make_values(draft: Draft, first: Ints, is_read: NDArray[np.uint8], rows: Ints) -> Rows[Any]:
    """Return the rows of ``values``."""
    values: Rows[Value] = make_rows(rows.max() + 1 if rows.size else 0, VALUE)
    for k in range(values.size):
        values[k].row, values[k].result = NO_ROW, -1
    for k in range(draft.sources.size):
        source = draft.sources[k]
        for at in range(source.value, source.value + steps_of(source.length)):
            if rows[at] >= 0:
                value = values[rows[at]]
                value.kind = source.kind
                if source.op == OP_EXTERNAL:
                    value.bits = EXTERNAL | (BORROWED if is_read[k] else 0)
                elif source.op == OP_CONSTANT:
                    value.row, value.bits = source.row, PERMANENT
                elif source.start >= 0:
                    value.row = STARTS - rows[source.start]
    for unit in range(draft.units.size):
        operation, cell_type = draft.units[unit], draft.types[draft.units[unit].cell_type]
        for k in range(num_steps(draft, unit) * cell_type.num_outputs):
            if rows[operation.value + k] >= 0:
                output, value = k % cell_type.num_outputs, values[rows[operation.value + k]]
                value.kind = draft.ports[cell_type.first_port + cell_type.num_inputs + output].kind
                if first[unit] >= 0 and is_read[first[unit] + output]:
                    value.bits = BORROWED
    return values


@compiled
def _read(values: Rows[Value], row: int) -> bool:
    """Count one reader; return False if there are too many."""
    if values[row].readers == MAX_READERS:
        return False
    values[row].readers += 1
    return True


@compiled
def _count_readers(draft: Draft, rows: Ints, values: Rows[Value]) -> bool:
    """Count the readers of each value; return False if one has too many.

    These are its reads by nodes, and each chain and loop that reads it, until that ends.
    """
    fits = True
    for at in range(draft.inputs.size):
        given = draft.inputs[at]
        for k in range(0 if given.is_whole else num_named(given)):
            fits &= _read(values, rows[named(draft, given, k)])
    return fits


@compiled
def _count_states(draft: Draft, rows: Ints, values: Rows[Value]) -> int:
    """Give every state a reader after the last. Return the unit that keeps its state step by step, or -1.

    States that several chains keep, or that are beside a growing one, are not kept before the request is done: their
    values before it stay until then (see ``session_state.py``).
    """
    kept = -2
    for k in range(draft.pages.size):
        if draft.pages[k].keeps > 0:  # the growing state goes back to its rows before the request, and so do all others
            kept = -1
    for k in range(draft.keeps.size):
        maker = draft.makers[draft.keeps[k].first]
        is_stepped = draft.keeps[k].length != 0 and maker >= 0 and draft.lengths[maker] > 0
        if not is_stepped or (kept != -2 and kept != maker):
            kept = -1
        elif kept == -2:
            kept = int(maker)
    for k in range(draft.sources.size):
        if draft.sources[k].start >= 0:
            _read(values, rows[draft.sources[k].start])
    for k in range(draft.keeps.size):
        after = rows[value_after(draft.keeps[k])]
        if kept < 0 or (values[after].readers > 0 and not is_chain(draft, kept)):
            _read(values, after)  # readers of a loop's last step must not free the state that the session goes on from
        _read(values, rows[draft.keeps[k].state])
    return int(kept) if kept > -1 else -1


@compiled
def value_after(keep: OperationRow) -> int:
    """Return the value that a state has after the request."""
    return int(keep.first + max(0, steps_of(keep.length) - 1) * keep.stride)


@compiled
def _place_sequences(draft: Draft, uses: Uses, at: Sum) -> int:
    """Give places to the sequences that are read, after those of the results; return the number of lists.

    A row of the request that is both a step and a value has its place as its row, until it has one.
    """
    num_lists = draft.results.size
    for k in range(draft.sources.size):
        if uses.is_read[k]:
            source = draft.sources[k]
            uses.places[k] = at
            for step in range(steps_of(source.length)):
                row = uses.rows[source.value + step]
                if row >= 0:
                    uses.values[row].row = word_of(draft.sums, at + position_of(source.length, step))
            uses.lists[num_lists, 0], uses.lists[num_lists, 1] = source.kind, sum_of(source.length)
            at, num_lists = at + sum_of(source.length), num_lists + 1
    for unit in range(draft.units.size):
        first, value = uses.first_sequences[unit], draft.units[unit].value
        for output in range(draft.types[draft.units[unit].cell_type].num_outputs if first >= 0 else 0):
            if uses.is_read[first + output]:
                uses.places[first + output] = at
                uses.lists[num_lists, 0] = kind_of(draft, value + output)
                uses.lists[num_lists, 1] = draft.lengths[unit]
                at, num_lists = at + draft.lengths[unit], num_lists + 1
    return num_lists


@making
def _list_externals(draft: Draft, uses: Uses) -> NDArray[np.int64]:
    externals, count = np.empty((draft.sources.size, 3), np.int64), 0
    for k in range(draft.sources.size):
        source = draft.sources[k]
        if source.op == OP_EXTERNAL:
            is_listed = source.length != 0 and uses.places[k] < 0
            externals[count, 0], externals[count, 1] = sum_of(source.length), uses.places[k]
            externals[count, 2] = uses.rows[source.value] if is_listed else -1
            count += 1
    return externals[:count]


@making
def find_uses(draft: Draft) -> tuple[Uses, bool]:
    """Find the readers of values and sequences.

    Return the uses, and whether no value has more than MAX_READERS readers.
    """
    _measure(draft)
    first, count = _number_sequences(draft)
    rows, singles = np.full(draft.makers.size, -1, np.int32), np.zeros(draft.makers.size, np.uint8)
    is_read, places = np.zeros(count, np.uint8), np.full(count, -1, np.int64)
    results, strides = np.full(count, -1, np.int64), np.zeros(count, np.int32)
    lists, externals = np.zeros((draft.results.size + count, 2), np.int64), np.zeros((0, 3), np.int64)
    uses = Uses(rows, make_rows(0, VALUE), first, is_read, places, results, strides, lists, externals, -1)
    _mark_inputs(draft, uses, singles)
    num_places = _place_results(draft, uses, singles)
    _mark_always(draft, uses, singles)
    count = 0
    for value in range(rows.size):
        if singles[value]:
            rows[value] = count
            count += 1
    values = _make_values(draft, first, is_read, rows)
    fits, kept = _count_readers(draft, rows, values), _count_states(draft, rows, values)
    found = Uses(rows, values, first, is_read, places, results, strides, lists, externals, kept)
    _note_results(draft, found)
    lists = lists[: _place_sequences(draft, found, num_places)]
    externals = _list_externals(draft, found)
    return Uses(rows, values, first, is_read, places, results, strides, lists, externals, kept), fits
