"""Session state: rows that outlive a request and are where the session's next request begins.

A new session has row 0. Its state begins with zeros, or with what another value of its first request is; so does that
of a request without a session. Whoever reads such a state reads that value's row, and if no task that does so is ever
complete, the session is new again after the request.

A request has three values for each state: the one that it begins with, the one that it ends with, and the one after
what is complete. If all states are carried by one chain or loop, the third follows every completed task, so a request
that fails or is cancelled leaves the state of its last completed task's last step. Otherwise the states of different
chains could be of different steps, so they change together, when the request is done. A row of KEPT state is never
freed before the tasks that read it are complete, because one of them may fail.

While a request runs it holds its session's rows and their reservations; between requests the session's slots do.
"""

from __future__ import annotations

from cellrt.core.jit import compiled
from cellrt.core.moves import DONE
from cellrt.core.rows import give_row, take_row
from cellrt.core.tables import BRING, HOST, KEPT, LOCATION_SHIFT, MAX_STATES, NUM_PERMANENT, STARTS

BEFORE, AFTER, CURRENT = 0, 1, 2
WORDS = 3
"""Words of a state in ``links``: the three values above."""


@compiled
def begin_states(t, request, session, shape, rows, first):
    """Gives a request the state of its session, or where it begins if that is new or there is none.

    Comes before the request's own tensors get rows, because those that nobody is to read now get none. Writes to
    ``rows`` from ``first`` on, for each state, the host row that the caller must copy it to, or -1.
    """
    for k in range(request.num_states):
        at = request.states + WORDS * k
        t.links[at + BEFORE] = t.links[at + CURRENT] = request.first_value + shape.states[2 * k]
        t.links[at + AFTER] = request.first_value + shape.states[2 * k + 1]
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
def end_states(t, request):
    """Leaves an ended request's state to its session; without one it is freed with the other rows."""
    if request.num_states == 0 or request.session < 0:
        return
    is_whole = not t.values[t.links[request.states + BEFORE]].bits & KEPT
    for k in range(request.num_states):
        at = request.states + WORDS * k
        if is_whole:
            t.links[at + CURRENT] = t.links[at + AFTER] if request.state == DONE else t.links[at + BEFORE]
        value = t.values[t.links[at + CURRENT]]
        slot = t.slots[request.session * MAX_STATES + k]
        slot.row, slot.kind = max(value.row, 0), value.kind
        _reserve(t, slot, 1)
        value.row = -1


@compiled
def advance_state(t, request, before, after):
    """Notes that a task is complete which took a state from value ``before`` to value ``after``."""
    for k in range(request.num_states):
        at = request.states + WORDS * k + CURRENT
        if t.links[at] == before:
            t.links[at] = after


@compiled
def drop_states(t, session, row):
    """Frees the rows of a session without a live request; its state is ``row`` from now on: 0 (new) or BRING."""
    for k in range(session * MAX_STATES, (session + 1) * MAX_STATES):
        slot = t.slots[k]
        _reserve(t, slot, -1)
        give_row(t, slot.row, slot.kind)
        slot.row = row


@compiled
def _reserve(t, slot, sign):
    """Counts a slot's row among the reserved ones of its kind, or no longer."""
    if slot.row >= NUM_PERMANENT:
        if slot.row >> LOCATION_SHIFT == HOST:
            t.kinds[slot.kind].reserved_host += sign
        else:
            t.kinds[slot.kind].reserved_worker += sign
