"""The way of a request from a protocol's handler to the engine: submit it, wait for its end, cancel it if its client
goes.

Belongs to the front end's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from cellrt.engine.due import due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.stream import Stream
from cellrt.errors import CancelledError, CellError, CellrtError, OverloadError, RequestError, SessionError, http_status
from cellrt.process.remote_session import RemoteSession
from cellrt.serve.backend import Backend
from cellrt.serve.described import Described
from cellrt.serve.lookup_errors import explained
from cellrt.serve.measures import Measures
from cellrt.serve.oip import Parameters

RETRY_AFTER_S = 1
"""The seconds after which a refused client may try again."""
MAY_RETRY = (429, 503)

T = TypeVar("T")
SEEN: ContextVar[list[str] | None] = ContextVar("SEEN", default=None)
"""A list for the ids in ``/debug`` of the requests that are submitted in this context; None: the ids are not needed."""
Gone = Callable[[Callable[[], object]], Callable[[], object]]
"""A function that calls another one once the client is gone; it returns a function that cancels this."""


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        results: by name.
        version: the version of the model that computed them. An open session keeps the version that it began with.
        id: the id that the request has in ``/debug``.
    """

    results: Result
    version: str
    id: str


class InferenceService:
    """The submission of requests for all protocols. ``backend``: the engine; ``measures``: counts requests.

    Attributes:
        draining: set when the server is about to end, for handlers that wait for their client's next request.
    """

    def __init__(self, backend: Backend, measures: Measures) -> None:
        self.backend, self.measures = backend, measures
        self.draining = asyncio.Event()
        self._num_streams = 0

    def drain(self) -> None:
        """Record that the server is about to end: no more requests are accepted."""
        self.backend.drain()
        self.draining.set()

    async def infer(self, described: Described, request: Any, how: Parameters, gone: Gone) -> Answer:
        """Return the answer to a request. Raise what ``Engine.infer`` raises."""
        with self.counted(described.name), blaming_request(described, request):
            if how.sequence is None:
                client = self.backend.client
                when = due(how.deadline, how.schedule_by)
                what = client._submit_collected, described.name, request, None, when, how.priority
                outcome, future = await unless_gone(client._collector.submit(*what), gone)
                id = self.note(future)
                if isinstance(outcome, CellrtError):
                    try:
                        raise outcome
                    finally:
                        del outcome, future
                return Answer(outcome, described.version, id)
            async with self._in_session(described, how) as session:
                future = session.submit(request, **how.options)
                id = self.note(future)
                return Answer(await unless_gone(as_awaitable(future), gone), _version_of(session), id)

    @asynccontextmanager
    async def stream(self, described: Described, request: Any, how: Parameters) -> AsyncIterator[tuple[Stream, str]]:
        """Provide the steps of a request, and the version of the model that computes them; leaving the block cancels
        it.

        Raise what ``Engine.stream`` raises.
        """
        limits = self.backend.settings.limits
        with self.counted(described.name), blaming_request(described, request), self.place_of_stream():
            if how.sequence is None:
                client = self.backend.client
                options = {**how.options, "max_unread": limits.max_unread}
                with client.stream(described.name, request, **options) as stream:
                    self.note(stream.future)
                    yield stream, described.version
                return
            async with self._in_session(described, how) as session:
                with session.stream(request, **how.options, max_unread=limits.max_unread) as stream:
                    self.note(stream.future)
                    yield stream, _version_of(session)

    @contextmanager
    def place_of_stream(self) -> Iterator[None]:
        """Count an open stream within the block. Raise OverloadError if as many as allowed are open."""
        most = self.backend.settings.limits.max_streams
        if self._num_streams >= most:
            raise OverloadError(f"{self._num_streams} streams are open, this front end takes {most} (max_streams)")
        self._num_streams += 1
        self.measures.streams.inc()
        try:
            yield
        finally:
            self._num_streams -= 1
            self.measures.streams.dec()

    @asynccontextmanager
    async def _in_session(self, described: Described, how: Parameters) -> AsyncIterator[RemoteSession]:
        """Provide the session that a request belongs to; close it afterwards if the request is its last."""
        if how.sequence is None:
            raise RequestError("the request is in no sequence")
        id, is_start, is_end = how.sequence
        session = await self.backend.session(described.name, id, is_start=is_start)
        try:
            yield session
        except SessionError:
            self.backend.forget_session(described.name, id)
            raise
        finally:
            if is_end:
                await self.backend.end_session(described.name, id, session)

    @contextmanager
    def counted(self, model: str) -> Iterator[None]:
        """Count refusals of a model's requests, and record when the last one was not refused."""
        try:
            yield
            self.measures.note_inference(model)
        except OverloadError:
            self.measures.rejections.labels(model).inc()
            raise

    def note(self, future: RequestFuture) -> str:
        """Return a request's id in ``/debug/requests/...``, and record it for this context."""
        id, seen = self.trace_id(future), SEEN.get()
        if id and seen is not None:
            seen.append(id)
        return id

    def trace_id(self, future: RequestFuture) -> str:
        """Return a request's id in ``/debug/requests/...``."""
        return self.backend.trace_id(future)


def _version_of(session: RemoteSession) -> str:
    return str(session._binding.version)


@contextmanager
def noting() -> Iterator[list[str]]:
    """Provide a list of the ids in ``/debug`` of the requests submitted within the block.

    An outer block gets them too.
    """
    around, seen = SEEN.get(), list[str]()
    token = SEEN.set(seen)
    try:
        yield seen
    finally:
        SEEN.reset(token)
        if around is not None:
            around.extend(seen)


@contextmanager
def blaming_request(described: Described, request: Any) -> Iterator[None]:
    """Raise a cell's failure as RequestError if the request is its cause, which ``explained`` decides."""
    try:
        yield
    except CellError as error:
        raise explained(described, request, error) from error


def never_gone(_: Callable[[], object]) -> Callable[[], object]:
    """Ignore the function: a ``Gone`` for handlers that are cancelled when their client goes."""
    return lambda: None


async def unless_gone(waiter: asyncio.Future[T], gone: Gone) -> T:
    """Return the result of a request; cancel it when its client goes, or this task is cancelled.

    Raise our CancelledError when the client goes.
    """
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        waiter.cancel()

    end = gone(leave)
    try:
        return await waiter
    except asyncio.CancelledError:
        if is_gone:
            raise CancelledError("the client is gone") from None
        raise
    finally:
        end()


def error_json(error: BaseException) -> dict[str, str]:
    """Return an error as a JSON object, for all protocols without an own form."""
    return {"error": str(error) or type(error).__name__, "type": type(error).__name__}


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the header with the time of the next try, if one may help."""
    return {"retry-after": str(RETRY_AFTER_S)} if http_status(error) in MAY_RETRY else {}
