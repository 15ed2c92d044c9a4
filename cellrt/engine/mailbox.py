"""Calls that other threads hand to event loops: however many come at once, a loop is woken once."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary


class _Held(threading.local):
    """The mailboxes whose loops this thread wakes at the end of a block; None: it wakes each at once."""

    mailboxes: list[Mailbox] | None = None


_held = _Held()


class Mailbox:
    """The calls that a loop is to make. Safe from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], object]] = deque()
        self._is_told = False

    def put(self, call: Callable[[], object]) -> None:
        """Have the loop call a function. Raise RuntimeError if the loop is closed."""
        self._calls.append(call)  # before the look: a loop that is about to call the others then sees this one
        if self._is_told:
            return
        if _held.mailboxes is None:
            self._tell()
            return
        if (loop := self._loop()) is not None and loop.is_closed():
            raise RuntimeError("the event loop is closed")
        _held.mailboxes.append(self)

    def wake(self) -> None:
        """Wake the loop if it has calls that it was not woken for. Raise RuntimeError if it is closed."""
        if self._calls and not self._is_told:
            self._tell()

    def _tell(self) -> None:
        if (loop := self._loop()) is not None:
            self._is_told = True
            try:
                loop.call_soon_threadsafe(self._call_all)
            except BaseException:
                self._is_told = False
                raise

    def _call_all(self) -> None:
        self._is_told = False  # before the look: a call that comes after it wakes the loop again
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:  # one raised, or a signal's handler did: the others are called all the same
                self._tell()


class WakingAtTheEnd:
    """A block in which this thread's calls to mailboxes wake each loop only once, at the end.

    Waking a loop gives up the interpreter lock, and a loop that wakes takes it: a thread with more calls to make would
    then wait for the lock at each of them.
    """

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, _held.mailboxes = _held.mailboxes, []

    def __exit__(self, *_: object) -> None:
        told, _held.mailboxes = _held.mailboxes, self._outer
        if told:
            _wake(told)


def let_go() -> list[Mailbox] | None:
    """Wake the loops that have calls so far, before work that takes time or waits for a loop.

    During that work loops are woken at once. Return the argument for ``hold``, which is called after it.
    """
    told = _held.mailboxes
    if told is not None:
        _wake(told)
        _held.mailboxes = None
    return told


def hold(told: list[Mailbox] | None) -> None:
    """Go on as before ``let_go``."""
    _held.mailboxes = told


def _wake(told: list[Mailbox]) -> None:
    while told:
        with suppress(RuntimeError):  # its loop was closed meanwhile: nothing waits there any more
            told.pop().wake()


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the mailbox of the loop that runs in this thread."""
    return _mailboxes.get(loop) or _mailboxes.setdefault(loop, Mailbox(loop))
