"""Pages that are dropped and computed again, where that takes less time than to copy them to the host and back.

The rows that a loop of one cell has appended follow from its steps' inputs, and these are at hand: the first step's
inputs came with the request, and inputs that are carried from step to step are results of every step. So a request that
is suspended (Pensieve section 3.4.3.5) may free its pages, and its loop begins anew as if all that it has made were
part of its prompt (section 3.4.3.4, where dropped tokens are prepended to a request's prompt). It takes as many of
these rows in a task as fit, and shows no results of them. The step that was to come is then the first whose results are
shown again.

This is possible where that loop is the only one to touch pages, where no state of the request belongs to a session, and
where each input that is carried is a result of every step. The pages of all other requests are copied.
"""

from __future__ import annotations

from cellrt.core.pages.holders import give_page
from cellrt.core.state.buddy_allocator import PLACES, allocate_block, free_block
from cellrt.core.state.moves import QUEUED
from cellrt.core.state.page_list import PageList, page_list_of
from cellrt.core.state.record_layout import CARRY, LEADS, Input, Record, body_of, input_of, record_of
from cellrt.core.state.settings import SUSPENSIONS
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import LOOP, STEPS, Request, Subgraph, Tables
from cellrt.native.jit import compiled

COPY, RECOMPUTE = SUSPENSIONS.index("copy"), SUSPENSIONS.index("recompute")


@compiled
def loop_of_pages(t: Tables, request: Request) -> int:
    """Return the loop that can fill a request's pages again, if nothing of the request is in flight; -1 if none can."""
    found = -1
    if request.session >= 0:
        return found
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if _has_pages(t, t.subgraphs[k]):
            if found >= 0 or not _can_begin_anew(t, t.subgraphs[k]):
                return -1
            found = k
    return found


@compiled
def _has_pages(t: Tables, subgraph: Subgraph) -> bool:
    """Return whether a subgraph reads or appends to a growing state."""
    cell_type = t.types[subgraph.cell_type]
    for port in range(cell_type.first_port, cell_type.first_port + cell_type.num_inputs):
        if t.ports[port].page_size > 0:
            return True
    return False


@compiled
def _can_begin_anew(t: Tables, subgraph: Subgraph) -> bool:
    """Return whether a subgraph is a loop of one cell whose steps' inputs so far are all at hand."""
    if subgraph.what != LOOP or subgraph.state != QUEUED or not body_of(t, subgraph).runs:
        return False
    for port in range(t.types[subgraph.cell_type].num_inputs):
        read = input_of(t, subgraph, port)
        if _is_carried(read) and not t.values[record_of(t, subgraph).first_value + read.source].bits & STEPS:
            return False
    return True


@compiled
def _is_carried(read: Input) -> bool:
    """Return whether an input is an output of the step before."""
    return read.mode == LEADS or read.mode == CARRY


@compiled
def is_cheaper(t: Tables, request: Request, loop: Subgraph) -> bool:
    """Return whether to compute a request's pages again: by setting, or because it is faster than to copy them twice.

    If no copy was ever measured, the answer is no.
    """
    settings = t.settings[0]
    if settings.suspension == COPY or settings.suspension == RECOMPUTE:
        return settings.suspension == RECOMPUTE
    pages, rows, most = 0, _rows_so_far(t, loop), t.types[loop.cell_type].max_rows
    for k in range(request.num_page_lists):
        pages += page_list_of(t, request, k).held
    tasks_ns = step_time(t, loop.cell_type, min(rows, most)) * ((rows + most - 1) // most)
    return tasks_ns < float(settings.page_ns) * 2 * pages


@compiled
def _rows_so_far(t: Tables, loop: Subgraph) -> int:
    """Return the rows that a loop has taken, shown or not; if it is taking them again, those before that."""
    return max(record_of(t, loop).done, record_of(t, loop).unseen)


@compiled
def begin_anew(t: Tables, request: Request, loop: Subgraph) -> bool:
    """Let a loop begin anew and read again what it has read.

    Return False, with nothing changed, if the table of places has no room for that.
    """
    record, first = record_of(t, loop), page_list_of(t, request, 0)
    length = record.end
    carried = 0
    for port in range(t.types[loop.cell_type].num_inputs):
        carried += 1 if _is_carried(input_of(t, loop, port)) else 0
    if carried > 0 and first.num_again == 0:
        place = allocate_block(t.blocks, PLACES, carried * length)
        if place < 0:
            return False
        first.again, first.num_again = place, carried * length
    place = first.again
    for port in range(t.types[loop.cell_type].num_inputs):
        read = input_of(t, loop, port)
        if _is_carried(read):
            read.again = place + 1
            _write_again(t, request, record, read, place)
            place += length
    record.unseen = _rows_so_far(t, loop)
    record.done = record.position = body_of(t, loop).all_done = 0
    return True


@compiled
def _write_again(t: Tables, request: Request, record: Record, read: Input, place: int) -> None:
    """Write to a place the rows that a carried input has read since the loop's begin, and reads at the next step."""
    value, lead = t.values[record.first_value + read.source], record.lead
    for step in range(lead + 1, record.done + 1):
        t.places[place + step] = t.places[request.first_place + value.result + step - 1 - lead]


@compiled
def rows_again(t: Tables, subgraph: Subgraph) -> int:
    """Return the rows that a loop takes again until its pages hold what they held; 0 if none were dropped."""
    record = record_of(t, subgraph)
    return record.unseen if record.unseen > record.lead else 0


@compiled
def drop_list(t: Tables, listed: PageList) -> None:
    """Free the pages of a list."""
    for place in range(listed.place, listed.place + listed.held):
        give_page(t, t.places[place], listed.kind)
    listed.held = listed.rows = 0


@compiled
def free_again(t: Tables, request: Request) -> None:
    """Free the places of the rows that a request's loop has read again."""
    listed = page_list_of(t, request, 0)
    if listed.num_again > 0:
        free_block(t.blocks, PLACES, int(listed.again), int(listed.num_again))
