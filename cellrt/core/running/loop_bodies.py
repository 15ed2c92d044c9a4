"""Loops of several cells while they run: the members of a body, which go in step.

A member may take its step as soon as what it reads of the others is sent (on the same worker) or done; the next step
begins when all of them have done this one, and none has said stop. So what the step before left is there for all, and
two rows for each state are enough. See ``record_layout.py`` for what is written where.

Where loops go ahead of their stop (``loops_ahead.py``) the next step begins when all members have sent this one to the
same worker, and its tasks go there too: so it is behind all that it reads, and steps are taken in in order.
"""

from __future__ import annotations

from cellrt.core.running.loops_ahead import keep_last
from cellrt.core.running.record_ends import end_inputs, end_outputs, release_edges
from cellrt.core.running.records import give_late_rows, note_steps
from cellrt.core.state.queue import dequeue, enqueue, refresh
from cellrt.core.state.record_layout import BODY_WORDS, NO_STOP, body_of, record_of
from cellrt.core.state.tables import MEMBER, MIXED, Request, Subgraph, Tables
from cellrt.native.jit import compiled


@compiled
def send_member(t: Tables, subgraph_id: int) -> None:
    """Notes that a member's step was submitted; wakes who may read it on the same worker (early release)."""
    subgraph = t.subgraphs[subgraph_id]
    body = body_of(t, subgraph)
    record_of(t, subgraph).position += 1
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
def note_member(t: Tables, subgraph: Subgraph, done: int, has_failed: bool) -> bool:
    """Takes in how a member's step went: what state stays, and whether it said stop. Returns whether it counts, which
    behind a stop it does not. Comes for dead requests too."""
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    is_behind = body.stopped > 0 and record.done >= body.stopped
    if is_behind or (done == 0 and not has_failed):  # the latter is behind a failure of the one that says stop
        return False
    note_steps(t, subgraph, 1, has_failed)
    if done < 0 and record.stop != NO_STOP and not has_failed:
        body.stopped = record.done
    return True


@compiled
def complete_member(t: Tables, request: Request, subgraph_id: int) -> bool:
    """Takes in that a member has done its step, and begins the next if all have. Returns whether the loop is over: then
    all members are."""
    subgraph = t.subgraphs[subgraph_id]
    body = body_of(t, subgraph)
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
    body.all_done += 1
    body.left = body.num_members
    if body.stopped or body.all_done == body.limit:
        for k in range(body.num_members):
            end_loop(t, request, member_of(t, subgraph, k))
        return True
    if body.to_send == body.num_members and record_of(t, subgraph).end == body.all_done + 1:
        body.sent_at = 0
    _begin_step(t, subgraph_id)
    _refresh_members(t, subgraph)
    return False


@compiled
def _begin_step(t: Tables, subgraph_id: int) -> None:
    """Begins the next step of a body if all members have done the last that is begun, or may go ahead of it."""
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
    """Has a loop's next step be of another cell type: it waits in that type's queue."""
    subgraph = t.subgraphs[subgraph_id]
    dequeue(t, subgraph_id)
    subgraph.cell_type = cell_type
    enqueue(t, subgraph_id)


@compiled
def member_of(t: Tables, subgraph: Subgraph, k: int) -> int:
    """The subgraph of member ``k`` of the body that one is a member of."""
    return t.requests[subgraph.request].first_subgraph + t.links[record_of(t, subgraph).body + BODY_WORDS + k]


@compiled
def end_loop(t: Tables, request: Request, subgraph_id: int) -> None:
    """Ends a loop, or a member of one: it has taken its last step. What it reads, those read too that went ahead."""
    subgraph = t.subgraphs[subgraph_id]
    if subgraph.in_flight == 0:
        end_inputs(t, subgraph)
    if subgraph.what == MEMBER and t.types[subgraph.cell_type].ahead > 0:
        keep_last(t, subgraph)
    end_outputs(t, subgraph)
    subgraph.nodes_left = 0
    dequeue(t, subgraph_id)
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
