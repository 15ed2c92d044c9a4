"""Measured times of a cell's step by number of rows, and the number of rows from which on more gain little.

Times are kept by *size class*: the power of two at or above the number of rows. Time that a busy machine adds to one
task must not shorten the next runs, which would cost more tasks: so each kept time is near the least that was measured
lately.
"""

from __future__ import annotations

from cellrt.core.state.constants import CERTAIN_PART, LARGE_BATCH_SLACK, MAX_OVERHEAD_NS
from cellrt.core.state.tables import NUM_SIZE_CLASSES, Tables, Task
from cellrt.native.jit import compiled


@compiled
def size_class(rows: int) -> int:
    """Return the power of two at or above ``rows``, as an exponent."""
    k = 0
    while (1 << k) < rows and k < NUM_SIZE_CLASSES - 1:
        k += 1
    return k


@compiled
def step_time(t: Tables, type_id: int, rows: int) -> float:
    """Return the measured ns of one step at about this many rows; 0 if no size is measured.

    For a size that is not measured it is the worst that the nearest one allows: as long as a larger one, or in
    proportion to a smaller one.
    """
    wanted = size_class(rows)
    for distance in range(NUM_SIZE_CLASSES):
        if wanted - distance >= 0 and t.step_ns[type_id, wanted - distance] > 0:
            return t.step_ns[type_id, wanted - distance] * (1 << distance)
        if wanted + distance < NUM_SIZE_CLASSES and t.step_ns[type_id, wanted + distance] > 0:
            return t.step_ns[type_id, wanted + distance]
    return 0.0


@compiled
def measure_step(t: Tables, task: Task, elapsed_ns: int, has_failed: bool) -> None:
    """Note the time of a completed task for one of its steps, and for one of its rows. Count the task.

    ``has_failed``: some of its rows failed, so that its time says nothing of others.
    """
    at = size_class(task.rows)
    _count(t, task, at, elapsed_ns)
    if not has_failed:
        _note_quickest(t, task, elapsed_ns)
    t.step_ns[task.cell_type, at] = _lately(t.step_ns[task.cell_type, at], elapsed_ns / task.steps)
    t.row_ns[task.cell_type, at] = _lately(t.row_ns[task.cell_type, at], elapsed_ns / max(1, task.positions))
    t.types[task.cell_type].large_batch = _large_batch(t, task.cell_type)


@compiled
def _count(t: Tables, task: Task, at: int, elapsed_ns: int) -> None:
    counts = t.counts[task.cell_type]
    counts.tasks += 1
    counts.rows += task.rows
    counts.positions += task.positions
    t.num_tasks[task.cell_type, at] += 1
    t.busy_ns[task.worker] += elapsed_ns


@compiled
def _note_quickest(t: Tables, task: Task, elapsed_ns: int) -> None:
    """Note the time of a task if its steps are the quickest so far.

    The costs of a task itself are not counted. So a task of one short step tells nothing of a step in a long run.
    """
    counts, each_ns = t.counts[task.cell_type], elapsed_ns / task.steps
    if counts.quickest_ns == 0 or each_ns < counts.quickest_ns:
        counts.quickest_ns = each_ns
        counts.certain_ns = CERTAIN_PART * max(0, elapsed_ns - MAX_OVERHEAD_NS) / task.steps


@compiled
def _lately(known_ns: float, measured_ns: float) -> float:
    """Return a time near the least that was measured lately."""
    return measured_ns if known_ns == 0 or measured_ns < known_ns else min(measured_ns, known_ns * 1.01)


@compiled
def _large_batch(t: Tables, type_id: int) -> int:
    """Return the least number of rows, a power of two, at which a row takes hardly longer than in any measured batch.

    It is 0 if no larger batch was measured, which might be better still.
    """
    best_ns, largest = 0.0, -1
    for k in range(NUM_SIZE_CLASSES):
        if t.row_ns[type_id, k] > 0:
            best_ns = t.row_ns[type_id, k] if largest < 0 else min(best_ns, t.row_ns[type_id, k])
            largest = k
    for k in range(largest):
        if 0 < t.row_ns[type_id, k] <= LARGE_BATCH_SLACK * best_ns:
            return 1 << k
    return 0
