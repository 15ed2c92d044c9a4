"""Session state: rows that outlive a request, and with which the session's next request begins.

A new session has row 0. Its state begins with zeros, or with another value of its first request; so does the state of a
request without a session. Nodes that read such a state read that value's row. If no task that reads it is ever
complete, the session is new again after the request.

If all states are carried by one chain or loop, its record keeps the state after its last complete step (``keeps`` of
``record_layout.py``), so a request that fails or is cancelled leaves that one. Otherwise the states of different chains
could be of different steps, so they change together, when the request is done: until then their values before the
request are held.

While a request runs it holds its session's rows and their reservations; between requests the session's slots do.
"""

from __future__ import annotations

from cellrt.core.pages.pages import drop_pages
from cellrt.core.pages.sharing import cut_pages, share_pages
from cellrt.core.running.record_ends import take_out_row
from cellrt.core.running.records import kind_of
from cellrt.core.state.moves import DEAD
from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.record_layout import nth_tap, output_of, record_of
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import (
    BORROWED,
    BRING,
    CHAIN,
    HOST,
    LOCATION_SHIFT,
    MAX_STATES,
    NO_ROW,
    NUM_PERMANENT,
    STARTS,
    Request,
    Slot,
    Subgraph,
    Tables,
)
from cellrt.native.jit import compiled
from cellrt.native.row_types import Rows

BEFORE, AFTER, SUBGRAPH, OUTPUT = 0, 1, 2, 3
WORDS = 4
"""The words of a state in ``links``: its value before the request and after it, then a subgraph and an output.

If every step leaves a state, the subgraph is that of the chain or loop and replaces the value after the request; else
it is -1.
"""


@compiled
def begin_states(
    t: Tables, request: Request, session: int, template: OpenTemplate, rows: Rows[int], first: int
) -> None:
    """Give a request the state of its session, or the value with which it begins if that is new or there is none.

    This comes before the request's own tensors get rows, because those that will not be read now get none. Write to
    ``rows`` from ``first`` on, for each state, the host row that the caller must copy it to, or -1.
    """
    for k in range(request.num_states):
        at = request.states + WORDS * k
        t.links[at + BEFORE] = request.first_value + template.states[k, BEFORE]
        t.links[at + AFTER] = request.first_value + template.states[k, AFTER]
        t.links[at + SUBGRAPH] = -1
        if template.states[k, SUBGRAPH] >= 0:
            t.links[at + SUBGRAPH] = request.first_subgraph + template.states[k, SUBGRAPH]
        t.links[at + OUTPUT] = template.states[k, OUTPUT]
        value = t.values[t.links[at + BEFORE]]
        start = STARTS - value.row
        rows[first + k] = -1
        value.row = 0
        if session >= 0:
            slot = t.slots[session * MAX_STATES + k]
            _reserve(t, slot, -1)
            value.row = slot.row
            slot.row, slot.kind = 0, value.kind
        if value.row == BRING:
            value.row = take_row(t, HOST, value.kind)
            rows[first + k] = value.row
        if start >= 0 and value.row == 0:
            value.row = STARTS - (request.first_value + start)
        elif start >= 0:
            t.values[request.first_value + start].readers -= 1


@compiled
def end_states(t: Tables, request: Request) -> None:
    """Leave an ended request's state to its session; without one it is freed with the other rows."""
    if request.num_states == 0 or request.session < 0:
        return
    for k in range(request.num_states):
        at = request.states + WORDS * k
        value = t.values[t.links[at + BEFORE]]
        handle = -1
        if t.links[at + SUBGRAPH] >= 0:
            handle = _take_out_state(t, request, t.subgraphs[t.links[at + SUBGRAPH]], t.links[at + OUTPUT])
        elif request.state != DEAD:
            value = t.values[t.links[at + AFTER]]
        if handle < 0:
            handle, value.row = value.row, -1
            if value.bits & BORROWED:
                _take_out_of_places(t, request, handle, value.kind)
        slot = t.slots[request.session * MAX_STATES + k]
        slot.row, slot.kind = max(handle, 0), value.kind
        _reserve(t, slot, 1)


@compiled
def _take_out_state(t: Tables, request: Request, subgraph: Subgraph, output: int) -> int:
    """Take out the row of the state that a chain or loop leaves to its session; return -1 if none of its steps is done.

    Nothing else holds the row then.
    """
    record, state = record_of(t, subgraph), output_of(t, subgraph, output)
    row = state.row
    if record.done == 0:
        return NO_ROW
    if take_out_row(t, subgraph, output):
        return row
    if subgraph.what != CHAIN:
        t.values[record.first_value + output].row = NO_ROW
        return row
    for k in range(record.num_taps):
        tap = nth_tap(t, record, k)
        value = t.values[tap.value]
        if tap.output == output and value.row == row:
            value.row = NO_ROW
            if not value.bits & BORROWED:
                return row
    _take_out_of_places(t, request, row, kind_of(t, subgraph, output))
    return row


@compiled
def _take_out_of_places(t: Tables, request: Request, row: int, kind: int) -> None:
    """Take a row of a kind out of the sequence that contains it: rows of other kinds may have the same handle."""
    first = request.first_place
    for k in range(request.num_lists):
        end = first + t.links[request.lists + 2 * k + 1]
        if t.links[request.lists + 2 * k] == kind:
            for at in range(first, end):
                if t.places[at] == row:
                    t.places[at] = NO_ROW
                    return
        first = end


@compiled
def drop_states(t: Tables, session: int, row: int) -> None:
    """Free the rows of a session without a live request; its state is ``row`` from now on: 0 (new) or BRING."""
    for k in range(session * MAX_STATES, (session + 1) * MAX_STATES):
        slot = t.slots[k]
        drop_pages(t, slot)
        _reserve(t, slot, -1)
        give_row(t, slot.row, slot.kind)
        slot.row = row


@compiled
def share_states(t: Tables, session: int, other: int, count: int) -> bool:
    """Give a new session, ``other``, the ``count`` growing states of one without a live request.

    Return False, with nothing changed, if there is no room for that, or the session has states that do not grow, or
    some that come with its next request.
    """
    num_copies = t.settings[0].num_copies
    for k in range(count):
        if not share_pages(t, t.slots[session * MAX_STATES + k], t.slots[other * MAX_STATES + k]):
            drop_states(t, other, 0)
            t.settings[0].num_copies = num_copies
            return False
    return True


@compiled
def cut_back(t: Tables, session: int, count: int, rows: int) -> bool:
    """Cut a session without a live request back to the first rows of its ``count`` growing states, which have as many.

    Return False if there is no room for the copy of a page that it shares, or a state is elsewhere: some are cut back
    then.
    """
    for k in range(count):
        if not cut_pages(t, t.slots[session * MAX_STATES + k], rows):
            return False
    return True


@compiled
def _reserve(t: Tables, slot: Slot, sign: int) -> None:
    """Add a slot's row to the reserved ones of its kind, or take it off them."""
    if slot.row >= NUM_PERMANENT:
        if slot.row >> LOCATION_SHIFT == HOST:
            t.kinds[slot.kind].reserved_host += sign
        else:
            t.kinds[slot.kind].reserved_worker += sign
