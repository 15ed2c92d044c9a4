"""A websocket whose frames are cut here: whatever pieces of them come, each message is heard once, whole, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from uvicorn.server import ServerState  # noqa: E402
from websockets.extensions.permessage_deflate import PerMessageDeflate  # noqa: E402
from websockets.frames import Frame, Opcode  # noqa: E402

from cellrt.serve.connection import DIRECT, WebSocketProtocol  # noqa: E402

MOST_BYTES = 80_000
HANDSHAKE = (
    "GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{}\r\n"
)
DEFLATED = "Sec-WebSocket-Extensions: permessage-deflate\r\n"
FRAMES = [
    Frame(Opcode.TEXT, b"one"),
    Frame(Opcode.BINARY, b""),
    Frame(Opcode.PING, b"there?"),
    Frame(Opcode.BINARY, bytes(range(126))),
    Frame(Opcode.TEXT, "f\u00fcnf ".encode(), fin=False),
    Frame(Opcode.PING, b"still?"),
    Frame(Opcode.CONT, b"and ", fin=False),
    Frame(Opcode.CONT, b"six"),
    Frame(Opcode.BINARY, b"7" * 70_000),
    Frame(Opcode.TEXT, b"eight"),
]
HEARD = ["one", b"", bytes(range(126)), "f\u00fcnf and six", b"7" * 70_000, "eight"]


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """Nobody reads."""

    def resume_reading(self) -> None:
        """Nobody reads."""


class Heard:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[str | bytes] = []
        self.is_lost = False

    def hear(self, message: str | bytes) -> None:
        self.messages.append(message)

    def lose(self) -> None:
        self.is_lost = True

    def resume(self) -> None:
        """It has nothing to send."""


def heard_of(
    data: bytes, size: int = MOST_BYTES, headers: str = "", answers: Sequence[str | bytes] = ()
) -> tuple[Heard, bytes]:
    """What a listener hears of a client's bytes that come in pieces of a size, and what the client is sent."""

    async def run() -> tuple[Heard, bytes]:
        heard, is_over = Heard(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            scope["extensions"][DIRECT].listen(heard)
            await is_over.wait()

        config = uvicorn.Config(app, ws_max_size=MOST_BYTES, ws_ping_interval=None, log_level="critical")
        config.load()
        protocol, transport = WebSocketProtocol(config, ServerState(), {}), Transport()
        protocol.connection_made(transport)
        protocol.data_received(HANDSHAKE.format(headers).encode())
        while not transport.written:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        _, _, transport.written = transport.written.partition(b"\r\n\r\n")
        for at in range(0, len(data), size):
            protocol.data_received(data[at : at + size])
        for answer in answers:
            assert protocol.say(answer)
        is_over.set()
        await asyncio.gather(*protocol.tasks)
        return heard, transport.written

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 130, 4096, 1 << 20])
def test_messages_are_heard_whole_in_whatever_pieces_they_come(size: int) -> None:
    heard, written = heard_of(b"".join(frame.serialize(mask=True) for frame in FRAMES), size)
    assert heard.messages == HEARD
    pongs = [Frame(Opcode.PONG, data).serialize(mask=False) for data in (b"there?", b"still?")]
    assert written == b"".join(pongs)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_compressed_messages_are_heard_too(size: int) -> None:
    deflate = PerMessageDeflate(False, False, 15, 15)
    data = b"".join(frame.serialize(mask=True, extensions=[deflate]) for frame in FRAMES)
    heard, written = heard_of(data, size, DEFLATED, answers=["x" * 1000])
    assert heard.messages == HEARD
    assert len(written) < 500, "answers are compressed too"


@pytest.mark.parametrize("content", ["", "text", b"bytes", b"1" * 125, b"2" * 126, "3" * 65_535, b"4" * 65_536])
def test_a_message_is_sent_as_the_library_sends_it(content: str | bytes) -> None:
    kind, data = (Opcode.TEXT, content.encode()) if isinstance(content, str) else (Opcode.BINARY, content)
    assert heard_of(b"", answers=[content])[1] == Frame(kind, data).serialize(mask=False)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (Frame(Opcode.TEXT, b"\xff").serialize(mask=True), 1007),
        (Frame(Opcode.BINARY, bytes(MOST_BYTES + 1)).serialize(mask=True), 1009),
        (Frame(Opcode.BINARY, b"unmasked").serialize(mask=False), 1002),
        (Frame(Opcode.CONT, b"of nothing").serialize(mask=True), 1002),
        (b"\x83\x80\0\0\0\0", 1002),
    ],
    ids=["no text", "too long", "unmasked", "a part of nothing", "no kind"],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_is_wrong_ends_the_connection_after_what_came_before_it(wrong: bytes, code: int, size: int) -> None:
    right = Frame(Opcode.TEXT, b"right").serialize(mask=True)
    heard, written = heard_of(right + wrong + right, size)
    assert heard.messages == ["right"]
    assert heard.is_lost and written[2:4] == code.to_bytes(2, "big")
