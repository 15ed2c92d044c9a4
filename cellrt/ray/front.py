"""The front: HTTP as ``cellrt serve`` has it, each request handed to the replica that has the state of its session.

It knows nothing of models: what a request says beyond its session, a replica finds out.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import ray.exceptions
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from cellrt.errors import CellrtError, DeviceError, RequestError, SessionError
from cellrt.ray.calls import NOT_BEGUN, Answer, Call, key_of
from cellrt.ray.kept import kept_directory
from cellrt.serve.door import told
from cellrt.serve.http import error_response, json_response, read_body
from cellrt.serve.keys import Keys
from cellrt.serve.oip import encode
from cellrt.serve.settings import Settings

MOST_DEATHS = 1
"""A request without a session that meets more dead replicas or workers may be what kills them."""
MOST_TRIES = 100
"""How often it is handed to another replica, if one after the other has no engine now."""
TRY_AFTER_S = 0.2
UNAVAILABLE = 503


class Front:
    """See the module. ``replicas``: the handle of their deployment."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self._limits, self._keys = settings.limits, Keys(settings.api_keys)
        self._replicas = replicas
        self._directory = kept_directory(serve.get_replica_context().app_name)

    async def answer(self, request: Request) -> Response:
        """Answers a request."""
        try:
            call = await self._read(request)
            if call.is_stream:
                return await self._stream(call)
            answer = await self._ask(call)
        except CellrtError as error:
            return await error_response(request, error)
        return _response(Response(answer.body, answer.status), answer)

    async def overview(self, request: Request) -> Response:
        """What the directory counts."""
        if not self._keys.came_with(request.headers):
            return json_response({"error": "a key is needed", "type": "Unauthorized"}, 401)
        return json_response(await self._directory.counts.remote())

    async def _read(self, request: Request) -> Call:
        """The request. Raises RequestTooLargeError, RequestError."""
        body = await read_body(request, self._limits.max_body_bytes)
        scope = request.scope
        call = Call(scope["method"], scope["path"], scope["query_string"], tuple(request.headers.raw), body)
        if call.changes_models:
            raise RequestError("models of an application of Ray Serve change when it is deployed anew: serve.run")
        return call

    async def _ask(self, call: Call) -> Answer:
        """A replica's answer; another is asked if it dies, unless the state of a session dies with it."""
        key = call.session
        handle = self._replicas.options(session_id=key)
        may_repeat = call.is_inference and not key
        num_deaths = 0
        for _ in range(MOST_TRIES):
            try:
                answer: Answer = await handle.answer.remote(call)
                if answer.status != UNAVAILABLE or not may_repeat:
                    return answer
                is_begun = NOT_BEGUN not in answer.headers
            except ray.exceptions.RayActorError as error:
                # One that ends in good order has answered all that it began, and left the session to the others.
                is_kept = may_repeat or (call.is_inference and await self._directory.is_kept.remote(key))
                if not is_kept or num_deaths == MOST_DEATHS:
                    raise _of_death(key, error) from None
                is_begun = True
            num_deaths += is_begun
            if num_deaths > MOST_DEATHS:
                return answer
            await asyncio.sleep(TRY_AFTER_S)
        raise DeviceError("no replica takes requests")

    async def _stream(self, call: Call) -> Response:
        """A replica's answer, part by part."""
        key = call.session
        handle = self._replicas.options(session_id=key, stream=True)
        parts = handle.stream.remote(call)
        try:
            head: Answer = await anext(parts)
        except ray.exceptions.RayActorError as error:
            raise _of_death(key, error) from None

        async def bodies() -> AsyncIterator[bytes]:
            yield head.body
            try:
                async for part in parts:
                    yield part.body
            except ray.exceptions.RayActorError as error:
                yield b"data: " + encode(told(_of_death(key, error))) + b"\n\n"

        return _response(StreamingResponse(bodies(), head.status), head)

    async def converse(self, socket: WebSocket) -> None:
        """A session of a model: each message is a request, answered in their order with its number, one at a time."""
        if not self._keys.came_with(socket.headers):
            await socket.close(1008, "a key is needed")
            return
        await socket.accept()
        given_id = socket.query_params.get("id", "")
        key = key_of(socket.path_params["model"], given_id or uuid.uuid4().hex)
        begun = await self._frame(key, None, is_start=not given_id)
        if begun:
            with suppress(RuntimeError, WebSocketDisconnect):
                await socket.send_text(encode(begun).decode())
                await socket.close(1008, begun["type"])
            return
        try:
            await self._converse(socket, key)
        finally:
            if not given_id:
                await self._frame(key, None, is_end=True)

    async def _converse(self, socket: WebSocket, key: str) -> None:
        number = 0
        with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                text = message.get("text")
                answer = await self._frame(key, message.get("bytes") or b"" if text is None else text)
                async with asyncio.timeout(self._limits.write_timeout_s):
                    await socket.send_text(encode({"number": number, **answer}).decode())
                number += 1

    async def _frame(
        self, key: str, message: str | bytes | None, *, is_start: bool = False, is_end: bool = False
    ) -> dict[str, Any]:
        handle = self._replicas.options(session_id=key)
        try:
            answer: dict[str, Any] = await handle.frame.remote(key, message, is_start=is_start, is_end=is_end)
        except ray.exceptions.RayActorError as error:
            return told(_of_death(key, error))
        return answer


def make_front() -> Starlette:
    """The ASGI application of the replica of ``Front`` in this process."""

    def front() -> Any:
        return serve.get_replica_context().servable_object

    async def answer(request: Request) -> Response:
        response: Response = await front().answer(request)
        return response

    async def overview(request: Request) -> Response:
        response: Response = await front().overview(request)
        return response

    async def converse(socket: WebSocket) -> None:
        await front().converse(socket)

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
    return Starlette(
        routes=[
            Route("/debug/replicas", overview),
            WebSocketRoute("/v1/models/{model}/session", converse),
            Route("/{path:path}", answer, methods=methods),
        ]
    )


def _of_death(key: str, error: BaseException) -> CellrtError:
    """What a replica's death is to whoever waits for it."""
    if not key:
        return DeviceError(f"the replica died that had the request: {error}")
    return SessionError(f"session {key}: the replica died that had its state: {error}")


def _response(response: Response, answer: Answer) -> Response:
    """The response with an answer's own headers; its length is counted anew."""
    kept = [(bytes(k), bytes(v)) for k, v in answer.headers if bytes(k).lower() != b"content-length"]
    response.raw_headers = [*(pair for pair in response.raw_headers if pair[0] == b"content-length"), *kept]
    return response
