"""Front ends share a listening socket: each takes one connection a round, and a free one those that another leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack

import httpx
import pytest

from cellrt.serve.listener import Listener
from tests.serve.helpers import WAIT_S, Server, children, start
from tests.waiting import until

SOON_S = 5.0
"""Shorter than a front end needs to start."""


class Counted(asyncio.Protocol):
    """A connection; ``made``: all of them."""

    def __init__(self, made: list[Counted]) -> None:
        made.append(self)


async def test_of_connections_that_wait_one_a_round_is_taken() -> None:
    made: list[Counted] = []
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for _ in range(8):
            stack.enter_context(socket.create_connection(sock.getsockname()))
        listener = Listener(sock, lambda: Counted(made))
        for _ in range(100):
            before = len(made)
            await asyncio.sleep(0)
            assert len(made) - before <= 1, "the others are for whoever shares the socket"
        assert len(made) == 8
        stack.enter_context(socket.create_connection(sock.getsockname()))
        await listener.close()
        await asyncio.sleep(0.01)
        assert len(made) == 8


def ask_anew(server: Server, timeout_s: float) -> int:
    """The status of a request by a connection of its own."""
    with httpx.Client(base_url=server.url, timeout=timeout_s, trust_env=False) as fresh:
        return fresh.post("/v1/models/chain/infer", json={"request": [[1, 2]]}).status_code


@pytest.mark.slow
def test_a_front_end_that_hangs_or_dies_leaves_its_connections_to_the_other() -> None:
    with start("chain", options=["--front-ends", "2"]) as server:
        first, second = before = children(server, "front_end")
        for stopped in (second, first):
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert ask_anew(server, WAIT_S) == 200  # the other may not have been there yet
                assert {ask_anew(server, SOON_S) for _ in range(20)} == {200}
            finally:
                os.kill(stopped, signal.SIGCONT)
        os.kill(first, signal.SIGKILL)
        assert {ask_anew(server, SOON_S) for _ in range(20)} == {200}
        until(lambda: len(set(children(server, "front_end")) - set(before)) == 1, "another is started")
