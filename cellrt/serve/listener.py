"""A listening socket that front ends share: an idle front end takes the next connection.

uvicorn's own way takes all that wait at once, so one of several front ends would have all connections of a burst. Here
each takes one a round of its loop. A front end that is busy, hangs or has died leaves its connections to the others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

log = logging.getLogger("cellrt")
AGAIN_S = 1.0
"""The seconds before the next try to accept a connection after there was no descriptor or memory for one."""


class Listener:
    """An acceptor of connections, from its construction until it is closed.

    Args:
        sock: the listening socket; other processes may have it too.
        make_protocol: makes the protocol that serves one connection.
    """

    def __init__(self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._make_protocol = sock, make_protocol
        self._connecting: set[asyncio.Task[object]] = set()
        self._is_closed = False
        sock.setblocking(False)
        self._listen()

    async def close(self) -> None:
        """Accept no more connections, and wait until the accepted ones have their protocols."""
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock, self._take_one)

    def _take_one(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another front end has it, or the client is gone
            return
        except OSError as error:
            log.warning("a connection could not be taken: %s", error)
            self._loop.remove_reader(self._sock)
            self._loop.call_later(AGAIN_S, self._listen)
            return
        connecting = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, connection))
        self._connecting.add(connecting)
        connecting.add_done_callback(partial(self._note_connected, connection))

    def _note_connected(self, connection: socket.socket, connecting: asyncio.Task[object]) -> None:
        self._connecting.discard(connecting)
        if not connecting.cancelled() and (error := connecting.exception()) is not None:
            log.warning("a connection could not be taken: %s", error)
            connection.close()
