"""Running chains and loops: from a record's place in a template to its last row.

``record_layout.py`` says what a record is. A chain or loop holds the values that it reads as a whole until it ends.
"""

from __future__ import annotations

from cellrt.core.state import page_list
from cellrt.core.state.moves import BLOCKED, QUEUED
from cellrt.core.state.queue import dequeue, enqueue, refresh, set_ready, unpin_if_idle
from cellrt.core.state.record_layout import (
    ALL,
    CARRY,
    EACH,
    EMITTED,
    LAST,
    LEADS,
    MANY,
    PAGED,
    SAME,
    STEP,
    WHOLE,
    Input,
    Output,
    Record,
    input_of,
    nth_edge,
    nth_tap,
    output_of,
    record_of,
)
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import (
    CHAIN,
    LOCATION_SHIFT,
    LOOP,
    MIXED,
    PENDING,
    STARTS,
    CellType,
    Request,
    Subgraph,
    Tables,
    Task,
    Value,
)
from cellrt.native.jit import compiled, inlined


@compiled
def begin_record(t: Tables, request: Request, subgraph: Subgraph) -> None:
    """Turn ids that count from the request's first ones into those of the tables."""
    links, record, cell_type = t.links, record_of(t, subgraph), t.types[subgraph.cell_type]
    record.taps += request.first_link
    record.first_value += request.first_value
    record.edges += request.first_link
    record.followers += request.first_link
    for k in range(record.num_taps):
        nth_tap(t, record, k).value += request.first_value
    for k in range(record.num_edges):
        nth_edge(t, record, k).subgraph += request.first_subgraph
    for k in range(record.num_followers):
        links[record.followers + k] += request.first_subgraph
    for port in range(cell_type.num_inputs):
        _begin_input(t, request, input_of(t, subgraph, port))
    if subgraph.what == LOOP:
        record.body += request.first_link
    for k in range(cell_type.num_outputs):
        output = output_of(t, subgraph, k)
        if output.sequence >= 0:
            output.sequence += request.first_place
        if output.result >= 0:
            output.result += request.first_place
    record.plain = _plain_steps(t, subgraph)


@compiled
def _begin_input(t: Tables, request: Request, read: Input) -> None:
    """Turn the ids of an input into those of the tables."""
    links, mode = t.links, read.mode
    if mode in (WHOLE, CARRY):
        read.at += request.first_value
    elif mode in (SAME, LAST):
        read.source += request.first_subgraph
        read.at += request.first_value if mode == LAST else 0
    elif mode == PAGED:
        read.at = request.page_lists + page_list.WORDS * read.at
    elif mode == LEADS:
        read.at += request.first_place
    elif mode in (STEP, ALL, EMITTED):
        read.at += request.first_place
        if read.source >= 0:
            read.source += request.first_subgraph
    elif mode in (MANY, EACH):
        read.at += request.first_link
        for k in range(read.start):
            links[read.at + k] += request.first_value


@compiled
def _plain_steps(t: Tables, subgraph: Subgraph) -> int:
    """Return the number of steps at the begin of a chain that only pass on its state.

    Nothing reads, waits for or follows these steps, and each is ready when the one before is sent.
    """
    record, cell_type = record_of(t, subgraph), t.types[subgraph.cell_type]
    is_led = record.num_sources + record.num_followers + record.keeps > 0
    if subgraph.what != CHAIN or is_led or cell_type.has_spans or not cell_type.carries:
        return 0
    for k in range(cell_type.num_outputs):
        output = output_of(t, subgraph, k)
        if output.sequence >= 0 or output.result >= 0:
            return 0
    steps = min(record.tap_step, record.end - 1)
    if record.num_edges > 0:
        steps = min(steps, nth_edge(t, record, 0).steps - 1)
    return steps


@compiled
def row_of(t: Tables, value: Value) -> int:
    """Return the handle of a value's row; for a new session's state, that of the value that it begins with."""
    return value.row if value.row > STARTS else t.values[STARTS - value.row].row


@compiled
def input_row(t: Tables, subgraph: Subgraph, port: int, step: int) -> int:
    """Return the handle that an input reads ``step`` steps after the next one; for state, only at the next."""
    links, record, read = t.links, record_of(t, subgraph), input_of(t, subgraph, port)
    mode, position = read.mode, record.position + step
    if mode == STEP or (mode == LEADS and position <= record.lead):
        return t.places[read.at + read.stride * position]
    if mode == EACH:
        return row_of(t, t.values[links[read.at + position]])
    if mode == LEADS or (mode == CARRY and position > 0):
        if read.again > 0 and position <= record.unseen:
            return t.places[read.again - 1 + position]
        return output_of(t, subgraph, read.source).row
    if mode == SAME or (mode == LAST and position > 0):
        return _member_row(t, read, position)
    return row_of(t, t.values[read.at])


@compiled
def _member_row(t: Tables, read: Input, position: int) -> int:
    """Return the handle that an input reads of another member of its body, at step ``position`` or the one before."""
    source = t.subgraphs[read.source]
    output = output_of(t, source, read.stride)
    is_ahead = read.mode == LAST and record_of(t, source).position > position
    return output.previous_row if is_ahead else output.row


@compiled
def num_rows_of(t: Tables, subgraph: Subgraph, port: int) -> int:
    """Return the number of rows of a ragged input."""
    read = input_of(t, subgraph, port)
    if read.mode == EMITTED:
        loop = record_of(t, t.subgraphs[read.source])
        return loop.done - loop.lead
    return read.start


@compiled
def ragged_ints(t: Tables, cell_type: CellType, subgraph: Subgraph) -> int:
    """Return the ints that the ragged inputs of a chain's or loop's step need beyond one row each."""
    count = 0
    for port in range(cell_type.num_inputs):
        if t.ports[cell_type.first_port + port].ragged:
            count += 2 * num_rows_of(t, subgraph, port)
    return count


@compiled
def ragged_row(t: Tables, subgraph: Subgraph, port: int, k: int) -> int:
    """Return the handle of row ``k`` of a ragged input."""
    read = input_of(t, subgraph, port)
    if read.mode == ALL:
        return t.places[read.at + read.stride * k]
    if read.mode == EMITTED:
        handle = t.places[read.at + k]
        return handle if handle > PENDING else PENDING - handle
    return row_of(t, t.values[t.links[read.at + k]])


@inlined
def bring_state(t: Tables, task: Task, output: Output, kind: int) -> None:
    """Move the state of an output to a task's worker, where the chain or loop goes on with nothing in flight.

    A row that the task reads elsewhere is given back when it is complete.
    """
    if output.first_row == 0 or output.first_row >> LOCATION_SHIFT == task.worker:
        return
    task.reads_late = 1
    if output.first_row == output.row:
        output.late_row = output.first_row
    else:
        give_row(t, output.first_row, kind)
    output.first_row = 0
    if output.second_row > 0 and output.second_row == output.row:
        output.late_row = output.second_row
    elif output.second_row > 0:
        give_row(t, output.second_row, kind)
    output.second_row = 0


@inlined
def state_row(t: Tables, output: Output, worker: int, kind: int) -> int:
    """Return the row that a task writes the state of an output to, which is not the one that it reads."""
    if output.first_row > 0 and output.first_row == output.row:
        if output.second_row == 0:
            output.second_row = take_row(t, worker, kind)
        return output.second_row
    if output.first_row == 0:
        output.first_row = take_row(t, worker, kind)
    return output.first_row


@compiled
def first_tap(t: Tables, record: Record, low: int, step: int) -> int:
    """Return the first tap of a step or a later one, from number ``low`` on."""
    high = record.num_taps
    while low < high:
        middle = (low + high) // 2
        if nth_tap(t, record, middle).step < step:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def tap_of(t: Tables, record: Record, step: int, output: int) -> int:
    """Return the value that is an output of a step, or -1; ``step`` is not sent yet."""
    if record.tap_step > step:
        return -1
    for k in range(first_tap(t, record, record.next_tap, step), record.num_taps):
        tap = nth_tap(t, record, k)
        if tap.step > step:
            return -1
        if tap.step == step and tap.output == output:
            return tap.value
    return -1


@compiled
def count_sent(t: Tables, subgraph_id: int, worker: int) -> None:
    """Count an edge whose producer was submitted to ``worker``; release the subgraph early if it was the last."""
    subgraph = t.subgraphs[subgraph_id]
    subgraph.sent_to = worker if subgraph.sent == 0 or subgraph.sent_to == worker else MIXED
    subgraph.sent += 1
    home = t.requests[subgraph.request].home if t.types[subgraph.cell_type].has_spans else 0
    if subgraph.sent == subgraph.waiting and subgraph.sent_to == worker and (home == 0 or home == worker):
        subgraph.pinned = worker
        enqueue(t, subgraph_id)


@compiled
def count_done(t: Tables, subgraph_id: int, was_sent: int) -> None:
    """Count an edge whose producer is complete; ``was_sent``: ``count_sent`` counted it."""
    subgraph = t.subgraphs[subgraph_id]
    subgraph.waiting -= 1
    if was_sent and subgraph.sent > 0:
        subgraph.sent -= 1
    if subgraph.waiting == 0 and subgraph.state == BLOCKED and subgraph.nodes_left > 0:
        enqueue(t, subgraph_id)
    elif subgraph.state == QUEUED:
        unpin_if_idle(t, subgraph_id)


@compiled
def send_steps(t: Tables, subgraph_id: int, steps: int, worker: int) -> None:
    """Count submitted steps of a chain; wake the subgraphs that may read them on the same worker (early release)."""
    subgraph = t.subgraphs[subgraph_id]
    record = record_of(t, subgraph)
    record.position += steps
    position = record.position
    if position <= record.plain:
        return
    if record.tap_step < position:
        _pass_taps(t, record, position)
    if position == record.end:
        subgraph.nodes_left = 0
        dequeue(t, subgraph_id)
        subgraph.num_ready = 0
    elif record.num_sources > 0 or record.keeps or t.types[subgraph.cell_type].has_spans:
        refresh(t, subgraph_id)
    elif not t.types[subgraph.cell_type].carries:
        set_ready(t, subgraph, subgraph.num_ready - steps)
    if record.num_edges + record.num_followers > 0 and t.settings[0].early_release:
        _wake_sent(t, record, position, worker)


@compiled
def _pass_taps(t: Tables, record: Record, position: int) -> None:
    """Go on to the first tap that is not sent."""
    k = first_tap(t, record, record.next_tap, position)
    record.next_tap = k
    record.tap_step = nth_tap(t, record, k).step if k < record.num_taps else record.end


@compiled
def _wake_sent(t: Tables, record: Record, position: int, worker: int) -> None:
    while record.next_sent < record.num_edges:
        edge = nth_edge(t, record, record.next_sent)
        if edge.steps > position:
            break
        record.next_sent += 1
        count_sent(t, edge.subgraph, worker)
    for k in range(record.num_followers):
        follower_id = t.links[record.followers + k]
        follower = t.subgraphs[follower_id]
        if follower.num_ready == 0 or not t.types[follower.cell_type].carries:  # else it has all that it can have
            refresh(t, follower_id)


@inlined
def note_steps(t: Tables, subgraph: Subgraph, steps: int, has_failed: bool) -> None:
    """Note the steps that a task did of a chain, and which state stays.

    Dead requests call it too, as a session may keep their state.
    """
    if not has_failed:
        record_of(t, subgraph).done += steps
    if has_failed:
        for k in range(t.types[subgraph.cell_type].num_outputs):
            output = output_of(t, subgraph, k)
            output.row = output.previous_row
    else:
        give_late_rows(t, subgraph)


@compiled
def give_late_rows(t: Tables, subgraph: Subgraph) -> None:
    """Give back the rows at another worker whose readers are done."""
    for k in range(t.types[subgraph.cell_type].num_outputs):
        output = output_of(t, subgraph, k)
        if output.late_row > 0:
            give_row(t, output.late_row, kind_of(t, subgraph, k))
            output.late_row = 0


@compiled
def kind_of(t: Tables, subgraph: Subgraph, output: int) -> int:
    """Return the kind of an output's rows."""
    cell_type = t.types[subgraph.cell_type]
    return t.ports[cell_type.first_port + cell_type.num_inputs + output].kind


@compiled
def wake_done(t: Tables, record: Record) -> None:
    """Wake the subgraphs that waited for the steps of a chain that are done."""
    while record.next_done < record.num_edges:
        edge = nth_edge(t, record, record.next_done)
        if edge.steps > record.done:
            break
        record.next_done += 1
        count_done(t, edge.subgraph, t.settings[0].early_release)
    for k in range(record.num_followers):
        follower_id = t.links[record.followers + k]
        follower = t.subgraphs[follower_id]
        # Else it has all that it can have, and waits for nothing that is only sent.
        if follower.num_ready == 0 or follower.pinned > 0 or not t.types[follower.cell_type].carries:
            refresh(t, follower_id)
