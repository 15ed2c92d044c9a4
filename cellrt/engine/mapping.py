"""The map of many requests of one model, however many there are, with a bounded number of them in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple

from cellrt.engine.announce import progress_bar
from cellrt.engine.copies import LISTS, NOT_PLAIN, plain_copy
from cellrt.engine.future import RequestFuture, Telling
from cellrt.errors import CellrtError, DeadlineError, RequestError
from cellrt.numbers import as_integer

IN_FLIGHT = 1024
"""The default number of requests in flight."""
TOGETHER = 64
"""The most requests that are submitted together."""
PATIENCE_S = 1e-3
"""The seconds for which a source is waited for until its items so far are submitted."""

Submit = Callable[[Sequence[Any]], Sequence[RequestFuture]]
"""A function that submits requests, all or none, and waits for places."""
SubmitAsync = Callable[[Sequence[Any]], Awaitable[Sequence[RequestFuture]]]


@dataclass(frozen=True)
class MapOptions:
    """The options of a map: see ``Serving.map``."""

    max_in_flight: int
    ordered: bool
    return_errors: bool
    progress: bool | str

    def __post_init__(self) -> None:
        most = as_integer(self.max_in_flight)
        if most is None or most < 1:
            raise RequestError(f"max_in_flight: expected a positive integer, got {self.max_in_flight!r}")
        object.__setattr__(self, "max_in_flight", most)


class Flight:
    """The requests of a map that were submitted and whose outcomes were not taken yet.

    ``note``: called with a request's number when it has ended, from any thread.
    """

    def __init__(self, options: MapOptions, note: Callable[[int], None]) -> None:
        self._options, self._note = options, note
        self._outcomes: dict[int, RequestFuture | CellrtError] = {}
        self._num_added = 0
        self._ended: deque[int] = deque()
        """The numbers of requests that have ended, as they came; not used if their order is that of the requests."""

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def room(self) -> int:
        """The number of requests to submit together next: 0 while more than three quarters are in flight."""
        most, count = self._options.max_in_flight, len(self)
        return min(TOGETHER, most - count) if 4 * count <= 3 * most else 0

    def add(self, outcomes: Sequence[RequestFuture | CellrtError]) -> None:
        """Add requests that were submitted, or refused with an error of their own."""
        for outcome in outcomes:
            number = self._num_added
            self._num_added += 1
            self._outcomes[number] = outcome
            if isinstance(outcome, RequestFuture):
                outcome.add_done_callback(Telling(self._note_over, number))
            else:
                self._note(number)

    def _note_over(self, number: int, _: object) -> None:
        self._note(number)

    def note_ended(self, number: int) -> None:
        """Note that a request has ended; called by the thread, or in the loop, that takes."""
        if not self._options.ordered:
            self._ended.append(number)

    def ready(self) -> int | None:
        """Return the number of the request whose outcome is to be taken next; None until it has ended.

        Raise RequestError in a future's callback if it has not: it never would.
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
        """Return the item of a request that has ended. Raise its error, unless errors are items."""
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
        """Cancel the requests in flight."""
        outcomes, self._outcomes = self._outcomes, {}
        for outcome in outcomes.values():
            if isinstance(outcome, RequestFuture):
                outcome.cancel()


class _Taken(NamedTuple):
    """Items of a source, and its state: whether it has no more, the error that ended it, whether it was slow.

    A slow source gives few items.
    """

    items: list[Any]
    is_last: bool
    error: Exception | None
    is_slow: bool


def _take(source: Iterator[Any], count: int, is_list: bool) -> _Taken:
    """Take at most this many items, fewer from a slow source, as they are when they are given.

    A source that is no list may change them when it is asked for the next.
    """
    items: list[Any] = []
    latest_s = time.perf_counter() + PATIENCE_S
    try:
        for item in islice(source, count):
            own = item if is_list else plain_copy(item)
            items.append(item if own is NOT_PLAIN else own)
            if own is NOT_PLAIN:  # it is submitted before the source is asked again
                return _Taken(items, False, None, False)
            if time.perf_counter() > latest_s:
                return _Taken(items, False, None, True)
    except Exception as error:
        return _Taken(items, True, error, False)
    return _Taken(items, len(items) < count, None, False)


def mapped(submit: Submit, requests: Iterable[Any], options: MapOptions) -> Iterator[Any]:
    """Yield results, as ``Serving.map`` says."""
    ended: SimpleQueue[int] = SimpleQueue()
    flight, source = Flight(options, ended.put), iter(requests)
    taken, is_list = _Taken([], False, None, False), isinstance(requests, LISTS)

    def ready() -> int | None:
        while not ended.empty():
            flight.note_ended(ended.get_nowait())
        return flight.ready()

    with _bar(options, requests) as advance:
        try:
            while True:
                # Of a slow source the next item is asked for when nothing is left that could be given meanwhile.
                number = ready() if taken.is_slow and flight else None
                while number is None and not taken.is_last and flight.room:
                    taken = _take(source, flight.room, is_list)
                    flight.add(_one_by_one_if_refused(submit, taken.items))
                    if taken.is_slow:
                        break
                if not flight:
                    break
                number = ready() if number is None else number
                if taken.is_last or not flight.room:
                    while number is None:
                        flight.note_ended(ended.get())
                        number = flight.ready()
                if number is not None:
                    item = flight.take(number)
                    advance()
                    yield item
            if taken.error is not None:
                raise taken.error
        finally:
            flight.close()


class _Pump:
    """A task that takes items out of a source as far as there is room for them.

    Items are copied, as in ``mapped``; after an item that cannot be copied, no more are asked for before it is
    submitted.
    """

    def __init__(self, source: AsyncIterator[Any], is_list: bool, flight: Flight, news: asyncio.Event) -> None:
        self.given: deque[Any] = deque()
        self.is_last = False
        self.error: BaseException | None = None
        self._may_go_on = True
        """True if the source may go on: its items so far are copied or submitted."""
        self._source, self._is_list = source, is_list
        self._flight, self._news, self._has_room = flight, news, asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def take(self) -> list[Any]:
        """Return items that can be submitted together; wait a moment for more if they are few."""
        if len(self.given) < self._flight.room and self._may_go_on and not self.is_last:
            await asyncio.sleep(PATIENCE_S)
        return [self.given.popleft() for _ in range(min(len(self.given), self._flight.room))]

    def note_room(self) -> None:
        """Note that more may be taken: what ``take`` returned is submitted."""
        self._may_go_on = self._may_go_on or not self.given
        self._has_room.set()

    async def close(self) -> None:
        """End it, and with it the source."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        latest_s = time.perf_counter() + PATIENCE_S
        try:
            while True:
                while len(self.given) >= self._flight.room or not self._may_go_on:
                    self._has_room.clear()
                    await self._has_room.wait()
                item = await anext(self._source)
                own = item if self._is_list else plain_copy(item)
                self._may_go_on = own is not NOT_PLAIN
                self.given.append(own if self._may_go_on else item)
                self._news.set()
                if time.perf_counter() > latest_s:  # a plain iterable never lets the loop go on by itself
                    await asyncio.sleep(0)
                    latest_s = time.perf_counter() + PATIENCE_S
        except StopAsyncIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # a source may be cancelled by others, too
            self.error = error
        self.is_last = True
        self._news.set()


async def mapped_async(
    submit: SubmitAsync, requests: Iterable[Any] | AsyncIterable[Any], options: MapOptions
) -> AsyncIterator[Any]:
    """Yield results, as ``Serving.map_async`` says."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def take_in(number: int) -> None:
        flight.note_ended(number)
        news.set()

    def note(number: int) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(take_in, number)

    flight = Flight(options, note)
    pump = _Pump(_as_async(requests), isinstance(requests, LISTS), flight, news)
    with _bar(options, requests) as advance:
        try:
            while True:
                news.clear()
                if pump.given and flight.room:
                    flight.add(await _one_by_one_if_refused_async(submit, await pump.take()))
                pump.note_room()
                number = flight.ready() if flight else None
                if number is not None:
                    item = flight.take(number)
                    advance()
                    yield item
                elif pump.is_last and not pump.given and not flight:
                    break
                elif not (pump.given and flight.room):
                    await news.wait()
            if pump.error is not None:
                raise pump.error
        finally:
            flight.close()
            await pump.close()


def _one_by_one_if_refused(submit: Submit, requests: Sequence[Any]) -> Sequence[RequestFuture | CellrtError]:
    """Submit requests together; if something is wrong with one of them, only that one gets the error."""
    try:
        return submit(requests) if requests else ()
    except DeadlineError as error:  # of all of them: they have waited together
        return [DeadlineError(str(error)) for _ in requests]
    except CellrtError as error:
        if len(requests) == 1:
            return (error,)
        return [outcome for request in requests for outcome in _one_by_one_if_refused(submit, [request])]


async def _one_by_one_if_refused_async(
    submit: SubmitAsync, requests: Sequence[Any]
) -> Sequence[RequestFuture | CellrtError]:
    try:
        return await submit(requests) if requests else ()
    except DeadlineError as error:  # of all of them: they have waited together
        return [DeadlineError(str(error)) for _ in requests]
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


def _bar(options: MapOptions, requests: object) -> AbstractContextManager[Callable[[], object]]:
    """Show a progress bar within the block, if it was asked for; yield a function that advances it."""
    if not options.progress:
        return nullcontext(lambda: None)
    return _shown_bar("" if options.progress is True else options.progress, requests)


@contextmanager
def _shown_bar(label: str, requests: object) -> Iterator[Callable[[], object]]:
    with progress_bar() as progress:
        task = progress.add_task(label, total=len(requests) if isinstance(requests, Sized) else None)
        yield partial(progress.advance, task)
