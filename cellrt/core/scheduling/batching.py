"""FormBatchedTask (Algorithm 1, lines 24-32): which nodes go into a task, how many steps it runs, in what order.

A task is formed in five passes over its rows: collect them in queue order (``collecting.py``), choose the number of
steps and sort the rows by length, write input rows, take output rows, then free the rows whose last reader is this
task. Freeing comes last, so that no row is read and written in one task. If a task takes one step of each of its
chains, the last three passes are one (``step_arrays.py``): chains hold what they read, so it frees nothing.
"""

from __future__ import annotations

from cellrt.core.pages.span_arrays import write_spans
from cellrt.core.running.loops_ahead import write_flags
from cellrt.core.scheduling.collecting import collect
from cellrt.core.state import task_layout as layout
from cellrt.core.state.constants import PRIORITY_MEMORY_RUNS
from cellrt.core.state.queue import backlog_of, steps_ready
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import ALL_TYPES, CHAIN_NEXT, NUM_PRIORITIES, Tables, Task
from cellrt.core.tasks.index_arrays import give_noted_rows, subgraph_of, write_inputs, write_outputs
from cellrt.core.tasks.step_arrays import write_steps
from cellrt.native.jit import compiled


@compiled
def _choose_steps(t: Tables, type_id: int, priority: int, rows: int, nodes_at: int) -> int:
    """Return how many steps a task of ``rows`` rows may run (DESIGN, "Runs").

    They must fit the join budget, so that no arrival waits long to join, and no step of a streamed request waits long
    to be shown. If no row is streamed, and no other work waits or is likely to come, a run may be longer. It may go on
    until half the time to the next expected arrival has passed, or, while another worker is idle and free for arrivals,
    as long as the longest run.
    """
    settings, most = t.settings[0], float(t.types[type_id].max_steps)
    step = step_time(t, type_id, rows)
    if not settings.runs or step <= 0:
        return 1
    budget = float(settings.join_budget_ns)
    longest = max(budget, float(settings.max_run_ns))
    if not _is_streamed(t, rows, nodes_at) and not _others_wait(t, priority, longest):
        gap = max(settings.arrival_gap_ns, float(settings.now_ns - settings.last_arrival_ns))
        has_spare = settings.idle_workers > settings.types_ready
        budget = longest if has_spare else min(max(budget, 0.5 * gap), longest)
    return max(1, int(min(budget / step, most)))


@compiled
def _least_steps(t: Tables, type_id: int, rows: int, steps: int) -> int:
    """Return after how many steps a run of ``steps`` ends with the first row that ends, instead of keeping it waiting.

    A run of loops that go ahead is no longer than that: the next run is at the worker when it ends, and all steps after
    a stop in both are wasted.
    """
    step = step_time(t, type_id, rows)
    return max(1, int(min(t.settings[0].min_run_ns / step, float(steps)))) if step > 0 else steps


@compiled
def _others_wait(t: Tables, priority: int, longest: float) -> bool:
    """Return whether other work needs the worker soon.

    It does if more types have work than there are idle workers to take it, or if a higher client priority has work or
    had some lately.
    """
    settings = t.settings[0]
    if settings.types_ready > max(1, settings.idle_workers) or priority < settings.top_priority:
        return True
    for higher in range(priority + 1, NUM_PRIORITIES):
        if settings.now_ns - t.since_ns[backlog_of(ALL_TYPES, higher)] < PRIORITY_MEMORY_RUNS * longest:
            return True
    return False


@compiled
def _is_streamed(t: Tables, rows: int, nodes_at: int) -> bool:
    """Return whether a client is shown the steps of one of the rows as they complete."""
    for row in range(rows):
        if t.requests[t.subgraphs[subgraph_of(t, t.ints[nodes_at + row])].request].streamed:
            return True
    return False


@compiled
def _run_length(t: Tables, node_id: int, limit: int) -> int:
    """Return how many nodes from ``node_id`` on can run one after the other with nothing else outstanding."""
    length = 1
    while length < limit and t.nodes[node_id + length - 1].bits & CHAIN_NEXT:
        if t.nodes[node_id + length].pending != 1:
            break
        length += 1
    return length


@compiled
def _sort_rows(
    t: Tables, worker: int, nodes_at: int, lengths_at: int, scratch_at: int, rows: int, limit: int, least: int
) -> int:
    """Write each row's length and sort rows by falling length (counting sort, stable); return the longest.

    No row is longer than the first that ends after ``least`` steps or more.
    """
    ints = t.ints
    if limit == 1:
        for row in range(rows):
            ints[lengths_at + row] = 1
        return 1
    # Find the lengths, and the first one of at least ``least`` steps: all are cut to it.
    cut = longest = limit
    early = t.settings[0].early_release
    for row in range(rows):
        id = ints[nodes_at + row]
        if id < 0:
            length = steps_ready(t, t.subgraphs[~id], worker if early else 0, limit)
        else:
            length = _run_length(t, id, limit)
        ints[lengths_at + row] = length
        cut = min(cut, length) if length >= least else cut
    longest, shortest = 1, cut
    for row in range(rows):
        length = ints[lengths_at + row] = min(cut, ints[lengths_at + row])
        longest, shortest = max(longest, length), min(shortest, length)
    # Sort: count the rows of each length, then put each row after the longer ones.
    if longest == shortest:
        return longest
    starts_at = scratch_at + 2 * rows
    for k in range(longest + 1):
        ints[starts_at + k] = 0
    for row in range(rows):
        ints[starts_at + longest - ints[lengths_at + row] + 1] += 1
    for k in range(1, longest + 1):
        ints[starts_at + k] += ints[starts_at + k - 1]
    for row in range(rows):
        ints[scratch_at + row] = ints[nodes_at + row]
        ints[scratch_at + rows + row] = ints[lengths_at + row]
    for row in range(rows):
        length = ints[scratch_at + rows + row]
        to = ints[starts_at + longest - length]
        ints[starts_at + longest - length] += 1
        ints[nodes_at + to] = ints[scratch_at + row]
        ints[lengths_at + to] = length
    return longest


@compiled
def _count_sizes(t: Tables, lengths_at: int, sizes_at: int, rows: int, steps: int) -> int:
    """Write how many rows each step has, where rows are sorted by falling length; return their sum."""
    if steps == 1:
        t.ints[sizes_at] = rows
        return rows
    for step in range(steps):
        t.ints[sizes_at + step] = 0
    for row in range(rows):
        t.ints[sizes_at + t.ints[lengths_at + row] - 1] += 1
    positions = t.ints[sizes_at + steps - 1]
    for step in range(steps - 2, -1, -1):
        t.ints[sizes_at + step] += t.ints[sizes_at + step + 1]
        positions += t.ints[sizes_at + step]
    return positions


@compiled
def _steps_that_fit(t: Tables, type_id: int, steps: int, header: int) -> int:
    """Return this many steps, or as many as a task's buffer has room for."""
    forming, cell_type = t.forming[0], t.types[type_id]
    if steps == 1 or (forming.ragged > 0 and forming.is_loop == 0):
        return 1
    space = t.settings[0].buffer_ints - header - 4 * forming.rows - forming.ragged
    return max(1, min(steps, space // (forming.rows * cell_type.per_row + 1)))


@compiled
def _write_header(t: Tables, task: Task, base: int, header: int, steps: int, goes_ahead: bool) -> int:
    """Write the part of a task's buffer before its index arrays, for at most this many steps; return where these begin.

    The rows are sorted by it.
    """
    ints, forming, rows = t.ints, t.forming[0], task.rows
    nodes_at = base + header
    lengths_at = nodes_at + rows
    sizes_at, least = lengths_at + rows, _least_steps(t, task.cell_type, rows, steps)
    task.steps = _sort_rows(t, task.worker, nodes_at, lengths_at, sizes_at, rows, steps, least)
    done_at = sizes_at + task.steps
    task.positions = _count_sizes(t, lengths_at, sizes_at, rows, task.steps)
    for row in range(rows):
        ints[done_at + row] = ints[lengths_at + row]
        ints[done_at + rows + row] = 0
    ints[base + layout.H_ROWS], ints[base + layout.H_STEPS], ints[base + layout.H_GOES_ON] = rows, task.steps, 0
    ints[base + layout.H_POSITIONS], ints[base + layout.H_IS_LOOP] = task.positions, forming.is_loop
    ints[base + layout.H_NODES], ints[base + layout.H_LENGTHS] = header, lengths_at - base
    ints[base + layout.H_BATCH_SIZES], ints[base + layout.H_DONE_STEPS] = sizes_at - base, done_at - base
    ints[base + layout.H_FAILED], ints[base + layout.H_STOP_OUTPUT] = done_at + rows - base, forming.stop
    ints[base + layout.H_LEAST_STEPS] = task.steps if goes_ahead else least
    ints[base + layout.H_NUM_SPANS] = ints[base + layout.H_SPANS] = ints[base + layout.H_FLAGS] = 0
    return done_at + 2 * rows


@compiled
def form_batched_task(t: Tables, type_id: int, priority: int, worker: int, task_id: int) -> int:
    """Form at most one task of a cell type for a worker in task row ``task_id``; return its number of rows.

    ``priority`` is the client priority whose turn it is: a task takes as many of its rows as fit, then rows of the
    others. Dependencies are not touched: ``schedule.submit_task`` does that.
    """
    cell_type, task, forming, base = (
        t.types[type_id],
        t.tasks[task_id],
        t.forming[0],
        task_id * t.settings[0].buffer_ints,
    )
    header = layout.HEADER + cell_type.num_inputs * layout.INPUT + cell_type.num_outputs * layout.OUTPUT
    collect(t, type_id, priority, worker, base + header)
    rows = forming.rows
    if rows == 0:
        cell_type.starved_at |= cell_type.has_spans << worker
        return 0
    goes_ahead = forming.is_loop == 1 and cell_type.ahead > 0
    # Choose the number of steps, and fill the task's row.
    steps = _choose_steps(t, type_id, priority, rows, base + header)
    if goes_ahead:
        steps = _least_steps(t, type_id, rows, steps)
    task.cell_type, task.worker, task.in_use, task.is_loop, task.rows = type_id, worker, 1, forming.is_loop, rows
    task.priority, task.priorities, task.number = priority, forming.priorities, t.settings[0].num_tasks
    task.is_sent = task.goes_ahead = 0
    end = _write_header(t, task, base, header, _steps_that_fit(t, type_id, steps, header), goes_ahead)
    # Write the index arrays.
    is_plain = cell_type.num_ragged + cell_type.has_spans == 0
    if forming.nodes + forming.loops == 0 and task.steps == 1 and is_plain:
        write_steps(t, task, base, end)
        t.ints[base + layout.H_NOTES] = t.settings[0].buffer_ints
    else:
        if cell_type.has_spans:
            end = write_spans(t, task, base, end)
        if cell_type.ahead > 0 and forming.loops > 0:
            end = write_flags(t, task, base, end)
        end, notes_at = write_inputs(t, task, base, end)
        write_outputs(t, task, base, end)
        buffer_end = base + t.settings[0].buffer_ints
        t.ints[base + layout.H_NOTES] = give_noted_rows(t, notes_at, buffer_end, False) - base
    task.expected_ns = step_time(t, type_id, rows) * task.steps
    return rows
