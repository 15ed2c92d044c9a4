"""Answers that a thread waits for, from a turn or from the other end of a connection.

Conditions and events of ``threading`` are not safe for this: an exception from a signal's handler that comes while one
is taken leaves its lock held, and the thread that should wake the others then waits for it.
"""

from __future__ import annotations

import time
from _thread import TIMEOUT_MAX, LockType, allocate_lock
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cellrt.errors import CellrtError

LOOK_EVERY_S = 0.5
"""The seconds after which a waiting thread looks by itself: a thread that was interrupted may not have rung."""


class Awaited:
    """An answer that is given once; ``then`` is called by the thread that gives it."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self._unsaid = allocate_lock()
        self._unsaid.acquire()
        self._then = then
        self.value: Any = None
        self.blob = b""
        self.error: CellrtError | None = None

    def say(self, value: Any = None, blob: bytes = b"", error: CellrtError | None = None) -> None:
        """Give the answer."""
        self.value, self.blob, self.error = value, blob, error
        with suppress(RuntimeError):  # it was said before
            self._unsaid.release()
        if self._then is not None:
            self._then()

    def when_said(self, then: Callable[[], object]) -> None:
        """Call a function when the answer is given, or now if it was; at a moment in between, twice."""
        self._then = then
        if self.wait(0):
            then()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the answer; return False if none was given within this many seconds.

        The end of an engine or a connection gives an answer, too.
        """
        if not self._unsaid.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), TIMEOUT_MAX)):
            return False
        with suppress(RuntimeError):  # it was said again meanwhile
            self._unsaid.release()
        return True


class Bell:
    """A bell that is rung when a condition may have become true; for any number of threads."""

    def __init__(self) -> None:
        self._sleepers: list[LockType] = []
        """The lock of each thread that waits, held until the bell rings."""

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition is true; return False if it is not after this many seconds."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while not is_so():
            left_s = LOOK_EVERY_S if end_s is None else min(LOOK_EVERY_S, end_s - time.monotonic())
            if left_s <= 0:
                return False
            lock = allocate_lock()
            lock.acquire()
            self._sleepers.append(lock)
            if not is_so():  # a thread that rings after this check finds the lock
                lock.acquire(timeout=left_s)
            with suppress(ValueError):
                self._sleepers.remove(lock)
        return True

    def ring(self) -> None:
        """Wake all waiting threads, which check their conditions."""
        while self._sleepers:
            with suppress(IndexError):  # another thread has woken the last
                self._sleepers.pop().release()
