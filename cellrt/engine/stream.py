"""The client's handle to read its request's steps: a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from cellrt.engine.future import RequestFuture, Result, Results, Telling
from cellrt.engine.mailbox import Mailbox, mailbox_of
from cellrt.errors import OverloadError, RequestError
from cellrt.numbers import as_integer


class Channel:
    """The queue of a stream's items, from the engine's thread to the client, which makes tensors of them; None ends it.

    ``max_unread``: the items that may wait; one more makes it overfull, is dropped, and ends the request.
    """

    def __init__(self, max_unread: int | None = None) -> None:
        """Raise RequestError unless ``max_unread`` is a positive integer or None."""
        most = as_integer(max_unread)
        if max_unread is not None and (most is None or most < 1):
            raise RequestError(f"max_unread: expected a positive integer, got {max_unread!r:.80}")
        self.items: SimpleQueue[tuple[Results, int] | None] = SimpleQueue()
        self.waiting: deque[tuple[Mailbox, asyncio.Future[None]]] = deque()
        """The futures of coroutines that wait in an event loop; a thread waits for the items."""
        self.give_up: Callable[[], object] = lambda: None
        """Ends the request."""
        self.max_unread = most
        self.is_overfull = False

    def put(self, results: Results, number: int) -> None:
        """Add an item, by its number among those that were made together.

        Called by the engine, which then wakes the client.
        """
        if self.is_overfull or (self.max_unread is not None and self.items.qsize() >= self.max_unread):
            self.is_overfull = True
            self.give_up()
            return
        self.items.put((results, number))

    def end(self) -> None:
        """Mark the end: nothing follows."""
        self.items.put(None)
        self.wake()

    def wake(self) -> None:
        """Wake all coroutines that wait in event loops; from any thread."""
        while self.waiting:
            try:
                mailbox, arrived = self.waiting.popleft()
                mailbox.put(partial(_set, arrived))
            except IndexError:  # another thread was first
                return
            except RuntimeError:  # the loop is closed: nothing listens any more
                self.give_up()


class Stream:
    """The results of a request, as they are made: iterate with ``for``, ``next`` or ``async for``.

    An item is a dict with the step's row of every result that has one row a step. Results that belong to no step, such
    as ``chain.last``, come together in one last item. So a stream of both has one item more than steps:

        {"h": ...}, {"h": ...}, {"h": ...}, {"end": ...}    # of {"h": chain.h, "end": chain.last.h}, 3 steps

    No item has all results: ``result()`` does, and the request's ``future``. An error of the request is raised from the
    iteration. Leaving the stream (``close``, ``with``, or dropping it) cancels the request.
    """

    def __init__(self, future: RequestFuture, channel: Channel) -> None:
        self.future = future
        self._channel = channel
        self._is_over = False
        channel.give_up = future.cancel
        future.add_done_callback(Telling(lambda _: channel.end()))

    def result(self, timeout: float | None = None) -> Result:
        """Return all results, as the request's future does; wait for its end at most ``timeout`` seconds."""
        return self.future.result(timeout)

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self.future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        """Wait for the next item. Raise the request's error, and RequestError in a future's callback."""
        if self._is_over:
            raise StopIteration
        try:
            item = self._channel.items.get_nowait()
        except Empty:
            self.future._refuse_to_wait()
            item = self._channel.items.get()
        if item is None:
            self._end()
            raise StopIteration
        results, number = item
        return results.of(number)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        """Wait for the next item. Raise the request's error."""
        while not self._is_over:
            try:
                item = self._channel.items.get_nowait()
            except Empty:
                await self._arrival()
                continue
            if item is not None:
                results, number = item
                return results.of(number)
            self._end()
        raise StopAsyncIteration

    def _end(self) -> None:
        """Note that the last item was read; raise the request's error if it has one."""
        self._is_over = True
        self._channel.end()  # for other threads that read the stream
        if self._channel.is_overfull:
            raise OverloadError(f"the stream was read too slowly: {self._channel.max_unread} steps waited")
        self.future.result()

    async def _arrival(self) -> None:
        """Wait until there is an item."""
        self.future._refuse_to_wait()
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        entry = mailbox_of(loop), arrived
        self._channel.waiting.append(entry)  # before the look: what is put after it wakes
        try:
            if self._channel.items.empty():
                await arrived
        finally:
            with suppress(ValueError):  # it was woken, or waits no more: this loop need not be told
                self._channel.waiting.remove(entry)


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
