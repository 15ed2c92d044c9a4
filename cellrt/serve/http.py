"""Functions that the HTTP handlers share: reading of bodies within limits, answers in JSON, and streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cellrt.errors import CancelledError, CellrtError, EngineClosedError, RequestTooLargeError, http_status
from cellrt.serve.connection import LOSS
from cellrt.serve.inference import SEEN, Gone, error_headers, error_json
from cellrt.serve.oip import encode

REQUEST_ID = "x-cellrt-request"
"""The header with a request's id in ``/debug/requests/...``."""

Tell = Callable[[BaseException], Mapping[str, object]]
"""A function that returns an error as the JSON object of a protocol."""
CUT_OFF = "the server ends, and this took longer than it waits for what was begun"


async def read_body(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raise RequestTooLargeError beyond this many bytes, before all of it is there; our CancelledError if the client goes
    before.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise RequestTooLargeError(f"the body has {length} bytes, at most {limit} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise RequestTooLargeError(f"the body has more than {limit} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise CancelledError("the client is gone") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def gone(request: Request) -> Gone:
    """Return the function that watches a request, whose body was read, for the end of its client."""
    by_connection: Gone | None = (request.scope.get("extensions") or {}).get(LOSS)
    if by_connection is not None:
        return by_connection

    def watch(tell: Callable[[], object]) -> Callable[[], object]:
        watcher = asyncio.ensure_future(until_gone(request.receive))
        watcher.add_done_callback(lambda done: None if done.cancelled() else tell())
        return watcher.cancel

    return watch


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a request, whose body was read, is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: object, status: int = 200, request_id: str = "") -> Response:
    """Return an answer in JSON. ``request_id``: the request's id in ``/debug/requests/...``, if it has one."""
    return Response(encode(value), status, {REQUEST_ID: request_id} if request_id else None, "application/json")


async def error_response(_: Request, error: Exception) -> Response:
    """Return the answer to a request that failed with an error of ours."""
    return error_answer(error)


def error_answer(error: Exception, as_json: Tell = error_json) -> Response:
    """Return the answer for an error of ours. ``as_json``: the error as a JSON object of the protocol."""
    headers = {**error_headers(error), **_seen_header()}
    return Response(encode(as_json(error)), http_status(error), headers, "application/json")


def _seen_header() -> dict[str, str]:
    """Return the header ``REQUEST_ID`` for the request that was submitted in this context."""
    seen = SEEN.get()
    return {REQUEST_ID: seen[-1]} if seen else {}


class EventStream(Response):
    """A response of server-sent events, each sent as soon as it is there.

    Args:
        events: the JSON of each event. An error that it raises is the last event, or the answer if nothing was sent.
        write_timeout_s: the seconds without reading after which a client is disconnected.
        as_json: returns an error as a JSON object of the protocol.
    """

    def __init__(
        self, events: AsyncIterator[bytes], write_timeout_s: float, headers: dict[str, str], as_json: Tell = error_json
    ) -> None:
        self._events, self._write_timeout_s, self._as_json = events, write_timeout_s, as_json
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream", "cache-control": "no-store", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. When the client goes, close their generator, and with it the request."""
        task = asyncio.current_task()
        watcher: asyncio.Future[None] = asyncio.ensure_future(until_gone(receive))
        watcher.add_done_callback(lambda done: None if done.cancelled() or task is None else task.cancel())
        try:
            await self._send_all(send, _until_cancelled(self._events, watcher))
        except (asyncio.CancelledError, TimeoutError):
            if not watcher.done():
                watcher.cancel()
                raise
        finally:
            watcher.cancel()
            with suppress(RuntimeError):
                await self._events.aclose()  # type: ignore[attr-defined]

    async def _send_all(self, send: Send, events: AsyncIterator[bytes]) -> None:
        write = self._writer(send)
        try:
            first = await anext(events, b"")  # an error before the first step is the answer
        except CellrtError as error:
            answer = error_answer(error, self._as_json)
            await write({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
            await write({"type": "http.response.body", "body": answer.body})
            return
        self.headers.update(_seen_header())  # the first event exists: the request was submitted
        await write({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await write(_event(first))
            async for event in events:
                await write(_event(event))
        except CellrtError as error:
            await write(_event(encode(self._as_json(error))))
        await write({"type": "http.response.body", "body": b""})

    def _writer(self, send: Send) -> Callable[[dict[str, object]], Awaitable[None]]:
        async def write(message: dict[str, object]) -> None:
            async with asyncio.timeout(self._write_timeout_s):
                await send(message)

        return write


async def _until_cancelled(events: AsyncIterator[bytes], watcher: asyncio.Future[None]) -> AsyncIterator[bytes]:
    """Yield the events. Raise EngineClosedError if cancelled while the client is there, as the server ends then."""
    try:
        async for event in events:
            yield event
    except asyncio.CancelledError as error:
        if watcher.done() or isinstance(error, CellrtError):
            raise
        raise EngineClosedError(CUT_OFF) from None


def _event(data: bytes) -> dict[str, object]:
    body = b"data: " + data + b"\n\n" if data else b""
    return {"type": "http.response.body", "body": body, "more_body": True}
