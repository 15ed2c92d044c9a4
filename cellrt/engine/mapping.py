"""Many requests of one model, however many there are, with a bounded number of them in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from cellrt.engine.future import RequestFuture
from cellrt.errors import CellrtError, RequestError

IN_FLIGHT = 1024
"""Requests in flight unless somebody says otherwise."""
TOGETHER = 64
"""Requests that are submitted together: who gives them slowly is not waited for much longer than for one."""

Submit = Callable[[Sequence[Any]], list[RequestFuture]]
"""Submits requests, all or none; waits for places."""
SubmitAsync = Callable[[Sequence[Any]], Awaitable[list[RequestFuture]]]


@dataclass(frozen=True)
class MapOptions:
    """How a map goes about it: see ``Serving.map``."""

    max_in_flight: int
    ordered: bool
    return_errors: bool
    progress: bool | str

    def __post_init__(self) -> None:
        given = self.max_in_flight
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise RequestError(f"max_in_flight: expected a positive integer, got {given!r}")


class Flight:
    """The requests of a map that were submitted and whose outcomes were not taken yet.

    ``note``: called with a request's number when it has ended, from any thread.
    """

    def __init__(self, options: MapOptions, note: Callable[[int], None]) -> None:
        self._options, self._note = options, note
        self._outcomes: dict[int, RequestFuture | CellrtError] = {}
        self._num_added = 0
        self._ended: deque[int] = deque()
        """Numbers of those that have ended, as they came; unless their order is that of the requests."""

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def room(self) -> int:
        """How many more to submit together: none while more than three quarters are in flight."""
        most, count = self._options.max_in_flight, len(self)
        return min(TOGETHER, most - count) if 4 * count <= 3 * most else 0

    def add(self, outcomes: Sequence[RequestFuture | CellrtError]) -> None:
        """Takes in requests that were submitted, or refused with an error of their own."""
        for outcome in outcomes:
            number = self._num_added
            self._num_added += 1
            self._outcomes[number] = outcome
            if isinstance(outcome, RequestFuture):
                outcome.add_done_callback(lambda _, number=number: self._note(number))  # type: ignore[misc]
            else:
                self._note(number)

    def note_ended(self, number: int) -> None:
        """Takes in that a request has ended; by the thread, or in the loop, that takes."""
        if not self._options.ordered:
            self._ended.append(number)

    def ready(self) -> int | None:
        """The number of the request whose outcome is to be taken next; None until it has ended.

        Raises RequestError in a future's callback if it has not: it never would.
        """
        if not self._options.ordered:
            if self._ended:
                return self._ended.popleft()
            self._refuse_to_wait()
            return None
        first = next(iter(self._outcomes))
        outcome = self._outcomes[first]
        if isinstance(outcome, CellrtError) or outcome.done():
            return first
        outcome._refuse_to_wait()
        return None

    def take(self, number: int) -> object:
        """The item of a request that has ended. Raises its error, unless errors are items."""
        outcome = self._outcomes.pop(number)
        error = outcome if isinstance(outcome, CellrtError) else outcome.error()
        if error is not None and not (self._options.return_errors and isinstance(error, CellrtError)):
            raise error
        item = error if isinstance(outcome, CellrtError) or error is not None else outcome.result()
        return item if self._options.ordered else (number, item)

    def _refuse_to_wait(self) -> None:
        for outcome in self._outcomes.values():
            if isinstance(outcome, RequestFuture):
                outcome._refuse_to_wait()
                return

    def close(self) -> None:
        """Cancels what is in flight."""
        outcomes, self._outcomes = self._outcomes, {}
        for outcome in outcomes.values():
            if isinstance(outcome, RequestFuture):
                outcome.cancel()


def mapped(submit: Submit, requests: Iterable[Any], options: MapOptions) -> Iterator[Any]:
    """See ``Serving.map``."""
    ended: SimpleQueue[int] = SimpleQueue()
    flight, source = Flight(options, ended.put), iter(requests)
    is_exhausted = False
    with _bar(options, requests) as advance:
        try:
            while True:
                while not is_exhausted and flight.room:
                    together = list(islice(source, flight.room))
                    is_exhausted = not together
                    flight.add(_one_by_one_if_refused(submit, together))
                if not flight:
                    return
                while not ended.empty():
                    flight.note_ended(ended.get_nowait())
                while (number := flight.ready()) is None:
                    flight.note_ended(ended.get())
                item = flight.take(number)
                advance()
                yield item
        finally:
            flight.close()


async def mapped_async(
    submit: SubmitAsync, requests: Iterable[Any] | AsyncIterable[Any], options: MapOptions
) -> AsyncIterator[Any]:
    """See ``Serving.map_async``."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def note(number: int) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.put_nowait, number)

    flight, source = Flight(options, note), _as_async(requests)
    is_exhausted = False
    with _bar(options, requests) as advance:
        try:
            while True:
                while not is_exhausted and flight.room:
                    together = [request async for request in _take(source, flight.room)]
                    is_exhausted = not together
                    flight.add(await _one_by_one_if_refused_async(submit, together))
                if not flight:
                    return
                while not ended.empty():
                    flight.note_ended(ended.get_nowait())
                while (number := flight.ready()) is None:
                    flight.note_ended(await ended.get())
                item = flight.take(number)
                advance()
                yield item
        finally:
            flight.close()


def _one_by_one_if_refused(submit: Submit, requests: Sequence[Any]) -> Sequence[RequestFuture | CellrtError]:
    """Submits requests together; if something is wrong with one of them, only that one gets the error."""
    try:
        return submit(requests) if requests else ()
    except CellrtError as error:
        if len(requests) == 1:
            return (error,)
        return [outcome for request in requests for outcome in _one_by_one_if_refused(submit, [request])]


async def _one_by_one_if_refused_async(
    submit: SubmitAsync, requests: Sequence[Any]
) -> Sequence[RequestFuture | CellrtError]:
    try:
        return await submit(requests) if requests else ()
    except CellrtError as error:
        if len(requests) == 1:
            return (error,)
        return [outcome for request in requests for outcome in await _one_by_one_if_refused_async(submit, [request])]


async def _as_async(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request


async def _take(source: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    """The next items, at most so many."""
    for _ in range(count):
        try:
            yield await anext(source)
        except StopAsyncIteration:
            return


def _bar(options: MapOptions, requests: object) -> AbstractContextManager[Callable[[], object]]:
    """A progress bar while one is inside, if it was asked for; gives what counts one further."""
    if not options.progress:
        return nullcontext(lambda: None)
    return _shown_bar("" if options.progress is True else options.progress, requests)


@contextmanager
def _shown_bar(label: str, requests: object) -> Iterator[Callable[[], object]]:
    from rich.console import Console  # here: a bare machine with a GPU need not have it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=len(requests) if isinstance(requests, Sized) else None)
        yield partial(progress.advance, task)
