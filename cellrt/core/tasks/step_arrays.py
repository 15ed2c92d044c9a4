"""The index arrays of a task that takes one step of each of its chains: the usual one, in one pass over its rows.

The pass writes what ``index_arrays.py`` would write, and sends each row as ``submit_task`` would. Each row takes the
scheduler to another place in memory, so it is visited once instead of once for each input, for each output and to be
sent.
"""

from __future__ import annotations

from cellrt.core.running.records import bring_state, input_row, send_steps, state_row
from cellrt.core.state import task_layout as layout
from cellrt.core.state.queue import note_sent
from cellrt.core.state.record_layout import (
    CARRY,
    INPUT_WORDS,
    OUTPUT_WORDS,
    RECORD_WORDS,
    STEP,
    input_at,
    output_at,
    record_of,
)
from cellrt.core.state.tables import Subgraph, Tables, Task
from cellrt.core.tasks.descriptions import add_result, add_store, begin_output, describe_input, description_at
from cellrt.core.tasks.index_arrays import step_output
from cellrt.native.jit import compiled, inlined


@compiled
def write_steps(t: Tables, task: Task, base: int, end: int) -> None:
    """Write all inputs and outputs from ``end`` on, and send the rows."""
    ints, rows, cell_type = t.ints, task.rows, t.types[task.cell_type]
    num_inputs, num_outputs = cell_type.num_inputs, cell_type.num_outputs
    output_words = OUTPUT_WORDS + cell_type.ahead
    nodes_at, outputs_end = base + ints[base + layout.H_NODES], end + num_inputs * rows
    task.reads_late, task.is_sent = 0, 1
    for output in range(num_outputs):
        outputs_end = begin_output(t, base, description_at(base, num_inputs, output), outputs_end, rows, rows)
    for row in range(rows):
        subgraph_id = ~ints[nodes_at + row]
        subgraph = t.subgraphs[subgraph_id]
        record = record_of(t, subgraph)
        _write_inputs(t, subgraph, num_inputs, output_words, record.position, end + row, rows)
        if record.position < record.plain:
            _hand_on(t, task, subgraph, row, base, num_inputs, num_outputs)
            note_sent(t, task, subgraph, 1)
            record.position += 1
        else:
            _write_outputs(t, task, subgraph, row, base)
            note_sent(t, task, subgraph, 1)
            send_steps(t, subgraph_id, 1, task.worker)
    for port in range(num_inputs):
        _look_up(t, end + rows * port, rows)
        describe_input(t, base, port, end + rows * port, end + rows * (port + 1), base - 1)


@inlined
def _write_inputs(
    t: Tables, subgraph: Subgraph, num_inputs: int, output_words: int, position: int, at: int, rows: int
) -> None:
    """Write the inputs of a chain's next step, ``rows`` ints apart.

    Each is a place that has the row, or the complement of the row's handle.
    """
    to = subgraph.record + RECORD_WORDS
    first_output = to + INPUT_WORDS * num_inputs
    for port in range(num_inputs):
        read = input_at(t.links, to)
        if read.mode == STEP:
            t.ints[at] = read.at + read.stride * position
        elif read.mode == CARRY and position > 0:
            t.ints[at] = ~output_at(t.links, first_output + output_words * read.source).row
        else:
            t.ints[at] = ~input_row(t, subgraph, port, 0)
        at, to = at + rows, to + INPUT_WORDS


@compiled
def _look_up(t: Tables, at: int, rows: int) -> None:
    """Replace places and complements of handles by handles: all at once, since each place is far from the others."""
    for k in range(at, at + rows):
        t.ints[k] = t.places[t.ints[k]] if t.ints[k] >= 0 else ~t.ints[k]


@inlined
def _hand_on(t: Tables, task: Task, subgraph: Subgraph, row: int, base: int, num_inputs: int, num_outputs: int) -> None:
    """Take the rows that a plain step writes its state to."""
    to, cell_type = subgraph.record + RECORD_WORDS + INPUT_WORDS * num_inputs, t.types[task.cell_type]
    port = cell_type.first_port + num_inputs
    for k in range(num_outputs):
        output = output_at(t.links, to)
        if output.is_state:
            kind = t.ports[port + k].kind
            bring_state(t, task, output, kind)
            handle = state_row(t, output, task.worker, kind)
            output.previous_row = output.row
            output.row = handle
            add_store(t, base, description_at(base, num_inputs, k), row, handle)
        to += OUTPUT_WORDS + cell_type.ahead


@compiled
def _write_outputs(t: Tables, task: Task, subgraph: Subgraph, row: int, base: int) -> None:
    """Take the rows of any other step's outputs and results."""
    cell_type = t.types[task.cell_type]
    for output in range(cell_type.num_outputs):
        kind = t.ports[cell_type.first_port + cell_type.num_inputs + output].kind
        to = description_at(base, cell_type.num_inputs, output)
        handle, place = step_output(t, task, subgraph, output, 0, True, kind)
        if handle >= 0:
            add_store(t, base, to, row, handle)
        if place >= 0:
            add_result(t, base, to, row, place, kind, t.requests[subgraph.request].streamed)
