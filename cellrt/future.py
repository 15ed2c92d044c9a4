"""What a client holds while its request runs: a future, or a stream of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

import torch

Result = dict[str, torch.Tensor]


class RequestFuture(Future[Result]):
    """A request's future: ``result(timeout)``, ``add_done_callback``, ``cancel``. Safe from any thread.

    ``cancel`` asks the engine; the request then ends with ``cellrt.CancelledError`` unless it ends otherwise first.
    """

    def __init__(self, request_cancel: Callable[[RequestFuture], None]) -> None:
        super().__init__()
        self._request_cancel = request_cancel

    def cancel(self) -> bool:
        """Asks the engine to cancel; False if the request has ended."""
        if self.done():
            return False
        self._request_cancel(self)
        return True

    def finish(self, outcome: Result | BaseException) -> None:
        """Ends the future; called by the engine, once."""
        try:
            if isinstance(outcome, BaseException):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except InvalidStateError:  # a client called set_result or set_exception itself
            pass


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
