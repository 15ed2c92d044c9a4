"""What stands before every door: keys, origins, the count of answers, and errors that none of them expected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import EngineClosedError, RequestError
from cellrt.serve.door import SEEN
from cellrt.serve.http import CUT_OFF, error_answer, json_response
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures

OPEN = ("/health", "/v2/health/live", "/v2/health/ready", "/", "/docs")
"""What needs no key: the pages are empty without one."""
HARMLESS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: pages of any origin may use them, and cannot read the answer."""
ASKS = "OPTIONS"
"""The method by which a browser asks what a page may send; it brings no key."""
MAY_SEND, MAY_READ = b"GET, HEAD, POST", b"x-cellrt-request, retry-after, inference-header-content-length"
"""Methods that pages of allowed origins may use, and headers of answers that they may read beside the usual ones."""
ASKED_AGAIN_S = 600
"""How long a browser may keep what it was told of them."""
LONGEST_ORIGIN = 60
"""So much of an origin an error says."""
LONGEST_PATH = 200
"""So much of a path that takes no websocket an error says."""
LONGEST_REASON = 123
"""Bytes of the reason that a websocket is closed with."""
NEEDS_KEY = "a key is needed: Authorization: Bearer KEY, or X-API-Key"
DENIAL = "websocket.http.response"
"""The extension of ASGI by which a websocket is answered before it is one."""
log = logging.getLogger("cellrt")


class Refusal(NamedTuple):
    """Why who comes is not let in: status, type and text of the answer, and its headers."""

    status: int
    type: str
    error: str
    headers: Mapping[str, str] = {}

    def response(self) -> Response:
        """The answer."""
        answer = json_response({"error": self.error, "type": self.type}, self.status)
        answer.headers.update(self.headers)
        return answer


class Gate:
    """Says who may come in.

    Args:
        keys: one of them must come with each request.
        origins: of other servers, in lower case, whose pages may do what changes something, read answers, or open a
            websocket.
    """

    def __init__(self, keys: Keys, origins: Collection[str] = ()) -> None:
        self._keys, self._origins = keys, origins

    def refusal(self, scope: Scope) -> Refusal | None:
        """Why a request or a websocket is not let in; None if it is."""
        is_harmless = scope["type"] == "http" and scope["method"] in HARMLESS
        if not is_harmless and (foreign := self._foreign_origin(scope)) is not None:
            said = f"Origin: pages of {foreign[:LONGEST_ORIGIN]!r} may not do this at this server"
            return Refusal(403, "Forbidden", said)
        is_asking = scope["type"] == "http" and scope["method"] == ASKS
        if is_asking or scope["path"] in OPEN or self._keys.came_with(Headers(scope=scope)):
            return None
        return Refusal(401, "Unauthorized", NEEDS_KEY, {"www-authenticate": "Bearer"})

    def permissions(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers by which a browser lets a page of an allowed origin read an answer (CORS)."""
        if not self._origins:
            return []
        headers = Headers(scope=scope)
        made, origin = [(b"vary", b"Origin")], headers.get("origin", "")
        if origin.lower() not in self._origins:
            return made
        made.append((b"access-control-allow-origin", origin.encode("latin-1")))
        if scope["method"] != ASKS:
            return [*made, (b"access-control-expose-headers", MAY_READ)]
        asked = headers.get("access-control-request-headers", "")
        made.append((b"access-control-allow-methods", MAY_SEND))
        made.append((b"access-control-allow-headers", asked.encode("latin-1")))
        return [*made, (b"access-control-max-age", str(ASKED_AGAIN_S).encode())]

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


def no_websocket(path: str) -> Refusal:
    """Of a websocket at a path that takes none."""
    said = f"there is no websocket at {path[:LONGEST_PATH]}, but at /v1/models/MODEL/session"
    return Refusal(404, RequestError.__name__, said)


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers who is not let in: a websocket too, or, where the server has no such thing, with a reason to close."""
    if scope["type"] == "websocket" and DENIAL not in (scope.get("extensions") or ()):
        reason = refusal.error.encode()[:LONGEST_REASON].decode(errors="ignore")
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
    else:
        await refusal.response()(scope, receive, send)


class Guard:
    """ASGI in front of ASGI.

    Args:
        app: what it lets requests in to.
        gate: says which.
        measures: counts answers.
    """

    def __init__(self, app: ASGIApp, gate: Gate, measures: Measures) -> None:
        self._app, self._gate, self._measures = app, gate, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers 401 or 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._let_in(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self._gate.refusal(scope):
            await refuse(refusal, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s, status = time.perf_counter(), 0
        permissions = self._gate.permissions(scope)
        SEEN.set([])

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if permissions:
                    message = {**message, "headers": [*message["headers"], *permissions]}
            await send(message)

        try:
            await self._let_in(scope, receive, note)
        except asyncio.CancelledError:  # the server ends: see CUT_OFF
            if not status:
                await error_answer(EngineClosedError(CUT_OFF))(scope, receive, note)
        except (Exception, SystemExit):  # a model's code may raise that too
            log.exception("%s %s", scope["method"], scope["path"])
            if not status:
                await refuse(FAILED, scope, receive, note)
        finally:
            handler = getattr(scope.get("endpoint"), "__name__", "none")
            self._measures.count_answer(handler, status, time.perf_counter() - begin_s)


FAILED = Refusal(500, "InternalError", "an error of the server; its log has it")
