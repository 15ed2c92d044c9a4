"""What a loop asks of many sessions between two of its rounds goes to the engine's process as one packet.

A packet a request wakes that process as often, and a task there has only the rows of those that have come: under load
that is most of what a piece of a stream costs.
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
"""Told of a request that was handed in, or why it could not be."""
Ended = Callable[[RequestFuture], object]
"""Told of its end, behind that; by the loop."""
Piece = tuple[RemoteSession, Any, Begun, Ended | None]
"""A request of a session that is about to be handed in, and who is told."""
How = tuple[object, Due, int]
"""What requests have in common that go together: binding, deadlines and priority."""


class Pieces:
    """See the module. For the sessions of one client and for one loop, in its thread.

    Each request is as if it came alone: one that is refused refuses no other. Answers that come together are one call
    of the loop.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox_of(self._loop)
        self._waves: list[dict[How, list[Piece]]] = []
        """Each has at most one request of a session: that of the first wave goes first."""
        self._num_of: dict[int, int] = {}
        """Requests of each session that wait, by its number."""

    def submit(
        self, session: RemoteSession, request: Any, due: Due, priority: int, begun: Begun, ended: Ended | None = None
    ) -> None:
        """Has a request handed in at the end of the round, after those of its session before it."""
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
        """Hands requests in; if that cannot be, each by itself."""
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
        except Exception as bug:  # nobody else would tell those who wait; they may have been handed in: never again
            log.exception("requests of sessions could not be handed in")
            told = [InternalError(f"{type(bug).__name__}: {bug}") for _ in pieces]
        for (_, _, begun, ended), its in zip(pieces, told):
            if isinstance(its, RemoteFuture):
                its.when_ended = ended
            begun(its)

    def _leave_ended(self, futures: list[RemoteFuture]) -> None:
        """In a thread of the client's: leaves the ends of requests to the loop, which has heard of their begin then."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self._mailbox.put(partial(_tell_ended, futures))


def _tell_ended(futures: list[RemoteFuture]) -> None:
    for future in futures:
        if future.when_ended is not None:
            future.when_ended(future)
