"""Every request from its acceptance to its end: waiting, admission, deadlines, cancellation, sessions, and one end.

Belongs to the holder of the turn. The legal states and moves are those of ``core/moves.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.completion import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED, NOTICE_STEPS
from cellrt.core.moves import LiveState
from cellrt.core.processor import Notice, Processor
from cellrt.core.tables import HOST
from cellrt.engine.future import RequestFuture, Result
from cellrt.engine.records import LiveRequest, SessionRecord
from cellrt.engine.registry import Plan
from cellrt.engine.replies import Replies
from cellrt.engine.sessions import Sessions
from cellrt.engine.turns import Call
from cellrt.engine.waiting import Deadlines, WaitingRequests
from cellrt.errors import CancelledError, CellrtError, DeadlineError, InternalError, RequestTooLargeError
from cellrt.worker.arenas import Arenas


class Requests:
    """The requests of one engine that have not ended.

    Args:
        processor, arenas: of the engine; arenas by location, the host first.
        sessions: whose requests run one after the other.
        replies: answers clients.
    """

    def __init__(self, processor: Processor, arenas: list[Arenas], sessions: Sessions, replies: Replies) -> None:
        self._processor, self._arenas, self._sessions, self._replies = processor, arenas, sessions, replies
        self._by_future: dict[RequestFuture, LiveRequest] = {}
        """Those that are not answered."""
        self._admitted: dict[int, LiveRequest] = {}
        """Those that hold rows, by their id in the processor."""
        self._waiting = WaitingRequests()
        self._deadlines = Deadlines()
        self._read: list[LiveRequest] = []
        """Answered with their results; their rows are given back together."""

    @property
    def is_empty(self) -> bool:
        """Whether every request has ended."""
        return not self._by_future and not self._admitted

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline, None if there is none."""
        return self._deadlines.next_ns

    def sequences_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Sequence numbers of requests by their ids in the processor."""
        return tuple(self._admitted[id].job.sequence for id in ids)

    def accept(self, request: LiveRequest) -> None:
        """Takes in a request that was handed in."""
        self._by_future[request.future] = request
        request.model.num_live += 1
        if request.future.done():  # cancelled before anybody saw it
            self.end(request, CancelledError(f"model {request.model.name!r}: the request was cancelled"))
            return
        self._deadlines.add(request)
        if request.session is None:
            self._wait(request)
        else:
            request.move(LiveState.IN_SESSION)
            self.ask_session(request.session, request)

    def ask_session(self, record: SessionRecord, item: LiveRequest | Call[object]) -> None:
        """Puts a request or a call behind what the session was asked before."""
        record.queue[item] = None
        self.go_on(record)

    def go_on(self, record: SessionRecord) -> None:
        """Goes on with a session: its next request waits for room once what came before it is over."""
        while (request := self._sessions.next_request(record)) is not None:
            try:
                self._sessions.begin(record, request)
            except CellrtError as error:
                self.end(request, error)
                continue
            self._wait(request)

    def admit(self) -> None:
        """Admits those who wait, in their order, as far as there is room."""
        while (request := self._waiting.first()) is not None:
            plan, session = request.plan, request.session
            if plan is None or (session is not None and session.error is not None):
                error = session.error if session is not None else None
                self.end_early(request, error or InternalError(f"{request} waits without a plan"))
                continue
            try:
                admitted = self._processor.admit(
                    plan.template,
                    request.job.sequence,
                    request.lane,
                    request.channel is not None,
                    session.id if session is not None else -1,
                )
            except RequestTooLargeError as error:
                self.end_early(request, RequestTooLargeError(f"{request}: {error} (see Engine(page_bytes=...))"))
                continue
            if admitted is None:
                if not self._processor.has_rows(plan.template) and self._sessions.evict_some():
                    continue
                return
            request.id, rows = admitted
            request.results_at = int(rows[-1])
            request.move(LiveState.ADMITTED)
            self._waiting.remove(request)
            self._admitted[request.id] = request
            self._copy_in(request, plan, rows)

    def take_notices(self, notices: list[Notice], error: CellrtError | None = None) -> None:
        """Takes in what the processor says of requests; ``error``: why they failed, if not by a cell."""
        for request_id, what in notices:
            request = self._admitted[request_id]
            if what == NOTICE_DONE:
                self._finish(request)
            elif what == NOTICE_FAILED:
                self.end(request, error or request.error or self._replies.internal_error(f"{request} failed", request))
            elif what == NOTICE_RELEASED:
                self._release(request)
            elif what == NOTICE_STEPS and request.plan is not None:
                self._replies.stream(request, request.plan)
        if self._read:
            read, self._read = self._read, []
            self._processor.release([request.id for request in read])
            for request in read:
                self._release(request)

    def note_failure(self, request_id: int, error: CellrtError) -> None:
        """Takes in why a row of a request failed; the processor's notice follows."""
        request = self._admitted.get(request_id)
        if request is not None and request.error is None:
            request.error = error

    def cancel(self, future: RequestFuture) -> None:
        """Ends a request whose client gave it up, if it has not ended."""
        request = self._by_future.get(future)
        if request is not None:
            self.end_early(request, CancelledError(f"model {request.model.name!r}: the request was cancelled"))

    def expire(self, now_ns: int) -> None:
        """Ends those whose deadline has passed."""
        while (request := self._deadlines.take_late(now_ns)) is not None:
            allowed = request.job.deadline_s
            self.end_early(request, DeadlineError(f"model {request.model.name!r}: not done within {allowed} s"))

    def end_early_all(self, error: CellrtError) -> None:
        """Ends every request; the rows of those in flight come back when their tasks are done."""
        for request in list(self._by_future.values()):
            self.end_early(request, error)

    def abandon_all(self, error: CellrtError) -> None:
        """Answers every request, at the end of an engine whose tables may be broken: nothing is given back."""
        for request in list(self._by_future.values()):
            told = error
            if isinstance(error, InternalError) and request.id >= 0:
                told = self._replies.internal_error(str(error), request)
                told.__cause__ = error.__cause__
            self._replies.answer(request, told)
        self._by_future.clear()

    def end_early(self, request: LiveRequest, error: CellrtError) -> None:
        """Ends a request that may be anywhere; its rows come back when nothing of it is in flight."""
        if request.is_answered:
            return
        is_released = request.state is LiveState.ADMITTED and self._processor.cancel(request.id)
        self.end(request, error)
        if is_released:
            self._release(request)

    def end(self, request: LiveRequest, outcome: Result | CellrtError) -> None:
        """The one end of every request towards its client: leaves whatever it waited in, and is answered."""
        if request.is_answered:
            return
        state, session = request.state, request.session
        request.move(LiveState.ENDING if state is LiveState.ADMITTED else LiveState.ENDED)
        del self._by_future[request.future]
        self._deadlines.note_answered(request)
        if state is LiveState.WAITING:
            self._waiting.remove(request)
        elif state is LiveState.IN_SESSION and session is not None:
            session.queue.pop(request, None)
        self._replies.answer(request, outcome)
        if state is not LiveState.ADMITTED:
            self._leave(request)

    def _wait(self, request: LiveRequest) -> None:
        request.move(LiveState.WAITING)
        self._waiting.add(request)

    def _copy_in(self, request: LiveRequest, plan: Plan, rows: NDArray[np.int32]) -> None:
        """Copies a request's tensors to their host rows."""
        first = 0
        for kind, values in plan.externals:
            self._arenas[HOST].put(kind, rows[first : first + len(values)], values)
            first += len(values)
        request.plan = plan._replace(externals=[])
        if request.session is not None:
            self._sessions.copy_in(request.session, request.id, rows[first:])
            self._sessions.note_admitted(request.session)

    def _finish(self, request: LiveRequest) -> None:
        """Reads the results of a complete request and answers with them."""
        if request.plan is None:
            raise self._replies.internal_error(f"{request} is done twice", request)
        self._replies.stream(request, request.plan)
        self._read.append(request)
        self.end(request, self._replies.read(request, request.plan))

    def _release(self, request: LiveRequest) -> None:
        """Takes in that an answered request holds no rows any more."""
        del self._admitted[request.id]
        request.move(LiveState.ENDED)
        self._leave(request)

    def _leave(self, request: LiveRequest) -> None:
        """After the end of everything of a request: its session goes on."""
        request.model.num_live -= 1
        record = request.session
        if record is not None and record.running is request:
            self._sessions.note_over(record)
            self.go_on(record)
