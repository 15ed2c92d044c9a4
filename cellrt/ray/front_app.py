"""The ASGI application of a front. Bodies are decompressed here: the session that a request is in stands in them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from cellrt.errors import RequestError
from cellrt.ray.messages import Call
from cellrt.serve.access import AccessPolicy, no_websocket, refuse
from cellrt.serve.content_encoding import Decompressed
from cellrt.serve.forms import TOO_DEEP
from cellrt.serve.http import read_body
from cellrt.serve.server_settings import Limits

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


class Answering(Protocol):
    """The interface of what answers requests, which is ``Front``.

    Its own policy controls access to paths that it answers itself; a replica's policy controls the rest.
    """

    access: AccessPolicy

    async def answer(self, request: Request) -> Response:
        """Answers a request."""

    async def overview(self, request: Request) -> Response:
        """Return the directory's counts."""

    async def converse(self, socket: WebSocket) -> None:
        """Serve a websocket."""


def front_app(front: Callable[[], Answering]) -> Starlette:
    """Return the application; ``front`` returns what answers, and is called at each request."""

    async def answer(request: Request) -> Response:
        return await front().answer(request)

    async def overview(request: Request) -> Response:
        if refusal := front().access.refusal(request.scope):
            return refusal.response()
        return await front().overview(request)

    async def converse(socket: WebSocket) -> None:
        if refusal := front().access.refusal(socket.scope):
            await refuse(refusal, socket.scope, socket.receive, socket.send)
        else:
            await front().converse(socket)

    async def converse_nowhere(socket: WebSocket) -> None:
        refusal = front().access.refusal(socket.scope) or no_websocket(socket.url.path)
        await refuse(refusal, socket.scope, socket.receive, socket.send)

    routes = [
        Route("/debug/replicas", overview),
        WebSocketRoute("/v1/models/{model}/session", converse),
        WebSocketRoute("/{path:path}", converse_nowhere),
        Route("/{path:path}", answer, methods=METHODS),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Decompressed)])


async def read_call(request: Request, limits: Limits) -> Call:
    """Return a request as it goes to a replica. Raise RequestTooLargeError, RequestError."""
    body = await read_body(request, limits.max_body_bytes)
    scope, headers = request.scope, tuple(request.headers.raw)
    call = Call(scope["method"], scope["path"], scope["query_string"], headers, body, uuid.uuid4().hex)
    if call.changes_models:
        raise RequestError("models of an application of Ray Serve change when it is deployed anew: serve.run")
    try:
        _ = call.session
    except RecursionError:  # it is no replica's: without its session it would run in none, or twice
        raise RequestError(TOO_DEEP.format(limits.max_depth)) from None
    return call
