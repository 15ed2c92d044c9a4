"""How long connections stay: idle ones, half closed ones, and websockets whose clients do not answer pings."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest
import uvicorn
from uvicorn.server import ServerState

from cellrt.serve.connection import HttpProtocol
from tests.serve.helpers import Server, start
from tests.steps import HOLD, HOLD_LONG
from tests.waiting import until

websocket = pytest.importorskip("websockets.sync.client")
KEEP_ALIVE_S, PING_TIMEOUT_S = 1.5, 0.4
WAIT_S = 30.0
LIMITS = "[limits]\nmax_streams_per_connection = 1\nmax_body_bytes = 1200\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for nobody long, and takes little at once."""
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text(f"keep-alive-s = {KEEP_ALIVE_S}\n{LIMITS}")
    with start("chain", options=["--config", str(path), "--ping-timeout-s", str(PING_TIMEOUT_S)]) as made:
        yield made


def opened(server: Server) -> socket.socket:
    return socket.create_connection((server.http.base_url.host, server.http.base_url.port), WAIT_S)


def asking(rows: list[list[float]]) -> bytes:
    body = json.dumps({"request": rows}).encode()
    return b"POST /v1/models/chain/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def read_all(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_an_idle_connection_is_used_again_within_its_time_and_closed_after_it(hasty: Server) -> None:
    with opened(hasty) as sock:
        for _ in range(2):
            sock.sendall(asking([[1, 2]]))
            answer = HTTPResponse(sock)
            answer.begin()
            assert answer.status == 200 and answer.read()
            time.sleep(0.3 * KEEP_ALIVE_S)
        begin_s = time.monotonic()
        assert read_all(sock) == b"" and time.monotonic() - begin_s > 0.3 * KEEP_ALIVE_S


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_closes_its_half_after_asking_is_answered(server: Server, count: int) -> None:
    with opened(server) as sock:
        sock.sendall(count * asking([[HOLD, 0]] * 5))
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).count(b"HTTP/1.1 200") == count


def test_a_client_that_closes_its_half_before_it_has_asked_all_is_left(server: Server) -> None:
    with opened(server) as sock:
        sock.sendall(asking([[1, 2]])[:-2])
        sock.shutdown(socket.SHUT_WR)
        assert b"200" not in read_all(sock)


def test_a_client_that_is_gone_without_a_word_frees_its_request(server: Server) -> None:
    with opened(server) as sock:
        sock.sendall(asking([[HOLD_LONG, 0]] * 100))
        until(lambda: server.unfinished() == 1, "it is under way")
    until(lambda: server.unfinished() == 0, "it is given up", 5.0)


def test_a_websocket_whose_client_answers_no_ping_is_closed(hasty: Server) -> None:
    head = [f"GET /v1/models/chain/session HTTP/1.1\r\nHost: {hasty.address}\r\nUpgrade: websocket\r\n"]
    head += ["Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"]
    with opened(hasty) as sock:
        sock.sendall("".join(head).encode())
        got = read_all(sock)
    assert got.startswith(b"HTTP/1.1 101") and b"keepalive ping timeout" in got


def test_a_websocket_whose_answers_to_pings_nobody_reads_for_its_many_messages_stays(hasty: Server) -> None:
    with websocket.connect(f"ws://{hasty.address}/v1/models/chain/session", proxy=None) as sock:
        for _ in range(5):
            sock.send(json.dumps({"request": [[HOLD_LONG, 0]] * 5}))
        assert [json.loads(sock.recv(WAIT_S))["number"] for _ in range(5)] == [*range(5)]


class Transport(asyncio.Transport):
    """Nobody is at its other end."""

    is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        """It is lost anyway."""


def test_who_watches_a_connection_is_told_of_its_loss_unless_that_has_ended() -> None:
    told: list[str] = []

    async def lose() -> None:
        protocol = HttpProtocol(uvicorn.Config(lambda: None), ServerState(), {})
        protocol.connection_made(Transport())
        protocol.watch(lambda: told.append("first"))
        protocol.watch(lambda: told.append("ended"))()
        protocol.connection_lost(None)
        protocol.watch(lambda: told.append("late"))
        assert told == ["first"]
        await asyncio.sleep(0)

    asyncio.run(lose())
    assert told == ["first", "late"]


def test_a_connection_that_is_watched_is_read_else_nobody_sees_its_loss() -> None:
    async def watch() -> Transport:
        transport = Transport()
        protocol = HttpProtocol(uvicorn.Config(lambda: None), ServerState(), {})
        protocol.connection_made(transport)
        protocol.flow.pause_reading()
        protocol.watch(lambda: None)
        return transport

    assert asyncio.run(watch()).is_reading
