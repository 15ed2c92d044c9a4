"""Let a thread sleep until another thread wakes it, also one in compiled code without the interpreter lock."""

from __future__ import annotations

import threading
from contextlib import suppress
from time import perf_counter_ns

import numpy as np

from cellrt.native.answer_wait import comes_soon, sleep_here, sleep_until_there, stop_waiting
from cellrt.native.futex import MAY_SPIN, NEVER, NS, SPIN_NS, roused, slept
from cellrt.native.row_types import CACHE_LINE, Rows

_AWAKE, _ASLEEP = range(2)
_TOGETHER, _LINE = 64, CACHE_LINE // 8
_LONGEST_S = 1e6
FEW, MANY = 4, 8
"""After ``FEW`` short sleeps a thread polls for results before it sleeps. If none come while it polls, it polls again
only after ``FEW + MANY`` short sleeps, as other threads may need the processor."""


class Sleeper:
    """A word that a thread sleeps on.

    Its memory is never freed, as a waker may be late. It is handed from one thread to another, so a thread that is
    woken must check whether what it waits for has come.
    """

    __slots__ = ("_at", "_num_short", "_words")

    def __init__(self, words: Rows[int], at: int) -> None:
        self._words, self._at, self._num_short = words, at, 0

    def lie_down(self) -> None:
        """Announce a sleep: a ``wake`` from now on ends it, even before it begins. Then check, and then sleep."""
        self._words[self._at] = _ASLEEP

    def sleep(self, word_at: int, seconds: float | None) -> None:
        """Sleep until it is woken, a signal comes or this many seconds have passed.

        Given the address of a client's word (0: none), the sleep also ends when results are there.
        """
        if word_at:
            self._sleep_until_there(word_at, _ns_of(seconds))
        else:
            slept(self._words, self._at, _ASLEEP, _ns_of(seconds))

    def sleep_on(self, word_at: int, id_at: int, id: int, seconds: float | None) -> None:
        """Sleep on a word that another process changes, too, until results are there or ``rouse`` is called.

        The sleep lasts at most this many seconds. See ``sleep_here``.
        """
        self._sleep_until_there(word_at, _ns_of(seconds), id_at, id)

    def _sleep_until_there(self, word_at: int, limit_ns: int, id_at: int = 0, id: int = 0) -> None:
        if self._num_short >= FEW and not 0 <= limit_ns < SPIN_NS:
            if comes_soon(word_at):
                return
            self._num_short = -MANY
        begin_ns = perf_counter_ns()
        if id_at:
            sleep_here(word_at, id_at, id, limit_ns)
        else:
            sleep_until_there(word_at, self._words, self._at, limit_ns)
        if MAY_SPIN and perf_counter_ns() - begin_ns < 2 * SPIN_NS:
            self._num_short += 1

    def get_up(self) -> None:
        """End the sleep. An outer sleep of this thread, interrupted by a signal's handler, then checks again first."""
        self._words[self._at] = _AWAKE

    def leave(self, word_at: int) -> None:
        """Stop waiting for a client's word."""
        stop_waiting(word_at, self._words, self._at)

    def wake(self) -> None:
        """Wake the thread that sleeps; called from any thread."""
        roused(self._words, self._at, _AWAKE)


def _ns_of(seconds: float | None) -> int:
    return NEVER if seconds is None or seconds > _LONGEST_S else int(NS * seconds)


_free: list[Sleeper] = []


class _Own:
    """The sleeper of a thread, as long as that lives."""

    sleeper: Sleeper | None = None

    def __init__(self) -> None:
        with suppress(IndexError):
            self.sleeper = _free.pop()
            return
        words: Rows[int] = np.zeros(_TOGETHER * _LINE, np.int64)  # type: ignore[assignment]
        made = [Sleeper(words, at) for at in range(0, words.size, _LINE)]
        self.sleeper = made.pop()
        _free.extend(made)

    def __del__(self, free: list[Sleeper] = _free) -> None:
        if self.sleeper is not None:  # a signal's handler may have raised before
            free.append(self.sleeper)


_of_threads = threading.local()


def own_sleeper() -> Sleeper:
    """Return the sleeper of the calling thread. One sleep may begin inside another, in a signal's handler."""
    try:
        own: Sleeper = _of_threads.own.sleeper
    except AttributeError:
        _of_threads.own = _Own()
        own = _of_threads.own.sleeper
    return own
