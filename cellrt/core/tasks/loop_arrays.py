"""The rows that loops' outputs get: state that goes from step to step, and results of every step or of the last."""

from __future__ import annotations

from cellrt.core.running.loops_ahead import state_after
from cellrt.core.state import task_layout as layout
from cellrt.core.state.record_layout import output_of, record_of
from cellrt.core.state.rows import take_row
from cellrt.core.state.tables import HOST, NO_ROW, PENDING, ROW_MASK, STEPS, Subgraph, Tables, Task
from cellrt.native.jit import compiled


@compiled
def loop_step_output(t: Tables, task: Task, subgraph: Subgraph, output: int, ahead: int, kind: int) -> tuple[int, int]:
    """Takes the row of a loop's output ``ahead`` steps after the next one, where rows of a task are single steps.

    Returns (its handle, or NO_ROW if nobody reads it; the place of its result, or -1).
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
def result_row(t: Tables, place: int, kind: int, is_streamed: int) -> int:
    """The host's row of a result, taken now unless an earlier step of a loop, of which the last counts, has it."""
    handle = t.places[place] if t.places[place] > PENDING else PENDING - t.places[place]
    if handle == NO_ROW:
        handle = take_row(t, HOST, kind)
        t.places[place] = PENDING - handle if is_streamed else handle
    return handle


@compiled
def loop_output(t: Tables, task: Task, base: int, record_at: int, output: int, kind: int, end: int) -> int:
    """Takes the rows of one output of a task of loops: the state after the run, and a host row for each result."""
    ints = t.ints
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    rows, limit = task.rows, task.rows * task.steps
    positions_at, rows_at = end, end + rows
    result_positions_at, result_rows_at = end + 2 * rows, end + 2 * rows + limit
    stores = results = every_step = 0
    for row in range(rows):
        subgraph = t.subgraphs[~ints[nodes_at + row]]
        if t.values[record_of(t, subgraph).first_value + output].bits & STEPS:
            every_step = 1
    for row in range(rows):
        subgraph = t.subgraphs[~ints[nodes_at + row]]
        value, request = t.values[record_of(t, subgraph).first_value + output], t.requests[subgraph.request]
        if output_of(t, subgraph, output).is_state:
            ints[positions_at + stores] = row
            ints[rows_at + stores] = state_after(t, task, subgraph, output, kind) & ROW_MASK
            stores += 1
        if value.result < 0:
            continue
        place = request.first_place + value.result
        if value.bits & STEPS:
            for step in range(ints[lengths_at + row]):
                handle = take_row(t, HOST, kind)
                t.places[place + record_of(t, subgraph).position + step] = (
                    PENDING - handle if request.streamed else handle
                )
                ints[result_positions_at + results] = row * task.steps + step
                ints[result_rows_at + results] = handle
                results += 1
        else:
            ints[result_positions_at + results] = limit + row if every_step else row
            ints[result_rows_at + results] = result_row(t, place, kind, request.streamed)
            results += 1
    describe_output(t, record_at, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    ints[record_at + layout.OUT_RESULT_STEPS] = every_step
    return end + 2 * rows + 2 * limit


@compiled
def describe_output(
    t: Tables,
    record_at: int,
    base: int,
    stores: int,
    positions_at: int,
    rows_at: int,
    results: int,
    result_positions_at: int,
    result_rows_at: int,
) -> None:
    """Says where the positions and rows of one output lie."""
    t.ints[record_at + layout.OUT_STORES] = stores
    t.ints[record_at + layout.OUT_STORE_POSITIONS] = positions_at - base
    t.ints[record_at + layout.OUT_STORE_ROWS] = rows_at - base
    t.ints[record_at + layout.OUT_RESULTS] = results
    t.ints[record_at + layout.OUT_RESULT_POSITIONS] = result_positions_at - base
    t.ints[record_at + layout.OUT_RESULT_ROWS] = result_rows_at - base
    t.ints[record_at + layout.OUT_RESULT_STEPS] = 0
