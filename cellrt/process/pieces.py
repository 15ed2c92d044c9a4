"""Batches of requests of many sessions: those that a loop submits in one round go to the engine's process as one
packet.

A packet for each request would wake that process as often, and a task there would have only the rows of requests that
have come: under load that is most of the cost of a stream's piece.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture
from cellrt.engine.mailbox import mailbox_of
from cellrt.errors import CellrtError, InternalError
from cellrt.process.pending import RemoteFuture
from cellrt.process.remote_session import RemoteSession

if TYPE_CHECKING:
    from cellrt.process.client import Client

log = logging.getLogger("cellrt")
Begun = Callable[[RequestFuture | CellrtError], object]
"""A callback that gets the future of a submitted request, or the error for which it was refused."""
Ended = Callable[[RequestFuture], object]
"""A callback that the loop calls with an ended request, after ``Begun``."""
Piece = tuple[RemoteSession, Any, Begun, Ended | None]
"""A request of a session that is about to be submitted, and its callbacks."""
How = tuple[object, Due, int]
"""The common options of requests that go together: binding, deadlines and priority."""


class Pieces:
    """The requests of one round of a loop. Belongs to one client and to one loop, in its thread.

    Each request is treated as if it came alone: one that is refused refuses no other. Answers that come together are
    one
    call of the loop.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox_of(self._loop)
        self._waves: list[dict[How, list[Piece]]] = []
        """Waves of requests. Each has at most one request of a session; the first wave is submitted first."""
        self._num_of: dict[int, int] = {}
        """The number of waiting requests of each session, by its number."""

    def submit(
        self, session: RemoteSession, request: Any, due: Due, priority: int, begun: Begun, ended: Ended | None = None
    ) -> None:
        """Submit a request at the end of the round, after earlier ones of its session."""
        number = session._number
        wave = self._num_of.get(number, 0)
        self._num_of[number] = wave + 1
        if wave == len(self._waves):
            if not wave:
                self._loop.call_soon(self._hand_in)
            self._waves.append({})
        how = session._binding, due, priority
        self._waves[wave].setdefault(how, []).append((session, request, begun, ended))

    def _hand_in(self) -> None:
        waves, self._waves = self._waves, []
        self._num_of.clear()
        for wave in waves:
            for (_, due, priority), pieces in wave.items():
                self._hand_in_some(pieces, due, priority)

    def _hand_in_some(self, pieces: Sequence[Piece], due: Due, priority: int) -> None:
        """Submit requests together; if that fails, submit each by itself."""
        binding = pieces[0][0]._binding
        numbers = [session._number for session, *_ in pieces]
        requests = [request for _, request, *_ in pieces]
        told: Sequence[RequestFuture | CellrtError]
        try:
            told = self._client._hand_in_each(binding, requests, numbers, due, priority, self._leave_ended)
        except CellrtError as error:
            if len(pieces) > 1:
                for piece in pieces:
                    self._hand_in_some([piece], due, priority)
                return
            told = [error]
        except Exception as bug:  # else their callbacks would never be called; not again: they may be submitted
            log.exception("requests of sessions could not be handed in")
            told = [InternalError(f"{type(bug).__name__}: {bug}") for _ in pieces]
        for (_, _, begun, ended), its in zip(pieces, told):
            if isinstance(its, RemoteFuture):
                its.when_ended = ended
            begun(its)

    def _leave_ended(self, futures: list[RemoteFuture]) -> None:
        """Pass the ends of requests from a thread of the client's to the loop, which then knows of their begin."""
        with suppress(RuntimeError):  # the loop is closed, and with it the callbacks
            self._mailbox.put(partial(_tell_ended, futures))


def _tell_ended(futures: list[RemoteFuture]) -> None:
    for future in futures:
        if future.when_ended is not None:
            future.when_ended(future)
