"""The index arrays of a task: which rows its inputs lie in, and which rows its outputs get.

Every input is written port by port, then every output; only then are the rows given back whose last reader this task
was, so that no row is read and written in one task. Until then they are noted at the far end of the task's buffer,
downwards: ``-1 - kind`` before the handles of each input.
"""

from __future__ import annotations

from cellrt.core.pages.span_arrays import write_pages, write_span_input
from cellrt.core.running.records import (
    bring_state,
    input_row,
    num_rows_of,
    ragged_row,
    row_of,
    state_row,
    tap_of,
)
from cellrt.core.state import task_layout as layout
from cellrt.core.state.record_layout import output_of, record_of
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import (
    BORROWED,
    CHAIN,
    HOST,
    LOCATION_SHIFT,
    MIXED,
    NO_ROW,
    NUM_PERMANENT,
    ROW_MASK,
    STARTS,
    CellType,
    Node,
    PortInfo,
    Subgraph,
    Tables,
    Task,
    Value,
)
from cellrt.core.tasks.loop_arrays import describe_output, loop_output, loop_step_output, result_row
from cellrt.native.jit import compiled, inlined


@inlined
def subgraph_of(t: Tables, id: int) -> int:
    """The subgraph of a row of a task: of a node, or ``~id`` of a chain or loop."""
    return ~id if id < 0 else t.nodes[id].subgraph


@compiled
def steps_ahead(t: Tables, nodes_at: int, row: int, ahead: int) -> int:
    """How many rows before this one are of the same chain, whose steps are rows of one task if it carries nothing;
    ``ahead`` is that of the row before."""
    return ahead + 1 if row > 0 and t.ints[nodes_at + row - 1] == t.ints[nodes_at + row] else 0


@compiled
def write_inputs(t: Tables, task: Task, base: int, end: int) -> tuple[int, int]:
    """Writes all inputs from ``end`` on; returns (end of what it wrote, position of the last note of a free row)."""
    cell_type = t.types[task.cell_type]
    notes_at = base + t.settings[0].buffer_ints
    task.reads_late = 0
    follows_ragged = False
    for port in range(cell_type.num_inputs):
        info = t.ports[cell_type.first_port + port]
        notes_at -= 1
        t.ints[notes_at] = -1 - info.kind
        if info.is_span:
            write_span_input(t, base, port, end)
        elif info.page_size > 0:
            end = write_pages(t, task, base, port, end)
        elif task.is_loop:
            end = _loop_input(t, task, base, port, end)
        elif info.ragged or follows_ragged:
            end, notes_at = _ragged_input(t, task, base, port, end, notes_at)
        else:
            end, notes_at = _plain_input(t, task, base, port, end, notes_at)
        if info.carry >= 0 and task.steps > 1 and not task.is_loop:
            _read_inside(t, task, base, info.carry)
        follows_ragged = follows_ragged or info.ragged != 0
    return end, notes_at


@compiled
def give_noted_rows(t: Tables, notes_at: int, end: int, is_complete: bool) -> int:
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
def _read_value(t: Tables, task: Task, value: Value, notes_at: int) -> tuple[int, int]:
    """Counts one read of a value; notes its row as free if it was the last.

    Returns (handle, position of the last note). A row elsewhere is still to be read when the task runs: it is counted
    when the task completes. But if nobody else is to read it and it is the host's, which cannot get lost, the task
    takes it over and gives it back then.
    """
    handle = value.row
    if handle >= NUM_PERMANENT and not value.bits & BORROWED:
        location = handle >> LOCATION_SHIFT
        if location == task.worker or (location == HOST and value.readers == 1):
            value.readers -= 1
            if value.readers == 0:
                value.row = NO_ROW
                notes_at -= 1
                t.ints[notes_at] = handle
        else:
            task.reads_late = 1
    elif handle <= STARTS:
        handle = row_of(t, value)
    return handle, notes_at


@compiled
def first_link_of(t: Tables, node: Node, cell_type: CellType, port: int) -> int:
    """Where the links of one input of a node begin: at its count if it is ragged."""
    at = node.first_link
    for k in range(port):
        at += 1 + t.links[at] if t.ports[cell_type.first_port + k].ragged else 1
    return at


@compiled
def _plain_input(t: Tables, task: Task, base: int, port: int, end: int, notes_at: int) -> tuple[int, int]:
    """An input of one row for each node, with no ragged input before it."""
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    steps = 1 if t.ports[t.types[task.cell_type].first_port + port].carry >= 0 else task.steps
    rows_at = end
    for step in range(steps):
        ahead = 0
        for row in range(ints[sizes_at + step]):
            id = ints[nodes_at + row]
            if id < 0:
                ahead = steps_ahead(t, nodes_at, row, ahead)
                ints[end] = input_row(t, t.subgraphs[~id], port, step + ahead)
            else:
                node = t.nodes[id + step]
                value = t.values[node.first_value + t.links[node.first_link + port]]
                ints[end], notes_at = _read_value(t, task, value, notes_at)
            end += 1
    describe_input(t, base, port, rows_at, end, base - 1)
    return end, notes_at


@compiled
def _ragged_input(t: Tables, task: Task, base: int, port: int, end: int, notes_at: int) -> tuple[int, int]:
    """An input of any number of rows for each node, or one behind such an input."""
    ints, cell_type = t.ints, t.types[task.cell_type]
    info = t.ports[cell_type.first_port + port]
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    steps = 1 if info.carry >= 0 else task.steps
    offsets_at, end = _start_offsets(t, info, task.rows if info.carry >= 0 else task.positions, base, end)
    rows_at, position = end, 0
    for step in range(steps):
        ahead = 0
        for row in range(ints[sizes_at + step]):
            id = ints[nodes_at + row]
            if id < 0:
                ahead = steps_ahead(t, nodes_at, row, ahead)
                end = _record_input(t, t.subgraphs[~id], port, step + ahead, info.ragged, end)
            else:
                node = t.nodes[id + step]
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
    describe_input(t, base, port, rows_at, end, offsets_at)
    return end, notes_at


@compiled
def _record_input(t: Tables, subgraph: Subgraph, port: int, step: int, is_ragged: int, end: int) -> int:
    """Writes the rows that a chain's or loop's step reads; returns the new end."""
    if not is_ragged:
        t.ints[end] = input_row(t, subgraph, port, step)
        return end + 1
    count = num_rows_of(t, subgraph, port)
    for k in range(count):
        t.ints[end + k] = ragged_row(t, subgraph, port, k)
    return end + count


@compiled
def _loop_input(t: Tables, task: Task, base: int, port: int, end: int) -> int:
    """An input of a loop's steps: that of the first, as all but state is the same at each."""
    ints, info = t.ints, t.ports[t.types[task.cell_type].first_port + port]
    nodes_at = base + ints[base + layout.H_NODES]
    offsets_at, end = _start_offsets(t, info, task.rows, base, end)
    rows_at = end
    for row in range(task.rows):
        end = _record_input(t, t.subgraphs[~ints[nodes_at + row]], port, 0, info.ragged, end)
        if info.ragged:
            ints[offsets_at + row + 1] = end - rows_at
    describe_input(t, base, port, rows_at, end, offsets_at)
    return end


@compiled
def _start_offsets(t: Tables, info: PortInfo, positions: int, base: int, end: int) -> tuple[int, int]:
    """Makes room for the offsets of a ragged input; returns (where they are, or ``base - 1``, new end)."""
    if not info.ragged:
        return base - 1, end
    t.ints[end] = 0
    return end, end + positions + 1


@compiled
def _read_inside(t: Tables, task: Task, base: int, carry: int) -> None:
    """Counts the reads of state handed from node to node inside a run: it needs no row."""
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    for step in range(1, task.steps):
        for row in range(ints[sizes_at + step]):
            if ints[nodes_at + row] >= 0:
                t.values[t.nodes[ints[nodes_at + row] + step - 1].first_value + carry].readers -= 1


@compiled
def describe_input(t: Tables, base: int, port: int, rows_at: int, end: int, offsets_at: int) -> None:
    """Finds where the rows of one input lie; if all at one location, turns handles into row numbers."""
    lowest, highest = 1 << 30, -1
    for k in range(rows_at, end):
        if t.ints[k] >= NUM_PERMANENT:
            lowest, highest = min(lowest, t.ints[k]), max(highest, t.ints[k])
    source = -2
    if highest >= 0:
        source = highest >> LOCATION_SHIFT if highest >> LOCATION_SHIFT == lowest >> LOCATION_SHIFT else MIXED
    if source != MIXED:
        for k in range(rows_at, end):
            t.ints[k] &= ROW_MASK
    to = base + layout.HEADER + port * layout.INPUT
    t.ints[to + layout.IN_SOURCE] = source
    t.ints[to + layout.IN_COUNT] = end - rows_at
    t.ints[to + layout.IN_ROWS] = rows_at - base
    t.ints[to + layout.IN_OFFSETS] = offsets_at - base


@compiled
def write_outputs(t: Tables, task: Task, base: int, end: int) -> None:
    """Takes an arena row for each output that somebody reads and a host row for each result."""
    cell_type = t.types[task.cell_type]
    for output in range(cell_type.num_outputs):
        kind = t.ports[cell_type.first_port + cell_type.num_inputs + output].kind
        to = base + layout.HEADER + cell_type.num_inputs * layout.INPUT + output * layout.OUTPUT
        if task.is_loop:
            end = loop_output(t, task, base, to, output, kind, end)
        else:
            end = _graph_output(t, task, base, to, output, kind, end)


@compiled
def _graph_output(t: Tables, task: Task, base: int, record_at: int, output: int, kind: int, end: int) -> int:
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    lengths_at = base + ints[base + layout.H_LENGTHS]
    limit = task.positions
    positions_at, rows_at, result_positions_at, result_rows_at = end, end + limit, end + 2 * limit, end + 3 * limit
    stores = results = start = 0
    for step in range(task.steps):
        ahead = 0
        for row in range(ints[sizes_at + step]):
            id, place = ints[nodes_at + row], -1
            if id < 0:
                is_last = step + 1 == ints[lengths_at + row]
                ahead = steps_ahead(t, nodes_at, row, ahead)
                subgraph = t.subgraphs[~id]
                if subgraph.what == CHAIN:
                    handle, place = step_output(t, task, subgraph, output, step + ahead, is_last, kind)
                else:
                    handle, place = loop_step_output(t, task, subgraph, output, step + ahead, kind)
            else:
                value, handle = t.values[t.nodes[id + step].first_value + output], NO_ROW
                if value.readers > 0:
                    handle = take_row(t, task.worker, kind)
                    value.row = handle
                if value.result >= 0:
                    place = t.requests[t.subgraphs[t.nodes[id].subgraph].request].first_place + value.result
            if handle >= 0:
                ints[positions_at + stores] = start + row
                ints[rows_at + stores] = handle & ROW_MASK
                stores += 1
            if place >= 0:
                is_streamed = t.requests[t.subgraphs[subgraph_of(t, id)].request].streamed
                ints[result_positions_at + results] = start + row
                ints[result_rows_at + results] = result_row(t, place, kind, is_streamed)
                results += 1
        start += ints[sizes_at + step]
    describe_output(t, record_at, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    return end + 4 * limit


@inlined
def step_output(
    t: Tables, task: Task, subgraph: Subgraph, output: int, step: int, is_last_of_run: bool, kind: int
) -> tuple[int, int]:
    """Takes the row of a chain's output ``step`` steps after the next one.

    Returns (its handle, or NO_ROW if nobody reads it; the place of its result, or -1).
    """
    record, made = record_of(t, subgraph), output_of(t, subgraph, output)
    position, handle, place = record.position + step, NO_ROW, -1
    tap = tap_of(t, record, position, output)
    if made.result >= 0:
        place = made.result + made.result_stride * position
    elif tap >= 0 and t.values[tap].result >= 0:
        place = t.requests[subgraph.request].first_place + t.values[tap].result
    if made.sequence >= 0:
        handle = take_row(t, task.worker, kind)
        t.places[made.sequence + position] = handle
    elif tap >= 0 and t.values[tap].readers > 0:
        handle = take_row(t, task.worker, kind)
    if tap >= 0 and handle >= 0:
        t.values[tap].row = handle
    if made.is_state and is_last_of_run:
        bring_state(t, task, made, kind)
        is_read = position + 1 < record.end or record.keeps
        if handle < 0 and is_read:
            handle = state_row(t, made, task.worker, kind)
        made.previous_row = made.row
        made.row = max(handle, 0)
    return handle, place
