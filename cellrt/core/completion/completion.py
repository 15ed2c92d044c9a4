"""The completion of tasks, and the early end of requests.

Every request ends through ``release`` in ``admission.py``, once nothing of it is in flight. The caller is told by
notices ``(request, what)``.
"""

from __future__ import annotations

from cellrt.core.pages.pages import break_pages, note_appended
from cellrt.core.requests.admission import release
from cellrt.core.running.loop_bodies import complete_step, end_loop, member_of, note_loop
from cellrt.core.running.record_ends import end_inputs, end_record, read_late
from cellrt.core.running.records import count_done, first_tap, give_late_rows, note_steps, wake_done
from cellrt.core.scheduling.gathering import let_others_join
from cellrt.core.state import task_layout as layout
from cellrt.core.state.event_log import log_event
from cellrt.core.state.moves import DEAD, DONE, LIVE, QUEUED, move_request
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED, NOTICE_STEPS
from cellrt.core.state.queue import dequeue, note_served, pin, refresh, rows_in_flight, unpin_if_idle
from cellrt.core.state.record_layout import body_of, nth_tap, output_of, record_of
from cellrt.core.state.rows import give_row
from cellrt.core.state.step_times import measure_step
from cellrt.core.state.tables import (
    CHAIN,
    COMPLETED,
    CROSSING,
    FAILED,
    LOCATION_SHIFT,
    LOOP,
    NO_ROW,
    PENDING,
    READS_AS_A_WHOLE,
    STEPS,
    Request,
    Subgraph,
    Tables,
    Task,
)
from cellrt.core.tasks.index_arrays import give_noted_rows, subgraph_of
from cellrt.native.jit import compiled, inlined
from cellrt.native.row_types import Matrix, Rows


@compiled
def complete(t: Tables, task_id: int, elapsed_ns: int, notices: Matrix, count: int) -> int:
    """Take a finished task out and release what waited for it. Add notices after the first ``count``.

    Return the new number of notices. ``notices`` [count + 4 * rows, 2] must have room. ``elapsed_ns`` is the measured
    time of the task, 0 if unknown. From now on the task's steps and positions are those that ran.
    """
    # Count the task itself: as running no more, as served, and with the steps that its rows took.
    settings, task = t.settings[0], t.tasks[task_id]
    base = task_id * settings.buffer_ints
    nodes_at, lengths_at = base + t.ints[base + layout.H_NODES], base + t.ints[base + layout.H_LENGTHS]
    failed_at, done_at = base + t.ints[base + layout.H_FAILED], base + t.ints[base + layout.H_DONE_STEPS]
    num_failed = settings.num_failed
    t.types[task.cell_type].num_running -= 1
    t.types[task.cell_type].starved_at = 0
    let_others_join(t, task, 1)
    note_served(t, task)
    if task.is_loop:
        _note_steps_taken(t, task, done_at, t.ints[base + layout.H_FLAGS] > 0)
    if task.reads_late:
        _count_late_reads(t, task_id)
    give_noted_rows(t, base + t.ints[base + layout.H_NOTES], base + settings.buffer_ints, True)
    # Complete its rows. Equal neighbours that are steps of one chain count together; the plain cases need no notice.
    row, may_be_several = 0, t.types[task.cell_type].carries == 0
    while row < task.rows:
        id, length, first, rows = t.ints[nodes_at + row], t.ints[lengths_at + row], row, 1
        subgraph = t.subgraphs[subgraph_of(t, id)]
        if may_be_several and id < 0 and subgraph.what == CHAIN and t.ints[failed_at + row] == 0:
            while row + rows < task.rows and t.ints[nodes_at + row + rows] == id and not t.ints[failed_at + row + rows]:
                rows += 1
        row += rows
        log_event(t, COMPLETED, subgraph.request, task.number, length * rows)
        subgraph.in_flight -= rows
        if t.ints[failed_at + first] == 0:
            if id >= 0:
                request = t.requests[subgraph.request]
                if length == 1 and request.state == LIVE and request.nodes_left > 1 and not request.streamed:
                    _complete_plain_node(t, request, subgraph, id)
                    continue
            elif _complete_plainly(t, task, subgraph, length):
                continue
        count = _complete_item(t, task, base, first, rows, notices, count)
    if elapsed_ns > 0:
        measure_step(t, task, elapsed_ns, settings.num_failed > num_failed)
    task.in_use = 0
    return count


@compiled
def _complete_item(t: Tables, task: Task, base: int, row: int, rows: int, notices: Matrix, count: int) -> int:
    """Complete a row, or ``rows`` rows that are steps of one chain; return the number of notices."""
    settings, ints = t.settings[0], t.ints
    id, length = ints[base + ints[base + layout.H_NODES] + row], ints[base + ints[base + layout.H_LENGTHS] + row]
    has_failed = ints[base + ints[base + layout.H_FAILED] + row] != 0
    done = ints[base + ints[base + layout.H_DONE_STEPS] + row]
    subgraph_id = subgraph_of(t, id)
    subgraph = t.subgraphs[subgraph_id]
    request_id, request = subgraph.request, t.requests[subgraph.request]
    shown, counts = settings.num_shown, True
    # Note what a chain or loop has done, which holds for requests that have ended early, too.
    if id < 0:
        if subgraph.what == LOOP:
            counts = _note_loop(t, task, subgraph, done, has_failed)
        else:
            done = abs(done) * rows
            note_steps(t, subgraph, done, has_failed)
        has_failed = has_failed and counts
        if counts and not has_failed and t.types[task.cell_type].has_spans:
            note_appended(t, subgraph, abs(done))
    # A failed row ends its request.
    if has_failed:
        settings.num_failed += 1
        break_pages(t, request)
        task.positions -= abs(done) if task.is_loop else length
        if request.state == LIVE:
            log_event(t, FAILED, request_id, task.number, row)
            kill(t, request_id)
            count = tell(notices, count, request_id, NOTICE_FAILED)
    # Of a live request, wake what waited for the row; the last row of an ended one gives its memory back.
    if request.state == LIVE and counts:
        if id >= 0:
            _complete_nodes(t, request, id, length)
            unpin_if_idle(t, subgraph_id)
        elif subgraph.what == CHAIN:
            _complete_steps(t, request, subgraph_id, length * rows)
        else:
            _complete_loop(t, request, subgraph_id, done)
        if request.nodes_left == 0:
            move_request(t, request, DONE)
            count = tell(notices, count, request_id, NOTICE_DONE)
        elif settings.num_shown != shown:
            count = tell(notices, count, request_id, NOTICE_STEPS)
    elif request.state >= DEAD and rows_in_flight(t, request) == 0:
        release(t, request_id)
        count = tell(notices, count, request_id, NOTICE_RELEASED)
    return count


@inlined
def _complete_plainly(t: Tables, task: Task, subgraph: Subgraph, steps: int) -> bool:
    """Complete steps of a chain if they only pass on its state; return whether they do.

    A subgraph that is queued belongs to a live request.
    """
    record = record_of(t, subgraph)
    if record.done + steps > record.plain or subgraph.state != QUEUED:
        return False
    record.done += steps
    if task.reads_late:
        give_late_rows(t, subgraph)
    if subgraph.in_flight == 0 and subgraph.sent == 0:
        pin(t, subgraph, 0)
    return True


@inlined
def _complete_plain_node(t: Tables, request: Request, subgraph: Subgraph, node_id: int) -> None:
    """Complete a node of a live request that is not streamed and has other nodes left."""
    _count_off(t, node_id)
    request.nodes_left -= 1
    if subgraph.in_flight == 0 and subgraph.sent == 0:
        pin(t, subgraph, 0)


@inlined
def _count_off(t: Tables, node_id: int) -> None:
    """Count off the edges from a node to other subgraphs."""
    node = t.nodes[node_id]
    if not node.bits & CROSSING:
        return
    for k in range(node.first_link + node.num_refs, node.first_link + node.num_refs + node.num_consumers):
        if t.links[k] >= READS_AS_A_WHOLE:
            count_done(t, node.subgraph + t.links[k] - READS_AS_A_WHOLE, True)
        elif t.nodes[node_id + t.links[k]].subgraph != node.subgraph:
            count_done(t, t.nodes[node_id + t.links[k]].subgraph, True)


@compiled
def tell(notices: Matrix, count: int, request_id: int, what: int) -> int:
    """Add a notice; return the new number of notices."""
    notices[count, 0], notices[count, 1] = request_id, what
    return count + 1


@compiled
def _note_loop(t: Tables, task: Task, subgraph: Subgraph, done: int, has_failed: bool) -> bool:
    """Note the result of a loop's row; return whether it counts: a row after the stop does not."""
    counts = note_loop(t, subgraph, done, has_failed)
    if not counts:
        task.positions -= abs(done) if task.is_loop else 1
        if subgraph.in_flight == 0 and t.requests[subgraph.request].state != DEAD:
            end_inputs(t, subgraph)
    return counts


@compiled
def _note_steps_taken(t: Tables, task: Task, done_at: int, goes_ahead: bool) -> None:
    """Set a loop's task to the steps that its rows took: they may have stopped before the end of their run.

    Where loops go ahead the device runs all steps, even if rows have stopped.
    """
    task.steps, task.positions = task.steps if goes_ahead else 1, 0
    for row in range(task.rows):
        task.steps = max(task.steps, abs(t.ints[done_at + row]))
        task.positions += abs(t.ints[done_at + row])


@compiled
def _complete_nodes(t: Tables, request: Request, first_id: int, length: int) -> None:
    """Count off the edges from a row's nodes to other subgraphs, and show their results."""
    for node_id in range(first_id, first_id + length):
        _count_off(t, node_id)
    if request.streamed:
        for node_id in range(first_id, first_id + length):
            for value in range(t.nodes[node_id].first_value, t.nodes[node_id].first_value + _num_outputs(t, node_id)):
                if t.values[value].result >= 0:
                    _show(t, request.first_place + t.values[value].result)
    request.nodes_left -= length


@compiled
def _num_outputs(t: Tables, node_id: int) -> int:
    return t.types[t.subgraphs[t.nodes[node_id].subgraph].cell_type].num_outputs


@compiled
def _show(t: Tables, place: int) -> None:
    """Mark a result as ready to be streamed."""
    if t.places[place] < PENDING:
        t.places[place] = PENDING - t.places[place]
        t.settings[0].num_shown += 1


@compiled
def _complete_steps(t: Tables, request: Request, subgraph_id: int, length: int) -> None:
    """Wake the subgraphs that waited for steps of a chain; end the chain after its last step."""
    subgraph = t.subgraphs[subgraph_id]
    record = record_of(t, subgraph)
    if request.streamed:
        before = record.done - length
        for k in range(t.types[subgraph.cell_type].num_outputs):
            output = output_of(t, subgraph, k)
            if output.result >= 0:
                for step in range(before, record.done):
                    _show(t, output.result + output.result_stride * step)
        for k in range(first_tap(t, record, 0, before), first_tap(t, record, 0, record.done)):
            value = t.values[nth_tap(t, record, k).value]
            if value.result >= 0:
                _show(t, request.first_place + value.result)
    if record.num_edges + record.num_followers > 0:
        wake_done(t, record)
    if record.done == record.end:
        end_record(t, subgraph)
        request.nodes_left -= 1
    elif record.num_sources > 0 or record.keeps or t.types[subgraph.cell_type].has_spans:
        refresh(t, subgraph_id)
    elif subgraph.in_flight == 0 and subgraph.sent == 0:
        pin(t, subgraph, 0)


@compiled
def _complete_loop(t: Tables, request: Request, subgraph_id: int, done: int) -> None:
    """Complete steps of one of a loop's cells: show their results, and make the next step ready or end the loop.

    ``done`` is negative if the last step said stop. Result rows of steps that were sent and will not be done are given
    back: no worker writes to them.
    """
    subgraph = t.subgraphs[subgraph_id]
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    _show_loop(t, request, subgraph, STEPS, max(record.done - abs(done), record.unseen), record.done)
    if subgraph.in_flight == 0:  # a run that ended early, or all that was sent
        _hide_steps(t, request, subgraph)
        record.position = record.done
    if complete_step(t, subgraph_id):
        for k in range(body.num_members):
            _hide_steps(t, request, t.subgraphs[member_of(t, subgraph, k)])
        end_loop(t, request, subgraph_id)
        for k in range(body.num_members):
            _show_loop(t, request, t.subgraphs[member_of(t, subgraph, k)], 0, record.lead, record.lead + 1)


@compiled
def _hide_steps(t: Tables, request: Request, subgraph: Subgraph) -> None:
    """Give back the rows of results of a loop's steps that were sent and are not done."""
    record = record_of(t, subgraph)
    for output in range(t.types[subgraph.cell_type].num_outputs):
        value = t.values[record.first_value + output]
        if value.result < 0 or not value.bits & STEPS:
            continue
        first = request.first_place + value.result - record.lead
        for place in range(first + max(record.done, record.unseen), first + record.position):
            give_row(t, t.places[place] if t.places[place] >= 0 else PENDING - t.places[place], value.kind)
            t.places[place] = NO_ROW


@compiled
def _show_loop(t: Tables, request: Request, subgraph: Subgraph, bits: int, begin: int, end: int) -> None:
    """Show the results of some steps of a loop's cell (``bits`` is STEPS), or those of its last step alone."""
    record = record_of(t, subgraph)
    for output in range(t.types[subgraph.cell_type].num_outputs):
        value = t.values[record.first_value + output]
        if value.result >= 0 and value.bits & STEPS == bits:
            for step in range(begin, end):
                _show(t, request.first_place + value.result + step - record.lead)


@compiled
def _count_late_reads(t: Tables, task_id: int) -> None:
    """Count off the reads of rows elsewhere, which was put off until the task has read them."""
    task = t.tasks[task_id]
    base = task_id * t.settings[0].buffer_ints
    ints, cell_type = t.ints, t.types[task.cell_type]
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    for row in range(task.rows):
        first_id = ints[nodes_at + row]
        for step in range(ints[lengths_at + row] if first_id >= 0 else 0):
            node = t.nodes[first_id + step]
            at = node.first_link
            for port in range(cell_type.num_inputs):
                info = t.ports[cell_type.first_port + port]
                count = 1
                if info.ragged:
                    count = t.links[at]
                    at += 1
                if info.carry < 0 or step == 0:
                    for k in range(at, at + count):
                        value = t.values[node.first_value + t.links[k]]
                        if value.row >> LOCATION_SHIFT != task.worker:
                            read_late(t, value)
                at += count


@compiled
def kill(t: Tables, request_id: int) -> None:
    """End a live request early, so that nothing of it is scheduled any more. Its rows are given back by ``release``."""
    request = t.requests[request_id]
    move_request(t, request, DEAD)
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if t.subgraphs[k].state == QUEUED:
            dequeue(t, k)


@compiled
def cancel(t: Tables, request_id: int) -> bool:
    """Kill a live request; return True if its rows are free already, False if tasks in flight still hold some."""
    kill(t, request_id)
    if rows_in_flight(t, t.requests[request_id]) == 0:
        release(t, request_id)
        return True
    return False


@compiled
def result_rows(t: Tables, request_ids: Rows[int], positions: Rows[int], rows: Rows[int]) -> None:
    """Write to ``rows`` the host rows of the results at these positions, request by request; -1 after a loop's stop."""
    at = 0
    for k in range(request_ids.size):
        first = t.requests[request_ids[k]].first_place
        for j in range(positions.size):
            rows[at] = t.places[first + positions[j]]
            at += 1
