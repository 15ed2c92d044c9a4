"""What stands before every door: keys, the count of answers, and errors that none of them expected."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import EngineClosedError
from cellrt.serve.http import CUT_OFF, error_answer
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures
from cellrt.serve.oip import encode

OPEN = ("/v2/health/live", "/v2/health/ready", "/", "/docs")
"""What needs no key: the pages are empty without one."""
log = logging.getLogger("cellrt")


class Guard:
    """ASGI in front of ASGI. ``keys``: one of them must come with each request."""

    def __init__(self, app: ASGIApp, keys: Keys, measures: Measures) -> None:
        self._app, self._measures = app, measures
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers 401."""
        if scope["type"] == "lifespan" or (self._knows(scope) and scope["type"] == "websocket"):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "a key is needed"})
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._knows(scope):
                await self._app(scope, receive, note)
            else:
                await _refuse(note)
        except asyncio.CancelledError:  # the server ends: see CUT_OFF
            if not status:
                await error_answer(EngineClosedError(CUT_OFF))(scope, receive, note)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if not status:
                await _answer(note, 500, {"error": "an error of the server; its log has it", "type": "InternalError"})
        finally:
            handler = getattr(scope.get("endpoint"), "__name__", "none")
            self._measures.count_answer(handler, status, time.perf_counter() - begin_s)

    def _knows(self, scope: Scope) -> bool:
        return scope["path"] in OPEN or self._keys.came_with(Headers(scope=scope))


async def _refuse(send: Send) -> None:
    told = {"error": "a key is needed: Authorization: Bearer KEY, or X-API-Key", "type": "Unauthorized"}
    await _answer(send, 401, told, (b"www-authenticate", b"Bearer"))


async def _answer(send: Send, status: int, told: object, *headers: tuple[bytes, bytes]) -> None:
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", b"application/json"), *headers]})
    await send({"type": "http.response.body", "body": encode(told)})
