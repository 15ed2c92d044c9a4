"""A client's connection: HTTP as uvicorn has it with httptools, but for clients that do not come to an end, or that
close their half, and a websocket, but for the server's end and its own pace.

uvicorn keeps all of a head without end, and waits for ever for who sends a request byte by byte, or does not read what
it asked for. Who closes their half of the connection once they have asked, gets no answer. When the server ends it
closes websockets at once, whatever they wait for, and at any time one whose answer to a ping it has not read itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

MOST_HEAD_BYTES = 1 << 20
"""Of a request's line and headers together; what a read brings behind them is counted too."""
HALF_CLOSED_S = 1.0
"""How long one who has closed their half is answered: most who do are gone, which nobody can tell before writing."""
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """One connection; closed when a request's head is longer than ``MOST_HEAD_BYTES``, by ``end_if_slow`` and
    ``end_if_unread``."""

    _is_in_head = True
    _head_bytes = 0
    _since: float | None = None
    """When the request that is coming began to, on the loop's clock, or the connection; None: none is."""
    _unread_bytes = 0
    """Of what was written, at the last look."""
    _read_s = 0.0
    """When the client was last seen to read, or to have read all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and is to send something."""
        self._since = self.loop.time()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Takes in what came."""
        if self._since is None:
            self._since = self.loop.time()
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"At most {MOST_HEAD_BYTES} bytes of headers are taken.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is all there."""
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is all there: what comes next is another request's head."""
        self._is_in_head = True
        self._since = None
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for a while, for the answers to what was asked."""
        is_answered = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        if self._since is not None or is_answered:
            return False
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        last.keep_alive = False
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    def end_if_slow(self, before: float) -> None:
        """Ends the connection if a request is coming since before that moment, on the loop's clock."""
        if self._since is not None and self._since < before:
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                self.transport.write(TIMED_OUT)
            self.transport.close()

    def end_if_unread(self, now: float, timeout_s: float) -> None:
        """Ends the connection if its client has read nothing for so long of what it was sent: to be asked often."""
        unread_bytes = self.transport.get_write_buffer_size()
        is_written = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if not unread_bytes or unread_bytes < self._unread_bytes or not is_written:  # more may have been added
            self._read_s = now
        elif now - self._read_s > timeout_s:
            self.transport.abort()
        self._unread_bytes = unread_bytes


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One websocket; when the server ends, its session closes it after it has answered."""

    async def send(self, message: ASGISendEvent) -> None:
        """As of its base, whose log takes a refusal with a body for an application that said nothing."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """Close it as its client has not answered a ping in time, unless what came was not read meanwhile."""
        if self.read_paused:
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def shutdown(self) -> None:
        """The server ends."""
        if not self.handshake_complete or self.close_sent:  # nobody has a session, or it has closed it
            super().shutdown()
