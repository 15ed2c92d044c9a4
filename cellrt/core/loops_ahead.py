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

from cellrt.core import record_layout as record
from cellrt.core import task_layout as layout
from cellrt.core.jit import compiled
from cellrt.core.queue import loop_tasks, refresh
from cellrt.core.records import give_late_rows, kind_of, output_at
from cellrt.core.rows import give_row, take_row
from cellrt.core.tables import CHAIN, LOCATION_SHIFT, MEMBER


@compiled
def send_run(t, subgraph_id, steps):
    """Notes that a task with so many steps of a loop was submitted; makes the next ready if it may go ahead."""
    links, at = t.links, t.subgraphs[subgraph_id].record
    links[at + record.POSITION] += steps
    if links[at + record.POSITION] > links[at + record.UNSEEN]:
        links[at + record.NUM_SENT] += 1
    refresh(t, subgraph_id)


@compiled
def row_ahead(t, subgraph, output, to, worker, kind):
    """The row that the next task of a loop or member writes the state of an output to, which is at ``to``."""
    links, is_member = t.links, subgraph.what == MEMBER
    sent = links[subgraph.record + (record.POSITION if is_member else record.NUM_SENT)]
    word = _word_of(t, subgraph, output, sent)
    if links[word] == 0:
        links[word] = take_row(t, worker, kind)
    if is_member or loop_tasks(t, subgraph) == 0:
        links[to + record.PREVIOUS_ROW] = links[to + record.ROW]
    links[to + record.ROW] = links[word]
    return links[word]


@compiled
def _word_of(t, subgraph, output, task):
    """The link of the row that task number ``task`` writes the state of an output to."""
    ahead = t.types[subgraph.cell_type].ahead
    place = task % (ahead + 2)
    if place < 2:
        return output_at(t, subgraph, output) + record.FIRST_ROW + place
    return t.links[subgraph.record + record.MORE_ROWS] + ahead * output + place - 2


@compiled
def write_flags(t, task, base, end):
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
        subgraph, at = t.subgraphs[~id], t.subgraphs[~id].record
        is_step = t.links[at + record.POSITION] + before >= t.links[at + record.UNSEEN]
        if not is_step or (t.links[at + record.STOP] == record.NO_STOP and task.is_loop == 0):
            continue
        may_stop = True
        own, turn = layout.NOBODYS + 1 + 2 * ~id, t.links[at + record.NUM_SENT] % 2
        if loop_tasks(t, subgraph) > 0:
            ints[end + row] = own + 1 - turn
        ints[end + rows + row] = own + turn
    if not may_stop:
        return end
    ints[base + layout.H_FLAGS], ints[base + layout.H_NEW_FLAGS] = end - base, end + rows - base
    return end + layout.FLAGS * rows


@compiled
def _write_members_flags(t, member, read_at, written_at):
    """Writes which flags the next step of a member reads and writes: all read that of the one that may say stop, as it
    was at the step before. Returns whether it reads or writes one."""
    links, position = t.links, t.links[member.record + record.POSITION]
    body = links[member.record + record.BODY]
    if links[body + record.STOPPER] < 0:
        return False
    own = layout.NOBODYS + 1 + 2 * (t.requests[member.request].first_subgraph + links[body + record.STOPPER])
    reads, writes = position > links[body + record.ALL_DONE], links[member.record + record.STOP] != record.NO_STOP
    if reads:
        t.ints[read_at] = own + (position - 1) % 2
    if writes:
        t.ints[written_at] = own + position % 2
    return reads or writes


@compiled
def note_run(t, subgraph, done, has_failed):
    """Takes in how the oldest task of a loop in flight went: what state stays. Returns whether it counts.

    ``done``: steps, negative if it stopped. Comes for dead requests too, whose session may keep the state.
    """
    links, at = t.links, subgraph.record
    if links[at + record.NUM_SENT] == record.OVER:
        return False
    if not has_failed:
        links[at + record.DONE] += abs(done)
        give_late_rows(t, subgraph)
    is_step = links[at + record.DONE] > links[at + record.UNSEEN]
    if not (is_step or has_failed):
        return True
    is_over = has_failed or (done < 0 and links[at + record.STOP] != record.NO_STOP)
    left = loop_tasks(t, subgraph)
    task = links[at + record.NUM_SENT] - 1 - left
    for output in range(t.types[subgraph.cell_type].num_outputs):
        to = output_at(t, subgraph, output)
        if links[to + record.IS_STATE]:
            if not has_failed:
                links[to + record.PREVIOUS_ROW] = links[_word_of(t, subgraph, output, task)]
            if is_over or left == 0:
                _keep_one(t, subgraph, output)
    if is_over:
        links[at + record.NUM_SENT] = record.OVER
    elif left == 0:
        links[at + record.NUM_SENT] = 1  # the next task takes the second row
    return True


@compiled
def keep_last(t, member):
    """Gives back all rows of the state of a member that is over but those of its last step."""
    links, at = t.links, member.record
    for output in range(t.types[member.cell_type].num_outputs):
        to = output_at(t, member, output)
        if links[to + record.IS_STATE]:
            last = links[to + record.ROW]
            if links[at + record.POSITION] > links[at + record.DONE]:
                last = links[_word_of(t, member, output, links[at + record.DONE] - 1)]
            links[to + record.PREVIOUS_ROW] = last
            _keep_one(t, member, output)
    links[at + record.POSITION] = links[at + record.DONE]


@compiled
def bring_member(t, task, member, output, to, kind):
    """As ``bring_state``, for a member that goes ahead: all its rows are of steps that all members have done."""
    links, row = t.links, t.links[to + record.ROW]
    if row == 0 or row >> LOCATION_SHIFT == task.worker:
        return
    task.reads_late = 1
    for step in range(t.types[member.cell_type].ahead + 2):
        word = _word_of(t, member, output, step)
        if links[word] == row:
            links[to + record.LATE_ROW] = row
        elif links[word] > 0:
            give_row(t, links[word], kind)
        links[word] = 0


@compiled
def _keep_one(t, subgraph, output):
    """Gives back all rows of an output's state but that of the last step that is done, which becomes the first."""
    links, to, kept = t.links, output_at(t, subgraph, output), 0
    links[to + record.ROW] = links[to + record.PREVIOUS_ROW]
    for task in range(t.types[subgraph.cell_type].ahead + 2):
        word = _word_of(t, subgraph, output, task)
        if links[word] > 0 and links[word] == links[to + record.ROW]:
            kept = links[word]
        elif links[word] > 0:
            give_row(t, links[word], kind_of(t, subgraph, output))
        links[word] = 0
    links[to + record.FIRST_ROW] = kept
