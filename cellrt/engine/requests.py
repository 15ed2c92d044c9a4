"""Every request from its acceptance to its end: waiting, admission, deadlines, cancellation, sessions, and one end.

As far as they can requests go on together: those of one template are admitted in one call, and those that a task
completes leave together. Belongs to the holder of the turn. The legal states and moves are those of
``core/state/moves.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.moves import LIVE, LiveState
from cellrt.core.state.notices import NOTICE_FAILED, NOTICE_RELEASED, NOTICE_SESSION, NOTICE_STEPS, Notices
from cellrt.core.state.tables import HOST, MAX_SUBMISSIONS
from cellrt.engine.admission import Admission, Asking
from cellrt.engine.blame import explained
from cellrt.engine.door import Door, Told
from cellrt.engine.places import Size
from cellrt.engine.replies import Replies
from cellrt.engine.request_group import ALONE, NO_INPUTS, Asked, RequestGroup, SessionRecord
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
        self._unanswered: dict[RequestGroup, None] = {}
        """Groups with requests that are not answered."""
        self._groups: list[RequestGroup | None] = [None] * processor.limits.max_requests
        """Of those that hold rows, by their id in the processor."""
        self._numbers = [0] * processor.limits.max_requests
        """Of the same their numbers in their groups."""
        self._num_held = 0
        """How many these are."""
        self._waiting = WaitingRequests()
        self._deadlines = deadlines
        self.has_new_deadlines = False
        """Whether some may be earlier than those that the timekeeper knows."""
        self.goes_on = False
        """Whether a turn is to admit requests of sessions that were leased."""
        self.refused_for: CellrtError | None = None
        """Why no more requests are admitted, once there is no worker left."""

    @property
    def is_empty(self) -> bool:
        """Whether every request has ended."""
        is_answered = not self._unanswered and not self._num_held and self._door.is_empty
        return is_answered and not self._processor.num_left_behind

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

    def accept(self, group: RequestGroup) -> None:
        """Takes in requests that were handed in."""
        group.begin()
        self._note_accepted(group, group.count)
        self._unanswered[group] = None
        group.model.num_live += group.count
        self._deadlines.add(group)
        if group.deadline_ns is not None and (why := self._deadlines.why_late(group)) is not None:
            for number in range(group.count):
                self.end(group, (number,), DeadlineError(why))  # each its own: whoever raises one adds to it
        elif group.sessions is None:
            self._wait(group, range(group.count) if group.count > 1 else ALONE)
        else:
            self._accept_in(group, group.sessions, 0)

    def join(self) -> None:
        """Has compiled code admit what came by the door; accepts what it cannot admit now."""
        if not self._processor.has_arrivals and not self._processor.has_calls:
            return
        if not self.has_waiting and self.refused_for is None and self._processor.join():
            return
        back: list[RequestGroup] = []
        for group in self._door.take_back():
            if self._door.num_admitted(group):
                self._take_over(group)
            else:
                self._door.give_up(group)
                back.append(group)
        for group in back:
            self.accept(group)
        if self.refused_for is not None:
            self.end_early_all(self.refused_for)

    def _note_accepted(self, group: RequestGroup, count: int) -> None:
        size = Size(count, group.num_rows(count))
        self._replies.places.note_accepted(size)
        group.model.places.note_accepted(size)

    def tell_by_door(self) -> None:
        """Takes in what compiled code has answered, and which of its requests have deadlines."""
        while self._door.due:
            group = self._door.due.popleft()
            if not group.is_over:
                self._deadlines.add(group)
                self.has_new_deadlines = True
        if self._door.has_answers:
            told = self._door.take_answers()
            for its in told.values():
                self._note_told(its)
            self._replies.answer_by_door(told)
        for record in self._sessions.leases.take_recalled():
            self.go_on(record)
            self.goes_on = True

    def _note_told(self, told: Told) -> None:
        over: dict[RequestGroup, None] = {}
        for _, numbers, group, first in told.ended:
            for record in group.sessions[first : first + len(numbers)] if group.sessions is not None else ():
                self._sessions.note_answered(record)
            if group.is_over and not group.is_begun:
                over[group] = None
        for group in over:
            group.forget()
            if group.has_deadline:
                self._deadlines.note_answered(group)

    def _take_over(self, group: RequestGroup) -> bool:
        """Goes on in Python with requests that compiled code had, of which the first were admitted; False if all have
        ended."""
        self.tell_by_door()
        if group.row < 0:
            return group.is_begun
        has_come = group.row >= MAX_SUBMISSIONS
        num_admitted, ids = self._door.take_over(group)
        group.begin()
        left = [*ids, *range(num_admitted, group.count)]
        if not has_come:  # of those that come from other processes queues count nothing else
            self._note_accepted(group, len(left))
        group.num_left, group.model.num_live = len(left), group.model.num_live + len(left)
        self._unanswered[group] = None
        for number in range(num_admitted):
            request = ids.get(number)
            group.states[number] = LiveState.ENDED if request is None else LiveState.ADMITTED
            if request is not None:
                group.ids[number] = request
                self._groups[request], self._numbers[request] = group, number
        self._num_held += len(ids)
        group.next = num_admitted
        for number in ids if group.sessions is not None else ():
            self._sessions.take_over(group.sessions[number], (group, number))  # type: ignore[index]
        if num_admitted == group.count:
            group.inputs = NO_INPUTS
        elif group.sessions is None:
            self._wait(group, range(num_admitted, group.count))
        else:
            self._accept_in(group, group.sessions, num_admitted)
        return True

    def has_begun(self, group: RequestGroup) -> bool:
        """Whether Python goes on with a group, from now on at the latest; False if all of it has ended."""
        self.join()
        return group.is_begun or self._take_over(group)

    def take_over_sessions(self) -> None:
        """Goes on in Python with all requests of sessions, before these may end with the worker that they are at."""
        self.join()
        for group in list(self._door.all()):
            if group.sessions is not None:
                self._take_over(group)

    def _take_over_all(self) -> None:
        """Goes on in Python with all requests; no more are admitted by it."""
        self.tell_by_door()
        for group in [*self._door.take_back(), *self._door.all(), *self._door.regions.all()]:
            self._take_over(group)

    def find_elsewhere(self, region: int, id: int) -> RequestGroup | None:
        """A request of a client in another process, by the client's number of it; Python goes on with it from now on.
        None if it is not here: it has ended, or was returned."""
        self.join()
        group = self._door.regions.find(region, id)
        return group if group is not None and self._take_over(group) else None

    def forget_plans(self, region: int, binding: int | None) -> None:
        """See ``Regions.forget``."""
        self.join()
        self.tell_by_door()
        self._door.regions.forget(region, binding)

    def close_region(self, region: int) -> None:
        """Goes on in Python with all requests of a client in another process, and looks for no more."""
        self.join()
        for group in self._door.regions.close(region):
            self._take_over(group)
        self.tell_by_door()
        self._door.regions.let_go(region)

    def _accept_in(self, group: RequestGroup, sessions: Sequence[SessionRecord], first: int) -> None:
        """Takes in requests of sessions, from a number on: those of sessions that have nothing to do go on together."""
        begun: list[int] = []
        for number, record in enumerate(sessions[first:], first):
            if not (record.is_free and self._sessions.leases.recall(record)):
                group.move((number,), LiveState.IN_SESSION)
                self.ask_session(record, (group, number))
            elif self._begin(record, (group, number)):
                begun.append(number)
        if begun:
            self._wait(group, begun)

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

    def _make_room(self, group: RequestGroup, number: int) -> bool:
        """After a request was not admitted: evicts idle sessions that hold what it needs, or ends it if nobody holds
        any of that, or none may be evicted. False if requests that run do: then it waits for them."""
        record, live = group.session_of(number), self._processor.num_live
        session = -1 if record is None else record.id
        num_resident = self._sessions.num_resident
        has_room = live and self._processor.has_room(group.plan.template, session)
        if num_resident and not has_room and self._sessions.evict_some():
            return True
        if live:
            return False
        if num_resident:
            self.end_early(group, (number,), OverloadError(f"{group.name_of(number)}: {self._sessions.why_full()}"))
            return True
        told = "with what its session has kept, it finds no room in an empty engine (see Engine(page_bytes=...))"
        self.end_early(group, (number,), self._too_large(group, number, told))
        return True

    def _too_large(self, group: RequestGroup, number: int, otherwise: str) -> RequestTooLargeError:
        """The error of a request for which there is never room, with what its session has kept; ``otherwise``: what it
        says if that is not for lack of rows or pages."""
        record = group.session_of(number)
        why = group.model.why_never(group.plan.template, -1 if record is None else record.id)
        told = otherwise if why is None else f"with what its session has kept, the request needs {why}"
        return RequestTooLargeError(f"{group.name_of(number)}: {told}")

    def give_way(self, location: int) -> bool:
        """Ends the latest request that has pages at a worker, or waits for its first, where sessions that are idle have
        the others and may not be evicted. False if there is none."""
        table = self._processor.tables.requests
        may_wait = (table["state"] == LIVE) & (table["num_page_lists"] > 0) & np.isin(table["home"], (0, location))
        found = np.flatnonzero(may_wait).tolist() if self._sessions.num_resident else []
        if not found:
            return False
        request_id = max(found, key=self._processor.sequence_of)
        group, number = self._group_of(request_id), self._numbers[request_id]
        told = f"{group.name_of(number)} found no more pages: {self._sessions.why_full()}"
        self.end_early(group, (number,), OverloadError(told))
        return True

    def _end_those_of_ended_sessions(self, together: Sequence[Asking]) -> bool:
        """Ends requests whose sessions have ended while they waited; False if there are none."""
        found = [
            (group, number, record.error)
            for group, numbers in together
            for number in numbers
            if (record := group.session_of(number)) is not None and record.error is not None
        ]
        for group, number, error in found:
            self.end_early(group, (number,), error)
        return bool(found)

    def take_notices(self, notices: Notices, error: CellrtError | None = None) -> None:
        """Takes in what the processor says of requests; ``error``: why they failed, if not by a cell."""
        done = notices.done()
        for id, what in notices if len(done) < len(notices) else ():
            if what == NOTICE_SESSION:
                self._sessions.note_given_back(self._processor.session_of(id))
                self.tell_by_door()
                continue
            group = self._group_of(id)
            number = self._numbers[id]
            if what == NOTICE_RELEASED:
                self._give_up(group, (number,))
            elif what == NOTICE_STEPS:
                self._replies.note_steps(group)
            elif what == NOTICE_FAILED:
                self._send_steps(group)
                known = (group.errors or {}).pop(number, None)
                self.end(group, (number,), error or known or self._failed(group, number))
        if done:
            self._finish(done)

    def note_failure(self, id: int, subgraph: int, cell_type: CellType, error: CellError) -> None:
        """Takes in why a row of a request failed, maybe as others did; the processor's notice follows."""
        group = self._find(id)
        if group is not None:
            number = self._numbers[id]
            group.errors = group.errors or {}
            if number not in group.errors:
                whose = group.session_of(number) or f"model {group.model.name!r}"
                at = self._processor.tables, subgraph, self._host
                group.errors[number] = explained(error, whose, cell_type, group.plan.program, *at)

    def cancel(self, group: RequestGroup, number: int) -> None:
        """Ends a request whose client gave it up, if it has not ended."""
        if self.has_begun(group) and group in self._unanswered:
            error = CancelledError(f"model {group.model.name!r}: the request was cancelled")
            self.end_early(group, (number,), error)

    def expire(self, now_ns: int) -> None:
        """Ends those that must have been done, or have begun, by now, and are or have not."""
        self.tell_by_door()
        while (late := self._deadlines.take_late(now_ns)) is not None:
            group, is_begun = late
            if not self.has_begun(group):
                continue
            limit_ns = (group.schedule_by_ns if is_begun else group.deadline_ns) or 0
            told = f"not {'begun' if is_begun else 'done'} within {(limit_ns - group.arrival_ns) / 1e9:.9g} s"
            for number in group.unanswered():
                if not (is_begun and self._is_running(group, number)):
                    self.end_early(group, (number,), DeadlineError(f"model {group.model.name!r}: {told}"))

    def _is_running(self, group: RequestGroup, number: int) -> bool:
        """Whether a task of a request was submitted to a worker."""
        return group.states[number] == LiveState.ADMITTED and self._processor.has_begun(group.ids[number])

    def end_early_all(self, error: CellrtError) -> None:
        """Ends every request; the rows of those in flight come back when their tasks are done."""
        self._take_over_all()
        for group in list(self._unanswered):
            self.end_early(group, group.unanswered(), error)

    def abandon_all(self, error: CellrtError) -> None:
        """Answers every request, at the end of an engine whose tables may be broken: nothing is given back."""
        self._replies.forget_steps()
        self._take_over_all()
        for group in list(self._unanswered):
            for number in group.unanswered():
                told = error
                if isinstance(error, InternalError) and group.ids[number] >= 0:
                    told = self._replies.internal_error(str(error), group.sequence_of(number))
                    told.__cause__ = error.__cause__
                self._replies.refuse(group, number, told)
        self._unanswered.clear()

    def end_early(self, group: RequestGroup, numbers: Sequence[int], error: CellrtError) -> None:
        """Ends requests that may be anywhere; their rows come back when nothing of them is in flight."""
        for number in numbers:
            if group.is_answered(number):
                continue
            self._send_steps(group)
            is_admitted = group.states[number] == LiveState.ADMITTED
            is_released = is_admitted and self._processor.cancel(group.ids[number])
            self.end(group, (number,), error)
            if is_released:
                self._give_up(group, (number,))

    def end(self, group: RequestGroup, numbers: Sequence[int], error: CellrtError) -> None:
        """Ends requests with an error, unless they are answered: they leave what they waited in."""
        for number in numbers:
            if group.is_answered(number):
                continue
            state = group.states[number]
            group.move((number,), LiveState.ENDING if state == LiveState.ADMITTED else LiveState.ENDED)
            self._note_answered(group, 1)
            if state == LiveState.WAITING:
                self._stop_waiting(group, 1)
            elif state == LiveState.IN_SESSION and (record := group.session_of(number)) is not None:
                record.queue.pop((group, number), None)
            self._replies.refuse(group, number, error)
            if state != LiveState.ADMITTED:
                self._leave(group, (number,))

    def _send_steps(self, group: RequestGroup) -> None:
        """Before a request that may be streamed ends: its client gets the steps that are complete."""
        if group.channel is not None:
            self._replies.stream()

    def _note_answered(self, group: RequestGroup, count: int) -> None:
        """Takes in that so many more requests of a group have their outcome."""
        group.num_left -= count
        if not group.num_left:
            del self._unanswered[group]
            self._deadlines.note_answered(group)

    def _wait(self, group: RequestGroup, numbers: Sequence[int]) -> None:
        group.move(numbers, LiveState.WAITING)
        group.num_waiting += len(numbers)
        group.next = min(group.next, numbers[0])
        self._waiting.add(group)

    def _stop_waiting(self, group: RequestGroup, count: int) -> None:
        """So many of a group's requests were admitted, or have ended."""
        group.num_waiting -= count
        if not group.num_waiting:
            self._waiting.note_gone()
            if LiveState.IN_SESSION not in group.states:
                group.inputs = NO_INPUTS

    def _admit(self, together: Sequence[Asking]) -> int:
        """Admits requests in order, as far as there is room; returns how many."""
        count = 0
        for group, numbers, ids in self._admission.admit(together):
            count += len(ids)
            group.note_ids(numbers, ids)
            for request_id, number in zip(ids, numbers):
                self._groups[request_id] = group
                self._numbers[request_id] = number
            group.move(numbers, LiveState.ADMITTED)
            group.next = numbers[-1] + 1
            self._stop_waiting(group, len(numbers))
        self._num_held += count
        self._waiting.note_admitted(count)
        return count

    def _finish(self, ids: list[int]) -> None:
        """Answers complete requests with their results, those of one kind together, and gives back their rows."""
        groups = [self._group_of(request_id) for request_id in ids]
        if groups.count(groups[0]) == len(ids):  # those of one group mostly end together
            self._finish_alike({groups[0]: ids})
            return
        by_kind: dict[int, dict[RequestGroup, list[int]]] = {}
        """Of each group, ids of requests; those that stream by themselves."""
        last: RequestGroup | None = None
        for request_id, group in zip(ids, groups):
            if group is not last:
                alike = by_kind.setdefault(id(group.plan.answered_with if group.channel is None else group), {})
                its, last = alike.setdefault(group, []), group
            its.append(request_id)
        for alike in by_kind.values():
            self._finish_alike(alike)

    def _finish_alike(self, alike: Mapping[RequestGroup, list[int]]) -> None:
        """See ``_finish``: of one kind."""
        first = next(iter(alike))
        if first.channel is not None:
            self._replies.note_steps(first)
            self._replies.stream()
        ids = np.array([request_id for its in alike.values() for request_id in its], np.int32)
        ended = [(group, self._numbers_of(group, its)) for group, its in alike.items()]
        results = self._replies.read(ended, ids)
        started_ns, left = self._processor.finish(ids)
        for group, numbers in ended:
            group.move(numbers, LiveState.ENDING)
            self._note_answered(group, len(numbers))
        self._replies.answer(ended, started_ns, results)
        if not self._unanswered:
            self._replies.tell()
        for group, numbers in ended:
            if left:  # tasks of them that went ahead are in flight
                numbers = [number for number in numbers if group.ids[number] not in left]
            if numbers:
                self._give_up(group, numbers)

    def _give_up(self, group: RequestGroup, numbers: Sequence[int]) -> None:
        """Takes in that answered requests hold no rows any more."""
        group.move(numbers, LiveState.ENDED)
        for number in numbers:
            self._groups[group.ids[number]] = None
        self._num_held -= len(numbers)
        self._leave(group, numbers)

    def _group_of(self, request_id: int) -> RequestGroup:
        """Whose request it is, by its id in the processor. Raises InternalError if it holds nothing."""
        group = self._find(request_id)
        if group is None:
            raise InternalError(f"no request has the id {request_id}")
        return group

    def _find(self, request_id: int) -> RequestGroup | None:
        """The same; compiled code may have had it so far. None if it holds nothing."""
        group = self._groups[request_id]
        if group is None and (its := self._door.whose(request_id)) is not None:
            self._take_over(its)
            group = self._groups[request_id]
        return group

    def _numbers_of(self, group: RequestGroup, ids: list[int]) -> Sequence[int]:
        """The numbers of a group's requests; as a range where they are in a row, as those mostly are that end
        together."""
        if group.count == 1:
            return ALONE
        numbers = [self._numbers[request_id] for request_id in ids]
        in_row = range(numbers[0], numbers[0] + len(numbers))
        return in_row if numbers == list(in_row) else numbers

    def _failed(self, group: RequestGroup, number: int) -> InternalError:
        return self._replies.internal_error(f"{group.name_of(number)} failed", group.sequence_of(number))

    def _leave(self, group: RequestGroup, numbers: Sequence[int]) -> None:
        """After the end of everything of requests: their sessions go on."""
        group.model.num_live -= len(numbers)
        for number in numbers if group.sessions is not None else ():
            record = group.session_of(number)
            if record is not None and record.running == (group, number):
                self._sessions.note_over(record)
                self.go_on(record)


def _asked_at(together: Sequence[Asking], place: int) -> tuple[RequestGroup, int]:
    """The request at a place among those that ask."""
    for group, numbers in together:
        if place < len(numbers):
            return group, numbers[place]
        place -= len(numbers)
    raise IndexError(place)
