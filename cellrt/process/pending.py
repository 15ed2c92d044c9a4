"""The unanswered calls and requests of a client."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from cellrt.engine.awaited import Awaited, Bell
from cellrt.engine.future import OVER, Owner, RequestFuture, Result, finish_together
from cellrt.engine.future import Outcome as Ended
from cellrt.engine.sleeper import own_sleeper
from cellrt.engine.stream import Channel
from cellrt.errors import CellrtError
from cellrt.native.answer_wait import have_told, is_elsewhere, is_there, rouse
from cellrt.process.model_binding import RowFormat
from cellrt.process.outcomes import Arrived, read_outcomes
from cellrt.process.recorded import LENGTH, Template
from cellrt.process.region import Region
from cellrt.process.wire import Kind
from cellrt.process.wire_errors import decode_error

UNKNOWN = -1


class Line:
    """The order of what a session is asked: its next request goes by the region if all is done that was asked before.

    The engine may give back what came by the region, and then has it behind what comes there later. A message it takes
    behind both.

    Attributes:
        last: the number of its last request: when that has results, all before it is done. 0: there was none; UNKNOWN:
            something was asked behind it, or it has failed.
        in_region: the number of its last request that went by the region; 0: there was none.
    """

    __slots__ = ("__weakref__", "in_region", "last")

    def __init__(self) -> None:
        self.last = self.in_region = 0


class RemoteFuture(RequestFuture):
    """A future of a request that runs in another process; ``id`` is its number on the connection."""

    index = number = 0
    when_ended: Callable[[RequestFuture], object] | None = None
    """A callback of the code that submitted the request; ``SentRequests.tell`` calls it."""

    region: Region | None = None
    slot = -1
    line: Line | None = None
    """The line of its session."""
    """The region and slot of its results, as long as ``word_at`` is set."""

    def __init__(self, owner: Owner, id: int) -> None:  # not the base's, which takes longer
        self._owner, self.id = owner, id

    @property
    def has_callbacks(self) -> bool:
        """True if the future was given callbacks."""
        return self._callbacks is not None

    @property
    def has_ended(self) -> bool:
        """True if this process knows that the request has ended."""
        return self._state in OVER

    def done(self) -> bool:
        """Return whether the request has ended."""
        region = self.region  # keeps the memory of the word alive
        if self._state not in OVER and region is not None and self.word_at and is_there(self.word_at):
            region.take_in(self)
        return self._state in OVER

    def add_done_callback(self, fn: Callable[[Future[Result]], object]) -> None:
        """Call ``fn(self)`` when the request has ended, in the client's thread, or at once if it has."""
        self.__dict__.setdefault("_callbacks", []).append(fn)
        region = self.region
        if region is not None and self.word_at and have_told(self.word_at):
            region.take_in(self, calls_back=False)
        if self._state in OVER:
            self._invoke_callbacks()

    def take_arrived(self, arrived: Arrived, number: int) -> None:
        """End the request with results, and wake the threads that wait; its callbacks are called later."""
        self._settle(arrived, OVER[1], number)

    def note_in_line(self) -> None:
        """Have its session's next request go by a message: what this one leaves behind is not known."""
        if self.line is not None:
            self.line.last = UNKNOWN

    def call_back(self) -> None:
        """Call its callbacks, each once."""
        self._invoke_callbacks()

    def leave_region(self) -> None:
        """Forget the region: the results have been read from it, or come by a message."""
        self.word_at, self.region = 0, None

    def _take_in(self, owner: Any) -> None:
        region = self.region
        if region is not None:
            region.take_in(self)

    def _wake(self) -> None:
        super()._wake()
        region = self.region
        if region is not None and self.word_at:
            rouse(self.word_at)
        self.leave_region()

    def _take(self, outcome: Ended, state: str, number: int) -> bool:
        is_taken = super()._take(outcome, state, number)
        if is_taken:
            self._wake()
        return is_taken

    def _wait(self, timeout: float | None) -> None:
        region = self.region
        if region is None or self.done():
            super()._wait(timeout)
            return
        self._refuse_to_wait()
        end_s = None if timeout is None else time.monotonic() + float(timeout)
        left_s, sleeper = timeout, own_sleeper()
        while not self.done():
            if left_s is not None and left_s <= 0.0:
                raise TimeoutError(f"the request has not ended within {timeout} s")
            word_at = self.word_at
            if not word_at or is_elsewhere(word_at):
                region.take_in(self)
                super()._wait(left_s)
                return
            sleeper.sleep_on(word_at, region.id_at(self.slot), self.id, left_s)
            if end_s is not None:
                left_s = end_s - time.monotonic()


Tell = Callable[[list[RemoteFuture]], object]
"""A function that the reader thread calls with requests that have ended together, instead of each one's callbacks."""


class SentRequests(NamedTuple):
    """The properties that requests of one submission and one graph share; ``tell`` is called when some have ended."""

    template: Template
    formats: Sequence[RowFormat]
    channel: Channel | None
    tell: Tell | None


Pending = tuple[RemoteFuture, SentRequests]
"""A request that has not ended."""


class Unanswered:
    """The unanswered calls and requests. The one reader thread handles answers; other threads add, forget and wait.

    Attributes:
        pending: the requests by number.
        awaited: the calls by number, and submissions that wait for room in the queue by their first request's number.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Pending] = {}
        self.awaited: dict[int, Awaited] = {}
        self._fewer = Bell()

    def forget(self, ids: Iterable[int]) -> list[int]:
        """Remove requests, whose answers are ignored from now on; return those that were pending."""
        gone = [id for id in ids if self.pending.pop(id, None) is not None]
        self._note_gone()
        return gone

    def note_ended(self, id: int) -> None:
        """Remove a request that has ended."""
        self.pending.pop(id, None)
        self._note_gone()

    def take_region(self, region: Region) -> None:
        """End the requests whose results are in the region."""
        arrived = Arrived()
        ended: list[tuple[Arrived, int, RemoteFuture]] = []
        for number, id in region.take_all(arrived):
            if (known := self.pending.get(id)) is not None:
                ended.append((arrived, number, known[0]))
            else:  # its client was interrupted before it had the future
                region.release(id)
        finish_together(ended)
        told: dict[Tell, list[RemoteFuture]] = {}
        for _, _, future in ended:
            known = self.pending.pop(future.id, None)
            if known is not None and (tell := known[1].tell) is not None:
                told.setdefault(tell, []).append(future)
            region.release(future.id)
        for tell, futures in told.items():
            tell(futures)
        if ended:
            self._note_gone()
        region.call_back()

    def drain(self, timeout: float | None) -> bool:
        """Wait until all requests have ended; return False after this many seconds."""
        return self._fewer.wait_for(lambda: not self.pending, timeout)

    def end(self, error: CellrtError) -> None:
        """End everything that waits for an answer. Nothing is added after this."""
        pending, self.pending = list(self.pending.values()), {}
        awaited, self.awaited = list(self.awaited.values()), {}
        for one in awaited:
            one.say(error=copied(error))
        for future, group in pending:
            _fail(future, group, copied(error))
        self._note_gone()

    def take(self, kind: int, body: memoryview) -> None:
        """Handle a message of results, errors or answers."""
        if kind == Kind.OUTCOMES:
            self._take_outcomes(body)
        elif kind == Kind.ERRORS:
            for id, told in json.loads(bytes(body)):
                self._take_error(id, decode_error(told))
            self._note_gone()
        elif kind == Kind.ACCEPTED:
            self._say(*struct.unpack("<Q", body))
        elif kind == Kind.ANSWER:
            self._take_answer(body)

    def _take_outcomes(self, body: memoryview) -> None:
        """Put steps into the channels of streams, then end the requests that have ended."""
        ended: list[RemoteFuture] = []
        arrived, steps = Arrived(), Arrived()
        stepped: dict[Channel, None] = {}
        told: dict[Tell, list[RemoteFuture]] = {}
        pending = self.pending
        for id, is_end, memory, places in read_outcomes(body, pending):
            known = pending.pop(id, None) if is_end else pending.get(id)
            if known is None:  # it was cancelled
                continue
            future, (template, formats, channel, tell) = known
            outcome = memory, places, template, formats
            if is_end:
                ended.append(future)
                arrived.add(outcome)
                if tell is not None:
                    told.setdefault(tell, []).append(future)
            elif channel is not None:
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
            error = decode_error(head["error"]) if head["error"] is not None else None
            awaited.say(head["value"], bytes(body[LENGTH.size + size :]), error)

    def _note_gone(self) -> None:
        """Notify waiting threads if all requests have ended."""
        if not self.pending:
            self._fewer.ring()


async def when_accepted(hand_in: Callable[[Awaited], Sequence[RequestFuture]]) -> Sequence[RequestFuture]:
    """Return the futures of requests that a function submits, once they have room in the queue.

    The event loop goes on meanwhile. Cancelling the task cancels the requests. Raise the error with which the engine
    refuses them.
    """
    loop, said = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: its tasks wait no more
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


def _fail(future: RemoteFuture, group: SentRequests, error: CellrtError) -> None:
    future.note_in_line()
    future.finish(error)
    if group.tell is not None:
        group.tell([future])


def copied(error: CellrtError) -> CellrtError:
    """Return a copy of an error: threads that raise the same error each need one, as raising changes its traceback."""
    made = type(error)(str(error))
    made.__cause__ = error.__cause__
    return made
