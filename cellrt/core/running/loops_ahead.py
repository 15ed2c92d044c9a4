"""Loops that go ahead: the next task is sent before it is known whether one before it said stop.

Tasks of a loop run on one worker in order and are taken in in order. One behind a task that stopped or failed counts
nothing: its rows were masked where it ran (``task_layout.py``), so that no state has moved and no result is shown.
Pages that it appended to hold no more rows than before, and go back when nothing of the request is in flight.

A task writes the state of an output to a row that no task in flight reads or writes: of n tasks in flight each has its
own, and the state before them has one. These rows take turns. When nothing is in flight, or the loop is over, all but
the one after the last step that is done go back: a task that is still in flight may write to them, but whoever takes
them comes behind it on the same stream. Of a loop of several cells they take turns by step, as other members read
them, and go back when it is over.
"""

from __future__ import annotations

from cellrt.core.running.records import give_late_rows, kind_of
from cellrt.core.state import task_layout as layout
from cellrt.core.state.queue import loop_tasks, refresh
from cellrt.core.state.record_layout import NO_STOP, OVER, ROWS_AT, body_of, output_of, output_position, record_of
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import CHAIN, LOCATION_SHIFT, MEMBER, Subgraph, Tables, Task
from cellrt.native.jit import compiled


@compiled
def send_run(t: Tables, subgraph_id: int, steps: int) -> None:
    """Notes that a task with so many steps of a loop was submitted; makes the next ready if it may go ahead."""
    record = record_of(t, t.subgraphs[subgraph_id])
    record.position += steps
    if record.position > record.unseen:
        record.num_sent += 1
    refresh(t, subgraph_id)


@compiled
def row_ahead(t: Tables, subgraph: Subgraph, number: int, worker: int, kind: int) -> int:
    """The row that the next task of a loop or member writes the state of output ``number`` to."""
    record, output, is_member = record_of(t, subgraph), output_of(t, subgraph, number), subgraph.what == MEMBER
    at = _turn_of(t, subgraph, number, record.position if is_member else record.num_sent)
    if t.links[at] == 0:
        t.links[at] = take_row(t, worker, kind)
    if is_member or loop_tasks(t, subgraph) == 0:
        output.previous_row = output.row
    output.row = t.links[at]
    return t.links[at]


@compiled
def _turn_of(t: Tables, subgraph: Subgraph, output: int, task: int) -> int:
    """The link of the row that task number ``task`` writes the state of an output to."""
    cell_type = t.types[subgraph.cell_type]
    return output_position(subgraph.record, cell_type, output) + ROWS_AT + task % (cell_type.ahead + 2)


@compiled
def write_flags(t: Tables, task: Task, base: int, end: int) -> int:
    """Writes from ``end`` on which flags the rows of a task read and write, if any are of a loop that may stop; returns
    the new end."""
    ints, rows, nodes_at = t.ints, task.rows, base + t.ints[base + layout.H_NODES]
    may_stop, before = task.is_loop == 1, 0
    for row in range(rows):
        id = ints[nodes_at + row]
        before = before + 1 if row > 0 and ints[nodes_at + row - 1] == id else 0
        ints[end + row], ints[end + rows + row] = layout.NEVER_STOPPED, layout.NOBODYS
        if id >= 0 or t.subgraphs[~id].what == CHAIN:
            continue
        task.goes_ahead = 1
        if t.subgraphs[~id].what == MEMBER:
            may_stop = _write_members_flags(t, t.subgraphs[~id], end + row, end + rows + row) or may_stop
            continue
        subgraph = t.subgraphs[~id]
        record = record_of(t, subgraph)
        is_step = record.position + before >= record.unseen
        if not is_step or (record.stop == NO_STOP and task.is_loop == 0):
            continue
        may_stop = True
        own, turn = layout.NOBODYS + 1 + 2 * ~id, record.num_sent % 2
        if loop_tasks(t, subgraph) > 0:
            ints[end + row] = own + 1 - turn
        ints[end + rows + row] = own + turn
    if not may_stop:
        return end
    ints[base + layout.H_FLAGS], ints[base + layout.H_NEW_FLAGS] = end - base, end + rows - base
    return end + layout.FLAGS * rows


@compiled
def _write_members_flags(t: Tables, member: Subgraph, read_at: int, written_at: int) -> bool:
    """Writes which flags the next step of a member reads and writes: all read that of the one that may say stop, as it
    was at the step before. Returns whether it reads or writes one."""
    record, body = record_of(t, member), body_of(t, member)
    if body.stopper < 0:
        return False
    own = layout.NOBODYS + 1 + 2 * (t.requests[member.request].first_subgraph + body.stopper)
    reads, writes = record.position > body.all_done, record.stop != NO_STOP
    if reads:
        t.ints[read_at] = own + (record.position - 1) % 2
    if writes:
        t.ints[written_at] = own + record.position % 2
    return reads or writes


@compiled
def note_run(t: Tables, subgraph: Subgraph, done: int, has_failed: bool) -> bool:
    """Takes in how the oldest task of a loop in flight went: what state stays. Returns whether it counts.

    ``done``: steps, negative if it stopped. Comes for dead requests too, whose session may keep the state.
    """
    record = record_of(t, subgraph)
    if record.num_sent == OVER:
        return False
    if not has_failed:
        record.done += abs(done)
        give_late_rows(t, subgraph)
    if not (record.done > record.unseen or has_failed):
        return True
    is_over = has_failed or (done < 0 and record.stop != NO_STOP)
    left = loop_tasks(t, subgraph)
    task = record.num_sent - 1 - left
    for number in range(t.types[subgraph.cell_type].num_outputs):
        output = output_of(t, subgraph, number)
        if output.is_state:
            if not has_failed:
                output.previous_row = t.links[_turn_of(t, subgraph, number, task)]
            if is_over or left == 0:
                _keep_one(t, subgraph, number)
    if is_over:
        record.num_sent = OVER
    elif left == 0:
        record.num_sent = 1  # the next task takes the second row
    return True


@compiled
def keep_last(t: Tables, member: Subgraph) -> None:
    """Gives back all rows of the state of a member that is over but those of its last step."""
    record = record_of(t, member)
    for number in range(t.types[member.cell_type].num_outputs):
        output = output_of(t, member, number)
        if output.is_state:
            last = output.row
            if record.position > record.done:
                last = t.links[_turn_of(t, member, number, record.done - 1)]
            output.previous_row = last
            _keep_one(t, member, number)
    record.position = record.done


@compiled
def bring_member(t: Tables, task: Task, member: Subgraph, number: int, kind: int) -> None:
    """As ``bring_state``, for a member that goes ahead: all its rows are of steps that all members have done."""
    output = output_of(t, member, number)
    row = output.row
    if row == 0 or row >> LOCATION_SHIFT == task.worker:
        return
    task.reads_late = 1
    for step in range(t.types[member.cell_type].ahead + 2):
        at = _turn_of(t, member, number, step)
        if t.links[at] == row:
            output.late_row = row
        elif t.links[at] > 0:
            give_row(t, t.links[at], kind)
        t.links[at] = 0


@compiled
def _keep_one(t: Tables, subgraph: Subgraph, number: int) -> None:
    """Gives back all rows of an output's state but that of the last step that is done, which becomes the first."""
    output, kept = output_of(t, subgraph, number), 0
    output.row = output.previous_row
    for task in range(t.types[subgraph.cell_type].ahead + 2):
        at = _turn_of(t, subgraph, number, task)
        if t.links[at] > 0 and t.links[at] == output.row:
            kept = t.links[at]
        elif t.links[at] > 0:
            give_row(t, t.links[at], kind_of(t, subgraph, number))
        t.links[at] = 0
    output.first_row = kept
