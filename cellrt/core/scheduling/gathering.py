"""When more rows are worth waiting for, or worth letting in first, because a task of few rows wastes a worker.

A row of a small task takes longer than one of a large task (``step_times.py``), and each task costs a turn. So a cell
type whose rows make a large task goes before those whose rows do not (``schedule.py``), and a worker with nothing to do
leaves a small task to one that will be free soon: what is ready then runs together.
"""

from __future__ import annotations

import numpy as np

from cellrt.core.state import task_layout as layout
from cellrt.core.state.constants import GAINS, MOST_OF_A_CHAIN, MOST_STEPS
from cellrt.core.state.queue import backlog_of, num_ready, num_ready_at
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import CHAIN, NUM_PRIORITIES, Subgraph, Tables, Task
from cellrt.native.jit import compiled


@compiled
def fills_a_task(t: Tables, type_id: int, worker: int) -> bool:
    """Whether a worker may take so many rows of a type that more would hardly make the task better."""
    cell_type = t.types[type_id]
    enough = cell_type.max_batch
    if cell_type.large_batch > 0 and cell_type.has_spans == 0 and t.settings[0].large_batches:
        enough = min(enough, cell_type.large_batch)
    return num_ready(t, type_id, worker) >= enough


@compiled
def should_let_in(t: Tables, type_id: int, priority: int, worker: int) -> bool:
    """Whether tasks of a type should not go on in a row: what is left is shared out to other workers, or the tasks are
    small, and what another type has ready fills one and may join them."""
    if t.settings[0].split and t.settings[0].idle_workers > 1 and not has_pinned(t, type_id, worker):
        return True
    if fills_a_task(t, type_id, worker) or not t.settings[0].large_batches:
        return False
    for other in range(t.settings[0].num_types):
        if other != type_id and num_ready_at(t, other, priority, worker) > 0 and fills_a_task(t, other, worker):
            return True
    return False


@compiled
def wait_for_company(t: Tables, type_id: int, worker: int) -> int:
    """ns after which another worker should be free for a type's few ready rows, if they are better left to it; else 0.

    They wait no longer than ``MOST_STEPS`` of them take (``MOST_OF_A_CHAIN`` where they are carried), nor than the join
    budget: as long as they might if there were no other worker. One that is late counts as free soon, but not for ever:
    where threads outnumber processors, tasks take longer than they should.
    """
    settings, rows = t.settings[0], num_ready(t, type_id, worker)
    if settings.gather == 0 or t.types[type_id].large_batch == 0 or fills_a_task(t, type_id, worker):
        return 0
    if has_pinned(t, type_id, worker) or busy_until(t, worker) > 0:
        return 0  # that can go nowhere else; and only a worker with nothing to do leaves anything
    if t.types[type_id].has_spans and _gains_by_another_worker(t, type_id):
        return 0
    steps = MOST_OF_A_CHAIN if t.types[type_id].carries else MOST_STEPS
    longest = int(min(np.float64(settings.join_budget_ns), np.float64(steps * step_time(t, type_id, rows))))
    soonest = longest + 1
    for other in range(1, settings.num_workers + 1):
        end_ns = busy_until(t, other)
        if end_ns > max(0, settings.now_ns - longest):  # one with nothing to do is as free as this one
            soonest = min(soonest, max(end_ns - settings.now_ns, longest // 4))
    return soonest if soonest <= longest else 0


@compiled
def _gains_by_another_worker(t: Tables, type_id: int) -> bool:
    """Whether chains and loops that no worker has yet, and those whose steps are at others now, are better shared out
    with one worker more than all where they are: whoever begins at a worker stays there, as its pages do."""
    steps, workers, seen = steps_without_a_worker(t, type_id), 1, 0
    for k in range(t.tasks.size):
        task = t.tasks[k]
        if task.in_use and task.cell_type == type_id:
            steps += t.ints[k * t.settings[0].buffer_ints + layout.H_NUM_SPANS]
            workers += 1 if seen >> task.worker & 1 == 0 else 0
            seen |= 1 << task.worker
    return gains_by_sharing(t, type_id, steps, workers)


@compiled
def gains_by_sharing(t: Tables, type_id: int, steps: int, workers: int) -> bool:
    """Whether a step of all takes much longer than one of each worker's share. It does not where memory brings all
    weights for either."""
    share = (steps + workers - 1) // workers
    return step_time(t, type_id, share) * GAINS <= step_time(t, type_id, steps)


@compiled
def steps_without_a_worker(t: Tables, type_id: int) -> int:
    """Steps that are ready of a type's chains and loops that no worker has yet; or as many as fill all workers."""
    steps = rows = 0
    for priority in range(NUM_PRIORITIES):
        rows += t.ready[backlog_of(type_id, priority), 0]
    most = t.types[type_id].max_batch * t.settings[0].num_workers
    for priority in range(NUM_PRIORITIES if rows > 0 else 0):
        subgraph_id = t.lanes[backlog_of(type_id, priority)].head
        while subgraph_id >= 0 and steps < most:
            subgraph = t.subgraphs[subgraph_id]
            if subgraph.pinned == 0 and subgraph.num_ready > 0:
                steps += steps_of_new(subgraph, subgraph.num_ready)
            subgraph_id = subgraph.next
    return steps


@compiled
def steps_of_new(subgraph: Subgraph, count: int) -> int:
    """What ``count`` rows of a chain or loop count: of a loop its next steps, which are one a task, and not the rows
    that it reads first."""
    return count if subgraph.what == CHAIN else 1


@compiled
def busy_until(t: Tables, worker: int) -> int:
    """When a worker should have done what it was given, by the clock of the tables; 0 if it has nothing."""
    end_ns = 0
    for task in range(t.tasks.size):
        if t.tasks[task].in_use and t.tasks[task].worker == worker:
            end_ns = max(end_ns, t.tasks[task].ends_ns)
    return end_ns


@compiled
def has_pinned(t: Tables, type_id: int, worker: int) -> bool:
    """Whether ready nodes of a type are for this worker alone."""
    for priority in range(NUM_PRIORITIES):
        if t.ready[backlog_of(type_id, priority), worker] > 0:
            return True
    return False


@compiled
def let_others_join(t: Tables, task: Task, num_ended: int) -> None:
    """Notes whether what is ready of a task's type waits at its worker until one of those in flight has ended.

    Where a worker's queue is deep, loops that begin while a task runs would make tasks of their own, and these groups
    would take turns for good, each with all weights to read for a part of the rows (ORCA section 3.1 has one batch). So
    of a type's loops there are no more tasks in flight than these go ahead, and one more. Of a cell that grows a state
    that holds for all tasks: loops join pieces of chains.
    """
    cell_type = t.types[task.cell_type]
    if cell_type.grows == 0 and task.goes_ahead == 0:
        return
    count = -num_ended
    for k in range(t.tasks.size):
        other = t.tasks[k]
        is_like = other.cell_type == task.cell_type and other.worker == task.worker
        if other.in_use and is_like and (cell_type.grows or other.goes_ahead):
            count += 1
    cell_type.joined_at &= ~(1 << task.worker)
    if count > cell_type.ahead:
        cell_type.joined_at |= 1 << task.worker
