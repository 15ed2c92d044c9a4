"""The ASGI application of a front end: all handlers behind the access check."""

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
from cellrt.serve import inference, openai_messages
from cellrt.serve.access import ASKS, AccessMiddleware, AccessPolicy
from cellrt.serve.backend import Backend
from cellrt.serve.content_encoding import Decompressed
from cellrt.serve.direct_routes import DirectRoutes
from cellrt.serve.http import error_response, json_response
from cellrt.serve.http_native import NativeHandlers
from cellrt.serve.http_oip import OipHandlers
from cellrt.serve.http_watching import WatchingHandlers
from cellrt.serve.inference import InferenceService
from cellrt.serve.keys import Keys
from cellrt.serve.openai_handlers import OpenAIHandlers

FIRST_S = 30.0
"""The seconds that connections wait for a front end to connect to the engine; then they are told that there is none."""

CALLS_A_LEVEL, CALLS_BESIDE = 3, 1000
"""Nested calls of functions: for each level of a request, by a function that walks a tree
recursively, and beside it.
"""
SHARED_MEMORY = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")
"""The paths of Triton's shared memory."""
LONGEST_PATH = 200
"""The most characters of an unknown path in an error."""


def make_app(service: InferenceService, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AccessMiddleware:
    """Return the application, which is connected to the engine's process from its start to its end.

    ``wrap``: adds middleware between the access check and the handlers.
    """
    backend = service.backend
    let_recurse(backend.settings.limits.max_depth)

    @asynccontextmanager
    async def connected(_: Starlette) -> AsyncIterator[None]:
        async with kept_connected(backend):
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await backend.is_connected.wait()
            yield

    oip, native = OipHandlers(service), NativeHandlers(service)
    app = Starlette(
        routes=[
            *oip.routes(),
            *OpenAIHandlers(service).routes(),
            *native.routes(),
            *WatchingHandlers(service).routes(),
        ],
        exception_handlers={CellrtError: error_response, HTTPException: _plain, Exception: _unexpected},
        lifespan=connected,
    )
    often = {("v1", "infer"): native.native_infer, ("v2", "infer"): oip.infer, ("v2", "generate"): oip.generate}
    access = AccessPolicy(Keys(backend.settings.api_keys), backend.settings.allowed_origins)
    return AccessMiddleware(wrap(Decompressed(DirectRoutes(app, often))), access, service.measures)


def let_recurse(depth: int) -> None:
    """Raise the recursion limit of Python, in the whole process, to read requests of this depth."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), CALLS_BESIDE + CALLS_A_LEVEL * depth))


@asynccontextmanager
async def kept_connected(backend: Backend) -> AsyncIterator[None]:
    """Keep a connection to the engine's process within the block."""
    connecting = asyncio.create_task(backend.keep_connected())
    try:
        yield
    finally:
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting
        await backend.close()


async def _plain(request: Request, error: Exception) -> Response:
    """Return the answer to an unknown path or method, or to OPTIONS."""
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
    is_native = not path.startswith("/v1/") or path.startswith("/v1/models/")
    as_json = inference.error_json if is_native else openai_messages.error_json
    response = json_response(as_json(RequestError(said)), error.status_code)
    response.headers.update(headers)
    return response


async def _unexpected(_: Request, error: Exception) -> Response:
    """Return the answer to a bug of the server's; its log has the error."""
    return json_response({"error": "an error of the server; its log has it", "type": "InternalError"}, 500)
