"""A client in the engine's process: its connection, its requests and sessions, and the news that it is still to get.

Only the thread that accepts connections receives a client's messages. News may be added in any thread, and is sent
together: at the end of the turn in which requests ended, by the thread that runs the turn, or by the accepting thread.
``leave`` releases everything that the client had, once, however its connection ended.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from functools import partial
from itertools import chain
from typing import Any, Protocol

from cellrt.core.state.region_layout import SLOT_BYTES, padded
from cellrt.engine.due import Due
from cellrt.engine.engine import Engine
from cellrt.engine.futures import Ends
from cellrt.engine.regions import Returned
from cellrt.engine.registry import Model
from cellrt.engine.request_group import RequestGroup, Seat, SessionRecord
from cellrt.engine.session import Session
from cellrt.errors import CellrtError, EngineClosedError, OverloadError, SessionError, UnknownModelError
from cellrt.graph.known import Alike
from cellrt.graph.results import Recorded
from cellrt.process.model_binding import RowFormat
from cellrt.process.outcomes import Outcome, outcome_parts
from cellrt.process.recorded import LENGTH, PLAN, Template, read_requests, read_template
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
NO_DUE = Due(None, None)
MAX_KEPT_SEATS = 8
"""The most clients that may name a session in what they hand in by their regions: the last that opened it."""
MAX_NAMED = 16
"""The most templates of a submission for which plans are named."""
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

    def note_returned(self, connection: ClientConnection, returned: Returned | int) -> None:
        """Have a request submitted that came by a region, or one that was cancelled by its id; in a turn."""

    def take_returned(self) -> None:
        """Submit what was returned so far; by the accepting thread."""


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
        self._region: tuple[int, memoryview, int] | None = None
        """The number of its region, the memory and the bell."""
        self._templates: list[Template] = []
        self._generation = 0
        """The number of times that the client has forgotten them."""
        self._plans: dict[int, Template] = {}
        """The templates of the plans that the client may name, by the numbers of these."""
        self._seen: dict[int, bool] = {}
        """Templates that requests came for, by number: whether a plan was named for them."""
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
            self._take_in_region()
            (session,), (rows,) = LENGTH.iter_unpack(body)
            with suppress(CellrtError):  # its next request says so
                self.session(session).cut_back(rows)
        elif kind == Kind.TEMPLATE:
            self._templates.append(read_template(body))
        elif kind == Kind.FORGET:
            self._forget_plans(None)
            (self._generation,) = LENGTH.unpack(body)
            self._templates.clear()
            self._seen.clear()
        elif kind == Kind.CALL:
            (size,) = LENGTH.unpack_from(body)
            head = json.loads(bytes(body[LENGTH.size : LENGTH.size + size]))
            if "session" in head["arguments"]:
                self._take_in_region()
            self._server.call(self, head["call"], head["name"], head["arguments"], bytes(body[LENGTH.size + size :]))
        elif kind == Kind.RELEASE:
            self._release(*LENGTH.unpack(body))
        else:
            raise BrokenWireError(f"a message of an unknown kind, {kind}")

    def _submit(self, submission: Submission, numbers: Sequence[tuple[int, int]], tensors: bytes) -> None:
        """Submit the requests of a message; if that fails, send the error, or let them wait."""
        if submission.follows:
            self._take_in_region()
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
        if self._region is not None and len(numbers) <= MAX_NAMED:
            for number, _ in numbers:
                self._name_plan(number)
        queued = QueuedSubmission(self, submission, asked, first)
        if submission.may_wait:
            self._queued.update(dict.fromkeys(submission.ids, queued))
            self._server.submit_or_wait(queued)
            return
        self._hand_in_or_refuse(queued)

    def open_region(self, memory: memoryview, bell: int) -> bool:
        """Take requests by a region from now on, and keep its memory and the bell; return False if there are too many
        regions."""
        address, manager, at = addressof(c_char.from_buffer(memory)), self._server.engine._manager, -1
        with suppress(EngineClosedError):
            at = manager.turns.call(partial(manager.regions.open, self, address, self.number, bell))
        if at >= 0:
            self._region = at, memory, bell
        return at >= 0

    def _take_in_region(self) -> None:
        """Have requests go first that came by the region before a message: it may be about their sessions."""
        if self._region is None:
            return
        manager = self._server.engine._manager
        with suppress(EngineClosedError):  # a turn may be about to return some
            manager.turns.call(partial(manager.requests.take_in_region, self._region[0]))
        self._server.take_returned()

    def _name_plan(self, number: int) -> None:
        """Name what runs for requests of a template, if they come for the second time and fit in a slot."""
        if self._region is None or self._seen.get(number, True):
            self._seen.setdefault(number, False)
            return
        self._seen[number] = True
        template, formats, manager = self._templates[number], self._server.formats(), self._server.engine._manager
        tensors = [(kind, rows * formats[kind].num_bytes) for kind, rows in template.externals]
        model = self.models[template.binding]
        with suppress(CellrtError):
            plan = model.plan_of(Recorded(template.program, [], template.results, template.states))
            size = sum([padded(size) for _, size in tensors]) + plan.answers.num_bytes
            if size > SLOT_BYTES:
                return
            with manager.turns.gate:
                named = manager.regions.publish(self._region[0], model, plan, tensors, template.binding)
            if named:
                self._plans[named] = template
                self.tell(Message(Kind.PLAN, (PLAN.pack(self._generation, number, named),)))

    def _forget_plans(self, binding: int | None) -> None:
        """Have the client name no plans of a binding any more, or none at all."""
        if self._region is None or not self._plans:
            return
        manager = self._server.engine._manager
        with suppress(EngineClosedError):
            manager.turns.call(partial(manager.requests.forget_plans, self._region[0], binding))
        self._server.take_returned()  # with the plans there
        for number, template in list(self._plans.items()):
            if binding in (None, template.binding):
                del self._plans[number]

    def ends_of(self, id: int) -> Callable[[RequestGroup], Ends]:
        """Return the factory of what sends a request's end to the client, by the request's number."""
        return RemoteRequests(self._live, self.tell_of_turn, id).begin

    def return_request(self, returned: Returned) -> None:
        """Have a request submitted as by a message."""
        self._server.note_returned(self, returned)

    def note_broken(self) -> None:
        """End the connection of a client that handed in what does not fit."""
        logging.getLogger("cellrt").warning("a client handed in what does not fit, and is seen off")
        self.wire.end()

    def submit_returned(self, returned: Returned) -> None:
        """Submit a request that turns could not take by the region, or send the client why it is refused."""
        template = self._plans.get(returned.plan)
        how = returned.arrival_ns, NO_DUE, returned.priority, False, False, False
        submission = Submission(returned.id, 1, (returned.session,) if returned.session else (), *how)
        if self.is_gone:
            return
        if template is None or template.binding not in self.models:
            self.refuse(submission, UnknownModelError("the client released the model before its request was admitted"))
            return
        (alike,) = read_requests([(template, 1)], self._server.formats(), returned.tensors)
        self._hand_in_or_refuse(QueuedSubmission(self, submission, {self.models[template.binding]: [alike]}, template))

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
            RemoteRequests(self._live, self.tell_of_turn, submission.first_id + alike.indices[0])
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
        if id not in self._live and self._region is not None:
            manager = self._server.engine._manager
            manager.turns.call(partial(manager.requests.find_elsewhere, self._region[0], id))
        group = self._live.get(id)
        return None if group is None else (group.requests, group.ids.index(id))

    def _cancel(self, id: int) -> None:
        if not self.cancel_here(id) and self._region is not None:
            self._server.engine._manager.turns.command(partial(self._cancel_in_region, id))

    def cancel_here(self, id: int) -> bool:
        """Cancel a request that came by a message, or was returned from the region; return False if it is not here."""
        group = self._live.pop(id, None)
        if group is not None:
            group.cancel(id)
        elif (queued := self._queued.pop(id, None)) is not None:
            queued.cancelled.add(id)
        else:
            return False
        return True

    def _cancel_in_region(self, id: int) -> None:
        """Cancel a request that came by the region; in a turn."""
        manager = self._server.engine._manager
        if self._region is not None and manager.requests.find_elsewhere(self._region[0], id) is None:
            self._server.note_returned(self, id)  # behind it, if it was returned
        else:
            self.cancel_here(id)

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
                if self._region is not None:
                    record.seats = (*record.seats[1 - MAX_KEPT_SEATS :], Seat(self._region[0], self.number, number))
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
        self._forget_plans(number)
        with self.lock:
            model = self.models.pop(number, None)
        if model is not None:
            self._unpin(model)

    def _close_region(self, memory: memoryview) -> None:
        """Cancel all that came by the region, after which nothing reads its ``memory``; in a turn."""
        if self._region is not None:
            at, _, bell = self._region
            self._server.engine._manager.requests.close_region(at)
            self._region = None
            os.close(bell)
        for id in list(self._live):
            self.cancel_here(id)

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
        turns = self._server.engine._manager.turns
        if self._region is not None and turns.stopped is None:
            turns.command(partial(self._close_region, self._region[1]))
        elif self._region is not None:
            os.close(self._region[2])
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
