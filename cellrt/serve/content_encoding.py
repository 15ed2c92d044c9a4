"""Bodies that come compressed, decompressed part by part, so that no body is ever larger than its limit."""

from __future__ import annotations

import zlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import RequestError
from cellrt.serve.http import json_response

HEADER = b"content-encoding"
PART_BYTES = 1 << 16
"""At most so much of a body is decompressed before whoever reads it has counted it."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What zlib calls the formats."""


class Decompressed:
    """ASGI in front of ASGI: whoever is behind it reads bodies as they were before gzip or deflate."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request; one whose body is encoded otherwise is answered 415."""
        encodings = [value for name, value in scope.get("headers", ()) if name == HEADER]
        if not encodings or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encoding = b", ".join(encodings).decode("latin-1").strip().lower()
        if encoding in _WINDOWS:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != HEADER]
            receive = _Decompressing(encoding, receive).receive
        elif encoding not in ("", "identity"):
            said = f"Content-Encoding: expected one of {[*_WINDOWS, 'identity']}, got {encoding!r:.80}"
            response = json_response({"error": said, "type": RequestError.__name__}, 415)
            response.headers["accept-encoding"] = ", ".join(_WINDOWS)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Decompressing:
    """One body."""

    def __init__(self, encoding: str, receive: Receive) -> None:
        self._encoding, self._receive = encoding, receive
        self._decoder = zlib.decompressobj(_WINDOWS[encoding])
        self._tail = b""
        """What came and was not decompressed."""
        self._has_more = False
        """Whether there is more to make of what came."""
        self._is_last = False

    async def receive(self) -> Message:
        """The next part. Raises RequestError if that is none of the encoding."""
        if not self._has_more:
            message = await self._receive()
            if message["type"] != "http.request" or self._is_last:
                return message
            self._tail, self._is_last = message.get("body", b""), not message.get("more_body", False)
        try:
            part = self._decoder.decompress(self._tail, PART_BYTES)
        except zlib.error as error:
            raise RequestError(f"the body: expected {self._encoding}, as Content-Encoding says: {error}") from None
        self._tail = self._decoder.unconsumed_tail
        self._has_more = bool(self._tail) or len(part) == PART_BYTES
        if self._decoder.unused_data:
            raise RequestError(f"the body: expected one {self._encoding}, got bytes behind its end")
        is_end = self._is_last and not self._has_more
        if is_end and not self._decoder.eof:
            raise RequestError(f"the body: expected {self._encoding}, as Content-Encoding says: it is cut off")
        return {"type": "http.request", "body": part, "more_body": not is_end}
