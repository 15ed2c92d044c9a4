"""The index arrays of a task that takes one step of each of its chains: the usual one, in one pass over its rows.

Writes what ``index_arrays.py`` would write. Each row takes the scheduler to another place in memory, so it is visited
once instead of once for each input and output.
"""

from __future__ import annotations

from cellrt.core import record_layout as record
from cellrt.core import task_layout as layout
from cellrt.core.index_arrays import describe_input, step_output, steps_ahead
from cellrt.core.jit import compiled
from cellrt.core.loop_arrays import result_row
from cellrt.core.records import bring_state, input_row, state_row
from cellrt.core.tables import NO_ROW, ROW_MASK


@compiled
def write_steps(t, task, base, end):
    """Writes all inputs and outputs from ``end`` on."""
    ints, rows, cell_type = t.ints, task.rows, t.types[task.cell_type]
    num_inputs, num_outputs = cell_type.num_inputs, cell_type.num_outputs
    nodes_at, outputs_at = base + ints[base + layout.H_NODES], end + num_inputs * rows
    descriptions_at = base + layout.HEADER + layout.INPUT * num_inputs
    task.reads_late = 0
    for output in range(num_outputs):
        _describe_output(ints, base, descriptions_at + layout.OUTPUT * output, outputs_at + 4 * rows * output, rows)
    ahead = 0
    for row in range(rows):
        subgraph = t.subgraphs[~ints[nodes_at + row]]
        ahead = steps_ahead(ints, nodes_at, row, ahead)
        _write_inputs(t, subgraph, num_inputs, ahead, end + row, rows)
        port = cell_type.first_port + num_inputs
        for output in range(num_outputs):
            to = descriptions_at + layout.OUTPUT * output
            handle, place = _output(t, task.worker, subgraph, output, num_inputs, ahead, t.ports[port + output].kind)
            if handle >= 0:
                at = outputs_at + 4 * rows * output + ints[to + layout.OUT_STORES]
                ints[at], ints[at + rows] = row, handle & ROW_MASK
                ints[to + layout.OUT_STORES] += 1
            if place >= 0:
                handle = result_row(t, place, t.ports[port + output].kind, t.requests[subgraph.request].streamed)
                at = outputs_at + 4 * rows * output + 2 * rows + ints[to + layout.OUT_RESULTS]
                ints[at], ints[at + rows] = row, handle
                ints[to + layout.OUT_RESULTS] += 1
    for port in range(num_inputs):
        describe_input(ints, base, port, end + rows * port, end + rows * (port + 1), base - 1)


@compiled
def _write_inputs(t, subgraph, num_inputs, ahead, at, rows):
    """Writes the rows that a chain reads ``ahead`` steps after the next one, ``rows`` ints apart."""
    links, to = t.links, subgraph.record + record.HEADER
    position = links[subgraph.record + record.POSITION] + ahead
    for port in range(num_inputs):
        mode = links[to + record.MODE]
        if mode == record.STEP:
            handle = t.places[links[to + record.AT] + links[to + record.STRIDE] * position]
        elif mode == record.CARRY and position > 0:
            state = subgraph.record + record.HEADER + record.INPUT * num_inputs
            handle = links[state + record.OUTPUT * links[to + record.SOURCE] + record.ROW]
        else:
            handle = input_row(t, subgraph, port, ahead)
        t.ints[at] = handle
        at, to = at + rows, to + record.INPUT


@compiled
def _output(t, worker, subgraph, output, num_inputs, ahead, kind):
    """As ``step_output`` of a task of one step."""
    links, at = t.links, subgraph.record
    to = at + record.HEADER + record.INPUT * num_inputs + record.OUTPUT * output
    position = links[at + record.POSITION] + ahead
    if links[to + record.SEQUENCE] >= 0 or links[to + record.RESULT] >= 0 or links[at + record.TAP_STEP] <= position:
        return step_output(t, worker, subgraph, output, ahead, True, kind)
    handle = NO_ROW
    if links[to + record.IS_STATE]:
        bring_state(t, to, worker, kind)
        links[to + record.PREVIOUS_ROW] = links[to + record.ROW]
        if position + 1 < links[at + record.LENGTH] or links[at + record.KEEPS]:
            handle = state_row(t, to, worker, kind)
        links[to + record.ROW] = max(handle, 0)
    return handle, -1


@compiled
def _describe_output(ints, base, to, at, rows):
    """Says where an output's rows will lie, none of which is there yet."""
    ints[to + layout.OUT_STORES] = ints[to + layout.OUT_RESULTS] = ints[to + layout.OUT_RESULT_STEPS] = 0
    ints[to + layout.OUT_STORE_POSITIONS], ints[to + layout.OUT_STORE_ROWS] = at - base, at + rows - base
    ints[to + layout.OUT_RESULT_POSITIONS] = at + 2 * rows - base
    ints[to + layout.OUT_RESULT_ROWS] = at + 3 * rows - base
