"""Small tasks: when to wait for more rows, or to let other rows in first, because a task of few rows wastes a worker.

A row of a small task takes longer than one of a large task (``step_times.py``), and each task costs a turn. So a cell
type whose rows make a large task goes before those whose rows do not (``schedule.py``). A worker with nothing to do
leaves a small task to a worker that will be free soon: the rows that are ready then run together.
"""

from __future__ import annotations

import numpy as np

from cellrt.core.state import task_layout as layout
from cellrt.core.state.constants import MAX_WAIT_STEPS, MAX_WAIT_STEPS_OF_CHAINS, SHARING_GAIN
from cellrt.core.state.queue import backlog_of, num_ready, num_ready_at
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import CHAIN, NUM_PRIORITIES, Subgraph, Tables, Task
from cellrt.native.jit import compiled


@compiled
def fills_a_task(t: Tables, type_id: int, worker: int) -> bool:
    """Return whether a worker may take so many rows of a type that more would hardly make the task better."""
    cell_type = t.types[type_id]
    enough = cell_type.max_batch
    if cell_type.large_batch > 0 and cell_type.has_spans == 0 and t.settings[0].large_batches:
        enough = min(enough, cell_type.large_batch)
    return num_ready(t, type_id, worker) >= enough


@compiled
def should_let_in(t: Tables, type_id: int, priority: int, worker: int) -> bool:
    """Return whether to form no further task of a type now.

    That is so if other idle workers should share what is left. It is so, too, if the task would be small, and the rows
    of another type fill a task and may join this one's rows afterwards.
    """
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
    """Return after how many ns another worker should be free for a type's few ready rows, or 0 if they should not wait.

    They wait no longer than ``MAX_WAIT_STEPS`` of their steps take (``MAX_WAIT_STEPS_OF_CHAINS`` where state is
    carried), nor than the join budget: no longer than they might if there were no other worker. A worker that is late
    counts as free soon, but not for ever: where threads outnumber processors, tasks take longer than they should.
    """
    settings, rows = t.settings[0], num_ready(t, type_id, worker)
    if settings.gather == 0 or t.types[type_id].large_batch == 0 or fills_a_task(t, type_id, worker):
        return 0
    if has_pinned(t, type_id, worker) or busy_until(t, worker) > 0:
        return 0  # pinned rows can go nowhere else, and only a worker with nothing to do leaves rows to another
    if t.types[type_id].has_spans and _gains_by_another_worker(t, type_id):
        return 0
    steps = MAX_WAIT_STEPS_OF_CHAINS if t.types[type_id].carries else MAX_WAIT_STEPS
    longest = int(min(np.float64(settings.join_budget_ns), np.float64(steps * step_time(t, type_id, rows))))
    soonest = longest + 1
    for other in range(1, settings.num_workers + 1):
        end_ns = busy_until(t, other)
        if end_ns > max(0, settings.now_ns - longest):  # one with nothing to do is as free as this one
            soonest = min(soonest, max(end_ns - settings.now_ns, longest // 4))
    return soonest if soonest <= longest else 0


@compiled
def _gains_by_another_worker(t: Tables, type_id: int) -> bool:
    """Return whether new chains and loops, and those that other workers run, gain by one more worker.

    They stay at the worker where they begin, as their pages do.
    """
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
    """Return whether a step of all rows takes much longer than one of each worker's share.

    It does not where reading the weights takes most of the time of either.
    """
    share = (steps + workers - 1) // workers
    return step_time(t, type_id, share) * SHARING_GAIN <= step_time(t, type_id, steps)


@compiled
def steps_without_a_worker(t: Tables, type_id: int) -> int:
    """Return how many steps of a type's chains and loops without a worker are ready, or as many as fill all workers."""
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
    """Return how many steps ``count`` rows of a new chain or loop count as.

    A loop counts as one: it takes its steps one a task, and the rows that it reads first are not counted.
    """
    return count if subgraph.what == CHAIN else 1


@compiled
def busy_until(t: Tables, worker: int) -> int:
    """Return when a worker should have done its tasks, by the clock of the tables; 0 if it has none."""
    end_ns = 0
    for task in range(t.tasks.size):
        if t.tasks[task].in_use and t.tasks[task].worker == worker:
            end_ns = max(end_ns, t.tasks[task].ends_ns)
    return end_ns


@compiled
def has_pinned(t: Tables, type_id: int, worker: int) -> bool:
    """Return whether ready nodes of a type are for this worker alone."""
    for priority in range(NUM_PRIORITIES):
        if t.ready[backlog_of(type_id, priority), worker] > 0:
            return True
    return False


@compiled
def let_others_join(t: Tables, task: Task, num_ended: int) -> None:
    """Decide whether ready rows of a task's type wait at its worker until one of the tasks in flight has ended.

    Where a worker's queue is deep, loops that begin while a task runs would form tasks of their own. These groups would
    alternate for good, each reading all weights for a part of the rows (ORCA section 3.1 has one batch). So no more
    tasks of a type's loops are in flight than these go ahead, and one more. For a cell that grows a state this holds
    for all tasks: loops join pieces of chains.
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
