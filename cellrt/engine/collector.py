"""Collect the requests that coroutines submit in one round of their event loop, and hand them in together.

Together they need one admission, and in another process one packet and one wake-up. Under load these are most of what a
request costs. If the engine refuses the requests as a whole, each is handed in by itself. Answers that come together
wake the event loop once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture, Result, Telling
from cellrt.engine.mailbox import Mailbox, mailbox_of
from cellrt.errors import CellrtError, OverloadError, RequestTooLargeError

Submit: TypeAlias = Callable[
    [str, Sequence[Any], Sequence[Any] | None, Due, int],
    Sequence[RequestFuture],
]
"""A function that hands in requests of a model, all or none: with their sessions or None, deadlines and priority."""
Alone: TypeAlias = Callable[[], None] | None
"""A function that hands a request in again, by itself; None if that was done or may not be done."""
Waiter: TypeAlias = asyncio.Future[tuple[Result | CellrtError, RequestFuture]]
"""A future of the event loop, which gets a request's results or error, and the request's future."""

OF_ALL = (RequestTooLargeError, OverloadError)
"""The errors with which another process refuses all requests of a round, though it has room for some."""


class Waiting(NamedTuple):
    """A request that is not handed in yet, and the future that its coroutine waits for."""

    request: Any
    session: Any
    waiter: Waiter


Alike: TypeAlias = tuple[Submit, str, Due, int, bool]
"""The properties that requests share which are handed in together; the last is True if they have sessions."""


class Round:
    """The requests that coroutines of one loop have submitted since the last were handed in."""

    def __init__(self) -> None:
        self.groups: dict[Alike, list[Waiting]] = {}
        self.sessions: set[object] = set()

    def take(self) -> dict[Alike, list[Waiting]]:
        """Return the requests, and forget them here."""
        groups, self.groups = self.groups, {}
        self.sessions.clear()
        return groups


class Collector:
    """Collects and hands in requests, for any number of event loops, each in its thread."""

    def __init__(self) -> None:
        self._rounds: WeakKeyDictionary[asyncio.AbstractEventLoop, Round] = WeakKeyDictionary()

    async def infer(self, submit: Submit, model: str, request: Any, session: Any, due: Due, priority: int) -> Result:
        """Submit a request and return its results; cancelling the task cancels the request."""
        outcome, _ = await self.submit(submit, model, request, session, due, priority)
        if isinstance(outcome, CellrtError):
            try:
                raise outcome
            finally:
                del outcome, _, request, session  # else the error and this frame would hold each other
        return outcome

    def submit(self, submit: Submit, model: str, request: Any, session: Any, due: Due, priority: int) -> Waiter:
        """Return a future of the loop for a request's outcome; cancelling it cancels the request.

        ``session`` is a session of this process, or None. If submitting raises an error, the future gets it. Requests
        that one loop submits to one session are handed in in this order.
        """
        loop = asyncio.get_running_loop()
        waiter: Waiter = loop.create_future()
        current = self._rounds.get(loop)
        if current is None:
            for other in [other for other in list(self._rounds) if other.is_closed()]:
                self._rounds.pop(other, None)
            current = self._rounds[loop] = Round()
        if session is not None:
            if session._record in current.sessions:
                _hand_in(current, loop)
            current.sessions.add(session._record)
        if not current.groups:
            loop.call_soon(_hand_in, current, loop)
        alike = submit, model, due, priority, session is not None
        current.groups.setdefault(alike, []).append(Waiting(request, session, waiter))
        return waiter

    def flush(self) -> None:
        """Hand in the requests of the loop that runs in this thread now, before a call that must come after them."""
        if self._rounds:
            with suppress(RuntimeError):  # no loop runs in this thread
                loop = asyncio.get_running_loop()
                if (current := self._rounds.get(loop)) is not None:
                    _hand_in(current, loop)


def _hand_in(current: Round, loop: asyncio.AbstractEventLoop) -> None:
    groups = current.take()
    try:
        while groups:
            alike = next(iter(groups))
            together = groups.pop(alike)
            _hand_in_some(loop, alike, [one for one in together if not one.waiter.done()])
    finally:
        if groups:  # KeyboardInterrupt or SystemExit was raised: the others are handed in all the same
            for alike, together in groups.items():
                current.groups.setdefault(alike, [])[:0] = together
            loop.call_soon(_hand_in, current, loop)


def _hand_in_some(loop: asyncio.AbstractEventLoop, alike: Alike, together: Sequence[Waiting]) -> None:
    """Hand in all requests together, or each by itself if the engine refuses them together."""
    if not together:
        return
    submit, model, due, priority, have_sessions = alike
    try:
        sessions = [one.session for one in together] if have_sessions else None
        futures = submit(model, [one.request for one in together], sessions, due, priority)
    except BaseException as error:  # any error: nothing else would tell the coroutines that wait
        if len(together) > 1 and isinstance(error, CellrtError):
            for one in together:
                _hand_in_some(loop, alike, [one])
        else:  # the requests may have been handed in: they must not be handed in again
            for one in together:
                if not one.waiter.done():
                    one.waiter.set_exception(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        del together, one  # else the error and this frame would hold each other
        return
    mailbox = mailbox_of(loop)
    for one, future in zip(together, futures):
        one.waiter.add_done_callback(partial(_left, future))
        alone = partial(_hand_in_some, loop, alike, [one]) if len(together) > 1 and not have_sessions else None
        future.add_done_callback(Telling(_note_end, mailbox, one.waiter, alone))


def _note_end(mailbox: Mailbox, waiter: Waiter, alone: Alone, future: Future[Result]) -> None:
    """Leave the end of a request to the event loop; called in a thread of the engine."""
    if isinstance(future, RequestFuture):
        with suppress(RuntimeError):  # the loop is closed: no coroutine waits there any more
            mailbox.put(partial(_tell, waiter, alone, future))


def _tell(waiter: Waiter, alone: Alone, future: RequestFuture) -> None:
    if waiter.done():
        return
    error = future.error()
    if alone is not None and isinstance(error, OF_ALL):
        alone()
    elif error is None or isinstance(error, CellrtError):
        waiter.set_result((error or future.result(), future))
    else:
        waiter.set_exception(error)


def _left(future: RequestFuture, waiter: Waiter) -> None:
    if waiter.cancelled():
        future.cancel()
