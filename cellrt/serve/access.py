"""The access check before every handler: keys, origins, the count of answers, and unexpected errors."""

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
from cellrt.serve.http import CUT_OFF, error_answer, json_response
from cellrt.serve.inference import SEEN
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures

OPEN = ("/health", "/v2/health/live", "/v2/health/ready", "/", "/docs")
"""Paths that need no key: the pages are empty without one."""
HARMLESS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: pages of any origin may use them, and cannot read the answer."""
ASKS = "OPTIONS"
"""The method by which a browser asks what a page may send; it brings no key."""
MAY_SEND, MAY_READ = b"GET, HEAD, POST", b"x-cellrt-request, retry-after, inference-header-content-length"
"""Methods that pages of allowed origins may use, and headers of answers that they may read beside the usual ones."""
ASKED_AGAIN_S = 600
"""The seconds for which a browser may cache these permissions."""
LONGEST_ORIGIN = 60
"""The most characters of an origin in an error."""
LONGEST_PATH = 200
"""The most characters, in an error, of a path that takes no websocket."""
LONGEST_REASON = 123
"""The most bytes of the reason in a websocket's close frame."""
NEEDS_KEY = "a key is needed: Authorization: Bearer KEY, or X-API-Key"
DENIAL = "websocket.http.response"
"""The ASGI extension by which the handshake of a websocket is answered with a response."""
log = logging.getLogger("cellrt")


class Refusal(NamedTuple):
    """A refusal of a request: status, type and text of the answer, and its headers."""

    status: int
    type: str
    error: str
    headers: Mapping[str, str] = {}

    def response(self) -> Response:
        """Return the refusal as a response."""
        answer = json_response({"error": self.error, "type": self.type}, self.status)
        answer.headers.update(self.headers)
        return answer


class AccessPolicy:
    """The rules of access.

    Args:
        keys: one of them must come with each request.
        origins: other servers' origins in lower case, whose pages may change state, read answers and open websockets.
    """

    def __init__(self, keys: Keys, origins: Collection[str] = ()) -> None:
        self._keys, self._origins = keys, origins

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return why a request or a websocket is refused; None if it is not."""
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
        """Return the origin of the page that sent a request, as its browser says; None for the server's own or none."""
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
    """Return the refusal of a websocket at a path that takes none."""
    said = f"there is no websocket at {path[:LONGEST_PATH]}, but at /v1/models/MODEL/session"
    return Refusal(404, RequestError.__name__, said)


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with a refusal.

    A websocket gets it as a response, or as the reason of its close frame where the server lacks that extension.
    """
    if scope["type"] == "websocket" and DENIAL not in (scope.get("extensions") or ()):
        reason = refusal.error.encode()[:LONGEST_REASON].decode(errors="ignore")
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
    else:
        await refusal.response()(scope, receive, send)


class AccessMiddleware:
    """ASGI middleware that checks access, counts answers and handles unexpected errors.

    Args:
        app: gets the requests that are not refused.
        access: decides which are refused.
        measures: counts answers.
    """

    def __init__(self, app: ASGIApp, access: AccessPolicy, measures: Measures) -> None:
        self._app, self._access, self._measures = app, access, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._let_in(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self._access.refusal(scope):
            await refuse(refusal, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s, status = time.perf_counter(), 0
        permissions = self._access.permissions(scope)
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
