"""A model's own requests over HTTP: ``/v1``, for what tensors of fixed shapes cannot say; a websocket for sessions."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import count
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.errors import CellrtError, EngineClosedError, RequestError, http_status
from cellrt.process.remote_session import RemoteSession
from cellrt.serve import oip
from cellrt.serve.arrays import NAMES, to_bytes
from cellrt.serve.described import Described
from cellrt.serve.door import Door, blamed, told
from cellrt.serve.forms import TensorForm
from cellrt.serve.guard import no_websocket, refuse
from cellrt.serve.http import CUT_OFF, EventStream, gone, json_response, read_body

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6, description="It must be done so many seconds from now.")]
Priority = Annotated[float, msgspec.Meta(ge=0, le=3, multiple_of=1, description="0 is the lowest, 3 the highest.")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=oip.LONGEST_ID)]

SERVICE_RESTART, POLICY_VIOLATION = 1012, 1008
"""How a websocket is closed whose server ends, or whose session is lost; and one that cannot begin."""
ENDING = "the server is about to end"
UPGRADE = {"upgrade": "websocket", "connection": "upgrade"}
"""What the answer says to a request that asks for no websocket where there is one; RFC 9110 wants both."""
LONGEST_PATH = 200
"""So much of a path that takes nothing but a websocket an error says."""
HEAD_LENGTH = struct.Struct("<I")
MESSAGE_BYTES = 512
"""What a websocket's message takes beside its content, roughly, as long as it waits."""


class NativeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/v1/models/{model}/infer``."""

    request: Any
    deadline_s: Seconds | None = None
    priority: Priority = oip.DEFAULT_PRIORITY
    session: Name | None = None
    start: bool = False
    """Whether the session begins with this request."""
    end: bool = False
    """Whether it ends with it."""
    stream: bool = False
    """Whether each step comes as it is made, as an event."""


class Frame(msgspec.Struct, forbid_unknown_fields=True):
    """A text message of the websocket."""

    request: Any
    deadline_s: Seconds | None = None
    priority: Priority = oip.DEFAULT_PRIORITY


_decoder = msgspec.json.Decoder(NativeRequest)
_frames = msgspec.json.Decoder(Frame)


class RawOutput(NamedTuple):
    """An output as a binary message has it: its name, type and shape, and its rows, raw and little-endian."""

    name: str
    datatype: str
    shape: list[int]
    content: bytes


def as_raw(results: Result) -> list[RawOutput]:
    """Results for a binary message."""
    return [
        RawOutput(name, NAMES[tensor.dtype], list(tensor.shape), to_bytes(tensor)) for name, tensor in results.items()
    ]


def packed(number: int, outputs: Sequence[RawOutput]) -> bytes:
    """A binary answer: the length of a head in 4 bytes, the head in JSON, and the contents of the outputs one after the
    other."""
    described = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape, _ in outputs]
    head = oip.encode({"number": number, "outputs": described})
    return b"".join([HEAD_LENGTH.pack(len(head)), head, *[content for *_, content in outputs]])


def read_frame(described: Described, message: str | bytes) -> Frame:
    """A message of the websocket, read: JSON, or the raw rows of the model's one tensor. Raises RequestError."""
    if isinstance(message, bytes):
        return Frame(_rows(described, message))
    frame: Frame = oip.decode(message.encode(), _frames, described.limits)
    return Frame(described.read_json(frame.request), frame.deadline_s, frame.priority)


def _rows(described: Described, data: bytes) -> Any:
    form = described.request
    if not isinstance(form, TensorForm) or form.shape[:1] != (-1,) or -1 in form.shape[1:]:
        raise RequestError(f"model {described.name!r} takes no raw rows: send JSON")
    info = next(iter(described.inputs.values())).info
    row_bytes = form.dtype.itemsize * oip.count_of(form.shape[1:], "a row")
    if len(data) % row_bytes:
        raise RequestError(f"expected rows of {row_bytes} bytes, got {len(data)} bytes")
    rows = oip.from_raw(data, (len(data) // row_bytes, *form.shape[1:]), info)
    return described.read_tensors({info.name: rows})


class NativeDoor:
    """The handlers. ``door``: where requests go."""

    def __init__(self, door: Door) -> None:
        self._door, self._backend = door, door.backend
        self._limits = door.backend.settings.limits

    def routes(self) -> list[BaseRoute]:
        """All of them."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model}/infer", self.native_infer, methods=["POST"]),
            WebSocketRoute("/v1/models/{model}/session", self.session),
            Route("/v1/models/{model}/session", self.not_upgraded),
            WebSocketRoute("/{path:path}", self.nowhere),
        ]

    async def models(self, request: Request) -> Response:
        """All models."""
        entries = await self._backend.call("models")
        return json_response({"models": [entry["name"] for entry in entries if entry["is_loaded"]]})

    async def native_infer(self, request: Request) -> Response:
        """A request as the model's own schema has it."""
        body = await read_body(request, self._limits.max_body_bytes)
        described = await self._backend.model(request.path_params["model"])
        message: NativeRequest = oip.decode(body, _decoder, self._limits)
        if message.session is None and (message.start or message.end):
            raise RequestError("start and end need a session")
        sequence = None if message.session is None else oip.InSequence(message.session, message.start, message.end)
        how = oip.Parameters(message.deadline_s, int(message.priority), sequence)
        given = described.read_json(message.request)
        if message.stream:
            return EventStream(self._events(described, given, how), self._limits.write_timeout_s, {})
        results, version, id = await self._door.infer(described, given, how, gone(request.receive))
        answer = {"model": described.name, "version": version, "results": oip.as_json(results)}
        return json_response(answer, request_id=id)

    async def _events(self, described: Described, given: Any, how: oip.Parameters) -> AsyncIterator[bytes]:
        note_first = self._door.measures.first_result_of(described.name)
        async with self._door.stream(described, given, how) as (stream, _):
            async for step in stream:
                note_first()
                yield oip.encode({"step": oip.as_json(step)})
        yield oip.encode({"done": True})

    async def not_upgraded(self, request: Request) -> Response:
        """A plain GET where a websocket is to be opened."""
        path = request.url.path[:LONGEST_PATH]
        answer = json_response(told(RequestError(f"{path} takes a websocket: upgrade the connection")), 426)
        answer.headers.update(UPGRADE)
        return answer

    async def nowhere(self, socket: WebSocket) -> None:
        """A websocket at a path that takes none."""
        await refuse(no_websocket(socket.url.path), socket.scope, socket.receive, socket.send)

    async def session(self, socket: WebSocket) -> None:
        """A session of a model: each message is a request, answered in their order with its number."""
        with suppress(WebSocketDisconnect, TimeoutError):  # the client is gone, or does not read
            await socket.accept()
            try:
                described = await self._backend.model(socket.path_params["model"])
                await _SocketSession(self._door, described, socket).run()
            except CellrtError as error:
                await _say(socket, oip.encode(told(error)).decode(), self._limits.write_timeout_s)
                code = SERVICE_RESTART if http_status(error) == HTTPStatus.SERVICE_UNAVAILABLE else POLICY_VIOLATION
                await socket.close(code, type(error).__name__)


class _Taken(NamedTuple):
    """A message as it came: its content, or why none is taken any more; when; and what it takes as long as it waits."""

    content: str | bytes | CellrtError
    begin_s: float
    num_bytes: int


class _Answer(NamedTuple):
    """What a message comes to: when it came, whether it was binary, its model and request, and the answer or why there
    is none."""

    begin_s: float
    is_binary: bool
    described: Described
    given: Any
    answer: asyncio.Future[Result] | CellrtError


class _SocketSession:
    """One websocket. Its requests are in a session if its model keeps state: of the id that the address has, or a new
    one that ends with the connection.

    What comes is taken in at once, so that a client that leaves is noticed whatever is under way; what waits is limited
    in bytes, and what is under way in number. When the server ends, or loses the session, what came before is answered.
    """

    def __init__(self, door: Door, described: Described, socket: WebSocket) -> None:
        """Raises RequestError for a wrong address."""
        self._door, self._described, self._socket = door, described, socket
        self._limits = door.backend.settings.limits
        self._sequence = _sequence_of(socket.query_params)
        self._messages: asyncio.Queue[_Taken] = asyncio.Queue()
        self._waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._places = asyncio.Semaphore(self._limits.max_streams_per_connection)
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue()
        self._num_taken = self._num_answered = 0

    async def run(self) -> None:
        """Serves until either end has had enough, or the session is lost with its engine. Raises CellrtError."""
        id, is_start, is_end = self._sequence
        backend, name = self._door.backend, self._described.name
        session, ends = None, {ENDING: self._door.draining}
        if self._described.keeps_state:
            ends["the session is lost with its engine"] = backend.engine_lost
            session = await backend.session(name, id, is_start=is_start)
        try:
            await self._serve(session, ends.values())
            if why := next((why for why, end in ends.items() if end.is_set()), None):
                await self._socket.close(SERVICE_RESTART, why)
        finally:
            while not self._answers.empty():
                waiting = self._answers.get_nowait()
                if isinstance(waiting.answer, asyncio.Future):
                    waiting.answer.cancel()
            if session is not None and is_end:
                await backend.end_session(name, id, session)

    async def _serve(self, session: RemoteSession | None, ends: Iterable[asyncio.Event]) -> None:
        """Serves until the client has gone, or one of the ends has come."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._submit(session))
                tasks.create_task(self._write())
                for end in ends:
                    tasks.create_task(self._end_with(end))
                await self._read()
        except* (WebSocketDisconnect, TimeoutError):
            pass
        except* asyncio.CancelledError:  # by uvicorn: the server does not wait any longer
            await self._cut_off()

    async def _end_with(self, end: asyncio.Event) -> None:
        """Ends all after that end, and after its client has been told of what was under way."""
        await end.wait()
        await self._messages.join()
        await self._answers.join()
        raise WebSocketDisconnect(SERVICE_RESTART)

    async def _cut_off(self) -> None:
        """Tells of each message that is not answered that the server does not wait for it."""
        said = told(EngineClosedError(CUT_OFF))
        for number in range(self._num_answered, self._num_taken):
            text = oip.encode({"number": number, **said}).decode()
            await _say(self._socket, text, self._limits.write_timeout_s)

    async def _read(self) -> None:
        """Takes in what comes."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            text = message.get("text")
            content = text if text is not None else message.get("bytes") or b""
            taken = _Taken(content, time.perf_counter(), len(content) + MESSAGE_BYTES)
            if self._door.draining.is_set():
                taken = taken._replace(content=EngineClosedError(ENDING))
            self._num_taken += 1
            self._waiting_bytes += taken.num_bytes
            self._messages.put_nowait(taken)
            while self._waiting_bytes > self._limits.max_body_bytes:
                self._has_room.clear()
                await self._has_room.wait()

    async def _submit(self, session: RemoteSession | None) -> None:
        """Submits what came, as far as there are places."""
        while True:
            await self._places.acquire()
            content, begin_s, num_bytes = await self._messages.get()
            self._waiting_bytes -= num_bytes
            self._has_room.set()
            answer: asyncio.Future[Result] | CellrtError
            given = None
            try:
                if isinstance(content, CellrtError):
                    raise content
                if session is None and not self._door.draining.is_set():  # another engine, or version of the model
                    self._described = await self._door.backend.model(self._described.name)
                frame = read_frame(self._described, content)
                given = frame.request
                with self._door.counted(self._described.name):
                    answer = as_awaitable(self._begin(session, frame))
            except CellrtError as error:
                answer = error
            self._answers.put_nowait(_Answer(begin_s, type(content) is bytes, self._described, given, answer))
            self._messages.task_done()

    def _begin(self, session: RemoteSession | None, frame: Frame) -> RequestFuture:
        if session is not None:
            return session.submit(frame.request, deadline=frame.deadline_s, priority=int(frame.priority))
        client = self._door.backend.client
        return client.submit(
            self._described.name, frame.request, deadline=frame.deadline_s, priority=int(frame.priority)
        )

    async def _write(self) -> None:
        """Answers in order."""
        for number in count():
            begin_s, is_binary, described, given, answer = await self._answers.get()
            status = HTTPStatus.OK.value
            try:
                if isinstance(answer, CellrtError):
                    raise answer
                with blamed(described, given):
                    results = await answer
                if is_binary:
                    message: str | bytes = packed(number, as_raw(results))
                else:
                    message = oip.encode({"number": number, "results": oip.as_json(results)}).decode()
            except CellrtError as error:
                message, status = oip.encode({"number": number, **told(error)}).decode(), http_status(error)
            await _say(self._socket, message, self._limits.write_timeout_s)
            self._num_answered += 1
            self._note(number, described.name, status, time.perf_counter() - begin_s)
            self._places.release()
            self._answers.task_done()

    def _note(self, number: int, model: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        measures = self._door.measures
        measures.count_answer("session", status, seconds)
        if number == 0 and status == HTTPStatus.OK:
            measures.first_result.labels(model).observe(seconds)


def _sequence_of(query: Mapping[str, str]) -> oip.InSequence:
    """The session that an address asks for; without an id a new one, which ends with the websocket.

    Raises RequestError.
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
    """Sends a text or binary message. Raises WebSocketDisconnect, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        try:
            await socket.send({"type": "websocket.send", "text" if type(message) is str else "bytes": message})
        except RuntimeError:  # it was closed meanwhile, as one that answers no pings
            raise WebSocketDisconnect(1006) from None
