"""What a client has asked that is not answered: requests that run in another process, and calls."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from cellrt.engine.awaited import Awaited, Bell
from cellrt.engine.future import Owner, RequestFuture, finish_together
from cellrt.engine.stream import Channel
from cellrt.errors import CellrtError
from cellrt.process.binding import RowFormat
from cellrt.process.blame import heard
from cellrt.process.outcomes import Arrived, read_outcomes
from cellrt.process.recorded import LENGTH, Template
from cellrt.process.wire import Kind


class RemoteFuture(RequestFuture):
    """A future whose request runs in another process; ``id`` is its number on the connection."""

    when_ended: Callable[[RequestFuture], object] | None = None
    """Called by who takes in that it has ended together with others (``Kindred.tell``); for whoever submitted it."""

    def __init__(self, owner: Owner, id: int) -> None:
        super().__init__(owner)
        self.id = id


Tell = Callable[[list[RemoteFuture]], object]
"""Told, by the thread that hears answers, of requests that have ended together, instead of each one's callbacks."""


class Kindred(NamedTuple):
    """What requests of one submission and one graph have in common; ``tell``: who hears of their ends, if anybody."""

    template: Template
    formats: Sequence[RowFormat]
    channel: Channel | None
    tell: Tell | None


Pending = tuple[RemoteFuture, Kindred]
"""A request that has not ended."""


class Unanswered:
    """See the module. The one thread that hears answers takes them in; others add, forget and wait.

    Attributes:
        pending: requests by number.
        awaited: calls by number, and requests that wait for places by the number of their first.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Pending] = {}
        self.awaited: dict[int, Awaited] = {}
        self._fewer = Bell()

    def forget(self, ids: Iterable[int]) -> list[int]:
        """Takes out requests, whatever comes of them; returns those of them that were there."""
        gone = [id for id in ids if self.pending.pop(id, None) is not None]
        self._note_gone()
        return gone

    def drain(self, timeout: float | None) -> bool:
        """Waits until all requests have ended; False after so many seconds."""
        return self._fewer.wait_for(lambda: not self.pending, timeout)

    def end(self, error: CellrtError) -> None:
        """Ends all that waits for an answer; nobody adds any more."""
        pending, self.pending = list(self.pending.values()), {}
        awaited, self.awaited = list(self.awaited.values()), {}
        for one in awaited:
            one.say(error=copied(error))
        for future, kindred in pending:
            _fail(future, kindred, copied(error))
        self._note_gone()

    def take(self, kind: int, body: memoryview) -> None:
        """Takes in a message of results, errors or answers."""
        if kind == Kind.OUTCOMES:
            self._take_outcomes(body)
        elif kind == Kind.ERRORS:
            for id, told in json.loads(bytes(body)):
                self._take_error(id, heard(told))
            self._note_gone()
        elif kind == Kind.ACCEPTED:
            self._say(*struct.unpack("<Q", body))
        elif kind == Kind.ANSWER:
            self._take_answer(body)

    def _known(self, id: int) -> tuple[Template, Sequence[RowFormat]] | None:
        pending = self.pending.get(id)
        return None if pending is None else (pending[1].template, pending[1].formats)

    def _take_outcomes(self, body: memoryview) -> None:
        """Hands streams their steps, then ends all that has ended."""
        ended: list[RequestFuture] = []
        arrived, steps = Arrived(), Arrived()
        stepped: dict[Channel, None] = {}
        told: dict[Tell, list[RemoteFuture]] = {}
        for id, is_end, outcome in read_outcomes(body, self._known):
            if is_end:
                if (pending := self.pending.pop(id, None)) is not None:
                    future, kindred = pending
                    ended.append(future)
                    arrived.add(outcome)
                    if kindred.tell is not None:
                        told.setdefault(kindred.tell, []).append(future)
            elif (waiting := self.pending.get(id)) is not None and (channel := waiting[1].channel) is not None:
                channel.put(steps, steps.add(outcome))
                stepped[channel] = None
        for channel in stepped:
            channel.wake()
        finish_together((arrived, number, future) for number, future in enumerate(ended))
        for tell, futures in told.items():
            tell(futures)
        self._note_gone()

    def _take_error(self, id: int, error: CellrtError) -> None:
        self._say(id, error)
        if (pending := self.pending.pop(id, None)) is not None:
            _fail(*pending, error)

    def _say(self, number: int, error: CellrtError | None = None) -> None:
        if (awaited := self.awaited.pop(number, None)) is not None:
            awaited.say(error=error)

    def _take_answer(self, body: memoryview) -> None:
        (size,) = LENGTH.unpack_from(body)
        head = json.loads(bytes(body[LENGTH.size : LENGTH.size + size]))
        if (awaited := self.awaited.pop(head["call"], None)) is not None:
            error = heard(head["error"]) if head["error"] is not None else None
            awaited.say(head["value"], bytes(body[LENGTH.size + size :]), error)

    def _note_gone(self) -> None:
        """Takes in that requests have ended."""
        if not self.pending:
            self._fewer.ring()


async def when_accepted(hand_in: Callable[[Awaited], Sequence[RequestFuture]]) -> Sequence[RequestFuture]:
    """The futures of requests that a function hands in, when they have places; others of the loop go on meanwhile.

    Who is cancelled meanwhile cancels them. Raises why they get none.
    """
    loop, said = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(said.set)

    accepted = Awaited(wake)
    futures = hand_in(accepted)
    try:
        if futures:
            await said.wait()
    except asyncio.CancelledError:
        for future in futures:
            future.cancel()
        raise
    if accepted.error is not None:
        raise accepted.error
    return futures


def _fail(future: RemoteFuture, kindred: Kindred, error: CellrtError) -> None:
    future.finish(error)
    if kindred.tell is not None:
        kindred.tell([future])


def copied(error: CellrtError) -> CellrtError:
    """An error for each who gets it: whoever raises one adds to it."""
    made = type(error)(str(error))
    made.__cause__ = error.__cause__
    return made
