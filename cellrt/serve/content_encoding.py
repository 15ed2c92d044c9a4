"""Decompression of request bodies part by part, so that no body is ever larger than its limit."""

from __future__ import annotations

import zlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import RequestError
from cellrt.serve.http import json_response

HEADER = b"content-encoding"
PART_BYTES = 1 << 16
"""The most bytes of a body that are decompressed before the reader has counted them."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The window sizes of the formats for zlib."""


class Decompressed:
    """ASGI middleware that decompresses bodies in gzip or deflate."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. One whose body has another encoding is answered 415."""
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
    """The decompressor of one body."""

    def __init__(self, encoding: str, receive: Receive) -> None:
        self._encoding, self._receive = encoding, receive
        self._decoder = zlib.decompressobj(_WINDOWS[encoding])
        self._tail = b""
        """Bytes that came and were not decompressed yet."""
        self._has_more = False
        """True if there may be more output from the bytes that came."""
        self._is_last = False

    async def receive(self) -> Message:
        """Return the next part. Raise RequestError if it is not in the encoding."""
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
