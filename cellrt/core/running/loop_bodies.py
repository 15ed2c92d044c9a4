"""The bodies of running loops: each has members, the records of its cells, which take each step together.

A member may take its step as soon as what it reads of the others is sent (on the same worker) or done. The next step
begins when all of them have done this one, and none has said stop. So the step before left its outputs for all, and two
rows for each state are enough. ``record_layout.py`` says what is written where. A loop of one cell waits for no other:
all its steps are begun from the start, and a task may take several of them, a *run*.

Where loops go ahead of their stop (``loops_ahead.py``) the next step begins when all members have sent this one to the
same worker, and its tasks go there too. So it runs after everything that it reads, and steps are taken in in order.
"""

from __future__ import annotations

from cellrt.core.running.loops_ahead import keep_last, settle
from cellrt.core.running.record_ends import end_inputs, end_outputs, release_edges
from cellrt.core.running.records import give_late_rows
from cellrt.core.state.moves import LIVE
from cellrt.core.state.queue import dequeue, enqueue, loop_tasks, refresh
from cellrt.core.state.record_layout import BODY_WORDS, BROKEN, NO_STOP, body_of, record_of
from cellrt.core.state.tables import MIXED, Request, Subgraph, Tables
from cellrt.native.jit import compiled


@compiled
def send_loop(t: Tables, subgraph_id: int, steps: int) -> None:
    """Count a submitted task with this many steps of a loop's cell.

    Wake the members that may read them on the same worker (early release), and make the next step ready if it may go
    ahead.
    """
    subgraph = t.subgraphs[subgraph_id]
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    record.position += steps
    if record.position > record.unseen:
        record.num_sent += 1
    if body.runs:
        refresh(t, subgraph_id)
        return
    body.to_send -= 1
    if body.sent_at == 0:
        body.sent_at = subgraph.pinned
    elif body.sent_at != subgraph.pinned:
        body.sent_at = MIXED
    refresh(t, subgraph_id)
    if t.settings[0].early_release:
        _refresh_followers(t, subgraph)
        if body.sent_at > 0 and body.to_send == 0 and t.types[subgraph.cell_type].ahead > 0:
            _begin_step(t, subgraph_id)
            _refresh_members(t, subgraph)


@compiled
def note_loop(t: Tables, subgraph: Subgraph, done: int, has_failed: bool) -> bool:
    """Note the steps that a task did of a loop's cell: which state stays, and whether the loop ends.

    It is called for dead requests, too.

    ``done`` is negative if the last step said stop. Return whether the steps count: after a stop they do not.
    """
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    is_behind = body.stopped == BROKEN or 0 < body.stopped <= record.done
    is_behind = is_behind or (done == 0 and not has_failed)  # after a failure of the one that says stop
    if not (is_behind or has_failed):
        record.done += abs(done)
        if done < 0 and record.stop != NO_STOP and record.done > record.unseen:
            body.stopped = record.done
    if not body.runs:
        if t.requests[subgraph.request].state != LIVE:  # else other cells may still read what is in flight
            settle(t, subgraph, record.done - 1)
    elif not is_behind and (has_failed or body.stopped > 0):
        settle(t, subgraph, record.num_sent - 1 - loop_tasks(t, subgraph) - int(has_failed))
        body.stopped = BROKEN if has_failed else body.stopped
    return not is_behind


@compiled
def complete_step(t: Tables, subgraph_id: int) -> bool:
    """Note that a loop's cell has done its steps, and begin the next step if all cells have.

    Return whether that was the last step: then ``end_loop`` follows.
    """
    subgraph = t.subgraphs[subgraph_id]
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    body.left -= 1
    if body.left > 0 and body.stopped > 0:
        _refresh_members(t, subgraph)
        return False
    if body.left > 0:
        refresh(t, subgraph_id)
        _refresh_followers(t, subgraph)
        return False
    for k in range(body.num_members):
        give_late_rows(t, t.subgraphs[member_of(t, subgraph, k)])
    body.all_done, body.left = record.done, body.num_members
    if body.stopped > 0 or body.all_done == body.limit:
        return True
    if body.to_send == body.num_members and record.end == body.all_done + 1:
        body.sent_at = 0
    _begin_step(t, subgraph_id)
    _refresh_members(t, subgraph)
    return False


@compiled
def _begin_step(t: Tables, subgraph_id: int) -> None:
    """Begin the next step of a body if all members have done the last that is begun, or may go ahead of it."""
    subgraph = t.subgraphs[subgraph_id]
    body, begun = body_of(t, subgraph), record_of(t, subgraph).end
    unknown = begun - body.all_done
    if begun == body.limit or body.stopped > 0 or body.to_send > 0:
        return
    if unknown > t.types[subgraph.cell_type].ahead:
        return
    if unknown == 0:
        body.sent_at = 0
    elif body.sent_at == MIXED:
        return
    body.to_send = body.num_members
    for k in range(body.num_members):
        record_of(t, t.subgraphs[member_of(t, subgraph, k)]).end += 1
    if body.num_types > 0:
        first = record_of(t, subgraph).body + BODY_WORDS + body.num_members
        _change_type(t, subgraph_id, t.links[first + begun])


@compiled
def _change_type(t: Tables, subgraph_id: int, cell_type: int) -> None:
    """Change the cell type of a loop's next step: it waits in that type's queue."""
    subgraph = t.subgraphs[subgraph_id]
    dequeue(t, subgraph_id)
    subgraph.cell_type = cell_type
    enqueue(t, subgraph_id)


@compiled
def member_of(t: Tables, subgraph: Subgraph, k: int) -> int:
    """Return the subgraph of member ``k`` of the body that a subgraph is a member of."""
    return t.requests[subgraph.request].first_subgraph + t.links[record_of(t, subgraph).body + BODY_WORDS + k]


@compiled
def end_loop(t: Tables, request: Request, subgraph_id: int) -> None:
    """End all members of a loop that has taken its last step.

    Tasks that went ahead read the same inputs as they did.
    """
    first = t.subgraphs[subgraph_id]
    for k in range(body_of(t, first).num_members):
        its_id = member_of(t, first, k)
        subgraph = t.subgraphs[its_id]
        if subgraph.in_flight == 0:
            end_inputs(t, subgraph)
        keep_last(t, subgraph)
        end_outputs(t, subgraph)
        subgraph.nodes_left = 0
        dequeue(t, its_id)
        request.nodes_left -= 1
        release_edges(t, subgraph)


@compiled
def _refresh_members(t: Tables, subgraph: Subgraph) -> None:
    for k in range(body_of(t, subgraph).num_members):
        refresh(t, member_of(t, subgraph, k))


@compiled
def _refresh_followers(t: Tables, subgraph: Subgraph) -> None:
    record = record_of(t, subgraph)
    for k in range(record.num_followers):
        refresh(t, t.links[record.followers + k])
