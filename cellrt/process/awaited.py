"""What somebody waits for that the other end of a connection says.

Conditions and events of ``threading`` are none for this: an exception out of a signal's handler that comes while one is
taken leaves its lock held, and whoever should wake the others then waits for it.
"""

from __future__ import annotations

import time
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cellrt.errors import CellrtError

LOOK_EVERY_S = 0.5
"""How often who waits looks by itself: a thread that was interrupted may not have rung."""


class Awaited:
    """Something that the engine's process will say once; ``then`` is called by whoever hears it."""

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
        self._unsaid.release()
        if self._then is not None:
            self._then()

    def wait(self) -> None:
        """Waits; the end of the connection says something too."""
        with self._unsaid:
            pass


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
