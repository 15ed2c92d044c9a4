"""Scheduling and batching: Algorithm 1 of BatchMaker (section 2.4.3), on tables, with a bound on waiting.

A *backlog* is the ready work of one cell type at one client priority. It waits from the moment it becomes ready, or
from the end of the last task that took of it, until a task takes of it. The next backlog is found as follows:

1. It is one of the highest client priority that has a backlog; of its cell types, the one that the policy or Algorithm
1 chooses.
2. But if a backlog of that priority has waited longer than ``max_wait``, the one that has waited longest is next, for
one task.
3. But if no lower priority was served for ``max_wait``, the backlog of a lower priority that has waited longest is next
(beyond ``max_wait``; a level of priority counts as one more ``max_wait``). For this the highest priority must have been
served while it waited, and every backlog of the highest priority since a lower one was: two lower ones never go before
the same higher one.

With W = ``max_wait``, B = ``join_budget`` and L = the longest task of a cell type, on a worker that is asked for work
when it is idle, it follows:

- While no higher priority is ready, a backlog waits no longer than the sum of: the work that was queued at the worker
  when it became ready, W, B, L of each other cell type ready at that priority, and, if a lower priority is ready too,
  one time the larger of B and its L. With W = 2 B, the default, and tasks that fit B where a step does, that is: the
  queued work, L of each ready type of no lower priority, and 4 B. [Until W has passed, anything may run. Then comes the
  rest of what was submitted in a row, which is B or one task; then, oldest first, those that have waited longer still,
  each once, as serving them makes them the youngest; and one of rule 3.]
- Under a higher priority that never ends, one backlog of the lower ones is served at least every W + B + R, where R is
  the bound above for the highest priority. So with n lower backlogs none waits longer than n + 3 times that. [Rule 3
  takes the oldest but for a head start of three levels, and W at least passes between two times.]

After a run, in the same row of tasks, come short tasks of what its ended rows made ready. So a request that ended in
the run is answered before any other takes another step, and no turn is spent on it. These tasks take no longer than F =
0.3 ms together, which the bounds have for each B.

A worker that leaves a few rows to another (``gathering.py``) counts as busy meanwhile: rows that have waited longer
than ``max_wait`` are never left.

If a worker is asked earlier (``queue_depth``), the bounds are those of being queued rather than of being run. Before a
step of a type was ever measured, one task of one step is submitted while others wait. Inside a backlog a policy's order
holds (``policy.py``), but every ``fair_every``-th task of a cell type begins with the request that arrived first. So a
request goes into a task of each cell type after at most ``fair_every`` tasks for each request that arrived before it.
Without a policy's ``rank`` a queue is first in, first out. All this holds under any policy, but for the turn of the
first arrival, which a policy that is not ``is_bounded`` does not have.
"""

from __future__ import annotations

import numpy as np

from cellrt.core.running.loop_bodies import send_loop
from cellrt.core.running.records import count_sent, send_steps
from cellrt.core.scheduling.batching import form_batched_task
from cellrt.core.scheduling.gathering import (
    busy_until,
    fills_a_task,
    has_pinned,
    let_others_join,
    should_let_in,
    wait_for_company,
)
from cellrt.core.scheduling.policy import chosen_type, first_score
from cellrt.core.state import task_layout as layout
from cellrt.core.state.constants import SHORT_TASK_WAITS, SHORT_TASKS_NS, TASK_OVERHEAD_NS
from cellrt.core.state.queue import (
    backlog_of,
    dequeue,
    note_sent,
    note_served,
    num_ready,
    num_ready_at,
    push_ready,
)
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import ALL_TYPES, CHAIN, NUM_PRIORITIES, READS_AS_A_WHOLE, Tables
from cellrt.core.tasks.index_arrays import rows_of_item, subgraph_of
from cellrt.native.jit import compiled, inlined
from cellrt.native.row_types import Rows


@compiled
def schedule(t: Tables, worker: int, task_ids: Rows[int]) -> int:
    """Choose a cell type for a worker that can take work and form tasks of it (Algorithm 1, lines 4-11).

    Write the numbers of the submitted tasks to ``task_ids`` and return how many there are. If there are no pages for
    the chosen cell type, another is chosen.
    """
    count = 0
    t.settings[0].left_ns = 0
    for _ in range(t.settings[0].num_types):
        count = _schedule_once(t, worker, task_ids)
        if count != 0:
            break
    return _follow_run(t, worker, task_ids, count) if count > 0 else 0


@compiled
def _follow_run(t: Tables, worker: int, task_ids: Rows[int], count: int) -> int:
    """Add short tasks of what a run's ended rows made ready, if the last task is a run: they cost no turn.

    Return the new number of tasks.
    """
    settings, last = t.settings[0], t.tasks[task_ids[count - 1]]
    ends_ns, left_ns = last.ends_ns, SHORT_TASKS_NS
    while last.steps > 1 and count < settings.max_tasks_to_submit:
        type_id = _short_type(t, last.priority, worker, left_ns, ends_ns)
        task_id = _free_task(t)
        if type_id < 0 or task_id < 0 or form_batched_task(t, type_id, last.priority, worker, task_id) == 0:
            break
        submit_task(t, task_id)
        t.ints[task_ids[count - 1] * settings.buffer_ints + layout.H_GOES_ON] = 1
        task_ids[count] = task_id
        count += 1
        left_ns -= t.tasks[task_id].expected_ns
        ends_ns += int(t.tasks[task_id].expected_ns)
        t.tasks[task_id].ends_ns = ends_ns
    return count


@compiled
def _short_type(t: Tables, priority: int, worker: int, left_ns: float, ends_ns: int) -> int:
    """Return a type with work for a worker that is done in this many ns, with one step a task, or -1.

    It must have waited long enough: each task costs something, and more rows may come.
    """
    best = -1
    for type_id in range(t.settings[0].num_types):
        rows = num_ready_at(t, type_id, priority, worker)
        if rows == 0 or t.types[type_id].max_steps > 1:
            continue
        if t.settings[0].num_workers > 1 and not has_pinned(t, type_id, worker):
            continue
        step_ns, waited_ns = step_time(t, type_id, rows), ends_ns - t.since_ns[backlog_of(type_id, priority)]
        if not 0 < step_ns <= left_ns or waited_ns < SHORT_TASK_WAITS * (step_ns + TASK_OVERHEAD_NS):
            continue
        if best < 0 or _goes_before(t, type_id, best, worker):
            best = type_id
    return best


@compiled
def _schedule_once(t: Tables, worker: int, task_ids: Rows[int]) -> int:
    """Choose once, as ``schedule`` does; return 0 if there were no pages, -1 if there is no work."""
    top, has_lower = _look_around(t, worker)
    if top < 0:
        return -1
    most = t.settings[0].max_tasks_to_submit
    if has_lower:
        lower = _longest_below(t, top, worker)
        if lower >= 0:
            return batch(t, lower // NUM_PRIORITIES, lower % NUM_PRIORITIES, worker, task_ids, most)
    late = _latest(t, top, worker)
    if late >= 0:
        return batch(t, late, top, worker, task_ids, 1)
    chosen = chosen_type(t, top, worker)
    if chosen < 0:
        chosen = _choose_type(t, top, worker)
    t.settings[0].left_ns = wait_for_company(t, chosen, worker)
    if t.settings[0].left_ns > 0:
        return -1
    return batch(t, chosen, top, worker, task_ids, most)


@compiled
def _look_around(t: Tables, worker: int) -> tuple[int, bool]:
    """Return the highest client priority with work for a worker, or -1, and whether there is any below it."""
    settings = t.settings[0]
    top, lowest, types_ready = -1, NUM_PRIORITIES, 0
    for type_id in range(settings.num_types):
        is_ready = 0
        for priority in range(NUM_PRIORITIES):
            if num_ready_at(t, type_id, priority, worker) > 0:
                top, lowest, is_ready = max(top, priority), min(lowest, priority), 1
        types_ready += is_ready
    settings.top_priority, settings.types_ready = top, types_ready
    return top, lowest < top


@compiled
def _longest_below(t: Tables, top: int, worker: int) -> int:
    """Return the backlog below the highest client priority whose turn it is by its age, or -1."""
    settings = t.settings[0]
    top_served_ns = t.since_ns[backlog_of(ALL_TYPES, top)]
    served_ns = t.since_ns[backlog_of(ALL_TYPES, 0)]
    for priority in range(1, top):
        served_ns = max(served_ns, t.since_ns[backlog_of(ALL_TYPES, priority)])
    if settings.now_ns - served_ns <= settings.max_wait_ns:
        return -1
    longest, most_ns = -1, 0.0
    for type_id in range(settings.num_types):
        for priority in range(top + 1):
            if num_ready_at(t, type_id, priority, worker) == 0:
                continue
            since_ns = t.since_ns[backlog_of(type_id, priority)]
            waited_ns = settings.now_ns - since_ns
            if priority == top and since_ns <= served_ns:
                return -1
            if priority < top and since_ns < top_served_ns and waited_ns > settings.max_wait_ns:
                if waited_ns + priority * settings.max_wait_ns > most_ns:
                    longest, most_ns = backlog_of(type_id, priority), waited_ns + priority * settings.max_wait_ns
    return longest


@compiled
def _latest(t: Tables, priority: int, worker: int) -> int:
    """Return the cell type that has waited longest at a client priority, if that is too long, or -1."""
    settings = t.settings[0]
    latest, latest_ns = -1, settings.now_ns
    for type_id in range(settings.num_types):
        since_ns = t.since_ns[backlog_of(type_id, priority)]
        if since_ns < latest_ns and num_ready_at(t, type_id, priority, worker) > 0:
            latest, latest_ns = type_id, since_ns
    return latest if settings.now_ns - latest_ns > settings.max_wait_ns else -1


@compiled
def _choose_type(t: Tables, priority: int, worker: int) -> int:
    """Return the cell type that Algorithm 1 takes (lines 5-10), of those with work at a client priority."""
    best, best_criterion = -1, 4
    for type_id in range(t.settings[0].num_types):
        if num_ready_at(t, type_id, priority, worker) == 0:
            continue
        if fills_a_task(t, type_id, worker):
            criterion = 1
        elif t.types[type_id].num_running == 0:
            criterion = 2
        else:
            criterion = 3
        if criterion < best_criterion or (criterion == best_criterion and _goes_before(t, type_id, best, worker)):
            best, best_criterion = type_id, criterion
    return best


@compiled
def _goes_before(t: Tables, type_id: int, other: int, worker: int) -> bool:
    """Return whether a cell type goes before another that meets the same criterion.

    The order is by priority, or by the first of what waits (``policy.py``).
    """
    if t.settings[0].by_first:
        return first_score(t, type_id, worker) < first_score(t, other, worker)
    return t.types[type_id].priority > t.types[other].priority


@compiled
def batch(t: Tables, type_id: int, priority: int, worker: int, task_ids: Rows[int], most: int) -> int:
    """Form and submit up to ``most`` tasks of one type (Algorithm 1, lines 12-23), for a client priority's turn.

    Stop early if one more task would not fit the join budget, so that an arrival does not wait for all of them. Stop,
    too, after a run that was long enough to end with the first row that ends (``min_run_s``), as that is answered
    before the next task.
    """
    settings, cell_type = t.settings[0], t.types[type_id]
    num_tasks = 0
    expected_ns = 0.0
    begin_ns = max(settings.now_ns, busy_until(t, worker))
    while num_tasks < most and num_ready_at(t, type_id, priority, worker) > 0:
        task_id = _free_task(t)
        if task_id < 0 or (num_tasks > 0 and num_ready(t, type_id, worker) < cell_type.min_batch):
            break
        if num_tasks > 0 and should_let_in(t, type_id, priority, worker):
            break
        if form_batched_task(t, type_id, priority, worker, task_id) == 0:
            break
        submit_task(t, task_id)
        task_ids[num_tasks] = task_id
        num_tasks += 1
        one_ns = t.tasks[task_id].expected_ns
        expected_ns += one_ns
        t.tasks[task_id].ends_ns = begin_ns + int(expected_ns)
        if expected_ns + one_ns > settings.join_budget_ns or expected_ns >= settings.min_run_ns:
            break
        if one_ns == 0 and settings.types_ready > 1 and settings.join_budget_ns < np.inf:
            break
    return num_tasks


@compiled
def _free_task(t: Tables) -> int:
    for task_id in range(t.tasks.size):
        if not t.tasks[task_id].in_use:
            return task_id
    return -1


@compiled
def submit_task(t: Tables, task_id: int) -> None:
    """Count the task as running, pin its subgraphs to its worker and update dependencies (Algorithm 1, lines 17-22).

    A loose subgraph is not pinned. If the task takes one step of each of its chains, its rows were sent as its index
    arrays were written.
    """
    task, settings = t.tasks[task_id], t.settings[0]
    settings.num_tasks += 1
    cell_type = t.types[task.cell_type]
    cell_type.num_running += 1
    cell_type.num_formed += 1
    let_others_join(t, task, 0)
    note_served(t, task)
    if task.is_sent:
        return
    base = task_id * settings.buffer_ints
    nodes_at, lengths_at = base + t.ints[base + layout.H_NODES], base + t.ints[base + layout.H_LENGTHS]
    row = 0
    while row < task.rows:
        id, length, count = t.ints[nodes_at + row], t.ints[lengths_at + row], rows_of_item(t, nodes_at, row, task.rows)
        subgraph_id = subgraph_of(t, id)
        subgraph = t.subgraphs[subgraph_id]
        note_sent(t, task, subgraph, count)
        if id >= 0:
            _update_dependencies(t, id, length, task.worker, settings.early_release)
        elif subgraph.what == CHAIN:
            send_steps(t, subgraph_id, length * count, task.worker)
        else:
            send_loop(t, subgraph_id, length * count)
        row += count


@inlined
def _update_dependencies(t: Tables, first_id: int, length: int, worker: int, early: int) -> None:
    """Make ready what only waited for a row's nodes, which are submitted (Algorithm 1, line 18).

    Nodes of the same subgraph become ready at once: it is pinned, and a stream keeps order. With early release a
    subgraph becomes ready, too, if all of its outstanding producers were submitted to one worker: it is pinned there.
    """
    subgraph_id = t.nodes[first_id].subgraph
    subgraph = t.subgraphs[subgraph_id]
    for node_id in range(first_id, first_id + length):
        node = t.nodes[node_id]
        first_consumer = node.first_link + node.num_refs
        for k in range(first_consumer, first_consumer + node.num_consumers):
            if t.links[k] >= READS_AS_A_WHOLE:
                if early:
                    count_sent(t, subgraph_id + t.links[k] - READS_AS_A_WHOLE, worker)
                continue
            consumer_id = node_id + t.links[k]
            consumer = t.nodes[consumer_id]
            if consumer.subgraph == subgraph_id:
                consumer.pending -= 1
                if consumer.pending == 0 and not first_id < consumer_id < first_id + length:
                    push_ready(t, consumer_id)
            elif early:
                count_sent(t, consumer.subgraph, worker)
    subgraph.nodes_left -= length
    if subgraph.nodes_left == 0:
        dequeue(t, subgraph_id)
