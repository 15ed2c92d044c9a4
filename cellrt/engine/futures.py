"""Futures of requests that were submitted together; each is made when it is first asked for.

Most are asked for when their request has ended, and then they cost one object each.
"""

from __future__ import annotations

import asyncio
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures._base import FINISHED
from contextlib import contextmanager, suppress
from itertools import groupby
from types import NoneType
from typing import Any, Protocol, TypeAlias, overload

import torch

from cellrt.engine.future import (
    OVER,
    SETTLING,
    Outcome,
    Owner,
    PackedResults,
    RequestFuture,
    Result,
    Results,
    as_awaitable,
    finish_together,
)
from cellrt.engine.interrupts import interruptible
from cellrt.engine.mailbox import mailbox_of
from cellrt.errors import CellrtError, RequestError
from cellrt.native.answer_wait import have_told

_TAKEN = (dict, BaseException, NoneType)
"""The types of outcomes that are not among results of many."""
Made: TypeAlias = list[tuple[Results, int, RequestFuture]]
"""Futures that end, each with results and its number among these."""
NO_INDICES: list[int] = []
"""An empty list; it is never written to."""


class Futures(Sequence[RequestFuture]):
    """The futures of requests that were submitted together, in their order.

    Args:
        future_of: makes the future of the request at an index, and returns the same one each time.
        count: how many they are.
        parts: outcomes of all, if those are known together, each with the indices of its requests here.
    """

    __slots__ = ("_future_of", "_indices", "_parts")

    def __init__(
        self,
        future_of: Callable[[int], RequestFuture],
        count: int,
        parts: Sequence[tuple[Outcomes, Sequence[int]]] | None = None,
    ) -> None:
        self._future_of, self._indices, self._parts = future_of, range(count), parts

    @classmethod
    def of(cls, futures: Sequence[RequestFuture]) -> Futures:
        """Return futures as such a sequence, whichever kind of sequence they are."""
        return futures if isinstance(futures, Futures) else cls(futures.__getitem__, len(futures))

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[RequestFuture]:
        return map(self._future_of, self._indices)

    @overload
    def __getitem__(self, index: int) -> RequestFuture: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestFuture]: ...
    def __getitem__(self, index: int | slice) -> RequestFuture | list[RequestFuture]:
        indices = self._indices[index]
        return self._future_of(indices) if isinstance(indices, int) else list(map(self._future_of, indices))

    def __add__(self, others: Iterable[RequestFuture]) -> list[RequestFuture]:
        return [*self, *others]

    def __radd__(self, others: Iterable[RequestFuture]) -> list[RequestFuture]:
        return [*others, *self]

    def __repr__(self) -> str:
        return f"Futures({len(self)})"

    def __await__(self) -> Generator[Any, None, list[Result]]:
        """Await the results as ``results`` does; cancelling the awaiting task cancels the requests."""
        return self._gather().__await__()

    async def _gather(self) -> list[Result]:
        try:
            if self._parts is not None:
                for outcomes, _ in reversed(self._parts):  # as in ``results``
                    await outcomes.wait_in_loop()
            else:
                for future in reversed(self):
                    if future._state not in OVER:
                        with suppress(CellrtError):
                            await as_awaitable(future)
        except BaseException:
            for future in self:
                future.cancel()
            raise
        return self._taken()  # waits for nothing: the engine may be yet to hear what the client has cancelled

    @interruptible
    def results(self, timeout: float | None = None) -> list[Result]:
        """Return the results of all, in order; wait for them at most ``timeout`` seconds.

        This costs a good part less than asking each future: tensors of requests that ended together are made together.
        Each has memory of its own. Raise the error of the first that has one, or TimeoutError; the others' results can
        still be had from their futures.
        """
        self._wait(timeout)
        return self._taken()

    @interruptible
    def stacked(self, timeout: float | None = None) -> Result:
        """Return the results of all as one tensor a name, ``[requests, *shape]``; wait as ``results`` does.

        This costs less than ``results``, as no tensor is made for each request. Raise RequestError if the requests'
        results have different names or shapes, and what ``results`` raises.
        """
        self._wait(timeout)
        parts = self._parts or ()
        made = parts[0][0].stacked() if len(parts) == 1 else None
        return _stacked(self._taken()) if made is None else made

    def _wait(self, timeout: float | None) -> None:
        """Wait until all have ended. Raise TimeoutError, and RequestError in a future's callback."""
        end_s = None if timeout is None else time.monotonic() + timeout
        try:
            if self._parts is not None:
                for outcomes, _ in reversed(self._parts):  # the last is mostly the last to end: one wait for all
                    outcomes.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            else:
                for future in reversed(self):
                    future._wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"the requests have not all ended within {timeout} s") from None

    def _taken(self) -> list[Result]:
        """Return the results of all, when all have ended."""
        parts = self._parts or ()
        if len(parts) == 1:  # in order
            found = parts[0][0].take()
        else:
            found = [None] * len(self)
            for outcomes, indices in parts:
                for index, result in zip(indices, outcomes.take()):
                    found[index] = result
        return [self[index].result() if result is None else result for index, result in enumerate(found)]


def _stacked(results: Sequence[Result]) -> Result:
    """Return results as one tensor a name. Raise RequestError if their names or shapes differ."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in result.items()} for result in results]
    for index, its in enumerate(shapes):
        if its != shapes[0]:
            raise RequestError(f"stacked: the results of requests 0 and {index} have shapes {shapes[0]} and {its}")
    return {name: torch.stack([result[name] for result in results]) for name in (results[0] if results else ())}


class Ends(Protocol):
    """The receiver of the ends of requests of one graph that were submitted together, each once.

    It is called by the holder of the turn.
    """

    def fail(self, number: int, error: CellrtError) -> None:
        """Note that a request has ended with an error."""

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """Note that requests have results, from number ``first`` of these on; under SETTLING.

        ``made`` gets the futures that the caller ends, each with the results and its number among these.
        """


class Outcomes:
    """The outcomes of requests that were submitted together, and the futures that were asked for.

    Each request gets its outcome once, from the holder of the turn. Any thread may ask for futures.

    Args:
        owner: the engine or connection that made the futures; forgotten when all have ended.
        first_number: the first request's number in its engine; the others follow it.
        count: how many they are.
    """

    __slots__ = (
        "_count",
        "_first_number",
        "_futures",
        "_indices",
        "_is_each_told",
        "_num_left",
        "_outcomes",
        "_owner",
        "_wakes",
        "word_at",
    )

    def __init__(self, owner: Owner, first_number: int, count: int) -> None:
        self._owner: Owner | None = owner
        self._first_number, self._count, self._num_left = first_number, count, count
        self._futures: dict[int, RequestFuture] = {}
        self.word_at = 0
        """The address of the word in front of the results, in memory that the owner keeps; 0: there is none."""
        self._is_each_told = False
        self._outcomes: list[Outcome | None] | None = None
        """The outcomes of requests that ended before their future was asked for; None until one does."""
        self._indices: list[int] = NO_INDICES
        """The numbers of requests that have results among these results."""
        self._wakes: Sequence[Callable[[], None]] = ()
        """The functions that wake those that wait for all of them."""

    def future(self, number: int) -> RequestFuture:
        """Return the future of a request; always the same."""
        if number in self._futures:
            return self._futures[number]
        with SETTLING:
            future = self._futures.get(number)
            if future is None:
                future = RequestFuture(self._owner, number, self._first_number + number)
                # In this order, for a signal's handler may raise anywhere: the outcome is the future's, or is here.
                outcomes = self._outcomes
                if outcomes is not None and (outcome := outcomes[number]) is not None:
                    future._take(outcome, FINISHED, self._indices[number])
                    self._futures[number] = future
                    outcomes[number] = None
                else:
                    self._futures[number] = future
        self._have_each_told()
        return future

    def _have_each_told(self) -> None:
        """Have turns tell of each request that ends, as some are asked for by themselves."""
        owner = self._owner
        if owner is not None and self.word_at and not self._is_each_told:
            self._is_each_told = True
            have_told(self.word_at)
            owner.have_told()

    def wait(self, timeout: float | None) -> None:
        """Wait until all have ended. Raise TimeoutError, and RequestError in a future's callback."""
        if not self._num_left:
            return
        self._refuse_in_callback()
        lock = allocate_lock()
        lock.acquire()
        with self._told_of_end(lock.release):
            if self._num_left:  # the thread that ends the last after this check finds the lock in the list
                lock.acquire(timeout=-1 if timeout is None else min(max(float(timeout), 0.0), threading.TIMEOUT_MAX))
        if self._num_left:
            raise TimeoutError(f"the requests have not all ended within {timeout} s")

    async def wait_in_loop(self) -> None:
        """Wait as ``wait`` does, in a coroutine: others of its loop go on meanwhile."""
        if not self._num_left:
            return
        self._refuse_in_callback()
        loop = asyncio.get_running_loop()
        over, mailbox = asyncio.Event(), mailbox_of(loop)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nothing waits there any more
                mailbox.put(over.set)

        with self._told_of_end(wake):
            if self._num_left:
                await over.wait()

    def _refuse_in_callback(self) -> None:
        owner = self._owner
        if owner is not None:
            owner.refuse_in_callback()

    @contextmanager
    def _told_of_end(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have ``wake`` called when the last has ended, within the block; it is called by the holder of the turn."""
        with SETTLING:
            self._wakes = [*self._wakes, wake]
        try:
            yield
        finally:
            with SETTLING:
                self._wakes = [other for other in self._wakes if other is not wake]

    def take(self) -> list[Result | None]:
        """Return the results of all, when all have ended; None for those whose future must be asked."""
        with SETTLING:
            outcomes = self._room()
            untaken = [number for number, each in enumerate(outcomes) if not isinstance(each, _TAKEN)]
            for together, group in groupby(untaken, outcomes.__getitem__):
                numbers = list(group)
                its = [self._indices[number] for number in numbers]
                for number, result in zip(numbers, together.of_many(its)):  # type: ignore[union-attr]
                    outcomes[number] = result
            return [each if type(each) is dict else None for each in outcomes]

    def stacked(self) -> Result | None:
        """Return the results of all as one tensor a name, when all have ended; None if they do not lie together."""
        with SETTLING:
            outcomes = self._outcomes or [None]
            first, are_all = outcomes[0], self._indices == list(range(self._count))
            if isinstance(first, _TAKEN) or not are_all or any(each is not first for each in outcomes):
                return None
            return first.stacked(self._count)

    def fail(self, number: int, error: BaseException) -> None:
        """End a request with an error, and run its callbacks."""
        with SETTLING:
            future = self._futures.get(number)
            if future is None:
                self._room()[number] = error
        self._note_over(1)
        if future is not None:
            future.finish(error)

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """Note results as ``Ends.note`` does: ``made`` gets the futures that were asked for."""
        futures = self._futures
        if isinstance(numbers, range) and not futures:
            outcomes, its = self._room(), slice(numbers.start, numbers.stop)
            outcomes[its], self._indices[its] = [results] * len(numbers), range(first, first + len(numbers))
        else:
            for index, number in enumerate(numbers, first):
                if number in futures:
                    made.append((results, index, futures[number]))
                else:
                    self._room()[number], self._indices[number] = results, index
        self._note_over(len(numbers))

    def _room(self) -> list[Outcome | None]:
        """Return the list that keeps outcomes until they are asked for."""
        if self._outcomes is None:
            self._outcomes, self._indices = [None] * self._count, [0] * self._count
        return self._outcomes

    def _note_over(self, count: int) -> None:
        self._num_left -= count
        if not self._num_left:
            self._owner = None
            for wake in self._wakes:
                wake()


def finish_all(ended: Iterable[tuple[RequestFuture | Ends, Sequence[int], PackedResults, int]]) -> None:
    """End requests with results; called by the holder of the turn.

    ``ended`` has for each receiver the numbers there, and the results with the number of the first among these.
    """
    made: Made = []
    with SETTLING:
        for told, numbers, results, first in ended:
            if isinstance(told, RequestFuture):
                made.append((results, first, told))
            else:
                told.note(numbers, results, first, made)
    if made:
        finish_together(made)
