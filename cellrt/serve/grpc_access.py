"""The interceptor of every gRPC handler: it checks keys, turns errors into statuses, counts answers and ends calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cellrt.errors import CellrtError, EngineClosedError, InternalError, http_status
from cellrt.serve.http import CUT_OFF
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures

log = logging.getLogger("cellrt")
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    410: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The gRPC statuses of our HTTP statuses; others are INTERNAL."""
OPEN = ("ServerLive", "ServerReady", "Check", "Watch")
"""Methods that need no key."""
NO_KEY = "a key is needed: authorization, or x-api-key"
Context = Any
Message = Any
Calls = set[asyncio.Task[None]]


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return an error's status and text for a client.

    Of an unexpected error the client learns only that the log has it.
    """
    if not isinstance(error, CellrtError):
        log.error("an error of the gRPC service", exc_info=error)
        error = InternalError("an error of the server; its log has it")
    return CODES.get(http_status(error), grpc.StatusCode.INTERNAL), str(error)


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A gRPC interceptor of handlers that are coroutines, also of those that answer streams.

    Args:
        keys: one of them must come with each call.
        measures: counts the answers; those of a stream it counts itself.
        calls: gets the tasks of the running calls. Cancelling one tells its client that the server ends.
    """

    def __init__(self, keys: Keys, measures: Measures, calls: Calls) -> None:
        self._keys, self._measures, self._calls = keys, measures, calls

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call with these checks around it."""
        handler = await continuation(details)
        if handler is None:
            return None
        name = details.method.rpartition("/")[2]
        knows = name in OPEN or self._keys.came_with(dict(details.invocation_metadata))
        kind = next(kind for kind in ("unary_unary", "unary_stream", "stream_stream") if getattr(handler, kind))
        return handler._replace(**{kind: self._guarded(name, getattr(handler, kind), knows, kind == "stream_stream")})

    def _guarded(
        self, name: str, handle: Callable[[Any, Context], Awaitable[Any]], knows: bool, is_stream: bool
    ) -> Any:
        async def answer(given: Any, context: Context) -> Any:
            begin_s, code, words = time.perf_counter(), grpc.StatusCode.OK, ""
            task: Any = asyncio.current_task()
            self._calls.add(task)
            try:
                if knows:
                    return await handle(given, context)
                code, words = grpc.StatusCode.UNAUTHENTICATED, NO_KEY
            except NotImplementedError:  # of the protocol's classes; gRPC would log a traceback for each call
                code, words = grpc.StatusCode.UNIMPLEMENTED, f"{name}: this server does not do that"
            except Exception as error:
                code, words = status_of(error)
            except asyncio.CancelledError:
                if context.cancelled():  # by the client
                    code = grpc.StatusCode.CANCELLED
                    raise
                code, words = status_of(EngineClosedError(CUT_OFF))
            finally:
                self._calls.discard(task)
                if not is_stream or words:
                    self._measures.count_call(name, code.name, time.perf_counter() - begin_s)
            return await context.abort(code, words)

        return answer
