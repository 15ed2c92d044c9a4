"""The description of a task's *spans*, which are the rows of one node, and of the pages of their growing states.

A task of a cell type with spans takes one step of each loop, and any number of steps of each chain, as far as rows and
pages reach: so one task holds pieces of long inputs and single steps of many requests (ORCA section 3.2).
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.core.state.page_list import page_list_at, page_list_of
from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.record_layout import input_at, input_of, input_position, record_of
from cellrt.core.state.tables import ROW_MASK, CellType, Request, Subgraph, Tables, Task
from cellrt.native.jit import compiled

PER_SPAN, PER_LIST = 4, 3
"""The ints that a span takes in a task's buffer, and those that each of its page lists takes besides its pages."""


@compiled
def write_spans(t: Tables, task: Task, base: int, end: int) -> int:
    """Write the first row of each span, and the step of its chain or loop; return the new end."""
    ints, nodes_at, count = t.ints, base + t.ints[base + layout.H_NODES], 0
    for row in range(task.rows):
        count += _is_first(t, nodes_at, row)
    ints[base + layout.H_NUM_SPANS], ints[base + layout.H_SPANS] = count, end - base
    span, steps_at = 0, end + count + 1
    for row in range(task.rows):
        if _is_first(t, nodes_at, row):
            ints[end + span] = row
            ints[steps_at + span] = record_of(t, t.subgraphs[~ints[nodes_at + row]]).position
            span += 1
    ints[end + count] = task.rows
    return steps_at + count


@compiled
def _is_first(t: Tables, nodes_at: int, row: int) -> int:
    """Return 1 if a row of a task is the first of its span, else 0."""
    return 1 if row == 0 or t.ints[nodes_at + row - 1] != t.ints[nodes_at + row] else 0


@compiled
def write_span_input(t: Tables, base: int, port: int, end: int) -> None:
    """Describe an input that says which rows are of one node: all of it is in the task's buffer."""
    to = base + layout.HEADER + port * layout.INPUT
    t.ints[to + layout.IN_SOURCE], t.ints[to + layout.IN_COUNT] = -2, 0
    t.ints[to + layout.IN_ROWS], t.ints[to + layout.IN_OFFSETS] = end - base, -1


@compiled
def write_pages(t: Tables, task: Task, base: int, port: int, end: int) -> int:
    """Write the pages of a growing state of each span, and its number of rows; return the new end."""
    ints = t.ints
    nodes_at, count, spans_at = base + ints[base + layout.H_NODES], ints[base + layout.H_NUM_SPANS], 0
    spans_at = base + ints[base + layout.H_SPANS]
    appends = t.ports[t.types[task.cell_type].first_port + port].appends
    lengths_at, starts_at = end + count + 1, end + 2 * count + 1
    rows_at = at = starts_at + count
    # Offsets, lengths and starts have one number a span, so that their places are known before the pages'.
    ints[end] = 0
    for span in range(count):
        subgraph = t.subgraphs[~ints[nodes_at + ints[spans_at + span]]]
        state, start = page_list_at(t.links, input_of(t, subgraph, port).at), input_of(t, subgraph, port).start
        length = state.rows if start < 0 else state.before + start
        if appends:
            length += record_of(t, subgraph).position
            ints[starts_at + span] = length
            length += ints[spans_at + span + 1] - ints[spans_at + span]
        else:
            ints[starts_at + span] = 0
        ints[lengths_at + span] = length
        for page in range((length + state.page_size - 1) // state.page_size):
            ints[at] = t.places[state.place + page] & ROW_MASK
            at += 1
        ints[end + span + 1] = at - rows_at
    # Point the input's record to them.
    to = base + layout.HEADER + port * layout.INPUT
    ints[to + layout.IN_SOURCE], ints[to + layout.IN_COUNT] = task.worker, at - rows_at
    ints[to + layout.IN_ROWS], ints[to + layout.IN_OFFSETS] = rows_at - base, end - base
    return at


@compiled
def task_room(t: Tables, cell_type: CellType) -> int:
    """Return the ints of a task's buffer that are left for pages and ragged inputs beside its most rows."""
    header = layout.HEADER + cell_type.num_inputs * layout.INPUT + cell_type.num_outputs * layout.OUTPUT
    return t.settings[0].buffer_ints - header - cell_type.max_rows * (cell_type.per_row + 1)


@compiled
def fits_in_a_task(t: Tables, request: Request, template: OpenTemplate) -> bool:
    """Return whether a task's buffer can list all pages that one chain or loop may need."""
    for k in range(template.subgraphs.size):
        subgraph = template.subgraphs[k]
        cell_type = t.types[subgraph.cell_type]
        if subgraph.record >= 0 and cell_type.has_spans:
            wanted = PER_SPAN + (t.settings[0].buffer_ints // 4 if cell_type.num_ragged > 0 else 0)
            for port in range(cell_type.num_inputs):
                if t.ports[cell_type.first_port + port].page_size > 0:
                    number = input_at(template.links, input_position(subgraph.record, port)).at
                    wanted += PER_LIST + page_list_of(t, request, number).capacity
            if wanted > task_room(t, cell_type):
                return False
    return True


@compiled
def page_ints(t: Tables, cell_type: CellType, subgraph: Subgraph) -> int:
    """Return the most ints that the spans and pages of one more chain or loop need."""
    count = PER_SPAN
    for port in range(cell_type.num_inputs):
        if t.ports[cell_type.first_port + port].page_size > 0:
            count += PER_LIST + _capacity(t, subgraph, port)
    return count


@compiled
def _capacity(t: Tables, subgraph: Subgraph, port: int) -> int:
    """Return the most pages of a growing state."""
    return page_list_at(t.links, input_of(t, subgraph, port).at).capacity
