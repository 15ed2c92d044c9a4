"""Requests that coroutines submit together are handed in together, and answers that come together wake the loop once.

What coroutines of a loop ask between two of its rounds goes as one bulk: one admission, in another process one packet
and one wake-up. Under load that is most of it. What cannot be taken as a whole is tried one by one.
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
"""Hands in requests of a model, of sessions if they have some, with their deadlines and a priority: all or none."""
Alone: TypeAlias = Callable[[], None] | None
"""Hands a request in again, by itself; None: it was."""
Waiter: TypeAlias = asyncio.Future[tuple[Result | CellrtError, RequestFuture]]
"""How a request ended that was submitted, with its future."""

OF_ALL = (RequestTooLargeError, OverloadError)
"""How another process refuses a bulk as a whole, of which some may have places."""


class Waiting(NamedTuple):
    """A request that is about to be handed in, and who waits for it."""

    request: Any
    session: Any
    waiter: Waiter


Alike: TypeAlias = tuple[Submit, str, Due, int, bool]
"""What requests have in common that go together: the last is whether they have sessions."""


class Round:
    """What coroutines of one loop have asked since it last handed something in."""

    def __init__(self) -> None:
        self.groups: dict[Alike, list[Waiting]] = {}
        self.sessions: set[object] = set()

    def take(self) -> dict[Alike, list[Waiting]]:
        """What was asked, which is forgotten."""
        groups, self.groups = self.groups, {}
        self.sessions.clear()
        return groups


class Collector:
    """See the module. For any number of loops, each in its thread."""

    def __init__(self) -> None:
        self._rounds: WeakKeyDictionary[asyncio.AbstractEventLoop, Round] = WeakKeyDictionary()

    async def infer(self, submit: Submit, model: str, request: Any, session: Any, due: Due, priority: int) -> Result:
        """The results of a request; cancelling the task cancels the request."""
        outcome, _ = await self.submit(submit, model, request, session, due, priority)
        if isinstance(outcome, CellrtError):
            try:
                raise outcome
            finally:
                del outcome, _, request, session  # else the error and this frame would hold each other
        return outcome

    def submit(self, submit: Submit, model: str, request: Any, session: Any, due: Due, priority: int) -> Waiter:
        """What a request comes to, of a session of this process or (None) of none; cancelling it cancels the request.

        What submitting raises comes from it, too. What one loop asks of a session goes in order.
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
        """Hands in what coroutines of the loop that runs here have asked so far: before what must come after it."""
        if self._rounds:
            with suppress(RuntimeError):  # none runs here
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
        if groups:  # something was raised that is no error: the others are handed in all the same
            for alike, together in groups.items():
                current.groups.setdefault(alike, [])[:0] = together
            loop.call_soon(_hand_in, current, loop)


def _hand_in_some(loop: asyncio.AbstractEventLoop, alike: Alike, together: Sequence[Waiting]) -> None:
    """Hands in all, or, if that cannot be, each by itself."""
    if not together:
        return
    submit, model, due, priority, have_sessions = alike
    try:
        sessions = [one.session for one in together] if have_sessions else None
        futures = submit(model, [one.request for one in together], sessions, due, priority)
    except BaseException as error:  # whatever it is, nobody else would tell those who wait
        if len(together) > 1 and isinstance(error, CellrtError):
            for one in together:
                _hand_in_some(loop, alike, [one])
        else:  # they may have been handed in: never again
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
    """In a thread of the engine's: leaves the end to the loop."""
    if isinstance(future, RequestFuture):
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
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
