"""A client in the engine's process: its connection, its requests and sessions, and the news that it is still to get.

Only the thread that accepts connections receives a client's messages. News may be added in any thread, and is sent
together: at the end of the turn in which requests ended, by the thread that runs the turn, or by the accepting thread.
``leave`` releases everything that the client had, once, however its connection ended.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from cellrt.engine.engine import Engine
from cellrt.engine.registry import Model
from cellrt.engine.request_group import RequestGroup, SessionRecord
from cellrt.engine.session import Session
from cellrt.errors import CellrtError, OverloadError, SessionError
from cellrt.graph.known import Alike
from cellrt.process.model_binding import RowFormat
from cellrt.process.outcomes import Outcome, outcome_parts
from cellrt.process.recorded import LENGTH, Template, read_requests, read_template
from cellrt.process.remote_requests import RemoteChannel, RemoteRequests
from cellrt.process.submission_queue import QueuedSubmission
from cellrt.process.submissions import Submission, read_submission
from cellrt.process.wire import BrokenWireError, Kind, Message, Wire
from cellrt.process.wire_errors import encode_error

News = Outcome | tuple[int, CellrtError] | Message
"""News for a client: a step or results, another end of a request, or an answer."""
MAX_NUMBERS = 10_000
"""The most requests of a client whose numbers in the engine are remembered, if the engine keeps a timeline."""
MIN_SESSIONS = 256
"""The number of sessions below which ended ones are not searched for."""
MAX_VERSIONS = 4
"""The most models of one name that a client gets unasked; beyond, it must ask for another."""
MAX_UNSENT = 1 << 16
"""The most messages and outcomes that a client may leave unread before its messages are no longer received."""


_NUMBERS = itertools.count(1)
"""Numbers of clients, for policies; 0 is the engine's own process."""


class Server(Protocol):
    """The parts of the engine's process that a client's connection uses."""

    engine: Engine

    def formats(self) -> Sequence[RowFormat]:
        """Return the formats of all kinds of rows."""

    def note_news(self, connection: ClientConnection) -> None:
        """Have a client's news sent soon; from any thread."""

    def note_turns_news(self, connection: ClientConnection) -> None:
        """Have a client's news sent at the end of the turn; by the thread that runs the turn."""

    def note_stuck(self, connection: ClientConnection) -> None:
        """Have a client's news sent when it reads again; from any thread."""

    def call(
        self, connection: ClientConnection, number: int, name: str, arguments: dict[str, Any], blob: bytes
    ) -> None:
        """Call one of the functions that clients may call, and send the client the answer."""

    def submit_or_wait(self, queued: QueuedSubmission) -> None:
        """Submit requests when there is room for them."""


class ClientConnection:
    """The connection of a client, with everything that the client has in the engine."""

    def __init__(self, server: Server, wire: Wire) -> None:
        self.wire = wire
        self.number = next(_NUMBERS)
        self.is_gone = False
        self.lock = threading.Lock()
        """A lock, held to send, and to change anything that ``leave`` releases."""
        self.names: set[str] = set()
        """The names of models that the client has requested bindings for."""
        self.models: dict[int, Model] = {}
        """Pinned models by the number of their binding."""
        self.sessions: dict[int, tuple[Session, bool]] = {}
        """Sessions by number, each with whether it ends with this client."""
        self._number_of: dict[SessionRecord, int] = {}
        self._closed: OrderedDict[int, str] = OrderedDict()
        """The names of the last closed sessions, by number."""
        self._look_at = MIN_SESSIONS
        """The number of sessions at which ended ones are searched for."""
        self.numbers: OrderedDict[int, int] = OrderedDict()
        """The engine's numbers of the last requests, by the client's; empty unless the engine keeps a timeline."""
        self._server = server
        self._num_bound = self._num_sessions = 0
        self._templates: list[Template] = []
        self._live: dict[int, RemoteRequests] = {}
        self._queued: dict[int, QueuedSubmission] = {}
        """The submissions that wait for room, by each of their requests."""
        self._untold: deque[News] = deque()
        self._has_news = False

    def listens(self) -> bool:
        """Return whether messages may be received: not while the client leaves too many unread."""
        return len(self._untold) < MAX_UNSENT

    def tell(self, *news: News) -> None:
        """Add news for the client; from any thread."""
        self._untold.extend(news)
        if not self._has_news:
            self._has_news = True
            self._server.note_news(self)

    def tell_of_turn(self, *news: News) -> None:
        """Add news for the client, to be sent at the end of the turn; by the thread that runs the turn."""
        self._untold.extend(news)
        if not self._has_news:
            self._has_news = True
            self._server.note_turns_news(self)

    def send_news(self) -> bool:
        """Send the news. Return False if the client reads nothing now: then it is sent once the client reads."""
        with self.lock:
            self._has_news = False
            if self.is_gone:
                self._untold.clear()
                return True
            try:
                while self.wire.flush() and self._untold:
                    self._send([self._untold.popleft() for _ in range(len(self._untold))])
            except BrokenWireError:
                self._untold.clear()  # the server hears of it
                return True
            except Exception:  # a bug ends this connection, not the turn that runs here
                logging.getLogger("cellrt").exception("news cannot be sent to a client")
                self._untold.clear()
                self.wire.end()
                return True
            is_stuck = self.wire.is_behind
        if is_stuck:
            self._server.note_stuck(self)
        return not is_stuck

    def _send(self, news: Sequence[News]) -> None:
        """Send news together. If there is no memory for that, send each alone, or an error in its place."""
        try:
            self.wire.send(_messages(news))
            return
        except OverloadError:
            pass
        for one in sorted(news, key=lambda one: not isinstance(one, Outcome)):
            try:
                self.wire.send(_messages([one]))
            except OverloadError as error:
                self.wire.send(_messages([_instead_of(one, error)]))

    def take(self) -> None:
        """Receive some messages. Raise BrokenWireError."""
        for kind, body in self.wire.receive():
            self._take(kind, body)
        if self.wire.owes_word:
            with self.lock:
                self.wire.send(())

    def _take(self, kind: int, body: memoryview) -> None:
        if kind == Kind.SUBMIT:
            self._submit(*read_submission(body))
        elif kind == Kind.CANCEL:
            for (id,) in LENGTH.iter_unpack(body):
                self._cancel(id)
        elif kind == Kind.CUT_BACK:
            (session,), (rows,) = LENGTH.iter_unpack(body)
            with suppress(CellrtError):  # its next request says so
                self.session(session).cut_back(rows)
        elif kind == Kind.TEMPLATE:
            self._templates.append(read_template(body))
        elif kind == Kind.FORGET:
            self._templates.clear()
        elif kind == Kind.CALL:
            (size,) = LENGTH.unpack_from(body)
            head = json.loads(bytes(body[LENGTH.size : LENGTH.size + size]))
            self._server.call(self, head["call"], head["name"], head["arguments"], bytes(body[LENGTH.size + size :]))
        elif kind == Kind.RELEASE:
            self._release(*LENGTH.unpack(body))
        else:
            raise BrokenWireError(f"a message of an unknown kind, {kind}")

    def _submit(self, submission: Submission, numbers: Sequence[tuple[int, int]], tensors: bytes) -> None:
        """Submit the requests of a message; if that fails, send the error, or let them wait."""
        try:
            groups = [(self._templates[number], count) for number, count in numbers]
            asked: dict[Model, list[Alike]] = {}
            for (template, _), alike in zip(groups, read_requests(groups, self._server.formats(), tensors)):
                asked.setdefault(self.models[template.binding], []).append(alike)
            first = groups[0][0]
            if sum(count for _, count in groups) != submission.num_requests:
                raise ValueError(f"{submission.num_requests} requests should come")
            if len(submission.sessions) not in (0, submission.num_requests):
                raise ValueError(f"{submission.num_requests} sessions should come")
        except (LookupError, ValueError) as error:
            raise BrokenWireError(f"a submission that does not fit: {error}") from error
        queued = QueuedSubmission(self, submission, asked, first)
        if submission.may_wait:
            self._queued.update(dict.fromkeys(submission.ids, queued))
            self._server.submit_or_wait(queued)
            return
        self._hand_in_or_refuse(queued)

    def _hand_in_or_refuse(self, queued: QueuedSubmission) -> None:
        try:
            self.hand_in(queued)
        except CellrtError as error:
            if queued.submission.is_each and queued.submission.num_requests > 1:
                for alone in queued.each():
                    self._hand_in_or_refuse(alone)
            else:
                self.refuse(queued.submission, error)

    def hand_in(self, queued: QueuedSubmission) -> None:
        """Submit requests, all or none. Raise what ``Engine.submit`` does."""
        submission = queued.submission
        sessions = [self.session(number)._record for number in submission.sessions]

        def begin_first(group: RequestGroup) -> RemoteRequests:
            if submission.may_wait:  # now: before one of them may fail, which is no refusal
                self.tell(Message(Kind.ACCEPTED, (LENGTH.pack(submission.first_id),)))
            return groups[0].begin(group)

        channel = None
        if submission.is_streamed:
            channel = RemoteChannel(self.tell_of_turn, submission.first_id, queued.template)
        groups = [
            RemoteRequests(self._live, self.tell_of_turn, submission.first_id + alike.places[0])
            for alike in chain.from_iterable(queued.asked.values())
        ]
        try:
            self._server.engine._submission.submit_recorded(
                queued.asked,
                min(submission.now_ns, time.perf_counter_ns()),
                submission.due,
                submission.priority,
                channel,
                sessions or None,
                [begin_first, *[group.begin for group in groups[1:]]],
                self.number,
            )
        except BaseException:
            for id in submission.ids:
                self._live.pop(id, None)
            raise
        if self._server.engine.has_timeline:
            for group in groups:
                self._note_numbers(group)
        if submission.may_wait:
            for id in submission.ids:
                self._queued.pop(id, None)
            for id in queued.cancelled:
                self._cancel(id)

    def session(self, number: int) -> Session:
        """Return the session of a number. Raise SessionError if it is closed."""
        known = self.sessions.get(number)
        if known is None:
            raise SessionError(f"{self._closed.get(number, f'session {number} of this client')} is closed")
        return known[0]

    def _note_numbers(self, group: RemoteRequests) -> None:
        """Record the numbers of requests in the engine."""
        numbers, first = self.numbers, group.requests.sequence
        numbers.update(zip(group.ids, range(first, first + group.requests.count)))
        while len(numbers) > MAX_NUMBERS:
            numbers.popitem(last=False)

    def refuse(self, submission: Submission, error: CellrtError) -> None:
        """Send the client the error for which its requests were not submitted."""
        for id in submission.ids:
            self._queued.pop(id, None)
        self.tell(*[(id, error) for id in submission.ids])

    def request(self, id: int) -> tuple[RequestGroup, int] | str | None:
        """Return a request's submission and its index there; or the reason of its wait; None if it has ended."""
        if id in self._queued:
            return "waits for a place in the queue"
        group = self._live.get(id)
        return None if group is None else (group.requests, group.ids.index(id))

    def _cancel(self, id: int) -> None:
        group = self._live.pop(id, None)
        if group is not None:
            group.cancel(id)
        elif (queued := self._queued.pop(id, None)) is not None:
            queued.cancelled.add(id)

    def wants(self, model: Model) -> bool:
        """Return whether the client gets a model unasked: it has unfolded for that name, and releases earlier models of
        it.
        """
        with self.lock:
            num_versions = sum(known.name == model.name for known in self.models.values())
        return model.name in self.names and num_versions < MAX_VERSIONS

    def number_of(self, model: Model, known: Collection[int]) -> int | None:
        """Return the number of a model's binding, and keep the model as long as the client has it. None if it was
        released.

        ``known``: the bindings that the client keeps until it has the answer. For a model without one a new number is
        made: the
        client may release another one before it hears of it again.
        """
        with self.lock:
            for number, its in self.models.items():
                if its is model and number in known:
                    return number
            number = self._num_bound = self._num_bound + 1
            if not self.is_gone:
                if not self._server.engine._manager.sessions.pin(model):
                    return None
                self.models[number] = model
            return number

    def add_session(self, session: Session, is_own: bool) -> int:
        """Return the number of a session that the client has opened. ``is_own``: it ends with this client."""
        record = session._record
        with self.lock:
            if record in self._number_of:
                return self._number_of[record]
            number = self._num_sessions = self._num_sessions + 1
            if not self.is_gone:
                self.sessions[number] = session, is_own
                self._number_of[record] = number
                self._forget_ended()
                return number
        if is_own:
            self._end_session(session)
        return number

    def forget_session(self, number: int) -> None:
        """Record that a session has ended."""
        with self.lock:
            session, _ = self.sessions.pop(number, (None, False))
            if session is not None:
                self._number_of.pop(session._record, None)
                self._closed[number] = str(session._record)
                if len(self._closed) > MAX_NUMBERS:
                    self._closed.popitem(last=False)

    def _forget_ended(self) -> None:
        """Forget sessions that expired or whose model is gone, when their number has doubled since the last time.

        Call it under the lock.
        """
        if len(self.sessions) < self._look_at:
            return
        for number, (session, _) in list(self.sessions.items()):
            if session._record.error is not None:
                del self.sessions[number], self._number_of[session._record]
        self._look_at = 2 * len(self.sessions) + MIN_SESSIONS

    def _end_session(self, session: Session) -> None:
        record = session._record
        self._server.engine._manager.end_session(record, SessionError(f"the client of {record} is gone"))

    def _release(self, number: int) -> None:
        with self.lock:
            model = self.models.pop(number, None)
        if model is not None:
            self._unpin(model)

    def _unpin(self, model: Model) -> None:
        manager = self._server.engine._manager
        manager.sessions.unpin(model)
        manager.turns.wake()

    def leave(self) -> None:
        """Release everything that the client had, after the end of its connection."""
        with self.lock:
            self.is_gone = True
            models, self.models = self.models, {}
            sessions, self.sessions = self.sessions, {}
            self._untold.clear()
            self.wire.close()
        for queued in set(self._queued.values()):
            queued.cancelled.update(queued.submission.ids)
        self._queued.clear()
        live = list(self._live.items())
        self._live.clear()
        for id, group in live:
            group.cancel(id)
        for session, is_own in sessions.values():
            if is_own:
                self._end_session(session)
        for model in models.values():
            self._unpin(model)


def _instead_of(news: News, error: OverloadError) -> News:
    """Return the error to send in place of news for which there is no memory.

    Raise it if the news has no such place.
    """
    if isinstance(news, Outcome):
        return news.id, error
    if isinstance(news, Message) and news.kind == Kind.ANSWER:
        return answer(json.loads(bytes(news.parts[1]))["call"], error=encode_error(error))
    raise error


def answer(call: int, value: Any = None, data: bytes = b"", error: object = None) -> Message:
    """Return the message that answers a call: its value, or its error."""
    head = json.dumps({"call": call, "value": value, "error": error}).encode()
    return Message(Kind.ANSWER, (LENGTH.pack(len(head)), head, data))


def _messages(news: Sequence[News]) -> list[Message]:
    """Return the messages for some news.

    Accepted requests come first, since an error before says that they are refused; then outcomes, since an error is a
    request's end.
    """
    outcomes = [one for one in news if isinstance(one, Outcome)]
    others = [one for one in news if not isinstance(one, Outcome)]
    errors = [(one[0], encode_error(one[1])) for one in others if not isinstance(one, Message)]
    messages = [one for one in others if isinstance(one, Message)]
    ends = [Message(Kind.OUTCOMES, outcome_parts(outcomes))] if outcomes else []
    if errors:
        ends.append(Message(Kind.ERRORS, (json.dumps(errors).encode(),)))
    accepted = [one for one in messages if one.kind == Kind.ACCEPTED]
    return [*accepted, *ends, *[one for one in messages if one.kind != Kind.ACCEPTED]]
