"""What happens when a task is done, a request ends early, or a worker is lost.

Every end goes through ``release`` in ``admission.py``, once nothing of the request is in flight. What the caller must
know comes back as notices ``(request, what)``.
"""

from __future__ import annotations

from cellrt.core import task_layout as layout
from cellrt.core.admission import release
from cellrt.core.batching import size_class
from cellrt.core.event_log import log_event
from cellrt.core.index_arrays import give_noted_rows, is_first_to_carry
from cellrt.core.jit import compiled
from cellrt.core.moves import BLOCKED, DEAD, DONE, LIVE, QUEUED, move_request
from cellrt.core.queue import dequeue, enqueue, note_served, pin, push_ready
from cellrt.core.rows import give_row
from cellrt.core.session_state import advance_state
from cellrt.core.tables import (
    COMPLETED,
    CROSSING,
    FAILED,
    HELD,
    KEPT,
    LOCATION_SHIFT,
    LOOP,
    MIXED,
    NUM_PERMANENT,
    RESULT_READY,
    STEPS,
)

NOTICE_DONE = 1
"""All nodes are complete: read the results, then call ``release``."""
NOTICE_FAILED = 2
"""A cell failed on this request: it is dead from now on."""
NOTICE_RELEASED = 3
"""A dead request gave back its last row."""
NOTICE_STEPS = 4
"""A streamed request has new results."""


@compiled
def complete(t, task_id, elapsed_ns, notices, count):
    """Takes a finished task out: releases what waited for it. Adds notices behind the ``count`` there are.

    Returns how many there are then. ``notices`` [count + 4 * rows, 2] must have room. ``elapsed_ns`` is the
    measured time of the task, 0 if unknown. The task's steps and positions are from now on those that ran.
    """
    settings, task = t.settings[0], t.tasks[task_id]
    base = task_id * settings.buffer_ints
    nodes_at, lengths_at = base + t.ints[base + layout.H_NODES], base + t.ints[base + layout.H_LENGTHS]
    failed_at, done_at = base + t.ints[base + layout.H_FAILED], base + t.ints[base + layout.H_DONE_STEPS]
    t.types[task.cell_type].num_running -= 1
    note_served(t, task)
    if task.is_loop:
        _note_steps_taken(t, task, done_at)
    if task.reads_late:
        _count_late_reads(t, task_id)
    give_noted_rows(t, base + t.ints[base + layout.H_NOTES], base + settings.buffer_ints, True)
    for row in range(task.rows):
        node_id = t.ints[nodes_at + row]
        subgraph = t.subgraphs[t.nodes[node_id].subgraph]
        request_id = subgraph.request
        request = t.requests[request_id]
        log_event(t, COMPLETED, request_id, task.number, t.ints[lengths_at + row])
        subgraph.in_flight -= 1
        request.in_flight -= 1
        if t.ints[failed_at + row]:
            task.positions -= abs(t.ints[done_at + row])
            if request.state == LIVE:
                log_event(t, FAILED, request_id, task.number, row)
                kill(t, request_id)
                notices[count, 0], notices[count, 1] = request_id, NOTICE_FAILED
                count += 1
        if request.state == LIVE:
            if t.nodes[node_id].bits & LOOP:
                _complete_loop(t, task_id, row, node_id)
            else:
                for k in range(t.ints[lengths_at + row]):
                    _complete_node(t, node_id + k, True)
                    if t.nodes[node_id + k].bits & HELD:
                        _release_readers(t, node_id + k, node_id + t.ints[lengths_at + row])
                if request.streamed:
                    _mark_results(t, node_id, t.ints[lengths_at + row], t.types[task.cell_type].num_outputs)
                request.nodes_left -= t.ints[lengths_at + row]
            unpin_if_idle(t, subgraph)
            if request.nodes_left == 0:
                move_request(t, request, DONE)
                notices[count, 0], notices[count, 1] = request_id, NOTICE_DONE
                count += 1
            elif request.streamed:
                notices[count, 0], notices[count, 1] = request_id, NOTICE_STEPS
                count += 1
        elif request.state == DEAD and request.in_flight == 0:
            release(t, request_id)
            notices[count, 0], notices[count, 1] = request_id, NOTICE_RELEASED
            count += 1
    if elapsed_ns > 0:
        _measure_step(t, task, elapsed_ns)
    task.in_use = 0
    return count


@compiled
def _note_steps_taken(t, task, done_at):
    """Has a loop's task have the steps that its rows took, which may have stopped before the end of their run."""
    task.steps, task.positions = 1, 0
    for row in range(task.rows):
        task.steps = max(task.steps, abs(t.ints[done_at + row]))
        task.positions += abs(t.ints[done_at + row])


@compiled
def _measure_step(t, task, elapsed_ns):
    """Keeps the time of one step at this task's size: near the least that was measured lately.

    What a busy machine adds to one task must not make the next runs shorter, which would cost more tasks.
    """
    at = size_class(task.rows)
    step_ns = elapsed_ns / task.steps
    old = t.step_ns[task.cell_type, at]
    if old == 0 or step_ns < old:
        t.step_ns[task.cell_type, at] = step_ns
    else:
        t.step_ns[task.cell_type, at] = min(step_ns, old * 1.01)


@compiled
def unpin_if_idle(t, subgraph):
    """A subgraph with nothing in flight may move to another worker."""
    if subgraph.in_flight == 0 and subgraph.sent == 0:
        pin(t, subgraph, 0)


@compiled
def _complete_node(t, node_id, was_sent):
    """Counts off a complete node's edges to other subgraphs; ``was_sent``: ``submit_task`` counted them."""
    node = t.nodes[node_id]
    if not node.bits & CROSSING:
        return
    for k in range(node.first_link + node.num_refs, node.first_link + node.num_refs + node.num_consumers):
        consumer = t.nodes[node_id + t.links[k]]
        if consumer.subgraph == node.subgraph:
            continue
        subgraph = t.subgraphs[consumer.subgraph]
        subgraph.waiting -= 1
        if was_sent and subgraph.sent > 0:
            subgraph.sent -= 1
        if subgraph.waiting == 0 and subgraph.state == BLOCKED and subgraph.nodes_left > 0:
            enqueue(t, consumer.subgraph)
        elif subgraph.state == QUEUED or subgraph.in_flight > 0:
            unpin_if_idle(t, subgraph)


@compiled
def _release_readers(t, node_id, end):
    """Counts off a HELD node's edges to nodes of its own subgraph from ``end`` on, which waited for its completion."""
    node = t.nodes[node_id]
    for k in range(node.first_link + node.num_refs, node.first_link + node.num_refs + node.num_consumers):
        consumer_id = node_id + t.links[k]
        consumer = t.nodes[consumer_id]
        if consumer.subgraph == node.subgraph and consumer_id >= end:
            consumer.pending -= 1
            if consumer.pending == 0:
                push_ready(t, consumer_id)


@compiled
def _mark_results(t, node_id, length, num_outputs):
    """Marks the results of complete nodes as there to be streamed."""
    request = t.requests[t.subgraphs[t.nodes[node_id].subgraph].request]
    for k in range(node_id, node_id + length):
        for output in range(num_outputs):
            result = t.values[t.nodes[k].first_value + output].result
            if result >= 0:
                t.links[request.results + request.num_results + result] |= RESULT_READY


@compiled
def _complete_loop(t, task_id, row, node_id):
    """Takes in how many steps a loop's row took; ends the loop or makes its next step ready."""
    base = task_id * t.settings[0].buffer_ints
    ints, node = t.ints, t.nodes[node_id]
    subgraph_id = node.subgraph
    subgraph = t.subgraphs[subgraph_id]
    request = t.requests[subgraph.request]
    done = ints[base + ints[base + layout.H_DONE_STEPS] + row]
    stopped = done < 0
    if request.streamed:
        for output in range(t.types[subgraph.cell_type].num_outputs):
            value = t.values[node.first_value + output]
            if value.bits & STEPS:
                first = request.results + request.num_results + value.result + subgraph.loop_steps
                for k in range(first, first + abs(done)):
                    t.links[k] |= RESULT_READY
    subgraph.loop_steps += abs(done)
    if not stopped and subgraph.loop_steps < subgraph.loop_limit:
        push_ready(t, node_id)
        return
    cell_type = t.types[subgraph.cell_type]
    length = ints[base + ints[base + layout.H_LENGTHS] + row]
    for output in range(cell_type.num_outputs):
        value = t.values[node.first_value + output]
        if value.bits & STEPS:
            first = request.results + value.result + subgraph.loop_steps
            for k in range(first, first + length - abs(done)):
                give_row(t, t.links[k], value.kind)
                t.links[k] = -1
        if value.readers == 0 and value.row >= NUM_PERMANENT:
            give_row(t, value.row, value.kind)
            value.row = -1
    _free_loop_inputs(t, node, cell_type)
    subgraph.nodes_left = 0
    dequeue(t, subgraph_id)
    request.nodes_left -= 1
    _complete_node(t, node_id, False)


@compiled
def _free_loop_inputs(t, node, cell_type):
    """The inputs that every step of a loop read alike are read for the last time."""
    at = node.first_link
    for port in range(cell_type.num_inputs):
        info = t.ports[cell_type.first_port + port]
        count = 1
        if info.ragged:
            count = t.links[at]
            at += 1
        if info.carry < 0:
            for k in range(count):
                _read_late(t, t.values[node.first_value + t.links[at + k]])
        at += count


@compiled
def _read_late(t, value):
    """Counts a read that was put off; gives the row back if it was the last."""
    if value.row >= NUM_PERMANENT:
        value.readers -= 1
        if value.readers == 0:
            give_row(t, value.row, value.kind)
            value.row = -1


@compiled
def _count_late_reads(t, task_id):
    """Counts the reads that were put off until the task has read: of rows elsewhere, and of KEPT state.

    Where a row of the task failed, the state it read stays; where not, what it made is the state from now on.
    """
    task = t.tasks[task_id]
    base = task_id * t.settings[0].buffer_ints
    ints, cell_type = t.ints, t.types[task.cell_type]
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    failed_at = base + ints[base + layout.H_FAILED]
    for row in range(task.rows):
        first_id = ints[nodes_at + row]
        subgraph = t.subgraphs[t.nodes[first_id].subgraph]
        request = t.requests[subgraph.request]
        last = t.nodes[first_id if task.is_loop else first_id + ints[lengths_at + row] - 1]
        has_failed = ints[failed_at + row] != 0
        for step in range(1 if task.is_loop else ints[lengths_at + row]):
            node = t.nodes[first_id + step]
            at = node.first_link
            for port in range(cell_type.num_inputs):
                info = t.ports[cell_type.first_port + port]
                count = 1
                if info.ragged:
                    count = t.links[at]
                    at += 1
                if task.is_loop and (info.carry < 0 or subgraph.loop_steps > 0):
                    if info.carry >= 0 and is_first_to_carry(t, cell_type, port):
                        _free_loop_state(t, base, row, port, node.first_value + info.carry, has_failed)
                elif info.carry < 0 or step == 0:
                    for k in range(at, at + count):
                        value_id = node.first_value + t.links[k]
                        value = t.values[value_id]
                        if value.bits & KEPT:
                            if has_failed:
                                continue
                            if info.carry >= 0:
                                advance_state(t, request, value_id, last.first_value + info.carry)
                            _read_late(t, value)
                        elif value.row >> LOCATION_SHIFT != task.worker:
                            _read_late(t, value)
                at += count


@compiled
def _free_loop_state(t, base, row, port, value_id, has_failed):
    """Frees the state that a loop's row read if it was not noted to be freed: of another worker, or KEPT.

    KEPT state of a row that failed stays, and what the row made is freed.
    """
    task = t.tasks[base // t.settings[0].buffer_ints]
    record = base + layout.HEADER + port * layout.INPUT
    handle = t.ints[base + t.ints[record + layout.IN_ROWS] + row]
    source = t.ints[record + layout.IN_SOURCE]
    if source != MIXED:
        handle |= source << LOCATION_SHIFT
    value = t.values[value_id]
    if value.bits & KEPT and has_failed:
        made = value.row
        value.row = handle
        give_row(t, made, value.kind)
    elif value.bits & KEPT or handle >> LOCATION_SHIFT != task.worker:
        give_row(t, handle, value.kind)


@compiled
def kill(t, request_id):
    """Ends a live request early: nothing of it is scheduled any more. Its rows come back through ``release``."""
    request = t.requests[request_id]
    move_request(t, request, DEAD)
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if t.subgraphs[k].state == QUEUED:
            dequeue(t, k)


@compiled
def cancel(t, request_id):
    """Kills a live request; returns True if its rows are back already, False if tasks in flight still hold some."""
    kill(t, request_id)
    if t.requests[request_id].in_flight == 0:
        release(t, request_id)
        return True
    return False


@compiled
def lose_worker(t, worker, notices):
    """Kills every request that has a task or a row at a lost worker; returns the number of notices.

    ``notices`` [3 * live requests, 2] must have room.
    """
    count = 0
    for request_id in range(t.requests.size):
        request = t.requests[request_id]
        if request.state == LIVE and _touches(t, request, worker):
            kill(t, request_id)
            notices[count, 0], notices[count, 1] = request_id, NOTICE_FAILED
            count += 1
            if request.in_flight == 0:
                release(t, request_id)
                notices[count, 0], notices[count, 1] = request_id, NOTICE_RELEASED
                count += 1
    for task_id in range(t.tasks.size):
        if t.tasks[task_id].in_use and t.tasks[task_id].worker == worker:
            _fail_all(t, task_id)
            count = complete(t, task_id, 0, notices, count)
    return count


@compiled
def _fail_all(t, task_id):
    """Marks every row of a lost task as failed: no state may follow it."""
    base = task_id * t.settings[0].buffer_ints
    failed_at = base + t.ints[base + layout.H_FAILED]
    for row in range(t.tasks[task_id].rows):
        t.ints[failed_at + row] = 1


@compiled
def _touches(t, request, worker):
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if t.subgraphs[k].pinned == worker and t.subgraphs[k].in_flight > 0:
            return True
    for k in range(request.first_value, request.first_value + request.num_values):
        if t.values[k].row >= NUM_PERMANENT and t.values[k].row >> LOCATION_SHIFT == worker:
            return True
    return False
