"""Loops of several cells while they run: the members of a body, which go in step.

A member may take its step as soon as what it reads of the others is sent (on the same worker) or done; the next step
begins when all of them have done this one, and none has said stop. So what the step before left is there for all, and
two rows for each state are enough. See ``record_layout.py`` for what is written where.

Where loops go ahead of their stop (``loops_ahead.py``) the next step begins when all members have sent this one to the
same worker, and its tasks go there too: so it is behind all that it reads, and steps are taken in in order.
"""

from __future__ import annotations

from cellrt.core import record_layout as record
from cellrt.core.jit import compiled
from cellrt.core.loops_ahead import keep_last
from cellrt.core.queue import dequeue, enqueue, refresh
from cellrt.core.record_ends import end_inputs, end_outputs, release_edges
from cellrt.core.records import give_late_rows, note_steps
from cellrt.core.tables import MEMBER, MIXED


@compiled
def send_member(t, subgraph_id):
    """Notes that a member's step was submitted; wakes who may read it on the same worker (early release)."""
    subgraph = t.subgraphs[subgraph_id]
    links, at, body = t.links, subgraph.record, t.links[subgraph.record + record.BODY]
    links[at + record.POSITION] += 1
    links[body + record.TO_SEND] -= 1
    if links[body + record.SENT_AT] == 0:
        links[body + record.SENT_AT] = subgraph.pinned
    elif links[body + record.SENT_AT] != subgraph.pinned:
        links[body + record.SENT_AT] = MIXED
    refresh(t, subgraph_id)
    if t.settings[0].early_release:
        _refresh_followers(t, at)
        is_sent = links[body + record.SENT_AT] > 0 and links[body + record.TO_SEND] == 0
        if is_sent and t.types[subgraph.cell_type].ahead > 0:
            _begin_step(t, t.requests[subgraph.request], subgraph_id)
            _refresh_members(t, t.requests[subgraph.request], body)


@compiled
def note_member(t, subgraph, done, has_failed):
    """Takes in how a member's step went: what state stays, and whether it said stop. Returns whether it counts, which
    behind a stop it does not. Comes for dead requests too."""
    links, at, body = t.links, subgraph.record, t.links[subgraph.record + record.BODY]
    is_behind = links[body + record.STOPPED] > 0 and links[at + record.DONE] >= links[body + record.STOPPED]
    if is_behind or (done == 0 and not has_failed):  # the latter is behind a failure of the one that says stop
        return False
    note_steps(t, subgraph, 1, has_failed)
    if done < 0 and links[at + record.STOP] != record.NO_STOP and not has_failed:
        links[body + record.STOPPED] = links[at + record.DONE]
    return True


@compiled
def complete_member(t, request, subgraph_id):
    """Takes in that a member has done its step, and begins the next if all have. Returns whether the loop is over: then
    all members are."""
    links, at = t.links, t.subgraphs[subgraph_id].record
    body = links[at + record.BODY]
    count = links[body + record.MEMBERS]
    links[body + record.LEFT] -= 1
    if links[body + record.LEFT] > 0 and links[body + record.STOPPED] > 0:
        _refresh_members(t, request, body)
        return False
    if links[body + record.LEFT] > 0:
        refresh(t, subgraph_id)
        _refresh_followers(t, at)
        return False
    for k in range(count):
        give_late_rows(t, t.subgraphs[member_of(t, request, body, k)])
    links[body + record.ALL_DONE] += 1
    links[body + record.LEFT] = count
    if links[body + record.STOPPED] or links[body + record.ALL_DONE] == links[body + record.LIMIT]:
        for k in range(count):
            end_loop(t, request, member_of(t, request, body, k))
        return True
    if links[body + record.TO_SEND] == count and links[at + record.LENGTH] == links[body + record.ALL_DONE] + 1:
        links[body + record.SENT_AT] = 0
    _begin_step(t, request, subgraph_id)
    _refresh_members(t, request, body)
    return False


@compiled
def _begin_step(t, request, subgraph_id):
    """Begins the next step of a body if all members have done the last that is begun, or may go ahead of it."""
    links, at = t.links, t.subgraphs[subgraph_id].record
    body, begun = links[at + record.BODY], links[at + record.LENGTH]
    count, unknown = links[body + record.MEMBERS], begun - links[body + record.ALL_DONE]
    if begun == links[body + record.LIMIT] or links[body + record.STOPPED] > 0 or links[body + record.TO_SEND] > 0:
        return
    if unknown > t.types[t.subgraphs[subgraph_id].cell_type].ahead:
        return
    if unknown == 0:
        links[body + record.SENT_AT] = 0
    elif links[body + record.SENT_AT] == MIXED:
        return
    links[body + record.TO_SEND] = count
    for k in range(count):
        links[t.subgraphs[member_of(t, request, body, k)].record + record.LENGTH] += 1
    if links[body + record.NUM_TYPES] > 0:
        _change_type(t, subgraph_id, links[body + record.MEMBERS + 1 + count + begun])


@compiled
def _change_type(t, subgraph_id, cell_type):
    """Has a loop's next step be of another cell type: it waits in that type's queue."""
    subgraph = t.subgraphs[subgraph_id]
    dequeue(t, subgraph_id)
    subgraph.cell_type = cell_type
    enqueue(t, subgraph_id)


@compiled
def member_of(t, request, body, k):
    """The subgraph of member ``k``."""
    return request.first_subgraph + t.links[body + record.MEMBERS + 1 + k]


@compiled
def end_loop(t, request, subgraph_id):
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
def _refresh_members(t, request, body):
    for k in range(t.links[body + record.MEMBERS]):
        refresh(t, member_of(t, request, body, k))


@compiled
def _refresh_followers(t, at):
    links = t.links
    for k in range(links[at + record.NUM_FOLLOWERS]):
        refresh(t, links[links[at + record.FOLLOWERS] + k])
