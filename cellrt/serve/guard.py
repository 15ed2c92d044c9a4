"""What stands before every door: keys, origins, the count of answers, and errors that none of them expected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import EngineClosedError
from cellrt.serve.door import SEEN
from cellrt.serve.http import CUT_OFF, error_answer
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures
from cellrt.serve.oip import encode

OPEN = ("/v2/health/live", "/v2/health/ready", "/", "/docs")
"""What needs no key: the pages are empty without one."""
HARMLESS = ("GET", "HEAD")
"""Methods that change nothing: pages of any origin may use them, and cannot read the answer."""
LONGEST_ORIGIN = 60
"""So much of an origin an error says; a websocket has 123 bytes for it."""
NEEDS_KEY = "a key is needed: Authorization: Bearer KEY, or X-API-Key"
BY_BEARER = (b"www-authenticate", b"Bearer")
DENIAL = "websocket.http.response"
"""The extension of ASGI by which a websocket is answered before it is one, and its messages."""
log = logging.getLogger("cellrt")


class Guard:
    """ASGI in front of ASGI.

    Args:
        app: what it lets requests in to.
        keys: one of them must come with each request.
        measures: counts answers.
        origins: of other servers, in lower case, whose pages may do what changes something, or open a websocket.
    """

    def __init__(self, app: ASGIApp, keys: Keys, measures: Measures, origins: Collection[str] = ()) -> None:
        self._app, self._measures = app, measures
        self._keys, self._origins = keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers 401 or 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "websocket":
            await self._count(scope, receive, send)
        elif (foreign := self._foreign_origin(scope)) is not None:
            await _deny(scope, send, 403, _foreign(foreign))
        elif not self._knows(scope):
            await _deny(scope, send, 401, _told("Unauthorized", NEEDS_KEY), BY_BEARER)
        else:
            await self._app(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s, status = time.perf_counter(), 0
        SEEN.set([])

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["method"] not in HARMLESS and (foreign := self._foreign_origin(scope)) is not None:
                await _answer(note, 403, _foreign(foreign))
            elif self._knows(scope):
                await self._app(scope, receive, note)
            else:
                await _answer(note, 401, _told("Unauthorized", NEEDS_KEY), BY_BEARER)
        except asyncio.CancelledError:  # the server ends: see CUT_OFF
            if not status:
                await error_answer(EngineClosedError(CUT_OFF))(scope, receive, note)
        except (Exception, SystemExit):  # a model's code may raise that too
            log.exception("%s %s", scope["method"], scope["path"])
            if not status:
                await _answer(note, 500, {"error": "an error of the server; its log has it", "type": "InternalError"})
        finally:
            handler = getattr(scope.get("endpoint"), "__name__", "none")
            self._measures.count_answer(handler, status, time.perf_counter() - begin_s)

    def _knows(self, scope: Scope) -> bool:
        return scope["path"] in OPEN or self._keys.came_with(Headers(scope=scope))

    def _foreign_origin(self, scope: Scope) -> str | None:
        """The origin of the page that a browser says sent this; None if it is the server's own or there is none."""
        host, origins = b"", []
        for name, value in scope["headers"]:
            if name == b"origin":
                origins.append(value.decode("latin-1").lower())
            elif name == b"host":
                host = value
        own = host.decode("latin-1").lower() or None
        foreign = (each for each in origins if each.partition("://")[2] != own and each not in self._origins)
        return next(foreign, None)


def _foreign(origin: str) -> Mapping[str, str]:
    return _told("Forbidden", f"Origin: pages of {origin[:LONGEST_ORIGIN]!r} may not do this at this server")


def _told(kind: str, error: str) -> Mapping[str, str]:
    return {"error": error, "type": kind}


async def _deny(scope: Scope, send: Send, status: int, told: Mapping[str, str], *headers: tuple[bytes, bytes]) -> None:
    """Refuses a websocket with an answer of HTTP, or, where the server has no such thing, with a reason to close."""
    if DENIAL in (scope.get("extensions") or ()):
        await _answer(send, status, told, *headers, what=DENIAL)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": told["error"]})


async def _answer(
    send: Send, status: int, told: Mapping[str, str], *headers: tuple[bytes, bytes], what: str = "http.response"
) -> None:
    start = {"type": f"{what}.start", "status": status}
    await send({**start, "headers": [(b"content-type", b"application/json"), *headers]})
    await send({"type": f"{what}.body", "body": encode(told)})
