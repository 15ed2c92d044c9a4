"""The front: HTTP as ``cellrt serve`` has it, each request handed to the replica that has the state of its session.

It knows nothing of models: what a request says beyond its session, a replica finds out.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray.exceptions
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from cellrt.errors import CellrtError
from cellrt.ray.front_app import front_app, read_call
from cellrt.ray.kept import kept_directory
from cellrt.ray.messages import Answer, Call, key_of
from cellrt.ray.repeating import MOST_TRIES, TRY_AFTER_S, ReplicaDiedError, answer_of, of_death
from cellrt.serve.access import AccessPolicy
from cellrt.serve.app import let_recurse
from cellrt.serve.http import error_response, json_response
from cellrt.serve.http_native import RawOutput, packed
from cellrt.serve.inference import error_json
from cellrt.serve.keys import Keys
from cellrt.serve.oip import encode
from cellrt.serve.server_settings import Settings


class Front:
    """The front of a deployment, as the module describes. ``replicas``: the handle of their deployment.

    Attributes:
        access: decides which requests are refused.
    """

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self._limits = settings.limits
        let_recurse(self._limits.max_depth)
        self.access = AccessPolicy(Keys(settings.api_keys), settings.allowed_origins)
        self._replicas = replicas
        self._directory = kept_directory(serve.get_replica_context().app_name)

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        try:
            call = await read_call(request, self._limits)
            if call.is_stream:
                return await self._stream(call)
            answer = await self._ask(call)
        except CellrtError as error:
            return await error_response(request, error)
        return _response(Response(answer.body, answer.status), answer)

    async def overview(self, request: Request) -> Response:
        """Return the directory's counts."""
        return json_response(await self._directory.counts.remote())

    async def _ask(self, call: Call) -> Answer:
        """Return a replica's answer: see ``repeating``."""
        handle = self._replicas.options(session_id=call.session)

        async def ask() -> Answer:
            with _deaths():
                answer: Answer = await handle.answer.remote(call)
            return answer

        return await answer_of(call, ask, partial(self._state_lacks, call))

    async def _state_lacks(self, call: Call) -> bool:
        state_lacks: bool = await self._directory.state_lacks.remote(call.session, call.id)
        return state_lacks

    async def _stream(self, call: Call) -> Response:
        """Return a replica's answer, part by part."""
        handle = self._replicas.options(session_id=call.session, stream=True)
        parts: Any = None

        async def ask() -> Answer:
            nonlocal parts
            parts = handle.stream.remote(call)
            with _deaths():
                head: Answer = await anext(parts)
            return head

        head = await answer_of(call, ask, partial(self._state_lacks, call))

        async def bodies() -> AsyncIterator[bytes]:
            yield head.body
            try:
                with _deaths():
                    async for part in parts:
                        yield part.body
            except ReplicaDiedError as error:
                yield b"data: " + encode(error_json(of_death(call.session, error))) + b"\n\n"

        return _response(StreamingResponse(bodies(), head.status), head)

    async def converse(self, socket: WebSocket) -> None:
        """Serve a session over a websocket: answer each message, a request, with its number, in order and one at a
        time.
        """
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
                    if (outputs := answer.get("outputs")) is not None:
                        await socket.send_bytes(packed(number, [RawOutput(*output) for output in outputs]))
                    else:
                        await socket.send_text(encode({"number": number, **answer}).decode())
                number += 1

    async def _frame(
        self, key: str, message: str | bytes | None, *, is_start: bool = False, is_end: bool = False
    ) -> dict[str, Any]:
        handle = self._replicas.options(session_id=key)
        answer: dict[str, Any] = {}
        for _ in range(MOST_TRIES):
            try:
                answer = await handle.frame.remote(key, message, is_start=is_start, is_end=is_end)
            except ray.exceptions.RayActorError as error:
                return error_json(of_death(key, error))
            if answer.pop("is_begun", True):
                break
            await asyncio.sleep(TRY_AFTER_S)
        return answer


def make_front() -> Starlette:
    """Return the ASGI application of the replica of ``Front`` in this process."""
    return front_app(lambda: serve.get_replica_context().servable_object)


@contextmanager
def _deaths() -> Iterator[None]:
    """Raise ReplicaDiedError where Ray says that a replica died which had been asked."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise ReplicaDiedError(str(error)) from error


def _response(response: Response, answer: Answer) -> Response:
    """Return the response with an answer's own headers and a recomputed length."""
    kept = [(bytes(k), bytes(v)) for k, v in answer.headers if bytes(k).lower() != b"content-length"]
    response.raw_headers = [*(pair for pair in response.raw_headers if pair[0] == b"content-length"), *kept]
    return response
