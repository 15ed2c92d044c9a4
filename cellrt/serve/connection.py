"""A client's connection: HTTP as uvicorn has it with httptools, but for clients that do not come to an end, or that
close their half, and a websocket, but for the server's end and its own pace.

uvicorn keeps all of a head without end, and waits for ever for who sends a request byte by byte, or does not read what
it asked for. Who closes their half of the connection once they have asked, gets no answer. When the server ends it
closes websockets at once, whatever they wait for, and at any time one whose answer to a ping it has not read itself.
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
"""Of a request's line and headers together; what a read brings behind them is counted too."""
HALF_CLOSED_S = 1.0
"""How long one who has closed their half is answered: most who do are gone, which nobody can tell before writing."""
DIRECT = "cellrt.websocket"
"""The extension of ASGI by which an application has the connection of a websocket itself."""
LOSS = "cellrt.loss"
"""The extension of ASGI by which it is told at once when the client of a request is gone: ``HttpProtocol.watch``."""
FIN, TEXT, BINARY = 0x80, 0x1, 0x2
"""Of the first byte of a frame: that it is its message's last, and what it has."""
_WHOLE = (FIN | TEXT, FIN | BINARY)
"""Of the first byte of a frame that is a whole message."""
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
    _is_lost = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watches: dict[int, Callable[[], object]] = {}
        """Who is told when the client is gone, by number."""
        self._num_watches = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._is_lost = True
        for tell in list(self._watches.values()):
            tell()

    def watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        """Has a function called once the client is gone whose request is all there; returns what ends that. A task that
        waits for it by ``receive`` takes a tenth of a small request's time."""
        if self._is_lost:
            self.loop.call_soon(tell)
        self.flow.resume_reading()  # or nobody sees that it goes
        number = self._num_watches = self._num_watches + 1
        self._watches[number] = tell
        return partial(self._watches.pop, number, None)

    def on_message_begin(self) -> None:
        """As of its base, and the scope has ``LOSS``."""
        super().on_message_begin()
        extensions: Any = {LOSS: self.watch}
        self.scope["extensions"] = extensions

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


class Listener(Protocol):
    """Who hears a websocket, in the loop."""

    def hear(self, message: str | bytes) -> None:
        """Takes a message."""

    def lose(self) -> None:
        """The client has gone, or the connection was closed."""

    def resume(self) -> None:
        """The client reads again."""


class _Disconnects(asyncio.Queue[Any]):
    """In the place of the queue for an application that asks for what comes: of that only the end is left."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def put_nowait(self, item: Any) -> None:
        """Takes an event."""
        if item["type"] == "websocket.disconnect":
            self._listener.lose()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One websocket; when the server ends, its session closes it after it has answered.

    To its application it is in the scope's extensions, under ``DIRECT``: a listener hears messages as they come, and
    sends without a task and a queue for each. What comes is cut into frames here. A whole message that is not
    compressed is read at once; all else the library reads, a frame at a time, so that it is always where one begins.
    """

    _listener: Listener | None = None
    _rest = bytearray()
    """The beginning of a frame."""
    _needed = 0
    """So many bytes of it must be there to go on."""
    _is_cut: bool | None = None
    """Whether what comes is cut into frames here; None: it is not known yet."""
    _is_in_fragments = False

    def handle_connect(self, event: Request) -> None:
        """As of its base, and the scope has the connection."""
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            extensions: Any = self.scope["extensions"]
            extensions[DIRECT] = self

    def listen(self, listener: Listener) -> None:
        """Has a listener hear what comes from now on, and what has come."""
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
        """Has the client wait with what it sends."""
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        """Has the client go on."""
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    @property
    def takes_more(self) -> bool:
        """Whether the client reads what it is sent."""
        return self.writable.is_set()

    def say(self, message: str | bytes) -> bool:
        """Sends a message, whether the client reads or not; False if the connection has ended."""
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
        """The client reads again."""
        super().resume_writing()
        if self._listener is not None:
            self._listener.resume()

    def data_received(self, data: bytes) -> None:
        """Takes in what came."""
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
        """A message that the library has read."""
        if self._listener is None:
            super().send_receive_event_to_app()
            return
        data, self.frames = b"".join(self.frames), []
        self._hear(data, self.curr_msg_data_type == "text")

    @property
    def _is_plain(self) -> bool:
        """Whether frames are what their heads say, as no extension changes them."""
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
        """Takes in the whole frames of what came; returns how many bytes they are."""
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


def _head(kind: int, size: int) -> bytes:
    """The head of the one frame of a message to a client."""
    if size < 126:
        return bytes((FIN | kind, size))
    if size < 1 << 16:
        return bytes((FIN | kind, 126)) + size.to_bytes(2, "big")
    return bytes((FIN | kind, 127)) + size.to_bytes(8, "big")
