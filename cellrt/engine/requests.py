"""Every request from its acceptance to its end: waiting, admission, deadlines, cancellation, sessions, and one end.

Requests come in bulks, and as far as they can they go on together: those of one template are admitted in one call, and
those that a task completes leave together. Belongs to the holder of the turn. The legal states and moves are those of
``core/state/moves.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.moves import LIVE, LiveState
from cellrt.core.state.notices import NOTICE_FAILED, NOTICE_RELEASED, NOTICE_STEPS, Notices
from cellrt.core.state.tables import HOST
from cellrt.engine.admission import Admission, Asking
from cellrt.engine.blame import explained
from cellrt.engine.door import Door
from cellrt.engine.places import Size
from cellrt.engine.records import ALONE, Arrival, Asked, Bulk, SessionRecord
from cellrt.engine.replies import Replies
from cellrt.engine.sessions import Sessions
from cellrt.engine.turns import Call
from cellrt.engine.waiting import Deadlines, WaitingRequests
from cellrt.errors import (
    CancelledError,
    CellError,
    CellrtError,
    DeadlineError,
    InternalError,
    OverloadError,
    RequestTooLargeError,
)
from cellrt.worker.arenas import Arenas
from cellrt.worker.cell_type import CellType

LONGER_LISTS = "a cell with a larger max_batch lets its tasks list more"
ADMITTED_TOGETHER = 1024
"""Most requests in one call: it keeps the interpreter lock for a fraction of a millisecond."""


class Requests:
    """The requests of one engine that have not ended.

    Args:
        processor, arenas: of the engine; arenas by location, the host first.
        sessions: whose requests run one after the other.
        replies: answers clients.
        deadlines: of the requests.
        door: has those that compiled code admits and answers.
    """

    def __init__(
        self,
        processor: Processor,
        arenas: list[Arenas],
        sessions: Sessions,
        replies: Replies,
        deadlines: Deadlines,
        door: Door,
    ) -> None:
        self._processor, self._sessions, self._replies, self._door = processor, sessions, replies, door
        self._admission, self._host = Admission(processor, arenas, sessions), arenas[HOST]
        self._unanswered: dict[Bulk, None] = {}
        """Bulks with requests that are not answered."""
        self._bulks: list[Bulk | None] = [None] * processor.limits.max_requests
        """Of those that hold rows, by their id in the processor."""
        self._numbers = [0] * processor.limits.max_requests
        """Of the same their numbers in their bulks."""
        self._num_held = 0
        """How many these are."""
        self._waiting = WaitingRequests()
        self._deadlines = deadlines

    @property
    def is_empty(self) -> bool:
        """Whether every request has ended."""
        return not self._unanswered and not self._num_held and self._door.is_empty

    @property
    def has_admitted(self) -> bool:
        """Whether there is anything to schedule."""
        return self._processor.num_live > 0

    @property
    def has_waiting(self) -> bool:
        """Whether any wait to be admitted."""
        return self._waiting.first() is not None

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline, None if there is none."""
        return self._deadlines.next_ns

    def sequences_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Sequence numbers of requests by their ids in the processor."""
        return tuple(map(self._processor.sequence_of, ids))

    def accept(self, bulk: Bulk) -> None:
        """Takes in requests that were handed in."""
        self._unanswered[bulk] = None
        bulk.model.num_live += bulk.size
        self._deadlines.add(bulk)
        if bulk.deadline_ns is not None and (why := self._deadlines.why_late(bulk)) is not None:
            for number in range(bulk.size):
                self.end(bulk, (number,), DeadlineError(why))  # each its own: whoever raises one adds to it
        elif bulk.sessions is None:
            self._wait(bulk, range(bulk.size) if bulk.size > 1 else ALONE)
        else:
            self._accept_in(bulk, bulk.sessions)

    def join(self) -> None:
        """Has compiled code admit what came by the door; accepts what it cannot admit now."""
        if not self._processor.has_arrivals or (not self.has_waiting and self._processor.join()):
            return
        back: list[Arrival] = []
        for arrival in self._door.take_back():
            if self._door.num_admitted(arrival):
                self._take_over(arrival)
            else:
                self._door.give_up(arrival)
                back.append(arrival)
        self.accept_all(back)

    def accept_all(self, arrivals: Sequence[Arrival]) -> None:
        """Takes in requests that were handed in, in order: those that may go on together do."""
        first = 0
        for end in range(1, len(arrivals) + 1):
            if end == len(arrivals) or not arrivals[end].follows(arrivals[end - 1]):
                self._note_accepted(bulk := Bulk(arrivals[first:end]), range(bulk.size))
                self.accept(bulk)
                first = end

    def _note_accepted(self, bulk: Bulk, numbers: Sequence[int]) -> None:
        size = Size(len(numbers), bulk.num_rows(numbers))
        self._replies.places.note_accepted(size)
        bulk.model.places.note_accepted(size)

    def tell_by_door(self) -> None:
        """Takes in what compiled code has answered."""
        if self._door.has_answers:
            self._replies.answer_by_door(self._door.take_answers())

    def _take_over(self, arrival: Arrival) -> Bulk | None:
        """Goes on in Python with requests that compiled code had, of which the first were admitted; None: all have
        ended."""
        self.tell_by_door()
        if arrival.row < 0:
            return arrival.bulk
        num_admitted, ids = self._door.take_over(arrival)
        bulk = Bulk([arrival])
        left = [*ids, *range(num_admitted, bulk.size)]
        self._note_accepted(bulk, left)
        bulk.num_left, bulk.model.num_live = len(left), bulk.model.num_live + len(left)
        self._unanswered[bulk] = None
        for number in range(num_admitted):
            request = ids.get(number)
            bulk.states[number] = LiveState.ENDED if request is None else LiveState.ADMITTED
            if request is not None:
                bulk.ids[number] = request
                self._bulks[request], self._numbers[request] = bulk, number
        self._num_held += len(ids)
        bulk.next = num_admitted
        if num_admitted < bulk.size:
            self._wait(bulk, range(num_admitted, bulk.size))
        else:
            bulk.tensors.forget_all()
        return bulk

    def bulk_of(self, arrival: Arrival) -> Bulk | None:
        """With whom requests go on in Python, from now on at the latest; None if all have ended."""
        self.join()
        return arrival.bulk or self._take_over(arrival)

    def _take_over_all(self) -> None:
        """Goes on in Python with all requests; no more are admitted by it."""
        self._door.take_back()
        for arrival in self._door.all():
            self._take_over(arrival)

    def _accept_in(self, bulk: Bulk, sessions: Sequence[SessionRecord]) -> None:
        """Takes in requests of sessions: those of sessions that have nothing to do go on together."""
        begun: list[int] = []
        for number, record in enumerate(sessions):
            if not record.is_free:
                bulk.move((number,), LiveState.IN_SESSION)
                self.ask_session(record, (bulk, number))
            elif self._begin(record, (bulk, number)):
                begun.append(number)
        if begun:
            self._wait(bulk, begun)

    def ask_session(self, record: SessionRecord, item: Asked | Call[object]) -> None:
        """Puts a request or a call behind what the session was asked before."""
        record.queue[item] = None
        self.go_on(record)

    def go_on(self, record: SessionRecord) -> None:
        """Goes on with a session: its next request waits for room once what came before it is over."""
        while (asked := self._sessions.next_request(record)) is not None:
            if self._begin(record, asked):
                self._wait(asked[0], asked[1:])

    def _begin(self, record: SessionRecord, asked: Asked) -> bool:
        """Has a session begin a request; False if it cannot: the request has ended then."""
        try:
            self._sessions.begin(record, asked)
        except CellrtError as error:
            self.end(asked[0], asked[1:], error)
            return False
        return True

    def admit(self) -> None:
        """Admits those who wait, in their order, as far as there is room."""
        while (first := self._waiting.first()) is not None:
            most = min(ADMITTED_TOGETHER, self._processor.limits.max_requests - self._processor.num_live)
            if not most:
                return
            together = self._waiting.run(first, most)
            if first.sessions is not None and self._end_those_of_ended_sessions(together):
                continue
            wanted = sum(len(numbers) for _, numbers in together)
            try:
                count = self._admit(together)
            except RequestTooLargeError as error:  # what its session has kept counts too
                number = together[0][1][0]
                self.end_early(first, (number,), self._too_large(first, number, f"{error}: {LONGER_LISTS}"))
                continue
            if count < wanted and not self._make_room(*_asked_at(together, count)):
                return

    def _make_room(self, bulk: Bulk, number: int) -> bool:
        """After a request was not admitted: evicts idle sessions that hold what it needs, or ends it if nobody holds
        any of that, or none may be evicted. False if requests that run do: then it waits for them."""
        record, live = bulk.session_of(number), self._processor.num_live
        session = -1 if record is None else record.id
        num_resident = self._sessions.num_resident
        has_room = live and self._processor.has_room(bulk.plan(number).template, session)
        if num_resident and not has_room and self._sessions.evict_some():
            return True
        if live:
            return False
        if num_resident:
            self.end_early(bulk, (number,), OverloadError(f"{bulk.name_of(number)}: {self._sessions.why_full()}"))
            return True
        told = "with what its session has kept, it finds no room in an empty engine (see Engine(page_bytes=...))"
        self.end_early(bulk, (number,), self._too_large(bulk, number, told))
        return True

    def _too_large(self, bulk: Bulk, number: int, otherwise: str) -> RequestTooLargeError:
        """The error of a request for which there is never room, with what its session has kept; ``otherwise``: what it
        says if that is not for lack of rows or pages."""
        record = bulk.session_of(number)
        why = bulk.model.why_never(bulk.plan(number).template, -1 if record is None else record.id)
        told = otherwise if why is None else f"with what its session has kept, the request needs {why}"
        return RequestTooLargeError(f"{bulk.name_of(number)}: {told}")

    def give_way(self, location: int) -> bool:
        """Ends the latest request that has pages at a worker, or waits for its first, where sessions that are idle have
        the others and may not be evicted. False if there is none."""
        table = self._processor.tables.requests
        may_wait = (table["state"] == LIVE) & (table["num_page_lists"] > 0) & np.isin(table["home"], (0, location))
        found = np.flatnonzero(may_wait).tolist() if self._sessions.num_resident else []
        if not found:
            return False
        request_id = max(found, key=self._processor.sequence_of)
        bulk, number = self._bulk_of(request_id), self._numbers[request_id]
        told = f"{bulk.name_of(number)} found no more pages: {self._sessions.why_full()}"
        self.end_early(bulk, (number,), OverloadError(told))
        return True

    def _end_those_of_ended_sessions(self, together: Sequence[Asking]) -> bool:
        """Ends requests whose sessions have ended while they waited; False if there are none."""
        found = [
            (bulk, number, record.error)
            for bulk, numbers in together
            for number in numbers
            if (record := bulk.session_of(number)) is not None and record.error is not None
        ]
        for bulk, number, error in found:
            self.end_early(bulk, (number,), error)
        return bool(found)

    def take_notices(self, notices: Notices, error: CellrtError | None = None) -> None:
        """Takes in what the processor says of requests; ``error``: why they failed, if not by a cell."""
        done = notices.done()
        for id, what in notices if len(done) < len(notices) else ():
            bulk = self._bulk_of(id)
            number = self._numbers[id]
            if what == NOTICE_RELEASED:
                self._give_up(bulk, (number,))
            elif what == NOTICE_STEPS:
                self._replies.note_steps(bulk)
            elif what == NOTICE_FAILED:
                self._send_steps(bulk)
                known = (bulk.errors or {}).pop(number, None)
                self.end(bulk, (number,), error or known or self._failed(bulk, number))
        if done:
            self._finish(done)

    def note_failure(self, id: int, subgraph: int, cell_type: CellType, error: CellError) -> None:
        """Takes in why a row of a request failed, maybe as others did; the processor's notice follows."""
        bulk = self._find(id)
        if bulk is not None:
            number = self._numbers[id]
            bulk.errors = bulk.errors or {}
            if number not in bulk.errors:
                whose = bulk.session_of(number) or f"model {bulk.model.name!r}"
                at = self._processor.tables, subgraph, self._host
                bulk.errors[number] = explained(error, whose, cell_type, bulk.plan(number).program, *at)

    def cancel(self, arrival: Arrival, place: int) -> None:
        """Ends a request whose client gave it up, if it has not ended; ``place``: among those of its arrival."""
        bulk = self.bulk_of(arrival)
        if bulk is not None and bulk in self._unanswered:
            error = CancelledError(f"model {bulk.model.name!r}: the request was cancelled")
            self.end_early(bulk, (arrival.first + place,), error)

    def expire(self, now_ns: int) -> None:
        """Ends those that must have been done, or have begun, by now, and are or have not."""
        while (late := self._deadlines.take_late(now_ns)) is not None:
            bulk, is_begun = late
            limit_ns = (bulk.schedule_by_ns if is_begun else bulk.deadline_ns) or 0
            told = f"not {'begun' if is_begun else 'done'} within {(limit_ns - bulk.arrival_ns(0)) / 1e9:.9g} s"
            for number in bulk.unanswered():
                if not (is_begun and self._has_begun(bulk, number)):
                    self.end_early(bulk, (number,), DeadlineError(f"model {bulk.model.name!r}: {told}"))

    def _has_begun(self, bulk: Bulk, number: int) -> bool:
        """Whether a task of a request was submitted to a worker."""
        return bulk.states[number] == LiveState.ADMITTED and self._processor.has_begun(bulk.ids[number])

    def end_early_all(self, error: CellrtError) -> None:
        """Ends every request; the rows of those in flight come back when their tasks are done."""
        self._take_over_all()
        for bulk in list(self._unanswered):
            self.end_early(bulk, bulk.unanswered(), error)

    def abandon_all(self, error: CellrtError) -> None:
        """Answers every request, at the end of an engine whose tables may be broken: nothing is given back."""
        self._replies.forget_steps()
        self._take_over_all()
        for bulk in list(self._unanswered):
            for number in bulk.unanswered():
                told = error
                if isinstance(error, InternalError) and bulk.ids[number] >= 0:
                    told = self._replies.internal_error(str(error), bulk.sequence_of(number))
                    told.__cause__ = error.__cause__
                self._replies.refuse(bulk, number, told)
        self._unanswered.clear()

    def end_early(self, bulk: Bulk, numbers: Sequence[int], error: CellrtError) -> None:
        """Ends requests that may be anywhere; their rows come back when nothing of them is in flight."""
        for number in numbers:
            if bulk.is_answered(number):
                continue
            self._send_steps(bulk)
            is_admitted = bulk.states[number] == LiveState.ADMITTED
            is_released = is_admitted and self._processor.cancel(bulk.ids[number])
            self.end(bulk, (number,), error)
            if is_released:
                self._give_up(bulk, (number,))

    def end(self, bulk: Bulk, numbers: Sequence[int], error: CellrtError) -> None:
        """Ends requests with an error, unless they are answered: they leave what they waited in."""
        for number in numbers:
            if bulk.is_answered(number):
                continue
            state = bulk.states[number]
            bulk.move((number,), LiveState.ENDING if state == LiveState.ADMITTED else LiveState.ENDED)
            self._note_answered(bulk, 1)
            if state == LiveState.WAITING:
                self._stop_waiting(bulk, 1)
            elif state == LiveState.IN_SESSION and (record := bulk.session_of(number)) is not None:
                record.queue.pop((bulk, number), None)
            self._replies.refuse(bulk, number, error)
            if state != LiveState.ADMITTED:
                self._leave(bulk, (number,))

    def _send_steps(self, bulk: Bulk) -> None:
        """Before a request that may be streamed ends: its client gets the steps that are complete."""
        if bulk.channel is not None:
            self._replies.stream()

    def _note_answered(self, bulk: Bulk, count: int) -> None:
        """Takes in that so many more requests of a bulk have their outcome."""
        bulk.num_left -= count
        if not bulk.num_left:
            del self._unanswered[bulk]
            self._deadlines.note_answered(bulk)

    def _wait(self, bulk: Bulk, numbers: Sequence[int]) -> None:
        bulk.move(numbers, LiveState.WAITING)
        bulk.num_waiting += len(numbers)
        bulk.next = min(bulk.next, numbers[0])
        self._waiting.add(bulk)

    def _stop_waiting(self, bulk: Bulk, count: int) -> None:
        """So many of a bulk's requests were admitted, or have ended."""
        bulk.num_waiting -= count
        if not bulk.num_waiting:
            self._waiting.note_gone()
            if LiveState.IN_SESSION not in bulk.states:
                bulk.tensors.forget_all()

    def _admit(self, together: Sequence[Asking]) -> int:
        """Admits requests in order, as far as there is room; returns how many."""
        count = 0
        for bulk, numbers, ids in self._admission.admit(together):
            count += len(ids)
            bulk.note_ids(numbers, ids)
            bulk.tensors.forget(numbers)
            for request_id, number in zip(ids, numbers):
                self._bulks[request_id] = bulk
                self._numbers[request_id] = number
            bulk.move(numbers, LiveState.ADMITTED)
            bulk.next = numbers[-1] + 1
            self._stop_waiting(bulk, len(numbers))
        self._num_held += count
        self._waiting.note_admitted(count)
        return count

    def _finish(self, ids: list[int]) -> None:
        """Answers complete requests with their results, those of one kind together, and gives back their rows."""
        bulks = [self._bulk_of(request_id) for request_id in ids]
        if bulks.count(bulks[0]) == len(ids):  # those of one bulk mostly end together
            self._finish_alike({bulks[0]: ids})
            return
        by_kind: dict[int, dict[Bulk, list[int]]] = {}
        """Of each bulk, ids of requests; those that stream by themselves."""
        last: Bulk | None = None
        for request_id, bulk in zip(ids, bulks):
            if bulk is not last:
                alike = by_kind.setdefault(id(bulk.answered_with if bulk.channel is None else bulk), {})
                its, last = alike.setdefault(bulk, []), bulk
            its.append(request_id)
        for group in by_kind.values():
            self._finish_alike(group)

    def _finish_alike(self, alike: Mapping[Bulk, list[int]]) -> None:
        """See ``_finish``: of one kind."""
        first = next(iter(alike))
        if first.channel is not None:
            self._replies.note_steps(first)
            self._replies.stream()
        ids = np.array([request_id for its in alike.values() for request_id in its], np.int32)
        ended = [(bulk, self._numbers_of(bulk, its)) for bulk, its in alike.items()]
        results = self._replies.read(ended, ids)
        started_ns, left = self._processor.finish(ids)
        for bulk, numbers in ended:
            bulk.move(numbers, LiveState.ENDING)
            self._note_answered(bulk, len(numbers))
        self._replies.answer(ended, started_ns, results)
        if not self._unanswered:
            self._replies.tell()
        for bulk, numbers in ended:
            if left:  # tasks of them that went ahead are in flight
                numbers = [number for number in numbers if bulk.ids[number] not in left]
            if numbers:
                self._give_up(bulk, numbers)

    def _give_up(self, bulk: Bulk, numbers: Sequence[int]) -> None:
        """Takes in that answered requests hold no rows any more."""
        bulk.move(numbers, LiveState.ENDED)
        for number in numbers:
            self._bulks[bulk.ids[number]] = None
        self._num_held -= len(numbers)
        self._leave(bulk, numbers)

    def _bulk_of(self, request_id: int) -> Bulk:
        """Whose request it is, by its id in the processor. Raises InternalError if it holds nothing."""
        bulk = self._find(request_id)
        if bulk is None:
            raise InternalError(f"no request has the id {request_id}")
        return bulk

    def _find(self, request_id: int) -> Bulk | None:
        """The same; compiled code may have had it so far. None if it holds nothing."""
        bulk = self._bulks[request_id]
        if bulk is None and (arrival := self._door.whose(request_id)) is not None:
            self._take_over(arrival)
            bulk = self._bulks[request_id]
        return bulk

    def _numbers_of(self, bulk: Bulk, ids: list[int]) -> Sequence[int]:
        """The numbers of a bulk's requests; as a range where they are in a row, as those mostly are that end
        together."""
        if bulk.size == 1:
            return ALONE
        numbers = [self._numbers[request_id] for request_id in ids]
        in_row = range(numbers[0], numbers[0] + len(numbers))
        return in_row if numbers == list(in_row) else numbers

    def _failed(self, bulk: Bulk, number: int) -> InternalError:
        return self._replies.internal_error(f"{bulk.name_of(number)} failed", bulk.sequence_of(number))

    def _leave(self, bulk: Bulk, numbers: Sequence[int]) -> None:
        """After the end of everything of requests: their sessions go on."""
        bulk.model.num_live -= len(numbers)
        for number in numbers if bulk.sessions is not None else ():
            record = bulk.session_of(number)
            if record is not None and record.running == (bulk, number):
                self._sessions.note_over(record)
                self.go_on(record)


def _asked_at(together: Sequence[Asking], place: int) -> tuple[Bulk, int]:
    """The request at a place among those that ask."""
    for bulk, numbers in together:
        if place < len(numbers):
            return bulk, numbers[place]
        place -= len(numbers)
    raise IndexError(place)
