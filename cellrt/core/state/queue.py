"""Each cell type's queue of subgraphs, and the counts of ready nodes that Algorithm 1 uses.

A queue is a first-in-first-out list of each client priority; a policy may put it in another order before a task takes
of it (``policy.py``). A subgraph keeps its place until all its nodes are submitted; a chain or loop has a ready node
where it may take a step.

The ready nodes of a type at one client priority are its *backlog* there: ``ready[backlog, worker]`` counts ready nodes
of queued subgraphs pinned to that worker, column 0 those that any worker may take. A backlog waits from the moment it
becomes ready; while a task that took of it is at a worker it does not wait, whatever is left of it.
"""

from __future__ import annotations

from cellrt.core.state.event_log import log_event
from cellrt.core.state.moves import HANDED_OUT, QUEUED, move_subgraph
from cellrt.core.state.record_layout import SAME, STEP, Input, body_of, input_of, record_of
from cellrt.core.state.tables import (
    ALL_TYPES,
    CHAIN,
    LAUNCHED,
    NUM_PRIORITIES,
    RELEASED,
    Request,
    Subgraph,
    Tables,
    Task,
)
from cellrt.native.jit import compiled, inlined


@compiled
def backlog_of(cell_type: int, priority: int) -> int:
    """Return the row of ``ready``, of ``since_ns`` and of ``lanes``."""
    return cell_type * NUM_PRIORITIES + priority


@compiled
def nth_priority(first: int, k: int) -> int:
    """Return the k-th client priority of a task: first the one whose turn it is, then the others, the highest first."""
    if k == 0:
        return first
    return NUM_PRIORITIES - k if NUM_PRIORITIES - k > first else NUM_PRIORITIES - 1 - k


@compiled
def enqueue(t: Tables, subgraph_id: int) -> None:
    """Hand a subgraph to the scheduler: everything that it needs from other subgraphs is there."""
    subgraph = t.subgraphs[subgraph_id]
    t.types[subgraph.cell_type].starved_at = 0
    lane = t.lanes[backlog_of(subgraph.cell_type, subgraph.priority)]
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
    if subgraph.record >= 0:
        refresh(t, subgraph_id)


@compiled
def _begin_wait(t: Tables, backlog: int) -> None:
    """Let a backlog wait from now on if nothing of it was ready.

    Nodes that become ready in a queued subgraph need no such check: a task of it was formed or has ended just now.
    """
    for location in range(t.ready.shape[1]):
        if t.ready[backlog, location] > 0:
            return
    t.since_ns[backlog] = t.settings[0].now_ns


@compiled
def dequeue(t: Tables, subgraph_id: int) -> None:
    """Take a subgraph out of its queue; it may have ready nodes only if its request is dead."""
    subgraph = t.subgraphs[subgraph_id]
    lane = t.lanes[backlog_of(subgraph.cell_type, subgraph.priority)]
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


@inlined
def pin(t: Tables, subgraph: Subgraph, worker: int) -> None:
    """Pin a subgraph to a worker's location (0: to none) and move its ready nodes to that count."""
    if subgraph.pinned != worker:
        if subgraph.state == QUEUED:
            at = backlog_of(subgraph.cell_type, subgraph.priority)
            t.ready[at, subgraph.pinned] -= subgraph.num_ready
            t.ready[at, worker] += subgraph.num_ready
        subgraph.pinned = worker


@compiled
def unpin_if_idle(t: Tables, subgraph_id: int) -> None:
    """Let a subgraph move to another worker if nothing of it is in flight, and nothing that it reads is only sent."""
    subgraph = t.subgraphs[subgraph_id]
    if subgraph.record >= 0:
        refresh(t, subgraph_id)
    elif subgraph.in_flight == 0 and subgraph.sent == 0:
        pin(t, subgraph, 0)


@compiled
def set_ready(t: Tables, subgraph: Subgraph, count: int) -> None:
    """Set how many steps of a chain or loop are ready: one or none, or any number for a cell that carries nothing."""
    if subgraph.state == QUEUED and count != subgraph.num_ready:
        at = backlog_of(subgraph.cell_type, subgraph.priority)
        if count > 0:
            t.types[subgraph.cell_type].starved_at = 0  # this one may have its page
            if t.ready[at, subgraph.pinned] == 0:
                _begin_wait(t, at)
        t.ready[at, subgraph.pinned] += count - subgraph.num_ready
    subgraph.num_ready = count


@compiled
def _follows(read: Input) -> bool:
    """Return whether an input follows another chain or member, step by step."""
    return (read.mode == STEP and read.source >= 0) or read.mode == SAME


@inlined
def steps_ready(t: Tables, subgraph: Subgraph, worker: int, most: int) -> int:
    """Return how many steps, ``most`` at most, a chain or loop can take now.

    The steps of chains that it follows count if they are done, or sent to ``worker`` (0: none).
    """
    record = record_of(t, subgraph)
    steps, left, port = min(most, record.end - record.position), record.num_sources, 0
    while left > 0:
        read = input_of(t, subgraph, port)
        if _follows(read):
            left -= 1
            source = t.subgraphs[read.source]
            its = record_of(t, source)
            made = its.position if worker > 0 and source.pinned == worker else its.done
            ahead = made - 1 - read.start - read.direction * record.position
            if ahead < 0:
                return 0
            if read.direction > 0:
                steps = min(steps, ahead // read.direction + 1)
        port += 1
    return steps


@compiled
def _sender(t: Tables, subgraph: Subgraph) -> int:
    """Return the worker of the first followed chain that has steps sent which are not done, or 0."""
    left, port = record_of(t, subgraph).num_sources, 0
    while left > 0:
        read = input_of(t, subgraph, port)
        if _follows(read):
            left -= 1
            source = t.subgraphs[read.source]
            if record_of(t, source).done < record_of(t, source).position:
                return source.pinned
        port += 1
    return 0


@compiled
def refresh(t: Tables, subgraph_id: int) -> None:
    """Find out whether a queued chain or loop may take a step, and where.

    It is pinned while rows of it are in flight, or while what it reads next is only sent (early release).
    """
    subgraph = t.subgraphs[subgraph_id]
    if subgraph.state != QUEUED:
        return
    record, early = record_of(t, subgraph), t.settings[0].early_release
    cell_type = t.types[subgraph.cell_type]
    worker = 0 if subgraph.in_flight == 0 and subgraph.sent == 0 else subgraph.pinned
    home = t.requests[subgraph.request].home if cell_type.has_spans else 0
    # Its inputs or its own outputs may be at another worker only: it goes home when these are done.
    is_in_use = home > 0 and worker > 0 and worker != home
    if home > 0 and not is_in_use:
        worker = home
    # A loop waits for its stop, or for tasks in flight, unless it may go ahead.
    count = 0
    is_loop = subgraph.what != CHAIN
    lead = record.unseen - record.position if is_loop else 0
    waits = subgraph.in_flight > 0 and record.keeps > 0
    if is_loop:
        body = body_of(t, subgraph)
        waits = waits and cell_type.ahead == 0
        waits = waits or 0 < body.stopped <= record.position or loop_tasks(t, subgraph) > cell_type.ahead
        if cell_type.ahead > 0 and body.all_done < record.position < record.end and not body.runs:
            worker = body.sent_at
    # Count its steps here; if there are none, those at the worker that its producers were sent to.
    if record.position < record.end and not waits and not is_in_use:
        most = max(1, 1 + lead) if cell_type.carries or is_loop else record.end
        count = steps_ready(t, subgraph, worker if early else 0, most)
        if count == 0 and worker == 0 and early:
            sender = _sender(t, subgraph)
            if sender > 0:
                count = steps_ready(t, subgraph, sender, most)
                worker = sender if count > 0 else 0
        if cell_type.is_whole and count < record.end and not is_loop:
            count = 0
    pin(t, subgraph, worker)
    set_ready(t, subgraph, count)


@compiled
def loop_tasks(t: Tables, subgraph: Subgraph) -> int:
    """Return the tasks in flight with steps of a loop's cell, without those whose rows show no results."""
    record = record_of(t, subgraph)
    if record.position <= record.unseen:
        return 0
    return subgraph.in_flight - max(0, record.unseen - record.done)


@inlined
def note_sent(t: Tables, task: Task, subgraph: Subgraph, rows: int) -> None:
    """Count rows of a task as in flight, and pin their subgraph to the task's worker, unless it is loose."""
    if not subgraph.is_loose:
        pin(t, subgraph, task.worker)
    subgraph.in_flight += rows
    if subgraph.has_begun == 0:
        subgraph.has_begun = 1
        if t.requests[subgraph.request].started_ns == 0:
            t.requests[subgraph.request].started_ns = t.settings[0].now_ns
    log_event(t, LAUNCHED, subgraph.request, task.number, task.rows)


@compiled
def rows_in_flight(t: Tables, request: Request) -> int:
    """Return the rows of a request in tasks that are not complete.

    They are summed here, as few callers ask, and a counter would be updated for each row.
    """
    rows = 0
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        rows += t.subgraphs[k].in_flight
    return rows


@compiled
def push_ready(t: Tables, node_id: int) -> None:
    """Append a node to its subgraph's ready list."""
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
def pop_ready(t: Tables, subgraph: Subgraph, to: int, most: int) -> int:
    """Move at most ``most`` nodes of a subgraph's ready list to ``ints``, from ``to`` on; return how many."""
    count, node_id = min(subgraph.num_ready, most), subgraph.ready_head
    for k in range(count):
        t.ints[to + k] = node_id
        node_id = t.nodes[node_id].next_ready
    subgraph.ready_head = node_id
    if node_id < 0:
        subgraph.ready_tail = -1
    subgraph.num_ready -= count
    if subgraph.state == QUEUED:
        t.ready[backlog_of(subgraph.cell_type, subgraph.priority), subgraph.pinned] -= count
    return count


@compiled
def num_ready_at(t: Tables, cell_type: int, priority: int, worker: int) -> int:
    """Return the ready nodes of a type at one client priority that ``worker`` may take.

    It is 0 where they found no page, or are to join tasks in flight.
    """
    if (t.types[cell_type].starved_at | t.types[cell_type].joined_at) >> worker & 1:
        return 0
    at = backlog_of(cell_type, priority)
    return t.ready[at, 0] + t.ready[at, worker]


@compiled
def num_ready(t: Tables, cell_type: int, worker: int) -> int:
    """Return the ready nodes of a type that ``worker`` may take (``ct.NumReadyNodes()`` of Algorithm 1)."""
    count = 0
    for priority in range(NUM_PRIORITIES):
        count += num_ready_at(t, cell_type, priority, worker)
    return count


@compiled
def note_served(t: Tables, task: Task) -> None:
    """Note that a task was formed, or has ended: the backlogs that it took of have not waited until now."""
    now_ns = t.settings[0].now_ns
    for priority in range(NUM_PRIORITIES):
        if task.priorities & (1 << priority):
            t.since_ns[backlog_of(task.cell_type, priority)] = now_ns
    t.since_ns[backlog_of(ALL_TYPES, task.priority)] = now_ns
