"""A short way to the doors that most requests go through: past the layers that find a handler among many.

The application has the same doors; what is not on the short way, it handles. Of a tiny request the layers would take
more than the door itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cellrt.errors import CellrtError
from cellrt.serve.http import error_response

Handler = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """ASGI in front of ASGI.

    Args:
        app: handles everything else.
        handlers: of POST to ``/{first}/models/{model}/{last}``, by first and last.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[tuple[str, str], Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
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
