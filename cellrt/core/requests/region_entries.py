"""Requests of clients in other processes: they join and leave by memory that is shared, as others do by the door.

A client writes a request's tensors to a slot of its region, then a row that says what it is, and at last the number of
the slot to a ring. A turn reads each once, tests it against what the engine knows, and makes a row of ``submissions``
of it: from there on it is the door's (``join_leave.py``). Its results are copied to the same slot. So whatever a client
writes, at any time, or leaves half written, costs its own requests alone.

Python takes what finds no room or no place in a queue, and what fails; then results come by a message.
"""

from __future__ import annotations

from cellrt.core.state.region_layout import (
    ANSWER_WORDS,
    ENTRIES,
    ENTRY_BYTES,
    HANDED,
    HEAD_BYTES,
    MAX_PLANS,
    MAX_SEATS,
    NUM_SLOTS,
    NUM_WORDS,
    RESTS,
    RING,
    SESSION_SHIFT,
    SLOT_BYTES,
    WORD_BYTES,
)
from cellrt.core.state.tables import (
    MAX_SUBMISSIONS,
    MAX_TENSORS,
    NEVER,
    NUM_PRIORITIES,
    NUM_REGIONS,
    SEQUENCE,
    Queue,
    Region,
    RegionPlan,
    Submission,
    Tables,
)
from cellrt.native.atomics import add, exchange, load
from cellrt.native.futex import ring
from cellrt.native.jit import compiled
from cellrt.native.memory import ints_at, words_at
from cellrt.native.row_types import CACHE_LINE, dtype_of, row_view

ENGINE = 0
"""The row of ``queues`` of all models together."""
INT_BYTES = 4
PLAN_INTS = dtype_of(RegionPlan).itemsize // INT_BYTES

_plan_at = row_view(RegionPlan)


@compiled
def has_handed_in(t: Tables) -> bool:
    """Return whether a client has handed in what no turn has seen, or what Python does not know to be broken."""
    for k in range(t.door[NUM_REGIONS]):
        region = t.regions[k]
        if region.is_broken != 0 or (region.is_open != 0 and has_more(region)):
            return True
    return False


@compiled
def has_more(region: Region) -> bool:
    """Return whether a client has handed in what no turn has taken out."""
    return bool(load(words_at(region.at, 1, NUM_WORDS)[0], HANDED) != region.taken)


@compiled
def lift(t: Tables, region: Region) -> int:
    """Make the next request of a region a submission, unless it is one; return its number, or -1 if it does not fit:
    then the region is broken, and no turn looks there any more."""
    if region.lifted > 0:  # it found no room before; what the client writes by now means nothing
        return region.lifted - 1
    words = words_at(region.at, 1, NUM_WORDS)[0]
    slot, num_left = load(words, RING + region.taken % NUM_SLOTS), load(words, HANDED) - region.taken
    if 0 <= slot < NUM_SLOTS and 0 < num_left <= NUM_SLOTS:
        at = region.first + int(slot)
        submission = t.submissions[at]
        if submission.is_there == 0 and _read(t, region, submission, at, int(slot)):
            submission.is_there = 1
            region.lifted = at + 1
            return at
    region.is_broken, region.is_open = 1, 0
    return -1


@compiled
def take(region: Region) -> None:
    """Record that the next request of a region is admitted, or Python has it."""
    region.lifted = 0
    region.taken += 1


@compiled
def _read(t: Tables, region: Region, submission: Submission, at: int, slot: int) -> bool:
    """Write a submission as a client's entry says; return whether that fits. Each word of the entry is read once."""
    words, entry = words_at(region.at, 1, NUM_WORDS)[0], ENTRIES + slot * (ENTRY_BYTES // WORD_BYTES)
    number, id, arrival_ns = load(words, entry), load(words, entry + 1), load(words, entry + 2)
    how = load(words, entry + 3)
    priority, session = how & ((1 << SESSION_SHIFT) - 1), how >> SESSION_SHIFT
    if number <= 0 or session < 0 or priority >= NUM_PRIORITIES:
        return False
    plan = _plan_at(ints_at(region.plans_at, MAX_PLANS, PLAN_INTS)[number % MAX_PLANS], 0)
    if plan.number != number:
        return False
    tensor_at = region.at + HEAD_BYTES + slot * SLOT_BYTES
    tensors = words_at(plan.tensors_at, MAX_TENSORS, 2)
    for k in range(plan.num_tensors):
        t.tensors[at, 2 * k], t.tensors[at, 2 * k + 1] = tensor_at, tensors[k, 0]
        tensor_at += (tensors[k, 1] + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    submission.template_at, submission.lengths_at = plan.template_at, plan.lengths_at
    submission.num_lengths, submission.sessions_at = plan.num_lengths, 0
    submission.answers_at, submission.num_answers = plan.answers_at, plan.num_answers
    submission.results_at, submission.word_at = tensor_at, region.at + (ANSWER_WORDS + slot) * WORD_BYTES
    submission.sequence = 1 + add(t.door, SEQUENCE, 1)
    submission.arrival_ns = min(max(arrival_ns, 0), t.settings[0].now_ns)
    submission.deadline_ns = submission.schedule_by_ns = NEVER
    submission.order, submission.priority, submission.client = 0.0, priority, region.client
    submission.count, submission.num_admitted, submission.num_answered = 1, 0, 0
    submission.plan, submission.id, submission.session = number, id, session
    return True


@compiled
def session_of(t: Tables, submission: Submission, at: int) -> tuple[int, int]:
    """Return the session with which a submission of a region goes on, and its ticket; -1 if no turn may say which."""
    region = (at - MAX_SUBMISSIONS) // NUM_SLOTS
    seat = t.seats[region * MAX_SEATS + submission.session % MAX_SEATS]
    if seat.number != submission.session or seat.model != plan_of(t, submission, at).model:
        return -1, 0
    return seat.id, seat.ticket


@compiled
def plan_of(t: Tables, submission: Submission, at: int) -> RegionPlan:
    """Return what runs for a submission that was just lifted."""
    region = t.regions[(at - MAX_SUBMISSIONS) // NUM_SLOTS]
    return _plan_at(ints_at(region.plans_at, MAX_PLANS, PLAN_INTS)[submission.plan % MAX_PLANS], 0)


@compiled
def has_places(t: Tables, plan: RegionPlan) -> bool:
    """Return whether one more request may be unfinished, of the engine and of its model."""
    return _has_place(t.queues[ENGINE], plan.num_rows) and _has_place(t.queues[plan.queue], plan.num_rows)


@compiled
def _has_place(queue: Queue, num_rows: int) -> bool:
    if queue.taken + queue.come - queue.ended >= queue.most:
        return False
    return bool(queue.rows_taken + queue.rows_come - queue.rows_ended + num_rows <= queue.most_rows)


@compiled
def take_places(t: Tables, plan: RegionPlan) -> None:
    """Count one more request."""
    for queue in (t.queues[ENGINE], t.queues[plan.queue]):
        queue.come += 1
        queue.rows_come += plan.num_rows


@compiled
def ring_bells(t: Tables) -> None:
    """Wake the clients that have results of which they are to be told, and sleep."""
    for k in range(t.door[NUM_REGIONS]):
        region = t.regions[k]
        if region.is_wanted != 0:
            region.is_wanted = 0
            if exchange(words_at(region.at, 1, NUM_WORDS)[0], RESTS, 0) != 0:
                ring(region.bell)
