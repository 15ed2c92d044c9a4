"""A replica: an engine's process, the doors of the server in front of it, and the sessions that are here.

Everything runs in the event loop that Ray Serve gives to user code.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message

from cellrt.errors import CellrtError, DeviceError, http_status
from cellrt.process.address import new_address
from cellrt.ray.directory import CHECK_EVERY_S, Grant, Order, ReleasedState
from cellrt.ray.kept import kept_directory
from cellrt.ray.messages import NOT_BEGUN, UNAVAILABLE, Answer, Call, parts_of
from cellrt.ray.moving_sessions import ASKING, Asking, MovingBackend
from cellrt.ray.scaling import Load
from cellrt.serve import oip
from cellrt.serve.app import kept_connected, make_app
from cellrt.serve.http_native import Frame, as_raw, read_frame
from cellrt.serve.inference import InferenceService, error_json, never_gone
from cellrt.serve.measures import Measures
from cellrt.serve.server_settings import Settings
from cellrt.serve.start_engine import start_engine

log = logging.getLogger("cellrt")
JSON = b"content-type", b"application/json"
NO_ENGINE = DeviceError("the replica has no engine now, or leaves")
LEAVE_S = 30.0
"""The time that a replica may take to leave its sessions to others, after the requests that it had."""


class Replica:
    """A replica, as the module describes."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        context = serve.get_replica_context()
        self._id = str(context.replica_id.unique_id)
        self._directory = kept_directory(context.app_name)
        self._giving: set[asyncio.Task[None]] = set()
        self._hearing: asyncio.Task[None] | None = None
        settings = replace(settings, address=new_address())
        self._started = await asyncio.to_thread(start_engine, settings)
        await asyncio.to_thread(self._started.wait)
        self._backend = MovingBackend(settings, _Asking(self._directory, self._id))
        self._service = InferenceService(self._backend, Measures(is_shared=False))
        self._app: ASGIApp = make_app(self._service)
        self._load = Load()
        self._connected = AsyncExitStack()
        await self._connected.enter_async_context(kept_connected(self._backend))
        await self._backend.is_connected.wait()
        await self._join()
        self._hearing = asyncio.create_task(self._hear())

    async def answer(self, call: Call) -> Answer:
        """Return the whole answer to a request."""
        parts = [part async for part in self.stream(call)]
        head = parts[0]
        return head._replace(body=b"".join(part.body for part in parts)) if len(parts) > 1 else head

    async def stream(self, call: Call) -> AsyncIterator[Answer]:
        """Yield the answer, part by part: each with head, and of the body what it adds; leaving gives the request
        up.
        """
        if call.is_inference and not self._takes_requests:
            yield Answer(http_status(NO_ENGINE), (NOT_BEGUN, JSON), oip.encode(error_json(NO_ENGINE)))
            return
        asking = Asking(call.id)
        ASKING.set(asking)
        messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
        running = asyncio.create_task(_run(self._app, call, messages))
        head = Answer(500, ())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    head = Answer(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"]))
                    if head.status == UNAVAILABLE and call.session and not asking.is_begun:
                        head = head._replace(headers=(NOT_BEGUN, *head.headers))
                elif message["type"] == "http.response.body":
                    yield head._replace(body=message.get("body", b""))
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def frame(self, key: str, message: str | bytes | None, *, is_start: bool, is_end: bool) -> dict[str, Any]:
        """Return the answer to a websocket's message, in the session of that key if its model keeps state.

        ``message``: of a binary one results come as ``outputs``; None: nothing is asked; the session may begin or end.
        What is wrong comes as ``error`` and ``type``, and ``is_begun`` is false if nothing was done because the replica
        has no engine now, or leaves.
        """
        if not self._takes_requests:
            return {"is_begun": False, **error_json(NO_ENGINE)}
        model, id = parts_of(key)
        try:
            described = await self._backend.model(model)
            sequence = oip.InSequence(id, is_start, is_end) if described.keeps_state else None
            if message is None:
                if sequence is not None:
                    session = await self._backend.session(model, id, is_start=is_start)
                    if is_end:
                        await self._backend.end_session(model, id, session)
                return {}
            frame: Frame = read_frame(described, message)
            how = oip.Parameters(frame.deadline_s, int(frame.priority), sequence, frame.schedule_by_s)
            answer = await self._service.infer(described, frame.request, how, never_gone)
            if isinstance(message, bytes):
                return {"outputs": [tuple(output) for output in as_raw(answer.results)]}
            return {"results": oip.as_json(answer.results)}
        except CellrtError as error:
            return error_json(error)

    @property
    def _takes_requests(self) -> bool:
        return self._backend.takes_requests and not self._backend.is_leaving

    async def check_health(self) -> None:
        """Raise DeviceError unless requests are taken; Ray Serve starts another replica then."""
        if not self._backend.takes_requests:
            raise DeviceError("the engine's process is gone, or has no worker left")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how long requests waited since the last call, and how busy workers were: see ``QueueingPolicy``."""
        return self._load.look(await self._backend.call("statistics"), time.monotonic())

    async def __del__(self) -> None:
        """Leave the replica's sessions to the others; Ray Serve calls this when nothing is asked of this replica
        any more.
        """
        if self._hearing is None:  # it has not begun; the engine's process ends with this one
            return
        self._hearing.cancel()
        self._backend.is_leaving = True
        with suppress(Exception):  # the whole application ends
            async with asyncio.timeout(LEAVE_S):
                if self._giving:
                    await asyncio.wait(self._giving)
                await self._backend.leave()
                await self._directory.leave.remote(self._id)
        await self._connected.aclose()
        await asyncio.to_thread(self._started.end)

    async def _join(self) -> None:
        actor = ray.get_runtime_context().current_actor
        await self._directory.join.remote(self._id, actor, dict(self._backend.held))

    async def _hear(self) -> None:
        """Follow the directory's orders to give states up; join it again when it has a successor."""
        while True:
            try:
                orders = await self._directory.orders.remote(self._id)
                if orders is None:
                    await self._join()
                for order in orders or ():
                    giving = asyncio.create_task(self._give(order))
                    self._giving.add(giving)
                    giving.add_done_callback(self._giving.discard)
            except Exception as error:
                log.warning("the directory does not answer: %s", error)
                await asyncio.sleep(CHECK_EVERY_S)

    async def _give(self, order: Order) -> None:
        left = await self._backend.give(order)
        await self._directory.deliver.remote(order, left)


class _Asking:
    """The directory, as ``MovingBackend`` asks it."""

    def __init__(self, directory: Any, replica: str) -> None:
        self._directory, self._replica = directory, replica

    async def take(self, key: str, *, is_start: bool) -> Grant:
        grant: Grant = await self._directory.take.remote(key, self._replica, is_start=is_start)
        return grant

    async def release(self, key: str, grant: int) -> None:
        await self._directory.release.remote(key, grant)

    async def park(self, sessions: Mapping[Order, ReleasedState]) -> None:
        await self._directory.park.remote(self._replica, sessions)


async def _run(app: ASGIApp, call: Call, messages: asyncio.Queue[Message | None]) -> None:
    """Run the application, and put the messages of its answer into ``messages``; None is the last."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": [(bytes(name), bytes(value)) for name, value in call.headers],
    }
    given = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        while not given:  # the client stays: when it goes, Ray Serve cancels the call
            await asyncio.Event().wait()
        return given.pop()

    try:
        await app(scope, receive, messages.put)
    finally:
        await messages.put(None)
