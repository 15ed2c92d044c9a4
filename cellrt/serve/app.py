"""The ASGI application of a front end: all doors behind the guard."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cellrt.errors import CellrtError, RequestError
from cellrt.serve.backend import Backend
from cellrt.serve.content_encoding import Decompressed
from cellrt.serve.door import Door
from cellrt.serve.guard import ASKS, Gate, Guard
from cellrt.serve.http import error_response, json_response
from cellrt.serve.http_native import NativeDoor
from cellrt.serve.http_oip import OipDoor
from cellrt.serve.http_watching import WatchingDoor
from cellrt.serve.keys import Keys
from cellrt.serve.openai_door import OpenAIDoor
from cellrt.serve.shortcut import Shortcut

FIRST_S = 30.0
"""How long connections wait for a front end's first sight of the engine; then they are told that there is none."""

CALLS_A_LEVEL, CALLS_BESIDE = 3, 1000
"""Calls of functions within each other: of a function that walks through a tree and calls itself, and beside it."""
SHARED_MEMORY = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")
"""Where Triton has it."""
LONGEST_PATH = 200
"""So much of a path that is not there an error says."""


def make_app(door: Door, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> Guard:
    """The application; it is connected to the engine's process from its start to its end.

    ``wrap``: what stands between the guard and the doors.
    """
    backend = door.backend
    let_recurse(backend.settings.limits.max_depth)

    @asynccontextmanager
    async def connected(_: Starlette) -> AsyncIterator[None]:
        async with kept_connected(backend):
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await backend.is_connected.wait()
            yield

    oip, native = OipDoor(door), NativeDoor(door)
    app = Starlette(
        routes=[*oip.routes(), *OpenAIDoor(door).routes(), *native.routes(), *WatchingDoor(door).routes()],
        exception_handlers={CellrtError: error_response, HTTPException: _plain, Exception: _unexpected},
        lifespan=connected,
    )
    often = {("v1", "infer"): native.native_infer, ("v2", "infer"): oip.infer, ("v2", "generate"): oip.generate}
    gate = Gate(Keys(backend.settings.api_keys), backend.settings.allowed_origins)
    return Guard(wrap(Decompressed(Shortcut(app, often))), gate, door.measures)


def let_recurse(depth: int) -> None:
    """Have Python allow what reads a request as deep, and unfolds it, to call itself as often, in the whole process."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), CALLS_BESIDE + CALLS_A_LEVEL * depth))


@asynccontextmanager
async def kept_connected(backend: Backend) -> AsyncIterator[None]:
    """Keeps the engine's process at hand."""
    connecting = asyncio.create_task(backend.keep_connected())
    try:
        yield
    finally:
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting
        await backend.close()


async def _plain(request: Request, error: Exception) -> Response:
    """No such path, or method; what there is, if that was asked."""
    if not isinstance(error, HTTPException):
        raise error
    headers, path, said = error.headers or {}, request.url.path[:LONGEST_PATH], error.detail
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and request.method == ASKS:
        return Response(status_code=204, headers={"allow": ", ".join(filter(None, (headers.get("Allow"), ASKS)))})
    if error.status_code == HTTPStatus.NOT_FOUND:
        said = f"there is nothing at {path}; /docs has what there is"
        if path.startswith(SHARED_MEMORY):
            said = f"there is no shared memory here, tensors come in requests: {path}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        said = f"{path} takes {headers.get('Allow', 'another method')}, got {request.method}"
    response = json_response({"error": said, "type": RequestError.__name__}, error.status_code)
    response.headers.update(headers)
    return response


async def _unexpected(_: Request, error: Exception) -> Response:
    """A bug of the server's; its log has it."""
    return json_response({"error": "an error of the server; its log has it", "type": "InternalError"}, 500)
