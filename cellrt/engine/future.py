"""What a client holds while its request runs: a future, or a stream of steps."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Result = dict[str, torch.Tensor]

_making = threading.Lock()
"""Held to make a future's condition, and to end a future that has none."""


class Owner(Protocol):
    """What a future must know of its engine."""

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early, if it has not ended."""

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback, where waiting for the engine would never end."""


class RequestFuture(Future[Result]):
    """A request's future: ``result(timeout)``, ``add_done_callback``, ``cancel``, ``await``. Safe from any thread.

    ``cancel`` asks the engine; the request then ends with ``cellrt.CancelledError`` unless it ends otherwise first.
    Callbacks run in a thread of the engine: they should be short, and waiting for a request there raises RequestError.
    """

    # The base makes a condition for every future and locks it at every call, which is a good part of what a small
    # request costs. Here a condition is made when the first thread needs one: most requests end before.

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._state = PENDING
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Result]], object]] = []

    def __getattr__(self, name: str) -> threading.Condition:
        if name != "_condition":
            raise AttributeError(f"a request's future has no {name!r}")
        with _making:
            condition: threading.Condition = self.__dict__.setdefault("_condition", threading.Condition())
        return condition

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> Result:
        """The results; waits for them at most ``timeout`` seconds. Raises the request's error, or TimeoutError."""
        if self._state == FINISHED and self._result is not None:
            return self._result
        self._refuse_to_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The request's error, or None; waits for its end at most ``timeout`` seconds, or raises TimeoutError."""
        self._refuse_to_wait()
        return super().exception(timeout)

    def _refuse_to_wait(self) -> None:
        if self._state != FINISHED:
            self._owner.refuse_in_callback()

    def __await__(self) -> Generator[Any, None, Result]:
        """The results; cancelling the awaiting task cancels the request."""
        result: Result = yield from as_awaitable(self).__await__()
        return result

    def add_done_callback(self, fn: Callable[[Future[Result]], object]) -> None:
        """Calls ``fn(self)`` when the request has ended, in the engine's thread, or at once if it has."""
        self._done_callbacks.append(fn)
        if self._state == FINISHED:
            self._invoke_callbacks()

    def cancel(self) -> bool:
        """Asks the engine to cancel; False if the request has ended."""
        if self.done():
            return False
        self._owner.ask_to_cancel(self)
        return True

    def finish(self, outcome: Result | BaseException) -> None:
        """Ends the future; called by the engine, once."""
        with _making:
            condition = self.__dict__.get("_condition")
            if condition is None:
                self._settle(outcome)
        if condition is not None:
            with condition:
                if self._settle(outcome):
                    for waiter in self._waiters:
                        (waiter.add_result if self._exception is None else waiter.add_exception)(self)
                    condition.notify_all()
        self._invoke_callbacks()

    def _settle(self, outcome: Result | BaseException) -> bool:
        if self._state == FINISHED:  # a client called set_result or set_exception itself
            return False
        if isinstance(outcome, BaseException):
            self._exception = outcome
        else:
            self._result = outcome
        self._state = FINISHED
        return True

    def _invoke_callbacks(self) -> None:
        """Each callback is taken out once, by whichever thread comes first."""
        while self._done_callbacks:
            try:
                callback = self._done_callbacks.pop(0)
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                logging.getLogger("cellrt").exception("a callback of %r raised", self)


class Channel:
    """Carries a stream's items from the engine's thread to the client; None ends it."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Result | None] = SimpleQueue()
        self.wake: Callable[[], None] | None = None

    def put(self, item: Result | None) -> None:
        """Adds a step, or None at the end; called by the engine."""
        self.items.put(item)
        wake = self.wake
        if wake is not None:
            wake()


class Stream:
    """Steps of a request as they complete: iterate with ``for`` or ``async for``.

    Each item is a dict from result name to that step's row. An error of the request is raised from the
    iteration. Leaving the stream (``close``, ``with``, or dropping it) cancels the request.
    """

    def __init__(self, future: RequestFuture, channel: Channel) -> None:
        self.future = future
        self._channel = channel
        future.add_done_callback(lambda _: channel.put(None))

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self.future.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[Result]:
        try:
            while (item := self._channel.items.get()) is not None:
                yield item
            self.future.result()
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Result]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self.future.cancel()

        self._channel.wake = wake
        try:
            while True:
                arrived.clear()
                while not self._channel.items.empty():
                    item = self._channel.items.get()
                    if item is None:
                        self.future.result()
                        return
                    yield item
                await arrived.wait()
        finally:
            self.close()


def as_awaitable(future: RequestFuture) -> Any:
    """Wraps a future for the running event loop; cancelling the wrapper cancels the request."""
    return asyncio.wrap_future(future)
