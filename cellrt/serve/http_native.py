"""The native protocol over HTTP: ``/v1``, for requests that are no tensors of fixed shapes;
a websocket for sessions.
"""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from cellrt.engine.due import ANY_TIME, due
from cellrt.engine.future import RequestFuture, Result, Telling
from cellrt.engine.mailbox import mailbox_of
from cellrt.errors import CellrtError, EngineClosedError, OverloadError, RequestError, http_status
from cellrt.process.outcomes import Arrived, Packed, outputs_of
from cellrt.process.pieces import Pieces
from cellrt.process.recorded import Template
from cellrt.process.remote_session import RemoteSession
from cellrt.process.shared_memory import Part
from cellrt.serve import oip
from cellrt.serve.access import no_websocket, refuse
from cellrt.serve.arrays import DATATYPE_OF, to_bytes
from cellrt.serve.connection import DIRECT, WebSocketProtocol
from cellrt.serve.described import Described
from cellrt.serve.http import CUT_OFF, EventStream, gone, json_response, read_body
from cellrt.serve.inference import InferenceService, blaming_request, error_json
from cellrt.serve.openai_answers import model_entry

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6, description="It must be done this many seconds from now.")]
Priority = Annotated[float, msgspec.Meta(ge=0, le=3, multiple_of=1, description="0 is the lowest, 3 the highest.")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=oip.LONGEST_ID)]

SERVICE_RESTART, POLICY_VIOLATION = 1012, 1008
"""Close codes of a websocket: its server ends or its session is lost; it cannot begin."""
ENDING = "the server is about to end"
UPGRADE = {"upgrade": "websocket", "connection": "upgrade"}
"""Headers of the answer to a plain request at a websocket's path; RFC 9110 requires both."""
LONGEST_PATH = 200
"""The most characters, in an error, of a path that takes only a websocket."""
HEAD_LENGTH = struct.Struct("<I")
MAX_HEADS = 256
"""The most heads of binary answers that are cached."""
OK = HTTPStatus.OK.value
MESSAGE_BYTES = 512
"""The approximate bytes of a waiting websocket message beside its content."""


class NativeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/v1/models/{model}/infer``."""

    request: Any
    deadline_s: Seconds | None = None
    schedule_by_s: Seconds | None = None
    priority: Priority = oip.DEFAULT_PRIORITY
    session: Name | None = None
    start: bool = False
    """True if the session begins with this request."""
    end: bool = False
    """True if the session ends with this request."""
    stream: bool = False
    """True if each step is to be an event, sent as soon as it is computed."""


class Frame(msgspec.Struct, forbid_unknown_fields=True):
    """A text message of the websocket."""

    request: Any
    deadline_s: Seconds | None = None
    schedule_by_s: Seconds | None = None
    priority: Priority = oip.DEFAULT_PRIORITY


_decoder = msgspec.json.Decoder(NativeRequest)
_frames = msgspec.json.Decoder(Frame)


class RawOutput(NamedTuple):
    """An output of a binary message: its name, type and shape, and its rows, raw and little-endian."""

    name: str
    datatype: str
    shape: list[int]
    content: Part


def as_raw(results: Result) -> list[RawOutput]:
    """Return results as outputs of a binary message."""
    return [
        RawOutput(name, DATATYPE_OF[tensor.dtype], list(tensor.shape), to_bytes(tensor))
        for name, tensor in results.items()
    ]


def packed(number: int, outputs: Sequence[RawOutput]) -> bytes:
    """Return a binary answer: the length of a head in 4 bytes, the head in JSON, and the contents of the outputs in
    order.
    """
    shown = _shown(tuple([(name, datatype, *shape) for name, datatype, shape, _ in outputs]))
    return b"".join([_head(number, shown), *[content for *_, content in outputs]])


def _head(number: int, shown: bytes) -> bytes:
    head = b'{"number":%d,"outputs":%s}' % (number, shown)
    return HEAD_LENGTH.pack(len(head)) + head


class _Binary:
    """A writer of binary answers from bytes of the engine's process, without tensors between.

    The head of an answer is cached for the next one, which mostly has the same template.
    """

    _template: Template | None = None
    _places: Sequence[tuple[int, int]] = ()
    _shown = b""
    _ranges: Sequence[tuple[int, int]] = ()

    def answer(self, number: int, outcome: Packed) -> bytes:
        """Return a binary answer, like ``packed``."""
        memory, places, template, _ = outcome
        if self._template is not template or self._places != places:
            outputs = outputs_of(outcome)
            self._shown = _shown(tuple([(name, DATATYPE_OF[dtype], *shape) for name, dtype, shape, *_ in outputs]))
            self._ranges = [(begin, end) for *_, begin, end in outputs]
            self._template, self._places = template, places
        return b"".join([_head(number, self._shown), *[memory[begin:end] for begin, end in self._ranges]])


@lru_cache(MAX_HEADS)
def _shown(outputs: tuple[tuple[Any, ...], ...]) -> bytes:
    """Return names, types and shapes of outputs, in JSON."""
    return oip.encode([{"name": name, "datatype": datatype, "shape": shape} for name, datatype, *shape in outputs])


def read_frame(described: Described, message: str | bytes) -> Frame:
    """Return a parsed message of the websocket: JSON, or raw rows of the model's one tensor. Raise RequestError."""
    if isinstance(message, bytes):
        return Frame(_rows(described, message))
    frame: Frame = oip.decode(message, _frames, described.limits)
    return msgspec.structs.replace(frame, request=described.read_json(frame.request))


def _rows(described: Described, data: bytes) -> Any:
    if (rows := described.raw_rows) is None:
        raise RequestError(f"model {described.name!r} takes no raw rows: send JSON")
    return rows.read(data)


class NativeHandlers:
    """The handlers of ``/v1``. ``service``: submits requests."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._backend = service, service.backend
        self._limits = service.backend.settings.limits
        self._binary = _Binary()

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all handlers."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model}/infer", self.native_infer, methods=["POST"]),
            WebSocketRoute("/v1/models/{model}/session", self.session),
            Route("/v1/models/{model}/session", self.not_upgraded),
            WebSocketRoute("/{path:path}", self.nowhere),
        ]

    async def models(self, request: Request) -> Response:
        """Return the names of all models, also in the form of OpenAI's protocol."""
        names = [entry["name"] for entry in await self._backend.call("models") if entry["is_loaded"]]
        return json_response({"models": names, "object": "list", "data": [model_entry(name) for name in names]})

    async def native_infer(self, request: Request) -> Response:
        """Return the answer to a request in the model's own schema."""
        body = await read_body(request, self._limits.max_body_bytes)
        described = await self._backend.model(request.path_params["model"])
        message: NativeRequest = oip.decode(body, _decoder, self._limits)
        if message.session is None and (message.start or message.end):
            raise RequestError("start and end need a session")
        sequence = None if message.session is None else oip.InSequence(message.session, message.start, message.end)
        how = oip.Parameters(message.deadline_s, int(message.priority), sequence, message.schedule_by_s)
        given = described.read_json(message.request)
        if message.stream:
            return EventStream(self._events(described, given, how), self._limits.write_timeout_s, {})
        results, version, id = await self._service.infer(described, given, how, gone(request))
        answer = {"model": described.name, "version": version, "results": oip.as_json(results)}
        return json_response(answer, request_id=id)

    async def _events(self, described: Described, given: Any, how: oip.Parameters) -> AsyncIterator[bytes]:
        note_first = self._service.measures.first_result_of(described.name)
        async with self._service.stream(described, given, how) as (stream, _):
            async for step in stream:
                note_first()
                yield oip.encode({"step": oip.as_json(step)})
        yield oip.encode({"done": True})

    async def not_upgraded(self, request: Request) -> Response:
        """Refuse a plain GET at the path of a websocket."""
        path = request.url.path[:LONGEST_PATH]
        answer = json_response(error_json(RequestError(f"{path} takes a websocket: upgrade the connection")), 426)
        answer.headers.update(UPGRADE)
        return answer

    async def nowhere(self, socket: WebSocket) -> None:
        """Refuse a websocket at a path that takes none."""
        await refuse(no_websocket(socket.url.path), socket.scope, socket.receive, socket.send)

    async def session(self, socket: WebSocket) -> None:
        """Serve a session of a model: each message is a request, answered in order with its number."""
        with suppress(WebSocketDisconnect, TimeoutError):  # the client is gone, or does not read
            await socket.accept()
            try:
                described = await self._backend.model(socket.path_params["model"])
                await _SocketSession(self._service, described, socket, self._binary).run()
            except CellrtError as error:
                await _say(socket, oip.encode(error_json(error)).decode(), self._limits.write_timeout_s)
                code = SERVICE_RESTART if http_status(error) == HTTPStatus.SERVICE_UNAVAILABLE else POLICY_VIOLATION
                await socket.close(code, type(error).__name__)


_Taken = tuple[str | bytes | CellrtError, float, int]
"""A received message: its content, or the error that refuses it; when it came; the bytes
that it takes while it waits.
"""


class _Asked:
    """An accepted message of a websocket, with its request.

    It has its session, when it came, whether it was binary, its model, request and future, and its end: the future, or
    the error that refused it; None as long as it has not ended.
    """

    __slots__ = ("begin_s", "described", "ended", "future", "given", "is_binary", "of")

    def __init__(self, of: _SocketSession, begin_s: float, is_binary: bool) -> None:
        self.of, self.begin_s, self.is_binary, self.described = of, begin_s, is_binary, of.described
        self.given: Any = None
        self.future: RequestFuture | None = None
        self.ended: RequestFuture | CellrtError | None = None

    def note_begun(self, begun: RequestFuture | CellrtError) -> None:
        """Record that the request was submitted, or the error that refused it."""
        if isinstance(begun, CellrtError):
            self.note_ended(begun)
            return
        self.future = begun
        if self.of.is_over:
            begun.cancel()

    def note_ended(self, ended: RequestFuture | CellrtError) -> None:
        """Record the end of the request, and go on with the websocket."""
        self.ended = ended
        self.of.resume()


class _SocketSession:
    """One websocket. Its requests are in a session if its model keeps state.

    The session has the id of the address, or a new one that ends with the connection. Messages are read at once, so
    that
    a client that leaves is noticed whatever is running; waiting messages are limited in bytes, and running requests in
    number. When the server ends, or loses the session, earlier messages are answered.

    Nothing here waits: each message and each end of a request calls ``resume``, which does all that can be done.
    """

    def __init__(self, service: InferenceService, described: Described, socket: WebSocket, binary: _Binary) -> None:
        """Raise RequestError for a wrong address."""
        self._service, self.described, self._socket, self._binary = service, described, socket, binary
        self._connection: WebSocketProtocol = socket.scope["extensions"][DIRECT]
        self._limits = service.backend.settings.limits
        self._sequence = _sequence_of(socket.query_params)
        self._session: RemoteSession | None = None
        self._pieces: Pieces | None = None
        """The collector of its session's connection; a later one would know another session by that number."""
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox_of(self._loop)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[_Taken] = deque()
        self._waiting_bytes = 0
        self._asked: deque[_Asked] = deque()
        self._finding: asyncio.Task[None] | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._is_ending = self._is_at_it = False
        self._num_taken = self._num_answered = 0

    async def run(self) -> None:
        """Serve until the client leaves, the server ends, or the session is lost with its engine. Raise CellrtError."""
        id, is_start, is_end = self._sequence
        backend, name = self._service.backend, self.described.name
        ends = {ENDING: self._service.draining}
        if self.described.keeps_state:
            ends["the session is lost with its engine"] = backend.engine_lost
            self._pieces = backend.pieces
            self._session = await backend.session(name, id, is_start=is_start)
        try:
            await self._serve(ends.values())
            if why := next((why for why, end in ends.items() if end.is_set()), None):
                await self._socket.close(SERVICE_RESTART, why)
        finally:
            self.lose()
            for asked in self._asked:
                if asked.future is not None:
                    asked.future.cancel()
            if self._session is not None and is_end:
                await backend.end_session(name, id, self._session)

    async def _serve(self, ends: Iterable[asyncio.Event]) -> None:
        """Serve until the client has gone, or one of the events is set."""
        waits = [self._loop.create_task(end.wait()) for end in ends]
        for wait in waits:
            wait.add_done_callback(self._begin_to_end)
        try:
            self._connection.listen(self)
            await self._over
        except asyncio.CancelledError:  # by uvicorn: the server does not wait any longer
            self._cut_off()
        finally:
            for task in [*waits, *([self._finding] if self._finding is not None else [])]:
                task.cancel()
            if self._unread is not None:
                self._unread.cancel()

    def _begin_to_end(self, wait: asyncio.Task[Any]) -> None:
        """Begin to end, as one of the events is set: end once the client has the answers to running requests."""
        if not wait.cancelled():
            self._is_ending = True
            self.resume()

    def _cut_off(self) -> None:
        """Answer each unanswered message that the server ends without its result."""
        said = error_json(EngineClosedError(CUT_OFF))
        for number in range(self._num_answered, self._num_taken):
            self._connection.say(oip.encode({"number": number, **said}).decode())

    def lose(self) -> None:
        """End the session, as the client has gone."""
        if not self._over.done():
            self._over.set_result(None)

    @property
    def is_over(self) -> bool:
        """True once no more messages are answered."""
        return self._over.done()

    def hear(self, message: str | bytes) -> None:
        """Submit a message's request, or let the message wait."""
        content = EngineClosedError(ENDING) if self._service.draining.is_set() else message
        self._num_taken += 1
        if not self._waiting and not self._is_at_it and self._has_place() and not self._over.done():
            self._begin(content, time.perf_counter())  # as most: the client waits for its last answer before it sends
            return
        num_bytes = len(message) + MESSAGE_BYTES
        self._waiting_bytes += num_bytes
        self._waiting.append((content, time.perf_counter(), num_bytes))
        self.resume()

    def resume(self) -> None:
        """Do all that can be done: send answers that are due, submit waiting messages."""
        if self._is_at_it or self._over.done():
            return
        self._is_at_it = True
        asked, waiting = self._asked, self._waiting
        try:
            while (asked and self._answer_one()) or (waiting and self._ask_one()):
                pass
            if self._waiting_bytes > self._limits.max_body_bytes:
                self._connection.read_no_more()
            elif self._connection.read_paused:
                self._connection.read_on()
            if self._is_ending and not self._asked and not self._waiting:
                self.lose()
        except Exception as error:  # of the server's own: the log has it
            self._over.set_exception(error)
        finally:
            self._is_at_it = False

    def _has_place(self) -> bool:
        """Return whether one more request may run."""
        return len(self._asked) < self._limits.max_streams_per_connection and self._finding is None

    def _ask_one(self) -> bool:
        """Submit the first waiting message. Return False if too many requests run."""
        if not self._has_place():
            return False
        content, begin_s, num_bytes = self._waiting.popleft()
        self._waiting_bytes -= num_bytes
        self._begin(content, begin_s)
        return True

    def _begin(self, content: str | bytes | CellrtError, begin_s: float) -> None:
        """Submit a message's request, or queue its refusal as the answer."""
        asked = _Asked(self, begin_s, type(content) is bytes)
        self._asked.append(asked)
        try:
            if isinstance(content, CellrtError):
                raise content
            if self._session is None and not self._service.draining.is_set():  # another engine, or version of the model
                known = self._service.backend.known(self.described.name)
                if known is None:
                    self._finding = self._loop.create_task(self._ask_when_found(asked, content))
                    return
                self.described = known
            self._ask(asked, content)
        except CellrtError as error:
            asked.note_ended(error)
        except Exception as error:  # of the server's own: the log has it
            if not self._over.done():
                self._over.set_exception(error)

    async def _ask_when_found(self, asked: _Asked, content: str | bytes) -> None:
        """Submit a message once its model's current description is there; the messages after it wait."""
        try:
            self.described = await self._service.backend.model(self.described.name)
            self._ask(asked, content)
        except CellrtError as error:
            asked.ended = error
        except Exception as error:  # of the server's own: the log has it
            if not self._over.done():
                self._over.set_exception(error)
        self._finding = None
        self.resume()

    def _ask(self, asked: _Asked, content: str | bytes) -> None:
        described = asked.described = self.described
        when, priority = ANY_TIME, oip.DEFAULT_PRIORITY
        if isinstance(content, bytes):
            asked.given = _rows(described, content)
        else:
            frame = read_frame(described, content)
            when, priority = due(frame.deadline_s, frame.schedule_by_s), int(frame.priority)
            asked.given = frame.request
        self._service.measures.note_inference(described.name)
        if self._session is not None and self._pieces is not None:
            self._pieces.submit(self._session, asked.given, when, priority, asked.note_begun, asked.note_ended)
        else:
            options = oip.Parameters(when.done_s, priority, None, when.begun_s).options
            future = self._service.backend.client.submit(described.name, asked.given, **options)
            asked.note_begun(future)
            future.add_done_callback(Telling(self._leave_end, asked))

    def _leave_end(self, asked: _Asked, future: Any) -> None:
        """Pass the end of a request from a thread of the client's to the loop."""
        with suppress(RuntimeError):  # the loop is closed, and with it the websocket
            self._mailbox.put(partial(asked.note_ended, future))

    def _answer_one(self) -> bool:
        """Send the first answer if its request has ended and the client reads. Return False if not."""
        asked = self._asked[0]
        if (ended := asked.ended) is None:
            return False
        if not self._connection.takes_more:
            if self._unread is None:
                self._unread = self._loop.call_later(self._limits.write_timeout_s, self.lose)
            return False
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._asked.popleft()
        number, status, measures = self._num_answered, OK, self._service.measures
        message: str | bytes
        try:
            if isinstance(ended, CellrtError):
                raise ended
            message = self._answer_of(ended, number, asked)
        except CellrtError as error:
            if isinstance(error, OverloadError):
                measures.rejections.labels(asked.described.name).inc()
            message, status = oip.encode({"number": number, **error_json(error)}).decode(), http_status(error)
        if not self._connection.say(message):
            self.lose()
            return False
        self._num_answered += 1
        seconds = time.perf_counter() - asked.begin_s
        measures.count_answer("session", status, seconds)
        if number == 0 and status == OK:
            measures.first_result.labels(asked.described.name).observe(seconds)
        return True

    def _answer_of(self, future: RequestFuture, number: int, asked: _Asked) -> str | bytes:
        """Return the answer to a message, from its request's future. Raise the request's error."""
        if asked.is_binary and (untaken := future.untaken()) is not None and isinstance(untaken[0], Arrived):
            return self._binary.answer(number, untaken[0].packed(untaken[1]))
        with blaming_request(asked.described, asked.given):
            results = future.result()
        if asked.is_binary:
            return packed(number, as_raw(results))
        return oip.encode({"number": number, "results": oip.as_json(results)}).decode()


def _sequence_of(query: Mapping[str, str]) -> oip.InSequence:
    """Return the session of an address; without an id a new one, which ends with the websocket.

    Raise RequestError.
    """
    id = query.get("id", "")
    if len(id) > oip.LONGEST_ID:
        raise RequestError(f"id: expected at most {oip.LONGEST_ID} characters, got {len(id)}")
    flags = {name: query.get(name, "false") for name in ("start", "end")}
    for name, value in flags.items():
        if value not in ("true", "false"):
            raise RequestError(f"{name}: expected true or false, got {value!r:.40}")
    if not id:
        if flags.keys() & query.keys():
            raise RequestError("start and end need an id")
        return oip.InSequence(uuid.uuid4().hex, is_start=True, is_end=True)
    return oip.InSequence(id, flags["start"] == "true", flags["end"] == "true")


async def _say(socket: WebSocket, message: str | bytes, timeout_s: float) -> None:
    """Send a text or binary message. Raise WebSocketDisconnect, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        try:
            await socket.send({"type": "websocket.send", "text" if type(message) is str else "bytes": message})
        except RuntimeError:  # it was closed meanwhile, as one that answers no pings
            raise WebSocketDisconnect(1006) from None
