"""The rows of loops' outputs: state that goes from step to step, and results of every step or of the last."""

from __future__ import annotations

from cellrt.core.running.loops_ahead import state_after
from cellrt.core.state import task_layout as layout
from cellrt.core.state.record_layout import output_of, record_of
from cellrt.core.state.tables import NO_ROW, STEPS, Subgraph, Tables, Task
from cellrt.core.tasks.descriptions import add_result, add_store, begin_output
from cellrt.native.jit import compiled


@compiled
def loop_step_output(t: Tables, task: Task, subgraph: Subgraph, output: int, ahead: int, kind: int) -> tuple[int, int]:
    """Take the row of a loop's output ``ahead`` steps after the next one, where rows of a task are single steps.

    Return (its handle, or NO_ROW if nothing reads it; the place of its result, or -1).
    """
    record, value = record_of(t, subgraph), t.values[record_of(t, subgraph).first_value + output]
    handle, place = NO_ROW, -1
    step = record.position + ahead
    if step < record.unseen:
        return handle, place
    if output_of(t, subgraph, output).is_state:
        handle = state_after(t, task, subgraph, output, kind)
    if value.result >= 0:
        place = t.requests[subgraph.request].first_place + value.result
        place += step - record.lead if value.bits & STEPS else 0
    return handle, place


@compiled
def write_run(t: Tables, task: Task, base: int, to: int, output: int, kind: int, end: int) -> int:
    """Take the rows of one output of a task of loops that run; return the new end.

    There is a row for the state after the run, and a host row for each result.
    """
    rows, limit, every_step = task.rows, task.rows * task.steps, 0
    nodes_at, lengths_at = base + t.ints[base + layout.H_NODES], base + t.ints[base + layout.H_LENGTHS]
    end = begin_output(t, base, to, end, rows, limit)
    for row in range(rows):
        subgraph = t.subgraphs[~t.ints[nodes_at + row]]
        if t.values[record_of(t, subgraph).first_value + output].bits & STEPS:
            every_step = 1
    t.ints[to + layout.OUT_RESULT_STEPS] = every_step
    for row in range(rows):
        subgraph = t.subgraphs[~t.ints[nodes_at + row]]
        record, request = record_of(t, subgraph), t.requests[subgraph.request]
        value = t.values[record.first_value + output]
        if output_of(t, subgraph, output).is_state:
            add_store(t, base, to, row, state_after(t, task, subgraph, output, kind))
        if value.result < 0:
            continue
        place = request.first_place + value.result
        if value.bits & STEPS:
            for step in range(t.ints[lengths_at + row]):
                its = place + record.position + step
                add_result(t, base, to, row * task.steps + step, its, kind, request.streamed)
        else:
            add_result(t, base, to, limit + row if every_step else row, place, kind, request.streamed)
    return end
