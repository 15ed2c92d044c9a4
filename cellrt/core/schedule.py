"""Scheduling and batching: Algorithm 1 of BatchMaker (section 2.4.3), on tables.

Nothing ready waits for ever. Between cell types: a type that was ready but passed over ``max_passed_over`` times in
a row is taken first, whatever its priority. Inside a type: every ``fair_every``-th task starts with the lane served
longest ago, and a lane is first in, first out.
"""

from __future__ import annotations

from cellrt.core import task_layout as layout
from cellrt.core.compiled import compiled
from cellrt.core.form import form_batched_task
from cellrt.core.queue import dequeue, enqueue, num_ready, pin, push_ready
from cellrt.core.story import tell
from cellrt.core.tables import HELD, LAUNCHED, LOOP, MIXED, NEVER, NUM_LANES


@compiled
def schedule(t, worker, task_ids):
    """Chooses a cell type for a worker that can take work and forms tasks of it (Algorithm 1, lines 4-11).

    Writes the numbers of the submitted tasks to ``task_ids`` and returns how many there are.
    """
    best, best_criterion, starved = -1, 4, -1
    for type_id in range(t.settings[0].num_types):
        cell_type = t.types[type_id]
        ready = num_ready(t, type_id, worker)
        if ready == 0:
            cell_type.passed_over = 0
            continue
        if ready >= cell_type.max_batch:
            criterion = 1
        elif cell_type.num_running == 0:
            criterion = 2
        else:
            criterion = 3
        if cell_type.passed_over >= t.settings[0].max_passed_over:
            if starved < 0 or cell_type.passed_over > t.types[starved].passed_over:
                starved = type_id
        if criterion < best_criterion or (criterion == best_criterion and _goes_before(t, type_id, best, worker)):
            best, best_criterion = type_id, criterion
        cell_type.passed_over += 1
    chosen = best if starved < 0 else starved
    return batch(t, chosen, worker, task_ids) if chosen >= 0 else 0


@compiled
def _goes_before(t, type_id, other, worker):
    """Order of cell types that meet the same criterion: priority, or the oldest request under FCFS."""
    if t.settings[0].order_by_arrival:
        return _oldest(t, type_id, worker) < _oldest(t, other, worker)
    return t.types[type_id].priority > t.types[other].priority


@compiled
def _oldest(t, type_id, worker):
    """Sequence number of the first request in the queue with a node that ``worker`` may take."""
    for lane in range(NUM_LANES):
        subgraph_id = t.lanes[type_id * NUM_LANES + lane].head
        while subgraph_id >= 0:
            subgraph = t.subgraphs[subgraph_id]
            if subgraph.num_ready > 0 and (subgraph.pinned == 0 or subgraph.pinned == worker):
                return t.requests[subgraph.request].sequence
            subgraph_id = subgraph.next
    return NEVER


@compiled
def batch(t, type_id, worker, task_ids):
    """Forms and submits up to ``max_tasks_to_submit`` tasks of one type (Algorithm 1, lines 12-23).

    Stops early once the submitted work fills the join budget, so that an arrival does not wait for all of them.
    """
    settings, cell_type = t.settings[0], t.types[type_id]
    cell_type.passed_over = 0
    num_tasks = 0
    expected_ns = 0.0
    while num_tasks < settings.max_tasks_to_submit:
        ready = num_ready(t, type_id, worker)
        task_id = _free_task(t)
        if task_id < 0 or ready == 0 or (num_tasks > 0 and ready < cell_type.min_batch):
            break
        if form_batched_task(t, type_id, worker, task_id) == 0:
            break
        submit_task(t, task_id)
        task_ids[num_tasks] = task_id
        num_tasks += 1
        expected_ns += t.tasks[task_id].expected_ns
        if expected_ns >= settings.join_budget_ns and expected_ns > 0:
            break
    return num_tasks


@compiled
def _free_task(t):
    for task_id in range(t.tasks.size):
        if not t.tasks[task_id].in_use:
            return task_id
    return -1


@compiled
def submit_task(t, task_id):
    """Counts the task as running, pins its subgraphs to its worker and updates dependencies (Algorithm 1, lines 17-22).

    All three in one pass over the rows, each of which takes the scheduler to another place in memory.
    """
    task, settings = t.tasks[task_id], t.settings[0]
    task.number = settings.num_tasks
    settings.num_tasks += 1
    t.types[task.cell_type].num_running += 1
    base = task_id * settings.buffer_ints
    nodes_at, lengths_at = base + t.ints[base + layout.H_NODES], base + t.ints[base + layout.H_LENGTHS]
    for row in range(task.rows):
        first_id = t.ints[nodes_at + row]
        subgraph = t.subgraphs[t.nodes[first_id].subgraph]
        pin(t, subgraph, task.worker)
        subgraph.in_flight += 1
        request = t.requests[subgraph.request]
        request.in_flight += 1
        if request.started_ns == 0:
            request.started_ns = settings.now_ns
        tell(t, LAUNCHED, subgraph.request, task.number, task.rows)
        if not t.nodes[first_id].bits & LOOP:
            _update_dependencies(t, first_id, t.ints[lengths_at + row], task.worker, settings.early_release)


@compiled
def _update_dependencies(t, first_id, length, worker, early):
    """Makes ready what only waited for a row's nodes, which are submitted (Algorithm 1, line 18).

    Nodes of the same subgraph become ready at once: it is pinned, and a stream keeps order. (But not behind HELD nodes,
    which may fail and then leave a state: see ``states.py``.) With early release so does a subgraph all of whose
    outstanding producers were submitted to one worker: it is pinned there too.
    """
    subgraph_id = t.nodes[first_id].subgraph
    subgraph = t.subgraphs[subgraph_id]
    for node_id in range(first_id, first_id + length):
        node = t.nodes[node_id]
        first_consumer = node.first_link + node.num_refs
        for k in range(first_consumer, first_consumer + node.num_consumers):
            consumer_id = node_id + t.links[k]
            consumer = t.nodes[consumer_id]
            if consumer.subgraph == subgraph_id:
                is_inside = first_id < consumer_id < first_id + length
                if node.bits & HELD and not is_inside:
                    continue
                consumer.pending -= 1
                if consumer.pending == 0 and not is_inside:
                    push_ready(t, consumer_id)
            elif early:
                _count_sent(t, consumer.subgraph, worker)
    subgraph.nodes_left -= length
    if subgraph.nodes_left == 0:
        dequeue(t, subgraph_id)


@compiled
def _count_sent(t, subgraph_id, worker):
    """Counts an edge whose producer was submitted to ``worker``; releases the subgraph early if it was the last."""
    subgraph = t.subgraphs[subgraph_id]
    subgraph.sent_to = worker if subgraph.sent == 0 or subgraph.sent_to == worker else MIXED
    subgraph.sent += 1
    if subgraph.sent == subgraph.waiting and subgraph.sent_to == worker:
        subgraph.pinned = worker
        enqueue(t, subgraph_id)
