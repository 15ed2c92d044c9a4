"""The index arrays of a task: the rows that its inputs lie in, and the rows that its outputs are stored to.

A task's rows are written item by item: an item is a node, or those next steps of a chain or loop that are rows of this
task, one after the other; mostly that is one.

Every input is written port by port, then every output. Only then are the rows given back whose last reader is this
task, so that no row is read and written in one task. Until then they are noted at the far end of the task's buffer,
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
from cellrt.core.state.record_layout import STEP, input_of, output_of, record_of
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import (
    BORROWED,
    CHAIN,
    HOST,
    LOCATION_SHIFT,
    NO_ROW,
    NUM_PERMANENT,
    STARTS,
    CellType,
    Node,
    PortInfo,
    Subgraph,
    Tables,
    Task,
    Value,
)
from cellrt.core.tasks.descriptions import begin_output, describe_input, description_at, put_result, put_store
from cellrt.core.tasks.loop_arrays import loop_step_output, write_run
from cellrt.native.jit import compiled, inlined


@inlined
def subgraph_of(t: Tables, id: int) -> int:
    """Return the subgraph of a row of a task: that of a node, or ``~id`` of a chain or loop."""
    return ~id if id < 0 else t.nodes[id].subgraph


@inlined
def rows_of_item(t: Tables, nodes_at: int, row: int, rows: int) -> int:
    """Return how many of a task's ``rows`` rows are of the item that begins with this one."""
    id, end = t.ints[nodes_at + row], row + 1
    if id < 0:
        while end < rows and t.ints[nodes_at + end] == id:
            end += 1
    return end - row


@compiled
def write_inputs(t: Tables, task: Task, base: int, end: int) -> tuple[int, int]:
    """Write all inputs from ``end`` on; return (the end of them, the position of the last note of a free row)."""
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
        else:
            end, notes_at = _write_input(t, task, base, port, end, notes_at, follows_ragged)
        if info.carry >= 0 and task.steps > 1 and not task.is_loop:
            _read_inside(t, task, base, info.carry)
        follows_ragged = follows_ragged or info.ragged != 0
    return end, notes_at


@compiled
def give_noted_rows(t: Tables, notes_at: int, end: int, is_complete: bool) -> int:
    """Give back the rows that ``write_inputs`` noted, those of the host only once the task is complete.

    Return the position of the last note that is left.
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
    """Count one read of a value; note its row as free if it was the last.

    Return (handle, position of the last note). A row elsewhere is still to be read when the task runs: it is counted
    when the task completes. But if it is the host's, which cannot get lost, and has no other reader, the task takes it
    over and gives it back then.
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
    """Return the position of the first link of an input of a node: that of its count if it is ragged."""
    at = node.first_link
    for k in range(port):
        at += 1 + t.links[at] if t.ports[cell_type.first_port + k].ragged else 1
    return at


@compiled
def _write_input(
    t: Tables, task: Task, base: int, port: int, end: int, notes_at: int, follows_ragged: bool
) -> tuple[int, int]:
    """Write the rows of an input of each item; for carried state and for a loop's run, only those of the first step."""
    ints, cell_type = t.ints, t.types[task.cell_type]
    info = t.ports[cell_type.first_port + port]
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    # Carried state has rows at the first step only, and a run reads all its inputs there.
    is_first, is_ragged = info.carry >= 0 or task.is_loop > 0, info.ragged != 0
    offsets_at, end = _start_offsets(t, info, task.rows if is_first else task.positions, base, end)
    rows_at, position = end, 0
    for step in range(1 if is_first else task.steps):
        row, rows = 0, ints[sizes_at + step]
        while row < rows:
            id, count = ints[nodes_at + row], 1
            # Chains and loops know their rows without nodes; nodes name values, whose reads are counted here.
            if id < 0:
                count = rows_of_item(t, nodes_at, row, rows)
                if is_ragged:
                    end = _write_ragged(t, t.subgraphs[~id], port, count, end, offsets_at + position + 1, rows_at)
                else:
                    _write_rows(t, t.subgraphs[~id], port, step, count, end)
                    end += count
            else:
                node = t.nodes[id + step]
                at, refs = node.first_link + port, 1
                if is_ragged or follows_ragged:
                    at = first_link_of(t, node, cell_type, port)
                if is_ragged:
                    refs = t.links[at]
                    at += 1
                for k in range(at, at + refs):
                    ints[end], notes_at = _read_value(t, task, t.values[node.first_value + t.links[k]], notes_at)
                    end += 1
                if is_ragged:
                    ints[offsets_at + position + 1] = end - rows_at
            row += count
            position += count
    describe_input(t, base, port, rows_at, end, offsets_at)
    return end, notes_at


@compiled
def _write_rows(t: Tables, subgraph: Subgraph, port: int, step: int, count: int, to: int) -> None:
    """Write the rows that ``count`` steps of a chain or loop read, from ``step`` steps after the next one on."""
    read = input_of(t, subgraph, port)
    if count == 1 or read.mode != STEP:
        for k in range(count):
            t.ints[to + k] = input_row(t, subgraph, port, step + k)
        return
    first = read.at + read.stride * (record_of(t, subgraph).position + step)
    for k in range(count):
        t.ints[to + k] = t.places[first + read.stride * k]


@compiled
def _write_ragged(t: Tables, subgraph: Subgraph, port: int, count: int, end: int, offsets_at: int, rows_at: int) -> int:
    """Write the rows that each of ``count`` steps of a chain or loop reads together; return the new end."""
    rows = num_rows_of(t, subgraph, port)
    for step in range(count):
        for k in range(rows):
            t.ints[end + k] = ragged_row(t, subgraph, port, k)
        end += rows
        t.ints[offsets_at + step] = end - rows_at
    return end


@compiled
def _start_offsets(t: Tables, info: PortInfo, positions: int, base: int, end: int) -> tuple[int, int]:
    """Make room for the offsets of a ragged input; return (their position, or ``base - 1``, and the new end)."""
    if not info.ragged:
        return base - 1, end
    t.ints[end] = 0
    return end, end + positions + 1


@compiled
def _read_inside(t: Tables, task: Task, base: int, carry: int) -> None:
    """Count the reads of state passed from node to node inside a run: it needs no row."""
    ints = t.ints
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    for step in range(1, task.steps):
        for row in range(ints[sizes_at + step]):
            if ints[nodes_at + row] >= 0:
                t.values[t.nodes[ints[nodes_at + row] + step - 1].first_value + carry].readers -= 1


@compiled
def write_outputs(t: Tables, task: Task, base: int, end: int) -> None:
    """Take an arena row for each output that is read and a host row for each result."""
    cell_type = t.types[task.cell_type]
    for output in range(cell_type.num_outputs):
        kind = t.ports[cell_type.first_port + cell_type.num_inputs + output].kind
        to = description_at(base, cell_type.num_inputs, output)
        if task.is_loop:
            end = write_run(t, task, base, to, output, kind, end)
        else:
            end = begin_output(t, base, to, end, task.positions, task.positions)
            _write_output(t, task, base, to, output, kind)


@compiled
def _write_output(t: Tables, task: Task, base: int, to: int, output: int, kind: int) -> None:
    """Take the rows of an output of each item, except for loops that run."""
    ints, position, stores, results = t.ints, 0, 0, 0
    nodes_at, sizes_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_BATCH_SIZES]
    lengths_at = base + ints[base + layout.H_LENGTHS]
    stored_at, rows_at = base + ints[to + layout.OUT_STORE_POSITIONS], base + ints[to + layout.OUT_STORE_ROWS]
    shown_at, host_rows_at = base + ints[to + layout.OUT_RESULT_POSITIONS], base + ints[to + layout.OUT_RESULT_ROWS]
    # Positions are numbered step by step, as in torch's PackedSequence.
    for step in range(task.steps):
        row, rows = 0, ints[sizes_at + step]
        while row < rows:
            id, count = ints[nodes_at + row], 1
            subgraph = t.subgraphs[subgraph_of(t, id)]
            if id < 0:
                count = rows_of_item(t, nodes_at, row, rows)
            if count > 1 and subgraph.what == CHAIN and _are_all_alike(t, subgraph, output, step + count):
                at = stored_at + stores, rows_at + stores, shown_at + results, host_rows_at + results
                stored, shown = _write_alike(t, task, subgraph, output, step, count, kind, position, *at)
                stores, results, position, row = stores + stored, results + shown, position + count, row + count
                continue
            for ahead in range(step, step + count):
                handle, place = NO_ROW, -1
                # A row is taken only for outputs that are read, and a host row only for results.
                if id >= 0:
                    value = t.values[t.nodes[id + step].first_value + output]
                    if value.readers > 0:
                        handle = take_row(t, task.worker, kind)
                        value.row = handle
                    if value.result >= 0:
                        place = t.requests[subgraph.request].first_place + value.result
                elif subgraph.what == CHAIN:
                    is_last = step + 1 == ints[lengths_at + row]
                    handle, place = step_output(t, task, subgraph, output, ahead, is_last, kind)
                else:
                    handle, place = loop_step_output(t, task, subgraph, output, ahead, kind)
                if handle >= 0:
                    stores = put_store(t, stored_at, rows_at, stores, position, handle)
                if place >= 0:
                    what = position, place, kind, t.requests[subgraph.request].streamed
                    results = put_result(t, shown_at, host_rows_at, results, *what)
                position += 1
            row += count
    ints[to + layout.OUT_STORES], ints[to + layout.OUT_RESULTS] = stores, results


@compiled
def _are_all_alike(t: Tables, subgraph: Subgraph, output: int, steps: int) -> bool:
    """Return whether no one of the next ``steps`` steps of a chain differs in an output: none is a value or a state."""
    record = record_of(t, subgraph)
    return record.tap_step >= record.position + steps and not output_of(t, subgraph, output).is_state


@compiled
def _write_alike(
    t: Tables,
    task: Task,
    subgraph: Subgraph,
    output: int,
    step: int,
    count: int,
    kind: int,
    position: int,
    stored_at: int,
    rows_at: int,
    shown_at: int,
    host_rows_at: int,
) -> tuple[int, int]:
    """Take the rows of an output of ``count`` steps of a chain that are alike, from ``step`` steps after the next on.

    Return how many rows and how many results there are.
    """
    made, stores, results = output_of(t, subgraph, output), 0, 0
    first = record_of(t, subgraph).position + step
    if made.sequence >= 0:
        for k in range(count):
            handle = t.places[made.sequence + first + k] = take_row(t, task.worker, kind)
            stores = put_store(t, stored_at, rows_at, stores, position + k, handle)
    if made.result >= 0:
        place, streamed = made.result + made.result_stride * first, t.requests[subgraph.request].streamed
        for k in range(count):
            what = position + k, place + made.result_stride * k, kind, streamed
            results = put_result(t, shown_at, host_rows_at, results, *what)
    return stores, results


@inlined
def step_output(
    t: Tables, task: Task, subgraph: Subgraph, output: int, step: int, is_last_of_run: bool, kind: int
) -> tuple[int, int]:
    """Take the row of a chain's output ``step`` steps after the next one.

    Return (its handle, or NO_ROW if nothing reads it; the place of its result, or -1).
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
