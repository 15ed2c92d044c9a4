"""The door: requests join the work that runs, and leave it with their results, without Python.

A client writes what it hands in to a row of ``submissions``, and the row's number to the ring ``submitted``. A turn
admits the requests and copies their tensors to the host's arena (``join``); when one is done its results are copied to
memory of the client's own (``leave``), and a thread that sleeps until then is woken. The ring ``answered`` has it until
Python has counted it, and notified those that wait otherwise. So new requests are batched with those that run from the
next cell on, and each leaves with its last (BatchMaker section 4.2).

A request of a session goes on with it if Python has leased it (``Lease``): if nothing else was asked of it before.

What is not that plain is Python's: requests that wait for room or their session, stream, fail, are cancelled or late.
It may take over a submission at any time (``engine/door.py``); its requests are Python's from then on.
"""

from __future__ import annotations

from cellrt.core.requests.admission import admit, finish, set_lengths
from cellrt.core.requests.region_entries import (
    has_more,
    has_places,
    lift,
    plan_of,
    ring_bells,
    session_of,
    take,
    take_places,
)
from cellrt.core.state.copying import copy_at
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_RELEASED, NOTICE_SESSION
from cellrt.core.state.pointers import OpenTemplate, template_at
from cellrt.core.state.region_layout import NUM_SLOTS
from cellrt.core.state.tables import (
    ALL_STEPS,
    ANSWER,
    ANSWERS,
    LAST_STEP,
    LATE_AT,
    MANY_ARRIVALS,
    MAX_SUBMISSIONS,
    NEVER,
    NUM_LEFT,
    NUM_REGIONS,
    SUBMITTED,
    TAKEN,
    URGENT,
    Answer,
    Request,
    Submission,
    Tables,
)
from cellrt.native.answer_word import is_each_told, say_there, say_there_to_others
from cellrt.native.atomics import load, store
from cellrt.native.jit import compiled
from cellrt.native.memory import ints_at, words_at
from cellrt.native.row_types import WORD_BYTES, Matrix, row_view

LEFT_BEHIND = -1
"""Submission of a request that is answered, while tasks of it that went ahead are in flight."""
ANSWER_WORDS = ANSWER.itemsize // WORD_BYTES

_answer_at = row_view(Answer)


@compiled
def join(t: Tables) -> bool:
    """Admit what clients have handed in, in order, as far as there is room; return whether that is all.

    If not, the next of ``submitted`` is the one that found no room; some of its requests may have. Or none is admitted,
    as their order is not that of their arrival. Requests of other processes come behind those of this one.
    """
    return _join_own(t) and _join_regions(t)


@compiled
def _join_own(t: Tables) -> bool:
    """Admit what clients of this process have handed in: see ``join``."""
    while True:
        end = load(t.door, SUBMITTED)
        if t.door[TAKEN] == end:
            return True
        if not _is_in_order(t, t.door[TAKEN], end):
            return False
        while t.door[TAKEN] < end:
            at = t.submitted[t.door[TAKEN] % MAX_SUBMISSIONS]
            submission = t.submissions[at]
            if submission.is_there == 0:  # a turn by hand may come to one again that found no room
                submission.is_there = 1
                _note_arrivals(t, submission)
            if not _admit_all(t, submission, at):
                return False
            store(t.door, TAKEN, t.door[TAKEN] + 1)


@compiled
def _join_regions(t: Tables) -> bool:
    """Admit what clients in other processes have handed in: see ``join``."""
    for k in range(t.door[NUM_REGIONS]):
        region = t.regions[k]
        if region.is_broken != 0:
            return False
        while region.is_open != 0 and has_more(region):
            at = lift(t, region)
            if at < 0:
                return False
            submission, plan = t.submissions[at], plan_of(t, t.submissions[at], at)
            if not has_places(t, plan):
                return False
            _note_arrivals(t, submission)
            if not _admit_all(t, submission, at):
                return False
            take_places(t, plan)
            take(region)
    return True


@compiled
def _is_in_order(t: Tables, first: int, end: int) -> bool:
    """Return whether submissions that were handed in one after the other are to be admitted so."""
    for k in range(first + 1, end):
        before = t.submissions[t.submitted[(k - 1) % MAX_SUBMISSIONS]]
        its = t.submissions[t.submitted[k % MAX_SUBMISSIONS]]
        if its.priority > before.priority or (its.priority == before.priority and its.order < before.order):
            return False
    return True


@compiled
def _note_arrivals(t: Tables, submission: Submission) -> None:
    """Update the smoothed time between arrivals, as ``Clock.note_arrivals`` does."""
    settings = t.settings[0]
    longest_ns = 2.0 * max(settings.max_run_ns, settings.join_budget_ns)
    for _ in range(min(submission.count, MANY_ARRIVALS)):
        gap_ns = min(float(submission.arrival_ns - settings.last_arrival_ns), longest_ns)
        settings.arrival_gap_ns += (gap_ns - settings.arrival_gap_ns) / 16
        settings.last_arrival_ns = submission.arrival_ns


@compiled
def _admit_all(t: Tables, submission: Submission, at: int) -> bool:
    """Admit the requests of a submission that are not; return whether all have found room."""
    template = template_at(submission.template_at)
    if submission.num_lengths > 0:
        set_lengths(template, ints_at(submission.lengths_at, 1, submission.num_lengths), 0)
    while submission.num_admitted < submission.count:
        number = submission.num_admitted
        how = submission.sequence + number, submission.priority, submission.client
        due = submission.deadline_ns, submission.schedule_by_ns
        session, ticket = -1, 0
        if submission.session > 0:
            session, ticket = session_of(t, submission, at)
        elif submission.sessions_at > 0:
            its = words_at(submission.sessions_at, submission.count, 2)
            session, ticket = its[number, 0], its[number, 1]
        has_session = submission.session > 0 or submission.sessions_at > 0
        if has_session and (session < 0 or t.leases[session].ticket != ticket):
            return False
        request_id = admit(t, template, *how, *due, 0, session, t.brought, 0)
        if request_id < 0:
            return False
        if session >= 0:
            t.leases[session].ticket = -ticket
        late_at = min(submission.deadline_ns, submission.schedule_by_ns)
        if late_at < NEVER and (t.door[LATE_AT] == 0 or late_at < t.door[LATE_AT]):
            t.door[LATE_AT] = late_at
        request = t.requests[request_id]
        request.submission, request.number = at + 1, number
        _bring(t, template, at, number)
        submission.num_admitted += 1
    return True


@compiled
def _bring(t: Tables, template: OpenTemplate, at: int, number: int) -> None:
    """Copy the tensors of a request that was just admitted to its host rows."""
    first = 0
    for k in range(template.externals.shape[0]):
        count, kind = template.externals[k, 0], t.kinds[t.tensors[at, 2 * k + 1]]
        given = t.tensors[at, 2 * k] + number * count * kind.row_bytes
        for j in range(count):
            row = t.brought[first + j]
            if row >= 0:
                copy_at(kind.host_at + row * kind.row_bytes, given + j * kind.row_bytes, kind.row_bytes)
        first += count


@compiled
def leave(t: Tables, notices: Matrix, count: int, now_ns: int) -> int:
    """Answer those requests of the door that notices say are done; return how many notices are left, for Python: they
    come first, in their order."""
    kept = 0
    for k in range(count):
        request_id, what = notices[k, 0], notices[k, 1]
        request = t.requests[request_id]
        if what == NOTICE_DONE and request.submission > 0:
            _answer(t, request, request_id, now_ns)
        elif what == NOTICE_RELEASED and request.submission == LEFT_BEHIND:
            request.submission = 0
            t.door[NUM_LEFT] -= 1
            _give_back(t, request.session)
            if request.session >= 0:
                notices[kept, 0], notices[kept, 1] = request_id, NOTICE_SESSION
                kept += 1
        else:
            notices[kept, 0], notices[kept, 1] = request_id, what
            kept += 1
    ring_bells(t)
    return kept


@compiled
def _give_back(t: Tables, session: int) -> bool:
    """Let another request go on with a session; return whether Python wants it instead, and has it now."""
    if session < 0:
        return False
    lease = t.leases[session]
    lease.ticket = 0 if lease.is_wanted else -lease.ticket
    if lease.is_wanted == 0:
        return False
    lease.is_wanted = 0
    return True


@compiled
def _answer(t: Tables, request: Request, request_id: int, now_ns: int) -> None:
    """Copy the results of a request that is done to its client's memory, and release it."""
    submission = t.submissions[request.submission - 1]
    results_at = submission.results_at
    for k in range(submission.num_answers):
        answers = ints_at(submission.answers_at, 1, submission.num_answers * ANSWER_WORDS)[0]
        results_at += _copy_out(t, request, submission.count, _answer_at(answers, k * ANSWER_WORDS), results_at)
    answered = t.answered[t.door[ANSWERS] % t.answered.size]
    answered.submission, answered.number = request.submission - 1, request.number
    answered.started_ns, answered.ended_ns = request.started_ns, now_ns
    answered.arrival_ns, answered.plan, answered.session = submission.arrival_ns, submission.plan, request.session
    submission.num_answered += 1
    is_last = submission.num_answered == submission.count
    if is_last:
        submission.is_there = 0
    request.submission = LEFT_BEHIND if finish(t, request_id) else 0
    t.door[NUM_LEFT] += 1 if request.submission == LEFT_BEHIND else 0
    is_wanted = request.submission == 0 and _give_back(t, request.session)
    word_at = submission.word_at
    store(t.door, ANSWERS, t.door[ANSWERS] + 1)  # before the word: a client that is woken may want its place again
    if answered.plan > 0:
        region = t.regions[(answered.submission - MAX_SUBMISSIONS) // NUM_SLOTS]
        region.is_wanted = 1 if say_there_to_others(word_at) else region.is_wanted
    elif word_at == 0:
        is_wanted = True
    elif is_last:
        is_wanted = say_there(word_at) or is_wanted
    else:
        is_wanted = is_each_told(word_at) or is_wanted
    if is_wanted:
        store(t.door, URGENT, t.door[ANSWERS])


@compiled
def _copy_out(t: Tables, request: Request, count: int, answer: Answer, results_at: int) -> int:
    """Copy a result of a request of a submission of so many to where those of all lie; return how many bytes these are.

    Of a loop the room behind the steps that it took stays as it is; in front of each are 8 bytes with their number.
    """
    positions = ints_at(answer.positions_at, 1, answer.num_positions)[0]
    kind, size, taken = t.kinds[answer.kind], answer.row_bytes, 0
    room = size * (1 if answer.steps == LAST_STEP else answer.num_positions)
    if answer.steps != ALL_STEPS:
        room += 8
    to = results_at + request.number * room
    for j in range(answer.num_positions):
        row = t.places[request.first_place + positions[j]]
        if answer.steps == ALL_STEPS:
            copy_at(to + j * size, kind.host_at + row * size, size)
        elif row >= 0:
            copy_at(to + 8 + (taken * size if answer.steps != LAST_STEP else 0), kind.host_at + row * size, size)
            taken += 1
    if answer.steps != ALL_STEPS:
        words_at(to, 1, 1)[0, 0] = taken
    return count * room
