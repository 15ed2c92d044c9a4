"""Each cell type's queue of subgraphs, and the counts of ready nodes that Algorithm 1 asks for.

A queue is ``NUM_LANES`` first-in-first-out lists; a request's lane comes from the policy and its priority, so an
order other than arrival costs no search. A subgraph stays in its place until all its nodes are submitted.

What of a type is ready at one client priority is its *backlog* there: ``ready[backlog, worker]`` counts ready nodes of
queued subgraphs pinned to that worker, column 0 those that any worker may take. A backlog waits from the moment it
becomes ready; while a task that took of it is at a worker it does not wait, whatever is left of it.
"""

from __future__ import annotations

from cellrt.core.event_log import log_event
from cellrt.core.jit import compiled
from cellrt.core.moves import HANDED_OUT, QUEUED, move_subgraph
from cellrt.core.tables import ALL_TYPES, NUM_LANES, NUM_PRIORITIES, RELEASED


@compiled
def backlog_of(cell_type, priority):
    """Row of ``ready`` and of ``since_ns``."""
    return cell_type * NUM_PRIORITIES + priority


@compiled
def enqueue(t, subgraph_id):
    """Hands a subgraph to the scheduler: all it needs from other subgraphs is there."""
    subgraph = t.subgraphs[subgraph_id]
    lane = t.lanes[subgraph.cell_type * NUM_LANES + t.requests[subgraph.request].lane]
    subgraph.previous, subgraph.next = lane.tail, -1
    if lane.tail >= 0:
        t.subgraphs[lane.tail].next = subgraph_id
    else:
        lane.head = subgraph_id
    lane.tail = subgraph_id
    move_subgraph(t, subgraph, QUEUED)
    at = backlog_of(subgraph.cell_type, subgraph.priority)
    if t.ready[at, subgraph.pinned] == 0:
        _begin_wait(t, at)
    t.ready[at, subgraph.pinned] += subgraph.num_ready
    log_event(t, RELEASED, subgraph.request, -1, subgraph.cell_type)


@compiled
def _begin_wait(t, backlog):
    """Has a backlog wait from now on if nothing of it was ready.

    Nodes that become ready in a queued subgraph need no such look: a task of it was formed or has ended just now.
    """
    for location in range(t.ready.shape[1]):
        if t.ready[backlog, location] > 0:
            return
    t.since_ns[backlog] = t.settings[0].now_ns


@compiled
def dequeue(t, subgraph_id):
    """Takes a subgraph out of its queue; it may have ready nodes only if its request is dead."""
    subgraph = t.subgraphs[subgraph_id]
    lane = t.lanes[subgraph.cell_type * NUM_LANES + t.requests[subgraph.request].lane]
    if subgraph.previous >= 0:
        t.subgraphs[subgraph.previous].next = subgraph.next
    else:
        lane.head = subgraph.next
    if subgraph.next >= 0:
        t.subgraphs[subgraph.next].previous = subgraph.previous
    else:
        lane.tail = subgraph.previous
    move_subgraph(t, subgraph, HANDED_OUT)
    t.ready[backlog_of(subgraph.cell_type, subgraph.priority), subgraph.pinned] -= subgraph.num_ready


@compiled
def pin(t, subgraph, worker):
    """Pins a subgraph to a worker's location (0: to none) and moves its ready nodes to that count."""
    if subgraph.pinned != worker:
        if subgraph.state == QUEUED:
            at = backlog_of(subgraph.cell_type, subgraph.priority)
            t.ready[at, subgraph.pinned] -= subgraph.num_ready
            t.ready[at, worker] += subgraph.num_ready
        subgraph.pinned = worker


@compiled
def push_ready(t, node_id):
    """Appends a node to its subgraph's ready list."""
    node = t.nodes[node_id]
    subgraph = t.subgraphs[node.subgraph]
    node.next_ready = -1
    if subgraph.ready_tail >= 0:
        t.nodes[subgraph.ready_tail].next_ready = node_id
    else:
        subgraph.ready_head = node_id
    subgraph.ready_tail = node_id
    subgraph.num_ready += 1
    if subgraph.state == QUEUED:
        t.ready[backlog_of(subgraph.cell_type, subgraph.priority), subgraph.pinned] += 1


@compiled
def pop_ready(t, subgraph):
    """Takes the first node of a subgraph's ready list."""
    node_id = subgraph.ready_head
    subgraph.ready_head = t.nodes[node_id].next_ready
    if subgraph.ready_head < 0:
        subgraph.ready_tail = -1
    subgraph.num_ready -= 1
    if subgraph.state == QUEUED:
        t.ready[backlog_of(subgraph.cell_type, subgraph.priority), subgraph.pinned] -= 1
    return node_id


@compiled
def num_ready_at(t, cell_type, priority, worker):
    """Ready nodes of a type at one client priority that ``worker`` may take."""
    at = backlog_of(cell_type, priority)
    return t.ready[at, 0] + t.ready[at, worker]


@compiled
def num_ready(t, cell_type, worker):
    """Ready nodes of a type that ``worker`` may take (``ct.NumReadyNodes()`` of Algorithm 1)."""
    count = 0
    for priority in range(NUM_PRIORITIES):
        count += num_ready_at(t, cell_type, priority, worker)
    return count


@compiled
def note_served(t, task):
    """Notes that a task was formed, or has ended: what it took of does not wait until now."""
    now_ns = t.settings[0].now_ns
    for priority in range(NUM_PRIORITIES):
        if task.priorities & (1 << priority):
            t.since_ns[backlog_of(task.cell_type, priority)] = now_ns
    t.since_ns[backlog_of(ALL_TYPES, task.priority)] = now_ns
