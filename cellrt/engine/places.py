"""Places in the queues: how many requests of an engine, or of one model, are unfinished, and how many may be.

Clients count up what they hand in, under the gate; the holder of the turn counts what it accepts and what has ended.
So nobody needs a lock for the other's number, and a client that was interrupted between counting and handing in is put
right by ``heal``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cellrt.errors import DeadlineError, EngineClosedError, OverloadError, RequestTooLargeError


class Places:
    """The queue of one engine, or the part of it that one model may fill. ``limit`` None: any number."""

    __slots__ = ("_num_accepted", "_num_ended", "_num_taken", "limit", "owner")

    def __init__(self, owner: str, limit: int | None) -> None:
        self.owner, self.limit = owner, limit
        self._num_taken = self._num_accepted = self._num_ended = 0

    @property
    def num_unfinished(self) -> int:
        """Requests handed in that have not ended."""
        return self._num_taken - self._num_ended

    def has_room(self, count: int) -> bool:
        """Whether so many more may be handed in now."""
        return self.limit is None or self.num_unfinished + count <= self.limit

    def check(self, count: int) -> None:
        """Raises RequestTooLargeError if so many will never fit, OverloadError if they do not fit now."""
        if self.has_room(count):
            return
        if self.limit is not None and count > self.limit:
            raise RequestTooLargeError(f"{count} requests at once; {self.owner} takes {self.limit}: hand in fewer")
        more = f"; {count} more came" if count > 1 else ""
        raise OverloadError(f"{self.num_unfinished} requests are unfinished, {self.owner} takes {self.limit}{more}")

    def take(self, count: int) -> None:
        """Counts requests that are about to be handed in; under the gate."""
        self._num_taken += count

    def note_accepted(self, count: int) -> None:
        """Counts requests that a turn has seen."""
        self._num_accepted += count

    def give_back(self, count: int) -> None:
        """Counts requests that have ended; in a turn."""
        self._num_ended += count

    def heal(self) -> None:
        """Forgets places taken for requests that never came; in a turn, under the gate, with an empty inbox."""
        self._num_taken = self._num_accepted


class Room:
    """Where clients wait for places, instead of being refused. ``gate``: what is held while places are counted."""

    def __init__(self, gate: threading.RLock) -> None:
        self._changed = threading.Condition(gate)
        self._num_waiting = 0
        self._wakes: list[Callable[[], object]] = []

    @contextmanager
    def watched(self, wake: Callable[[], object]) -> Iterator[None]:
        """While one is inside, ``wake`` is called whenever a place may have become free; in a turn."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)

    def wait(self, places: Sequence[Places], count: int, end_s: float | None, is_closed: threading.Event) -> None:
        """Waits, holding the gate, until there are ``count`` places in each.

        Args:
            places: of the engine and of the model.
            count: places wanted.
            end_s: when to give up, on the monotonic clock; None: never.
            is_closed: set once nothing ends any more.

        Raises RequestTooLargeError, DeadlineError, EngineClosedError.
        """
        self._num_waiting += 1
        try:
            while not all(one.has_room(count) for one in places):
                for one in places:
                    if one.limit is not None and count > one.limit:
                        one.check(count)
                if is_closed.is_set():
                    raise EngineClosedError("the engine closed while a request waited for a place in its queue")
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise DeadlineError("the deadline passed while the request waited for a place in the queue")
                self._changed.wait(left_s)
        finally:
            self._num_waiting -= 1

    def note_place(self) -> None:
        """Takes in that a place may have become free; in a turn."""
        for wake in tuple(self._wakes):
            wake()
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()
