"""Requests that arrive together are handed in together, and answers that come together wake the loop once.

A message to the engine's process costs a packet and a wake-up whatever is in it, and so does each wake-up of the loop.
Requests that the loop takes in between two of its rounds go as one message; under load that is most of them.
Belongs to the front end's event loop; answers are heard by a thread of the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from cellrt.engine.future import RequestFuture, Result, Telling
from cellrt.engine.mailbox import Mailbox, mailbox_of
from cellrt.errors import CellrtError, RequestTooLargeError
from cellrt.serve.backend import Backend

Alone = Callable[[], None] | None
"""Hands a request in again, by itself; None: it was."""
Waiter = asyncio.Future[tuple[Result | CellrtError, RequestFuture]]
"""How a request ended that was submitted, with its future."""
"""Who waits for a request: gets its results, and its own future."""


class Waiting(NamedTuple):
    """A request that is about to be handed in, and who waits for it."""

    request: Any
    waiter: Waiter


class Collector:
    """See the module."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waiting: dict[tuple[str, float | None, int], list[Waiting]] = {}

    def submit(self, model: str, request: Any, deadline: float | None, priority: int) -> Waiter:
        """What a request comes to; cancelling it cancels the request. What submitting raises comes from it too."""
        loop = asyncio.get_running_loop()
        waiter: Waiter = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._hand_in, loop)
        self._waiting.setdefault((model, deadline, priority), []).append(Waiting(request, waiter))
        return waiter

    def _hand_in(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, {}
        for (model, deadline, priority), together in waiting.items():
            self._hand_in_some(loop, model, deadline, priority, [one for one in together if not one.waiter.done()])

    def _hand_in_some(
        self,
        loop: asyncio.AbstractEventLoop,
        model: str,
        deadline: float | None,
        priority: int,
        together: Sequence[Waiting],
    ) -> None:
        """Hands in all, or, if that cannot be, each by itself."""
        try:
            requests = [one.request for one in together]
            futures = self._backend.client.submit_many(model, requests, deadline=deadline, priority=priority)
        except Exception as error:  # whatever it is, nobody else would tell those who wait
            if len(together) == 1:
                together[0].waiter.set_exception(error)
            else:
                for one in together:
                    self._hand_in_some(loop, model, deadline, priority, [one])
            return
        for one, future in zip(together, futures):
            one.waiter.add_done_callback(partial(_left, future))
            alone = partial(self._hand_in_some, loop, model, deadline, priority, [one]) if len(together) > 1 else None
            future.add_done_callback(Telling(_note_end, mailbox_of(loop), one.waiter, alone))


def _note_end(mailbox: Mailbox, waiter: Waiter, alone: Alone, future: Future[Result]) -> None:
    """In a thread of the client's: leaves the end to the loop."""
    if isinstance(future, RequestFuture):
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            mailbox.put(partial(_tell, waiter, alone, future))


def _tell(waiter: Waiter, alone: Alone, future: RequestFuture) -> None:
    if waiter.done():
        return
    error = future.error()
    if alone is not None and isinstance(error, RequestTooLargeError):
        alone()  # together they were too large, which is not what any of their clients asked for
    elif error is None or isinstance(error, CellrtError):
        waiter.set_result((error or future.result(), future))
    else:
        waiter.set_exception(error)


def _left(future: RequestFuture, waiter: Waiter) -> None:
    if waiter.cancelled():
        future.cancel()
