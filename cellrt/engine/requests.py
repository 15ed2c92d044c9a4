"""Every request from its acceptance to its end: waiting, admission, deadlines, cancellation, sessions, and one end.

Requests are handled in groups where possible: those of one template are admitted in one call, and those that a task
completes are answered in one call. All of it is called by the holder of the turn. ``core/state/moves.py`` has the legal
states and moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.moves import LIVE, LiveState
from cellrt.core.state.notices import NOTICE_FAILED, NOTICE_RELEASED, NOTICE_SESSION, NOTICE_STEPS, Notices
from cellrt.core.state.tables import HOST, MAX_SUBMISSIONS
from cellrt.engine.blame import explained
from cellrt.engine.door import Door, Told
from cellrt.engine.group_admission import Asking, GroupAdmission
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
"""The most requests of one call: it holds the interpreter lock for a fraction of a millisecond."""


class Requests:
    """The requests of one engine that have not ended.

    Args:
        processor: the engine's processor.
        arenas: the engine's arenas by location, the host first.
        sessions: the engine's sessions; the requests of each run one after the other.
        replies: answers clients.
        deadlines: the requests' deadlines.
        door: holds the requests that compiled code admits and answers.
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
        self._admission, self._host = GroupAdmission(processor, arenas, sessions), arenas[HOST]
        self._unanswered: dict[RequestGroup, None] = {}
        """The groups with requests that are not answered."""
        self._groups: list[RequestGroup | None] = [None] * processor.limits.max_requests
        """The group of each request that holds rows, by the request's id in the processor."""
        self._numbers = [0] * processor.limits.max_requests
        """The numbers of the same requests in their groups, by their ids."""
        self._num_held = 0
        """The number of requests that hold rows."""
        self._waiting = WaitingRequests()
        self._deadlines = deadlines
        self.has_new_deadlines = False
        """True if a new deadline may be earlier than those that the timekeeper knows."""
        self.goes_on = False
        """True if a turn should admit requests of sessions that compiled code had."""
        self.refused_for: CellrtError | None = None
        """The reason why no more requests are admitted, once no worker is left."""

    @property
    def is_empty(self) -> bool:
        """True if every request has ended."""
        is_answered = not self._unanswered and not self._num_held and self._door.is_empty
        return is_answered and not self._processor.num_left_behind

    @property
    def has_admitted(self) -> bool:
        """True if there is anything to schedule."""
        return self._processor.num_live > 0

    @property
    def has_waiting(self) -> bool:
        """True if requests wait to be admitted."""
        return self._waiting.first() is not None

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline, None if there is none."""
        return self._deadlines.next_ns

    def sequences_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the sequence numbers of requests, given their ids in the processor."""
        return tuple(map(self._processor.sequence_of, ids))

    def accept(self, group: RequestGroup) -> None:
        """Accept requests that were handed in: they wait for admission, or end if they are late."""
        group.begin()
        self._note_accepted(group, group.count)
        self._unanswered[group] = None
        group.model.num_live += group.count
        self._deadlines.add(group)
        if group.deadline_ns is not None and (why := self._deadlines.why_late(group)) is not None:
            for number in range(group.count):
                self.end(group, (number,), DeadlineError(why))  # an error each: raising one changes it
        elif group.sessions is None:
            self._wait(group, range(group.count) if group.count > 1 else ALONE)
        else:
            self._accept_in(group, group.sessions, 0)

    def join(self) -> None:
        """Have compiled code admit the requests of the door; accept here those that it cannot admit now."""
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
        """Note which requests compiled code has answered, and which of those that it holds have deadlines."""
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
            self._door.note_told()
        for record in self._sessions.leases.take_recalled():
            self.go_on(record)
            self.goes_on = True

    def _note_told(self, told: Told) -> None:
        over: dict[RequestGroup, None] = {}
        if told.sessions:
            self._sessions.note_answered(self._sessions.of_ids(told.sessions))
        for _, numbers, group, first in told.ended:
            if group.sessions is not None:
                self._sessions.note_answered(group.sessions[first : first + len(numbers)])
            if group.is_over and not group.is_begun:
                over[group] = None
        for group in over:
            group.forget()
            if group.has_deadline:
                self._deadlines.note_answered(group)

    def _take_over(self, group: RequestGroup) -> bool:
        """Take over requests from compiled code, which may have admitted the first of them.

        Return False if all have ended.
        """
        self.tell_by_door()
        if group.row < 0:
            return group.is_begun
        has_come = group.row >= MAX_SUBMISSIONS
        num_admitted, ids = self._door.take_over(group)
        group.begin()
        left = [*ids, *range(num_admitted, group.count)]
        if not has_come:  # else compiled code has counted them when they came
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
        """Take over a group from compiled code unless Python has it; return False if all its requests have ended."""
        self.join()
        return group.is_begun or self._take_over(group)

    def take_over_sessions(self) -> None:
        """Take over all requests of sessions from compiled code, before sessions end with a lost worker."""
        self.join()
        own = [group for group in self._door.all() if group.sessions is not None]
        for group in [*own, *self._door.regions.all(in_sessions=True)]:
            self._take_over(group)

    def _take_over_all(self) -> None:
        """Take over all requests from compiled code, without admitting any."""
        self.tell_by_door()
        for group in [*self._door.take_back(), *self._door.all(), *self._door.regions.all()]:
            self._take_over(group)

    def find_elsewhere(self, region: int, id: int) -> RequestGroup | None:
        """Take over a request of a client in another process, given the client's number of it, and return its group.

        Return None if it is not here: it has ended, or was returned.
        """
        self.join()
        group = self._door.regions.find(region, id)
        return group if group is not None and self._take_over(group) else None

    def take_in_region(self, region: int) -> None:
        """Admit or return to its client all that a client in another process has handed in."""
        self.join()
        self._door.regions.take_back(region)

    def forget_plans(self, region: int, binding: int | None) -> None:
        """Forget plans of a client in another process, as ``Regions.forget`` does."""
        self.join()
        self.tell_by_door()
        self._door.regions.forget(region, binding)

    def close_region(self, region: int) -> None:
        """Take over all requests of a client in another process, and accept no more of them."""
        self.join()
        for group in self._door.regions.close(region):
            self._take_over(group)
        self.tell_by_door()
        self._door.regions.let_go(region)

    def _accept_in(self, group: RequestGroup, sessions: Sequence[SessionRecord], first: int) -> None:
        """Accept a group's requests of sessions, from number ``first`` on; those of free sessions wait together."""
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
        """Put a request or a call at the end of a session's queue."""
        record.queue[item] = None
        self.go_on(record)

    def go_on(self, record: SessionRecord) -> None:
        """Begin a session's next request, if the one before is over: it waits for room from now on."""
        while (asked := self._sessions.next_request(record)) is not None:
            if self._begin(record, asked):
                self._wait(asked[0], asked[1:])

    def _begin(self, record: SessionRecord, asked: Asked) -> bool:
        """Have a session begin a request; if it cannot, end the request and return False."""
        try:
            self._sessions.begin(record, asked)
        except CellrtError as error:
            self.end(asked[0], asked[1:], error)
            return False
        return True

    def admit(self) -> None:
        """Admit the requests that wait, in their order, as far as there is room."""
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
            except RequestTooLargeError as error:  # the state that its session has kept counts too
                number = together[0][1][0]
                self.end_early(first, (number,), self._too_large(first, number, f"{error}: {LONGER_LISTS}"))
                continue
            if count < wanted and not self._make_room(*_asked_at(together, count)):
                return

    def _make_room(self, group: RequestGroup, number: int) -> bool:
        """Make room for a request that was not admitted, by evicting idle sessions.

        End the request if no running request holds what it needs, and no session can be evicted. Return False if it
        has to wait for running requests.
        """
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
        """Return the error of a request for which there is never room, besides the state that its session has kept.

        ``otherwise`` is the reason that it gives if neither rows nor pages are too few.
        """
        record = group.session_of(number)
        why = group.model.why_never(group.plan.template, -1 if record is None else record.id)
        told = otherwise if why is None else f"with what its session has kept, the request needs {why}"
        return RequestTooLargeError(f"{group.name_of(number)}: {told}")

    def give_way(self, location: int) -> bool:
        """End the latest request that has pages at a worker, or waits for its first, if idle sessions hold the others.

        It is called when these sessions may not be evicted. Return False if there is no such request.
        """
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
        """End requests whose sessions have ended while they waited; return False if there are none."""
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
        """Handle the processor's notices of requests; ``error`` says why requests failed, if no cell failed."""
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
        """Note the error of a request's row, if it is the request's first; the processor's notice follows."""
        group = self._find(id)
        if group is not None:
            number = self._numbers[id]
            group.errors = group.errors or {}
            if number not in group.errors:
                whose = group.session_of(number) or f"model {group.model.name!r}"
                at = self._processor.tables, subgraph, self._host
                group.errors[number] = explained(error, whose, cell_type, group.plan.program, *at)

    def cancel(self, group: RequestGroup, number: int) -> None:
        """End a request that its client has cancelled, if it has not ended."""
        if self.has_begun(group) and group in self._unanswered:
            error = CancelledError(f"model {group.model.name!r}: the request was cancelled")
            self.end_early(group, (number,), error)

    def expire(self, now_ns: int) -> None:
        """End the requests whose deadline has passed, or which have not begun by the time that they must begin."""
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
        """Return whether a task of a request was submitted to a worker."""
        return group.states[number] == LiveState.ADMITTED and self._processor.has_begun(group.ids[number])

    def end_early_all(self, error: CellrtError) -> None:
        """End every request; rows of requests in flight are free when their tasks are done."""
        self._take_over_all()
        for group in list(self._unanswered):
            self.end_early(group, group.unanswered(), error)

    def abandon_all(self, error: CellrtError) -> None:
        """Answer every request with an error, at the end of an engine whose tables may be broken: no rows are freed."""
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
        """End requests in any state with an error; their rows are free when no task of theirs is in flight."""
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
        """Answer requests with an error, unless they are answered, and take them out of the queues they wait in."""
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
        """Send the complete steps of a request that may be streamed, before it ends."""
        if group.channel is not None:
            self._replies.stream()

    def _note_answered(self, group: RequestGroup, count: int) -> None:
        """Note that so many more requests of a group are answered."""
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
        """Note that so many of a group's waiting requests were admitted, or have ended."""
        group.num_waiting -= count
        if not group.num_waiting:
            self._waiting.note_gone()
            if LiveState.IN_SESSION not in group.states:
                group.inputs = NO_INPUTS

    def _admit(self, together: Sequence[Asking]) -> int:
        """Admit requests in order, as far as there is room; return how many were admitted."""
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
        """Answer complete requests with their results, in one call for plans that answer together; free their rows."""
        groups = [self._group_of(request_id) for request_id in ids]
        if groups.count(groups[0]) == len(ids):  # requests of one group mostly end together
            self._finish_alike({groups[0]: ids})
            return
        by_kind: dict[int, dict[RequestGroup, list[int]]] = {}
        """The ids of requests by group, for each kind of answer; a streamed request is a kind of its own."""
        last: RequestGroup | None = None
        for request_id, group in zip(ids, groups):
            if group is not last:
                alike = by_kind.setdefault(id(group.plan.answered_with if group.channel is None else group), {})
                its, last = alike.setdefault(group, []), group
            its.append(request_id)
        for alike in by_kind.values():
            self._finish_alike(alike)

    def _finish_alike(self, alike: Mapping[RequestGroup, list[int]]) -> None:
        """Answer complete requests of one kind, and free their rows."""
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
            if left:  # tasks that ran ahead of their ends are in flight
                numbers = [number for number in numbers if group.ids[number] not in left]
            if numbers:
                self._give_up(group, numbers)

    def _give_up(self, group: RequestGroup, numbers: Sequence[int]) -> None:
        """Note that answered requests hold no rows any more."""
        group.move(numbers, LiveState.ENDED)
        for number in numbers:
            self._groups[group.ids[number]] = None
        self._num_held -= len(numbers)
        self._leave(group, numbers)

    def _group_of(self, request_id: int) -> RequestGroup:
        """Return the group of a request, given its id in the processor. Raise InternalError if it holds no rows."""
        group = self._find(request_id)
        if group is None:
            raise InternalError(f"no request has the id {request_id}")
        return group

    def _find(self, request_id: int) -> RequestGroup | None:
        """Return the group of a request, which is taken over if compiled code has it; None if it holds no rows."""
        group = self._groups[request_id]
        if group is None and (its := self._door.whose(request_id)) is not None:
            self._take_over(its)
            group = self._groups[request_id]
        return group

    def _numbers_of(self, group: RequestGroup, ids: list[int]) -> Sequence[int]:
        """Return the numbers of a group's requests, given their ids: as a range if they follow each other, which
        requests that end together mostly do."""
        if group.count == 1:
            return ALONE
        numbers = [self._numbers[request_id] for request_id in ids]
        in_row = range(numbers[0], numbers[0] + len(numbers))
        return in_row if numbers == list(in_row) else numbers

    def _failed(self, group: RequestGroup, number: int) -> InternalError:
        return self._replies.internal_error(f"{group.name_of(number)} failed", group.sequence_of(number))

    def _leave(self, group: RequestGroup, numbers: Sequence[int]) -> None:
        """Go on with the sessions of requests that have ended and hold nothing any more."""
        group.model.num_live -= len(numbers)
        for number in numbers if group.sessions is not None else ():
            record = group.session_of(number)
            if record is not None and record.running == (group, number):
                self._sessions.note_over(record)
                self.go_on(record)


def _asked_at(together: Sequence[Asking], place: int) -> tuple[RequestGroup, int]:
    """Return the request at a place among those that are to be admitted."""
    for group, numbers in together:
        if place < len(numbers):
            return group, numbers[place]
        place -= len(numbers)
    raise IndexError(place)
