"""The index arrays of a task: which rows its inputs lie in, and which rows its outputs get.

Every input is written port by port, then every output; only then are the rows given back whose last reader this task
was, so that no row is read and written in one task. Until then they are noted at the far end of the task's buffer,
downwards: ``-1 - kind`` before the handles of each input.
"""

from __future__ import annotations

from cellrt.core import task_layout as layout
from cellrt.core.jit import compiled
from cellrt.core.rows import give_row, take_row
from cellrt.core.tables import (
    CARRIED,
    HOST,
    KEPT,
    LAST_ONLY,
    LOCATION_SHIFT,
    MIXED,
    NUM_PERMANENT,
    ROW_MASK,
    STARTS,
    STEPS,
)


@compiled
def write_inputs(t, task, base, end):
    """Writes all inputs from ``end`` on; returns (end of what it wrote, position of the last note of a free row)."""
    cell_type = t.types[task.cell_type]
    notes_at = base + t.settings[0].buffer_ints
    task.reads_late = 0
    follows_ragged = False
    for port in range(cell_type.num_inputs):
        info = t.ports[cell_type.first_port + port]
        notes_at -= 1
        t.ints[notes_at] = -1 - info.kind
        if task.is_loop:
            end, notes_at = _loop_input(t, task, base, port, end, notes_at)
        elif info.ragged or follows_ragged:
            end, notes_at = _ragged_input(t, task, base, port, end, notes_at)
        else:
            end, notes_at = _plain_input(t, task, base, port, end, notes_at)
        if info.carry >= 0 and task.steps > 1 and not task.is_loop:
            _read_inside(t, task, base, info.carry)
        follows_ragged = follows_ragged or info.ragged != 0
    return end, notes_at


@compiled
def give_noted_rows(t, notes_at, end, is_complete):
    """Gives back the rows that ``write_inputs`` noted, those of the host only once the task is complete.

    Returns the position of the last note that is left.
    """
    left_at, kind = end, 0
    for at in range(end - 1, notes_at - 1, -1):
        note = t.ints[at]
        if note >= 0 and (is_complete or note >> LOCATION_SHIFT != HOST):
            give_row(t, note, kind)
        else:
            kind = -1 - note if note < 0 else kind
            left_at -= 1
            t.ints[left_at] = note
    return left_at


@compiled
def _row_of(t, value):
    """The handle of a value's row; of a new session's state that of what it begins with."""
    return value.row if value.row > STARTS else t.values[STARTS - value.row].row


@compiled
def _read_value(t, task, value, notes_at):
    """Counts one read of a value; notes its row as free if it was the last.

    Returns (handle, position of the last note). A row elsewhere is still to be read when the task runs, and one of KEPT
    state is needed if the task fails: they are counted when the task completes. But if nobody else is to read it and it
    is the host's, which cannot get lost, the task takes it over and gives it back then.
    """
    handle = value.row
    if value.bits & KEPT:
        task.reads_late = 1
        handle = _row_of(t, value)
    elif handle >= NUM_PERMANENT:
        location = handle >> LOCATION_SHIFT
        if location == task.worker or (location == HOST and value.readers == 1):
            value.readers -= 1
            if value.readers == 0:
                value.row = -1
                notes_at -= 1
                t.ints[notes_at] = handle
        else:
            task.reads_late = 1
    elif handle <= STARTS:
        handle = _row_of(t, value)
    return handle, notes_at


@compiled
def first_link_of(t, node, cell_type, port):
    """Where the links of one input of a node begin: at its count if it is ragged."""
    at = node.first_link
    for k in range(port):
        at += 1 + t.links[at] if t.ports[cell_type.first_port + k].ragged else 1
    return at


@compiled
def _plain_input(t, task, base, port, end, notes_at):
    """An input of one row for each node, with no ragged input before it."""
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    steps = 1 if t.ports[t.types[task.cell_type].first_port + port].carry >= 0 else task.steps
    rows_at = end
    for step in range(steps):
        for row in range(ints[sizes_at + step]):
            node = t.nodes[ints[nodes_at + row] + step]
            value = t.values[node.first_value + t.links[node.first_link + port]]
            ints[end], notes_at = _read_value(t, task, value, notes_at)
            end += 1
    _describe_input(ints, base, port, rows_at, end, base - 1)
    return end, notes_at


@compiled
def _ragged_input(t, task, base, port, end, notes_at):
    """An input of any number of rows for each node, or one behind such an input."""
    ints, cell_type = t.ints, t.types[task.cell_type]
    info = t.ports[cell_type.first_port + port]
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    steps = 1 if info.carry >= 0 else task.steps
    offsets_at, end = _start_offsets(ints, info, task.rows if info.carry >= 0 else task.positions, base, end)
    rows_at, position = end, 0
    for step in range(steps):
        for row in range(ints[sizes_at + step]):
            node = t.nodes[ints[nodes_at + row] + step]
            at, count = first_link_of(t, node, cell_type, port), 1
            if info.ragged:
                count = t.links[at]
                at += 1
            for k in range(at, at + count):
                ints[end], notes_at = _read_value(t, task, t.values[node.first_value + t.links[k]], notes_at)
                end += 1
            position += 1
            if info.ragged:
                ints[offsets_at + position] = end - rows_at
    _describe_input(ints, base, port, rows_at, end, offsets_at)
    return end, notes_at


@compiled
def is_first_to_carry(t, cell_type, port):
    """Whether no port before reads the same state: it is given back once."""
    for before in range(port):
        if t.ports[cell_type.first_port + before].carry == t.ports[cell_type.first_port + port].carry:
            return False
    return True


@compiled
def _loop_input(t, task, base, port, end, notes_at):
    """An input of a loop's step. What every step reads alike is counted as read when the loop ends."""
    ints, cell_type = t.ints, t.types[task.cell_type]
    info = t.ports[cell_type.first_port + port]
    nodes_at = base + ints[base + layout.H_NODES]
    offsets_at, end = _start_offsets(ints, info, task.rows, base, end)
    rows_at = end
    for row in range(task.rows):
        node = t.nodes[ints[nodes_at + row]]
        at, count = first_link_of(t, node, cell_type, port), 1
        if info.ragged:
            count = t.links[at]
            at += 1
        if info.carry >= 0 and t.subgraphs[node.subgraph].loop_steps > 0:
            value = t.values[node.first_value + info.carry]
            ints[end] = value.row
            if ints[end] >> LOCATION_SHIFT != task.worker or value.bits & KEPT:
                task.reads_late = 1
            elif is_first_to_carry(t, cell_type, port):
                notes_at -= 1
                ints[notes_at] = ints[end]
            end += 1
        elif info.carry >= 0:
            ints[end], notes_at = _read_value(t, task, t.values[node.first_value + t.links[at]], notes_at)
            end += 1
        else:
            for k in range(at, at + count):
                handle = _row_of(t, t.values[node.first_value + t.links[k]])
                if handle >= NUM_PERMANENT and handle >> LOCATION_SHIFT != task.worker:
                    task.reads_late = 1
                ints[end] = handle
                end += 1
        if info.ragged:
            ints[offsets_at + row + 1] = end - rows_at
    _describe_input(ints, base, port, rows_at, end, offsets_at)
    return end, notes_at


@compiled
def _start_offsets(ints, info, positions, base, end):
    """Makes room for the offsets of a ragged input; returns (where they are, or ``base - 1``, new end)."""
    if not info.ragged:
        return base - 1, end
    ints[end] = 0
    return end, end + positions + 1


@compiled
def _read_inside(t, task, base, carry):
    """Counts the reads of state handed from step to step inside a run: it needs no row."""
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    for step in range(1, task.steps):
        for row in range(ints[sizes_at + step]):
            t.values[t.nodes[ints[nodes_at + row] + step - 1].first_value + carry].readers -= 1


@compiled
def _describe_input(ints, base, port, rows_at, end, offsets_at):
    """Finds where the rows of one input lie; if all at one location, turns handles into row numbers."""
    lowest, highest = 1 << 30, -1
    for k in range(rows_at, end):
        if ints[k] >= NUM_PERMANENT:
            lowest, highest = min(lowest, ints[k]), max(highest, ints[k])
    source = -2
    if highest >= 0:
        source = highest >> LOCATION_SHIFT if highest >> LOCATION_SHIFT == lowest >> LOCATION_SHIFT else MIXED
    if source != MIXED:
        for k in range(rows_at, end):
            ints[k] &= ROW_MASK
    record = base + layout.HEADER + port * layout.INPUT
    ints[record + layout.IN_SOURCE] = source
    ints[record + layout.IN_COUNT] = end - rows_at
    ints[record + layout.IN_ROWS] = rows_at - base
    ints[record + layout.IN_OFFSETS] = offsets_at - base


@compiled
def write_outputs(t, task, base, end):
    """Takes an arena row for each output that somebody reads and a host row for each result."""
    cell_type = t.types[task.cell_type]
    for output in range(cell_type.num_outputs):
        kind = t.ports[cell_type.first_port + cell_type.num_inputs + output].kind
        record = base + layout.HEADER + cell_type.num_inputs * layout.INPUT + output * layout.OUTPUT
        if task.is_loop:
            end = _loop_output(t, task, base, record, output, kind, end)
        else:
            end = _graph_output(t, task, base, record, output, kind, end)


@compiled
def _graph_output(t, task, base, record, output, kind, end):
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    limit = task.positions
    positions_at, rows_at, result_positions_at, result_rows_at = end, end + limit, end + 2 * limit, end + 3 * limit
    stores = results = start = 0
    for step in range(task.steps):
        for row in range(ints[sizes_at + step]):
            node = t.nodes[ints[nodes_at + row] + step]
            value = t.values[node.first_value + output]
            if value.readers > 0:
                handle = take_row(t, task.worker, kind)
                value.row = handle
                ints[positions_at + stores] = start + row
                ints[rows_at + stores] = handle & ROW_MASK
                stores += 1
            if value.result >= 0:
                handle = take_row(t, 0, kind)
                request = t.requests[t.subgraphs[node.subgraph].request]
                t.links[request.results + value.result] = handle
                ints[result_positions_at + results] = start + row
                ints[result_rows_at + results] = handle
                results += 1
        start += ints[sizes_at + step]
    _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    return end + 4 * limit


@compiled
def _loop_output(t, task, base, record, output, kind, end):
    ints = t.ints
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    rows, limit = task.rows, task.rows * task.steps
    positions_at, rows_at = end, end + rows
    result_positions_at, result_rows_at = end + 2 * rows, end + 2 * rows + limit
    stores = results = every_step = 0
    for row in range(rows):
        if t.values[t.nodes[ints[nodes_at + row]].first_value + output].bits & STEPS:
            every_step = 1
    for row in range(rows):
        node = t.nodes[ints[nodes_at + row]]
        value = t.values[node.first_value + output]
        subgraph = t.subgraphs[node.subgraph]
        request = t.requests[subgraph.request]
        if value.readers > 0 or value.bits & CARRIED:
            if value.row >= NUM_PERMANENT and not value.bits & CARRIED:
                give_row(t, value.row, kind)  # of the step before, which nobody will read
            value.row = take_row(t, task.worker, kind)
            ints[positions_at + stores] = row
            ints[rows_at + stores] = value.row & ROW_MASK
            stores += 1
        if value.bits & STEPS:
            for step in range(ints[lengths_at + row]):
                handle = take_row(t, 0, kind)
                t.links[request.results + value.result + subgraph.loop_steps + step] = handle
                ints[result_positions_at + results] = row * task.steps + step
                ints[result_rows_at + results] = handle
                results += 1
        elif value.bits & LAST_ONLY:
            handle = t.links[request.results + value.result]
            if handle < 0:
                handle = take_row(t, 0, kind)
                t.links[request.results + value.result] = handle
            ints[result_positions_at + results] = limit + row if every_step else row
            ints[result_rows_at + results] = handle
            results += 1
    _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    ints[record + layout.OUT_RESULT_STEPS] = every_step
    return end + 2 * rows + 2 * limit


@compiled
def _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at):
    ints[record + layout.OUT_STORES] = stores
    ints[record + layout.OUT_STORE_POSITIONS] = positions_at - base
    ints[record + layout.OUT_STORE_ROWS] = rows_at - base
    ints[record + layout.OUT_RESULTS] = results
    ints[record + layout.OUT_RESULT_POSITIONS] = result_positions_at - base
    ints[record + layout.OUT_RESULT_ROWS] = result_rows_at - base
    ints[record + layout.OUT_RESULT_STEPS] = 0
