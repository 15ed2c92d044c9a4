"""Connections of clients: uvicorn's HTTP and websocket protocols, with limits for slow clients and graceful ends.

uvicorn buffers a request's head without limit, and waits for ever for a client that sends a request byte by byte, or
does not read what it asked for. A client that closes its half of the connection after a request gets no answer. When
the server ends, uvicorn closes websockets at once, whatever they wait for, and at any time one whose answer to a ping
it has not read itself. The classes here mend that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

try:
    from websockets.speedups import apply_mask
except ImportError:  # it is not compiled for every platform
    from websockets.utils import apply_mask

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from websockets.http11 import Request

MOST_HEAD_BYTES = 1 << 20
"""The limit of a request's line and headers together; bytes that the same read brings behind them are counted too."""
HALF_CLOSED_S = 1.0
"""The seconds in which a client that closed its half is answered.

Most such clients are gone, which only a write shows.
"""
DIRECT = "cellrt.websocket"
"""The ASGI extension that gives an application the connection of a websocket itself."""
LOSS = "cellrt.loss"
"""The ASGI extension that tells an application at once when a request's client is gone: ``HttpProtocol.watch``."""
FIN, TEXT, BINARY = 0x80, 0x1, 0x2
"""Bits of a frame's first byte: it is its message's last, and the kind of its content."""
_WHOLE = (FIN | TEXT, FIN | BINARY)
"""First bytes of a frame that is a whole message."""
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """An HTTP connection that is closed for a head longer than ``MOST_HEAD_BYTES``, or a client that is too slow.

    ``end_if_slow`` and ``end_if_unread`` close slow ones.
    """

    _is_in_head = True
    _head_bytes = 0
    _since: float | None = None
    """The begin of the request that is being received, or of the connection, on the loop's clock; None between
    requests.
    """
    _unread_bytes = 0
    """The bytes that were written and not sent at the last check."""
    _read_s = 0.0
    """The last time at which the client was seen to read, or had read everything."""
    _is_lost = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watches: dict[int, Callable[[], object]] = {}
        """Callbacks for when the client is gone, by number."""
        self._num_watches = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Call the callbacks of ``watch``: the client is gone."""
        super().connection_lost(exc)
        self._is_lost = True
        for tell in list(self._watches.values()):
            tell()

    def watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        """Call a function once the client is gone, after its request was received; return a function that cancels this.

        A task that waits for it by ``receive`` takes a tenth of a small request's time.
        """
        if self._is_lost:
            self.loop.call_soon(tell)
        self.flow.resume_reading()  # or its end would not be noticed
        number = self._num_watches = self._num_watches + 1
        self._watches[number] = tell
        return partial(self._watches.pop, number, None)

    def on_message_begin(self) -> None:
        """Begin a request, with ``LOSS`` in its scope."""
        super().on_message_begin()
        extensions: Any = {LOSS: self.watch}
        self.scope["extensions"] = extensions

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, and the time limit of its first request."""
        self._since = self.loop.time()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, with a limit for the head."""
        if self._since is None:
            self._since = self.loop.time()
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"At most {MOST_HEAD_BYTES} bytes of headers are taken.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Record that the head is complete."""
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Record that the body is complete: the next bytes are another request's head."""
        self._is_in_head = True
        self._since = None
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for a while, for the answers to earlier requests."""
        is_answered = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        if self._since is not None or is_answered:
            return False
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        last.keep_alive = False
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    def end_if_slow(self, before: float) -> None:
        """Close the connection if a request has been coming since before that moment, on the loop's clock."""
        if self._since is not None and self._since < before:
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                self.transport.write(TIMED_OUT)
            self.transport.close()

    def end_if_unread(self, now: float, timeout_s: float) -> None:
        """Close the connection if its client has read nothing for so long. Call it often."""
        unread_bytes = self.transport.get_write_buffer_size()
        is_written = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if not unread_bytes or unread_bytes < self._unread_bytes or not is_written:  # more may have been added
            self._read_s = now
        elif now - self._read_s > timeout_s:
            self.transport.abort()
        self._unread_bytes = unread_bytes


class Listener(Protocol):
    """A receiver of a websocket's messages, in the loop."""

    def hear(self, message: str | bytes) -> None:
        """Receive a message."""

    def lose(self) -> None:
        """Record that the client has gone, or the connection was closed."""

    def resume(self) -> None:
        """Go on writing, as the client reads again."""


class _Disconnects(asyncio.Queue[Any]):
    """A queue for an application that has a listener: of the events only the end is passed on."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def put_nowait(self, item: Any) -> None:
        """Pass on an event if it is the end."""
        if item["type"] == "websocket.disconnect":
            self._listener.lose()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A websocket. When the server ends, the application closes it after its answers.

    An application gets it in the scope's extensions, under ``DIRECT``: a listener receives messages as they come, and
    sends without a task and a queue for each. Received bytes are split into frames here. A whole message that is not
    compressed is read at once; all else is left to the library, a frame at a time, so that it always begins with a
    frame.
    """

    _listener: Listener | None = None
    _rest = bytearray()
    """The beginning of a frame."""
    _needed = 0
    """The bytes of ``_rest`` that must be there to go on."""
    _is_cut: bool | None = None
    """True if received bytes are split into frames here; None: not known yet."""
    _is_in_fragments = False

    def handle_connect(self, event: Request) -> None:
        """Answer the handshake, with the connection in the scope."""
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            extensions: Any = self.scope["extensions"]
            extensions[DIRECT] = self

    def listen(self, listener: Listener) -> None:
        """Pass all messages to a listener from now on, and those that have come before."""
        before, self.queue = self.queue, _Disconnects(listener)
        self._listener = listener
        while not before.empty():
            event: Any = before.get_nowait()
            if event["type"] == "websocket.receive":
                listener.hear(event["text"] if event.get("text") is not None else event["bytes"])
            else:
                self.queue.put_nowait(event)
        self.read_on()

    def read_no_more(self) -> None:
        """Stop reading, so that the client waits."""
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        """Go on reading."""
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    @property
    def takes_more(self) -> bool:
        """True if the client reads what it is sent."""
        return self.writable.is_set()

    def say(self, message: str | bytes) -> bool:
        """Send a message, whether the client reads or not. Return False if the connection has ended."""
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            return False
        is_text = isinstance(message, str)
        content = message.encode() if isinstance(message, str) else message
        if self._is_plain:
            self.transport.write(_head(TEXT if is_text else BINARY, len(content)) + content)
        else:
            (self.conn.send_text if is_text else self.conn.send_binary)(content)
            self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def resume_writing(self) -> None:
        """Tell the listener that the client reads again."""
        super().resume_writing()
        if self._listener is not None:
            self._listener.resume()

    def data_received(self, data: bytes) -> None:
        """Split received bytes into frames, or leave them to the library."""
        if self._is_cut is None:
            if self.handshake_complete:
                self._is_cut = self._is_plain
            elif self.handshake_initiated:  # before it is answered: the library keeps it
                self._is_cut = False
        if not self._is_cut:
            super().data_received(data)
        elif not self._rest:
            if (at := self._cut(data)) < len(data):
                self._rest = bytearray(memoryview(data)[at:])
        else:
            self._rest += data
            if len(self._rest) >= self._needed:
                del self._rest[: self._cut(self._rest)]

    def send_receive_event_to_app(self) -> None:
        """Pass a message that the library has read to the listener."""
        if self._listener is None:
            super().send_receive_event_to_app()
            return
        data, self.frames = b"".join(self.frames), []
        self._hear(data, self.curr_msg_data_type == "text")

    @property
    def _is_plain(self) -> bool:
        """True if no extension changes frames."""
        return not self.conn.extensions

    def _hear(self, data: bytes, is_text: bool) -> None:
        if self._listener is None or self.close_sent:
            return
        try:
            message = data.decode() if is_text else data
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        self._listener.hear(message)

    def _cut(self, data: bytes | bytearray) -> int:
        """Handle the whole frames among received bytes. Return the number of their bytes."""
        at, size, most = 0, len(data), self.config.ws_max_size
        while size - at >= 2 and self.conn.state is State.OPEN:
            first, length = data[at], data[at + 1] & 0x7F
            begin = at + 6
            if length >= 126:
                width = 2 if length == 126 else 8
                begin += width
                length = int.from_bytes(data[at + 2 : at + 2 + width], "big") if size >= at + 2 + width else 0
            if not data[at + 1] & 0x80 or length > most:  # the library says what is wrong
                self._is_cut = False
                break
            end = begin + length
            if size < end:
                self._needed = end - at
                return at
            self._take_frame(first, data, at, begin, end)
            at = end
        if self._is_cut and self.conn.state is State.OPEN:
            self._needed = 2
            return at
        super().data_received(bytes(data[at:]))
        self._is_cut = False
        return size

    def _take_frame(self, first: int, data: bytes | bytearray, at: int, begin: int, end: int) -> None:
        if first in _WHOLE and self._listener is not None and not self._is_in_fragments:
            self._hear(apply_mask(data[begin:end], data[begin - 4 : begin]), first == FIN | TEXT)
            return
        if first & 0x0F <= BINARY:
            self._is_in_fragments = not first & FIN
        super().data_received(bytes(data[at:end]))

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event; a refusal with a body ends the handshake, which uvicorn would log as an application without an
        answer.
        """
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """Close the websocket as its client has not answered a ping in time, unless reading was paused."""
        if self.read_paused:
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def shutdown(self) -> None:
        """Close the connection when the server ends, unless its session closes it."""
        if not self.handshake_complete or self.close_sent:  # there is no session, or it has closed it
            super().shutdown()


def _head(kind: int, size: int) -> bytes:
    """Return the head of a message of one frame to a client."""
    if size < 126:
        return bytes((FIN | kind, size))
    if size < 1 << 16:
        return bytes((FIN | kind, 126)) + size.to_bytes(2, "big")
    return bytes((FIN | kind, 127)) + size.to_bytes(8, "big")
