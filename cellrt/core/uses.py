"""Who reads what of a graph: which values get a row in the tables, which are read as sequences, what must be reserved.

A tensor of the request that a chain reads step by step, or an output of a chain that another chain or a ragged input
reads whole, is a *sequence*: a run of places, one a step. Only what is read by itself is a value: so a chain has none
for its steps, however many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import compiled, make_rows, making
from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LIST,
    NEXT,
    NOTHING,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_MEMBER,
    OP_RESULT,
    OP_RESULT_STEPS,
    OP_STATE,
    PAGED,
    RANGE,
    SAME,
    STEP,
    inputs_at,
    next_input,
)
from cellrt.core.tables import BORROWED, EXTERNAL, MAX_READERS, NO_ROW, PERMANENT, STARTS, STEPS, VALUE


class Uses(NamedTuple):
    """What is read of a program. Sequences are numbered: each source has one, then each output of each chain."""

    rows: NDArray[np.int32]  # of each value of the program: its row in ``values``, or -1
    values: NDArray[np.void]
    first_sequences: NDArray[np.int32]  # of each unit: the sequence of its first output, -1 if it is no chain
    places: NDArray[np.int32]  # of each sequence: the place of its first step, or -1 if it is not read
    results: NDArray[np.int32]  # of each sequence: the place of its first step's result, or -1
    result_strides: NDArray[np.int32]
    lists: NDArray[np.int32]  # [list, (kind, count)]: what lies in the places, results first
    num_lists: NDArray[np.int32]  # [1]
    externals: NDArray[np.int32]  # [tensor, (count, place or -1, first value or -1)]
    kept_unit: int  # the chain or loop whose state a session keeps step by step, or -1


@compiled
def is_chain(draft, program, unit):
    """Whether a unit has steps whose number is known."""
    return draft.unit_lengths[unit] > 0 and program[draft.unit_at[unit]] not in (OP_LOOP, OP_MEMBER)


@compiled
def is_inside(draft, program, types, base, stride, count):
    """Whether ``count`` values from ``base`` on are steps of one tensor of the request or of one output of a chain."""
    if count < 1:
        return False
    maker = draft.makers[base]
    if maker != draft.makers[base + (count - 1) * stride]:
        return False
    if maker < 0:
        return program[draft.source_at[-1 - maker]] == OP_EXTERNAL
    return is_chain(draft, program, maker) and (count == 1 or stride % types[draft.unit_types[maker]].num_outputs == 0)


@compiled
def place_of(draft, types, uses_first, value):
    """The sequence of a value that is a step of one, and the number of its step."""
    maker = draft.makers[value]
    if maker < 0:
        return -1 - maker, value - draft.source_values[-1 - maker]
    num_outputs = types[draft.unit_types[maker]].num_outputs
    at = value - draft.unit_values[maker]
    return uses_first[maker] + at % num_outputs, at // num_outputs


@compiled
def _make_records(draft, program, types):
    """Gives one step to each node with an input that is a whole sequence, a growing state or a span: it becomes a
    chain of one step."""
    for unit in range(draft.unit_at.size):
        at = inputs_at(program, draft.unit_at[unit])
        for _ in range(types[draft.unit_types[unit]].num_inputs):
            mode, is_read_whole = program[at], program[at] in (PAGED, NOTHING, EMITTED)
            if mode == RANGE:
                is_read_whole = is_inside(draft, program, types, program[at + 1], program[at + 2], program[at + 3])
            if is_read_whole and draft.unit_lengths[unit] == 0:
                draft.unit_lengths[unit] = 1
            at = next_input(program, at)


@making
def _number_sequences(draft, program, types):
    """The first sequence of each unit, and how many sequences there are."""
    first = np.full(draft.unit_at.size, -1, np.int32)
    count = draft.source_at.size
    for unit in range(first.size):
        if is_chain(draft, program, unit):
            first[unit] = count
            count += types[draft.unit_types[unit]].num_outputs
    return first, count


@compiled
def _mark_inputs(draft, program, types, first, is_read, singles):
    """Marks the sequences and the single values that units read."""
    for unit in range(draft.unit_at.size):
        at = inputs_at(program, draft.unit_at[unit])
        for _ in range(types[draft.unit_types[unit]].num_inputs):
            mode = program[at]
            if mode in (PAGED, NOTHING, EMITTED, SAME):
                pass
            elif mode in (FIXED, CARRY, NEXT, LAST):
                singles[program[at + 1]] = 1
            elif mode in (LIST, EACH):
                for k in range(program[at + 1]):
                    singles[program[at + 2 + k]] = 1
            else:
                base, stride = program[at + 1], program[at + 2]
                count = draft.unit_lengths[unit] if mode == STEP else program[at + 3]
                if is_inside(draft, program, types, base, stride, count):
                    is_read[place_of(draft, types, first, base)[0]] = 1
                else:
                    for k in range(count):
                        singles[base + k * stride] = 1
            at = next_input(program, at)


@compiled
def _mark_results(draft, program, types, ports, first, results, strides, singles, lists):
    """Gives each result its places; returns (places, lists)."""
    places = num_lists = 0
    for k in range(draft.results.size):
        at = draft.results[k]
        base, count = program[at + 1], 1
        maker = draft.makers[base]
        num_outputs = types[draft.unit_types[maker]].num_outputs
        if program[at] == OP_RESULT:
            stride, count = program[at + 2], program[at + 3]
            is_whole = is_inside(draft, program, types, base, stride, count) and abs(stride) == num_outputs
            if is_whole and count == draft.unit_lengths[maker] and count > 1:
                sequence, step = place_of(draft, types, first, base)
                is_whole = results[sequence] < 0
                if is_whole:
                    strides[sequence] = 1 if stride > 0 else -1
                    results[sequence] = places - step * strides[sequence]
            else:
                is_whole = False
            if not is_whole:
                for j in range(count):
                    singles[base + j * stride] = 1
        elif program[at] == OP_RESULT_STEPS:
            count = program[at + 2]
        cell_type = types[draft.unit_types[maker]]
        output = (base - draft.unit_values[maker]) % num_outputs
        lists[num_lists, 0] = ports[cell_type.first_port + cell_type.num_inputs + output].kind
        lists[num_lists, 1] = count
        places, num_lists = places + count, num_lists + 1
    return places, num_lists


@compiled
def _note_results(draft, program, types, first, results, rows, values):
    """Has the values that are results know their places."""
    place = 0
    for k in range(draft.results.size):
        at = draft.results[k]
        base, op, count = program[at + 1], program[at], 1
        if op == OP_RESULT:
            count = program[at + 3]
            is_whole = False
            if count > 1 and first[draft.makers[base]] >= 0:
                sequence, step = place_of(draft, types, first, base)
                is_whole = results[sequence] == place + (step if program[at + 2] < 0 else -step)
            for j in range(0 if is_whole else count):
                values[rows[base + j * program[at + 2]]].result = place + j
        else:
            count = program[at + 2] if op == OP_RESULT_STEPS else 1
            values[rows[base]].result = place
            values[rows[base]].bits |= STEPS if op == OP_RESULT_STEPS else 0
        place += count


@compiled
def _mark_always(draft, program, types, is_read, singles):
    """Marks what is a value whoever reads it: outputs of nodes and loops, constants, states; and of a tensor that is no
    sequence all rows if it is any."""
    for unit in range(draft.unit_at.size):
        if not is_chain(draft, program, unit):
            for k in range(types[draft.unit_types[unit]].num_outputs):
                singles[draft.unit_values[unit] + k] = 1
    for source in range(draft.source_at.size):
        at, value = draft.source_at[source], draft.source_values[source]
        if program[at] == OP_STATE and program[at + 2] >= 0:
            singles[program[at + 2]] = 1
    for source in range(draft.source_at.size):
        at, value = draft.source_at[source], draft.source_values[source]
        if program[at] != OP_EXTERNAL:
            singles[value] = 1
        elif not is_read[source]:
            is_any = False
            for k in range(program[at + 2]):
                is_any = is_any or singles[value + k] > 0
            for k in range(program[at + 2]):
                singles[value + k] |= is_any


@making
def _make_values(draft, program, types, ports, first_sequences, is_read, rows):
    """The rows of ``values``."""
    values = make_rows(max(0, rows.max() + 1) if rows.size else 0, VALUE)
    for k in range(values.size):
        values[k].row, values[k].result = NO_ROW, -1
    for source in range(draft.source_at.size):
        at, first = draft.source_at[source], draft.source_values[source]
        if program[at] == OP_EXTERNAL:
            for value in range(first, first + program[at + 2]):
                if rows[value] >= 0:
                    values[rows[value]].kind = program[at + 1]
                    values[rows[value]].bits = EXTERNAL | (BORROWED if is_read[source] else 0)
        else:
            value = values[rows[first]]
            value.kind = program[at + 1]
            if program[at] == OP_CONSTANT:
                value.row, value.bits = program[at + 2], PERMANENT
            elif program[at + 2] >= 0:
                value.row = STARTS - rows[program[at + 2]]
    for unit in range(draft.unit_at.size):
        cell_type, first = types[draft.unit_types[unit]], draft.unit_values[unit]
        count = draft.unit_lengths[unit] if is_chain(draft, program, unit) else 1
        for k in range(count * cell_type.num_outputs):
            if rows[first + k] >= 0:
                output = k % cell_type.num_outputs
                value = values[rows[first + k]]
                value.kind = ports[cell_type.first_port + cell_type.num_inputs + output].kind
                if first_sequences[unit] >= 0 and is_read[first_sequences[unit] + output]:
                    value.bits = BORROWED
    return values


@compiled
def _read(values, row):
    """Counts one reader; False if there are too many."""
    if values[row].readers == MAX_READERS:
        return False
    values[row].readers += 1
    return True


@compiled
def _count_readers(draft, program, types, rows, values):
    """Counts the readers of each value: its reads by nodes, and each chain and loop that reads it, until that is over.

    False if there are too many of one.
    """
    fits = True
    for unit in range(draft.unit_at.size):
        at = inputs_at(program, draft.unit_at[unit])
        for _ in range(types[draft.unit_types[unit]].num_inputs):
            mode = program[at]
            if mode in (PAGED, NOTHING, EMITTED, SAME):
                pass
            elif mode in (FIXED, CARRY, NEXT, LAST):
                fits &= _read(values, rows[program[at + 1]])
            elif mode in (LIST, EACH):
                for k in range(program[at + 1]):
                    fits &= _read(values, rows[program[at + 2 + k]])
            else:
                base, stride = program[at + 1], program[at + 2]
                count = draft.unit_lengths[unit] if mode == STEP else program[at + 3]
                if not is_inside(draft, program, types, base, stride, count):
                    for k in range(count):
                        fits &= _read(values, rows[base + k * stride])
            at = next_input(program, at)
    return fits


@compiled
def _count_states(draft, program, rows, values):
    """Gives every state a reader after the last. Returns the unit that keeps its state step by step, or -1.

    Of states that several chains keep, or beside one that grows, nothing is kept before the request is done: the values
    before it stay until then (see ``session_state.py``).
    """
    kept = np.int64(-2)
    for page in range(draft.pages.size):
        if program[draft.pages[page] + 3] > 0:  # what has grown goes back to what it was before, and so does all else
            kept = np.int64(-1)
    for k in range(draft.states.size):
        at = draft.states[k]
        maker = draft.makers[program[at + 2]]
        is_stepped = program[at + 4] > 0 and maker >= 0 and draft.unit_lengths[maker] > 0
        if not is_stepped or (kept != -2 and kept != maker):
            kept = np.int64(-1)
        elif kept == -2:
            kept = np.int64(maker)
    for source in range(draft.source_at.size):
        at = draft.source_at[source]
        if program[at] == OP_STATE and program[at + 2] >= 0:
            _read(values, rows[program[at + 2]])
    for k in range(draft.states.size):
        at = draft.states[k]
        after = rows[value_after(program, at)]
        if kept < 0 or (values[after].readers > 0 and not is_chain(draft, program, kept)):
            _read(values, after)  # who reads a loop's last step must not give back what the session goes on from
        _read(values, rows[program[at + 1]])
    return max(kept, -1)


@compiled
def value_after(program, keep_at):
    """The value that a state has after the request."""
    return program[keep_at + 2] + max(0, program[keep_at + 4] - 1) * program[keep_at + 3]


@compiled
def _place_sequences(draft, program, types, ports, first, is_read, places, lists, at, num_lists, rows, values):
    """Gives places to the sequences that are read, behind those of the results; returns the number of lists.

    A row of the request that is both a step and a value has its place as its row, until it has one.
    """
    for source in range(draft.source_at.size):
        if is_read[source]:
            places[source] = at
            for k in range(program[draft.source_at[source] + 2]):
                row = rows[draft.source_values[source] + k]
                if row >= 0:
                    values[row].row = at + k
            lists[num_lists, 0] = program[draft.source_at[source] + 1]
            lists[num_lists, 1] = program[draft.source_at[source] + 2]
            at, num_lists = at + program[draft.source_at[source] + 2], num_lists + 1
    for unit in range(draft.unit_at.size):
        if first[unit] < 0:
            continue
        cell_type = types[draft.unit_types[unit]]
        for output in range(cell_type.num_outputs):
            if is_read[first[unit] + output]:
                places[first[unit] + output] = at
                lists[num_lists, 0] = ports[cell_type.first_port + cell_type.num_inputs + output].kind
                lists[num_lists, 1] = draft.unit_lengths[unit]
                at, num_lists = at + draft.unit_lengths[unit], num_lists + 1
    return num_lists


@making
def _list_externals(draft, program, places, rows):
    externals = np.empty((draft.source_at.size, 3), np.int32)
    count = 0
    for source in range(draft.source_at.size):
        at = draft.source_at[source]
        if program[at] == OP_EXTERNAL:
            value = draft.source_values[source]
            row = rows[value] if program[at + 2] > 0 and places[source] < 0 else -1
            externals[count, 0], externals[count, 1], externals[count, 2] = program[at + 2], places[source], row
            count += 1
    return externals[:count].copy()


@making
def find_uses(draft, program, types, ports):
    """Finds who reads what. Returns (uses, whether no value has more than MAX_READERS readers)."""
    _make_records(draft, program, types)
    first, num_sequences = _number_sequences(draft, program, types)
    is_read, singles = np.zeros(num_sequences, np.uint8), np.zeros(draft.makers.size, np.uint8)
    results, strides = np.full(num_sequences, -1, np.int32), np.zeros(num_sequences, np.int32)
    places = np.full(num_sequences, -1, np.int32)
    lists = np.zeros((draft.results.size + num_sequences, 2), np.int32)
    _mark_inputs(draft, program, types, first, is_read, singles)
    num_places, num_lists = _mark_results(draft, program, types, ports, first, results, strides, singles, lists)
    for k in range(draft.states.size):
        singles[value_after(program, draft.states[k])] |= 2
    _mark_always(draft, program, types, is_read, singles)
    rows = np.full(draft.makers.size, -1, np.int32)
    count = 0
    for value in range(rows.size):
        if singles[value]:
            rows[value] = count
            count += 1
    values = _make_values(draft, program, types, ports, first, is_read, rows)
    fits = _count_readers(draft, program, types, rows, values)
    kept = _count_states(draft, program, rows, values)
    _note_results(draft, program, types, first, results, rows, values)
    num_lists = _place_sequences(
        draft, program, types, ports, first, is_read, places, lists, num_places, num_lists, rows, values
    )
    externals = _list_externals(draft, program, places, rows)
    counts = np.full(1, num_lists, np.int32)
    return Uses(rows, values, first, places, results, strides, lists, counts, externals, kept), fits
