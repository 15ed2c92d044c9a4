"""Each cell type's queue of subgraphs, and the counts of ready nodes that Algorithm 1 asks for.

A queue is ``NUM_LANES`` first-in-first-out lists; a request's lane comes from the policy and its priority, so an
order other than arrival costs no search. A subgraph stays in its place until all its nodes are submitted.
``ready[cell_type, worker]`` counts ready nodes of queued subgraphs pinned to that worker, column 0 those that any
worker may take.
"""

from __future__ import annotations

from cellrt.core.compiled import compiled
from cellrt.core.story import tell
from cellrt.core.tables import NUM_LANES, RELEASED


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
    subgraph.queued = 1
    t.ready[subgraph.cell_type, subgraph.pinned] += subgraph.num_ready
    tell(t, RELEASED, subgraph.request, -1, subgraph.cell_type)


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
    subgraph.queued = 0
    t.ready[subgraph.cell_type, subgraph.pinned] -= subgraph.num_ready


@compiled
def pin(t, subgraph, worker):
    """Pins a subgraph to a worker's location (0: to none) and moves its ready nodes to that count."""
    if subgraph.pinned != worker:
        if subgraph.queued:
            t.ready[subgraph.cell_type, subgraph.pinned] -= subgraph.num_ready
            t.ready[subgraph.cell_type, worker] += subgraph.num_ready
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
    if subgraph.queued:
        t.ready[subgraph.cell_type, subgraph.pinned] += 1


@compiled
def pop_ready(t, subgraph):
    """Takes the first node of a subgraph's ready list."""
    node_id = subgraph.ready_head
    subgraph.ready_head = t.nodes[node_id].next_ready
    if subgraph.ready_head < 0:
        subgraph.ready_tail = -1
    subgraph.num_ready -= 1
    if subgraph.queued:
        t.ready[subgraph.cell_type, subgraph.pinned] -= 1
    return node_id


@compiled
def num_ready(t, cell_type, worker):
    """Ready nodes of a type that ``worker`` may take (``ct.NumReadyNodes()`` of Algorithm 1)."""
    return t.ready[cell_type, 0] + t.ready[cell_type, worker]
