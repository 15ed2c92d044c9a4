"""What somebody waits for that a turn, or the other end of a connection, says.

Conditions and events of ``threading`` are none for this: an exception out of a signal's handler that comes while one is
taken leaves its lock held, and whoever should wake the others then waits for it.
"""

from __future__ import annotations

import time
from _thread import TIMEOUT_MAX, LockType, allocate_lock
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cellrt.errors import CellrtError

LOOK_EVERY_S = 0.5
"""How often who waits looks by itself: a thread that was interrupted may not have rung."""


class Awaited:
    """Something that will be said once; ``then`` is called by whoever says it."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self._unsaid = allocate_lock()
        self._unsaid.acquire()
        self._then = then
        self.value: Any = None
        self.blob = b""
        self.error: CellrtError | None = None

    def say(self, value: Any = None, blob: bytes = b"", error: CellrtError | None = None) -> None:
        """Takes in what was said."""
        self.value, self.blob, self.error = value, blob, error
        with suppress(RuntimeError):  # it was said before
            self._unsaid.release()
        if self._then is not None:
            self._then()

    def when_said(self, then: Callable[[], object]) -> None:
        """Calls a function when it is said, or now if it was; in a moment between, twice."""
        self._then = then
        if self.wait(0):
            then()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits; False if nothing was said within so many seconds. The end of an engine or a connection says something
        too."""
        if not self._unsaid.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), TIMEOUT_MAX)):
            return False
        with suppress(RuntimeError):  # it was said again meanwhile
            self._unsaid.release()
        return True


class Bell:
    """Rung when something may have come to be so; for any number of threads."""

    def __init__(self) -> None:
        self._sleepers: list[LockType] = []
        """Of each thread that waits a lock, held until the bell rings."""

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until something is so; False if it is not after so many seconds."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while not is_so():
            left_s = LOOK_EVERY_S if end_s is None else min(LOOK_EVERY_S, end_s - time.monotonic())
            if left_s <= 0:
                return False
            lock = allocate_lock()
            lock.acquire()
            self._sleepers.append(lock)
            if not is_so():  # who rings after this look finds the lock
                lock.acquire(timeout=left_s)
            with suppress(ValueError):
                self._sleepers.remove(lock)
        return True

    def ring(self) -> None:
        """Wakes all who wait; they look."""
        while self._sleepers:
            with suppress(IndexError):  # another thread has woken the last
                self._sleepers.pop().release()
