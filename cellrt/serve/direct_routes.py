"""A direct route to the handlers of most requests, past the layers that find a handler among many.

The application has the same handlers; it handles all other requests. For a tiny request the layers would take more time
than the handler itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cellrt.errors import CellrtError
from cellrt.serve.http import error_response

Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """ASGI middleware that calls some handlers directly.

    Args:
        app: handles everything else.
        handlers: the handlers of POST ``/{first}/models/{model}/{last}``, by (first, last).
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[tuple[str, str], Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        parts: list[str] = scope["path"].split("/") if is_post else []
        if len(parts) == 5 and parts[2] == "models" and (handler := self._handlers.get((parts[1], parts[4]))):
            scope["path_params"], scope["endpoint"] = {"model": parts[3]}, handler
            request = Request(scope, receive)
            try:
                response = await handler(request)
            except CellrtError as error:
                response = await error_response(request, error)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)
