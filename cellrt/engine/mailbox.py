"""What event loops are told by other threads: however much comes at once, a loop is woken once."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary


class Mailbox:
    """What a loop is to call. Safe from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], object]] = deque()
        self._is_told = False

    def put(self, call: Callable[[], object]) -> None:
        """Has the loop call a function. Raises RuntimeError if the loop is closed."""
        self._calls.append(call)  # before the look: a loop that is about to call the others then sees this one
        if not self._is_told and (loop := self._loop()) is not None:
            self._is_told = True
            try:
                loop.call_soon_threadsafe(self._call_all)
            except RuntimeError:
                self._is_told = False
                raise

    def _call_all(self) -> None:
        self._is_told = False  # before the look: what comes after it wakes the loop again
        while self._calls:
            self._calls.popleft()()


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The mailbox of the loop that runs in this thread."""
    return _mailboxes.get(loop) or _mailboxes.setdefault(loop, Mailbox(loop))
