"""Loops of several cells while they run: the members of a body, which go in step.

A member may take its step as soon as what it reads of the others is sent (on the same worker) or done; the next step
begins when all of them have done this one, and none has said stop. So what the step before left is there for all, and
two rows for each state are enough. See ``record_layout.py`` for what is written where.
"""

from __future__ import annotations

from cellrt.core import record_layout as record
from cellrt.core.jit import compiled
from cellrt.core.queue import dequeue, enqueue, refresh
from cellrt.core.record_ends import end_inputs, end_outputs, release_edges
from cellrt.core.records import give_late_rows


@compiled
def send_member(t, subgraph_id):
    """Notes that a member's step was submitted; wakes who may read it on the same worker (early release)."""
    at = t.subgraphs[subgraph_id].record
    t.links[at + record.POSITION] += 1
    refresh(t, subgraph_id)
    if t.settings[0].early_release:
        _refresh_followers(t, at)


@compiled
def complete_member(t, request, subgraph_id, has_stopped):
    """Takes in that a member has done its step, and begins the next if all have. Returns whether the loop is over: then
    all members are."""
    links, at = t.links, t.subgraphs[subgraph_id].record
    body = links[at + record.BODY]
    if has_stopped and links[at + record.STOP] != record.NO_STOP:
        links[body + record.HAS_STOPPED] = 1
    links[body + record.LEFT] -= 1
    if links[body + record.LEFT] > 0:
        refresh(t, subgraph_id)
        _refresh_followers(t, at)
        return False
    count = links[body + record.MEMBERS]
    for k in range(count):
        give_late_rows(t, t.subgraphs[member_of(t, request, body, k)])
    if links[body + record.HAS_STOPPED] or links[at + record.DONE] == links[body + record.LIMIT]:
        for k in range(count):
            end_loop(t, request, member_of(t, request, body, k))
        return True
    links[body + record.LEFT] = count
    for k in range(count):
        links[t.subgraphs[member_of(t, request, body, k)].record + record.LENGTH] += 1
    if links[body + record.NUM_TYPES] > 0:
        _change_type(t, subgraph_id, links[body + record.MEMBERS + 1 + count + links[at + record.DONE]])
    for k in range(count):
        refresh(t, member_of(t, request, body, k))
    return False


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
    end_outputs(t, subgraph)
    subgraph.nodes_left = 0
    dequeue(t, subgraph_id)
    request.nodes_left -= 1
    release_edges(t, subgraph)


@compiled
def _refresh_followers(t, at):
    links = t.links
    for k in range(links[at + record.NUM_FOLLOWERS]):
        refresh(t, links[links[at + record.FOLLOWERS] + k])
