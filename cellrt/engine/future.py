"""The future that a client holds while its request runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from cellrt.engine.mailbox import hold, let_go, mailbox_of
from cellrt.engine.sleeper import Sleeper, own_sleeper
from cellrt.errors import CancelledError
from cellrt.native.answer_wait import have_told, is_there

Result = dict[str, torch.Tensor]

OVER = (CANCELLED_AND_NOTIFIED, FINISHED)

SETTLING = threading.RLock()
"""The lock under which a future's condition is made, and a future without one is settled. It is reentrant, as garbage
collection inside may cancel another future."""


class Results(Protocol):
    """Results of many requests."""

    def of(self, number: int) -> Result:
        """Return the results of one of them; to be called once for each."""

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Return the results of some of them, each in memory of its own; to be called once for each."""

    def stacked(self, count: int) -> Result | None:
        """Return the results of the first ``count`` of them as one tensor a name, ``[count, *shape]``.

        Return None if they do not lie in memory like that. Those of each may be asked for afterwards.
        """


class PackedResults(Results, Protocol):
    """Results of many requests that lie in memory as bytes."""

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """Return the index, the number of rows (-1: no row dimension) and the bytes of each result of a request."""


Outcome = Result | BaseException | Results


class Owner(Protocol):
    """The methods of an engine that a future calls."""

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """End a request early, if it has not ended."""

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback, where waiting for the engine would never end."""

    def have_told(self) -> None:
        """Have a turn notify clients of answers of which they were not notified yet."""


class Telling(partial[object]):
    """A callback of the engine's own: it only notifies a thread or a loop, so loops need not be woken before it."""


class RequestFuture(Future[Result]):
    """A request's future: a ``concurrent.futures.Future`` that can be awaited, too. Safe from any thread.

    ``cancel`` ends it at once with ``cellrt.CancelledError``; the engine then drops what is left of the request.
    Callbacks run in a thread of the engine (after ``cancel``: of the caller). They should be short, and waiting there
    for a request that has not ended raises RequestError.
    """

    # The base class makes a condition for every future and locks it at every call, which is a good part of the cost of
    # a small request. Here a thread that asks for the result sleeps on a word of its own, and a condition is made only
    # for threads that wait for several futures. Attributes that most futures never set are defaults of the class.
    #
    # Compiled code may answer the request: then the owner has the results as soon as a word says so
    # (``native/answer_word.py``). The first to read the word settles the future: a thread of the client or a turn.

    _state = PENDING
    _result: Result | None = None
    _exception: BaseException | None = None
    _made_condition: threading.Condition | None = None
    _sleepers: Sequence[Sleeper] = ()
    """The sleepers of the threads that wait for the end."""
    word_at = 0
    """The address of the word in front of the results, in memory that the owner keeps; 0: there is none."""
    _callbacks: list[Callable[[Future[Result]], object]] | None = None
    _together: Results | None = None
    """The results of many requests, its own among them, until it is asked for its own."""

    def __init__(self, owner: Owner | None, place: int = 0, number: int = 0) -> None:
        self._owner = owner
        self.place = place
        """The request's number in its owner; after the end, its number in ``_together``."""
        self.number = number
        """The request's number in its engine, which timelines show."""

    @property
    def _waiters(self) -> list[Any]:
        """The waiters for several futures, as in the base class."""
        waiters: list[Any] = self.__dict__.setdefault("_made_waiters", [])
        return waiters

    @_waiters.setter
    def _waiters(self, _: list[Any]) -> None:
        """Ignore the value that the base class sets."""

    @property
    def _condition(self) -> threading.Condition:
        """The condition that the base class, ``futures.wait`` and ``futures.as_completed`` hold to read it."""
        self._refuse_to_wait()
        self._have_told()
        with SETTLING:
            if self._made_condition is None:
                self._made_condition = threading.Condition()
            return self._made_condition

    @_condition.setter
    def _condition(self, _: threading.Condition) -> None:
        """Ignore the value that the base class sets."""

    def __repr__(self) -> str:
        self.done()
        return f"RequestFuture({self._state.lower().replace('_', ' ')})"

    def done(self) -> bool:
        """Return whether the request has ended."""
        if self._state in OVER:
            return True
        owner = self._owner  # keeps the memory of the word alive
        if owner is None or not self.word_at or not is_there(self.word_at):
            return self._state in OVER
        self._take_in(owner)
        return True

    def cancelled(self) -> bool:
        """Return whether ``cancel`` ended it."""
        return self._state == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """Return False: from its submission on a request may run, and may be cancelled."""
        return False

    def result(self, timeout: float | None = None) -> Result:
        """Return the results; wait for them at most ``timeout`` seconds. Raise the request's error, or TimeoutError."""
        if self._state not in OVER:
            self._wait(timeout)
        if self._together is not None:  # checked before the result, which replaces it
            self._take_out()
        if self._result is not None:
            return self._result
        try:
            raise self._exception or RuntimeError("a future ended without an outcome")
        finally:
            del self  # else the error, its traceback's frames and the future would hold each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the request's error, or None; wait for its end at most ``timeout`` seconds, or raise TimeoutError.

        Raise CancelledError if the request was cancelled, as any future does.
        """
        self._wait(timeout)
        if self.cancelled() and self._exception is not None:
            try:
                raise self._exception
            finally:
                del self  # as in ``result``
        return self._exception

    def error(self) -> BaseException | None:
        """Return the error of a request that has ended, also CancelledError; None if it runs, or has results."""
        return self._exception

    def untaken(self) -> tuple[Results, int] | None:
        """Return the results of many that include its own, and its number there; None if it has its own, or none."""
        self.done()
        together = self._together
        return None if together is None else (together, self.place)

    def add_done_callback(self, fn: Callable[[Future[Result]], object]) -> None:
        """Call ``fn(self)`` when the request has ended, in a thread of the engine; at once if it has ended."""
        self.__dict__.setdefault("_callbacks", []).append(fn)
        self._have_told()
        if self._state in OVER:
            self._invoke_callbacks()

    def cancel(self) -> bool:
        """End the request with CancelledError; return False if it has ended in another way."""
        owner = self._owner
        if not self.done() and self._settle(
            CancelledError("the request was cancelled by its client"), CANCELLED_AND_NOTIFIED
        ):
            if owner is not None:
                owner.ask_to_cancel(self)
            self._invoke_callbacks()
        return self.cancelled()

    def finish(self, outcome: Result | BaseException) -> bool:
        """End the future; called by the engine, once. Return False if the client has cancelled it before."""
        if not self._settle(outcome, FINISHED):
            return False
        self._invoke_callbacks()
        return True

    def __await__(self) -> Generator[Any, None, Result]:
        """Await the results; cancelling the awaiting task cancels the request."""
        result: Result = yield from as_awaitable(self).__await__()
        return result

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        self._refuse_to_wait()
        end_s = None if timeout is None else time.monotonic() + float(timeout)
        left_s, owner, sleeper = timeout, self._owner, own_sleeper()
        sleepers = self.__dict__.setdefault("_sleepers", [])
        sleepers.append(sleeper)
        try:
            while True:
                sleeper.lie_down()
                if self.done():  # a thread that ends it after this check finds the sleeper in the list
                    return
                if left_s is not None and left_s <= 0.0:
                    raise TimeoutError(f"the request has not ended within {timeout} s")
                sleeper.sleep(self.word_at, left_s)
                if end_s is not None:
                    left_s = end_s - time.monotonic()
        finally:
            sleepers.remove(sleeper)
            sleeper.get_up()
            if owner is not None and self.word_at and self._state not in OVER:
                sleeper.leave(self.word_at)

    def _have_told(self) -> None:
        """Have a turn in Python tell of the end, as a callback, a loop or a condition waits for it."""
        owner = self._owner
        if owner is not None and self.word_at and have_told(self.word_at):
            self._take_in(owner)

    def _take_in(self, owner: Any) -> None:
        """Settle the future after compiled code has answered: its owner has the results. A turn runs the callbacks."""
        self._settle(owner, FINISHED)

    def _wake(self) -> None:
        """Wake the threads that wait for the end; called after it."""
        for sleeper in tuple(self._sleepers):
            sleeper.wake()

    def _refuse_to_wait(self) -> None:
        owner = self._owner
        if owner is not None and not self.done():
            owner.refuse_in_callback()

    def _settle(self, outcome: Outcome, state: str, number: int = 0) -> bool:
        """Give the future its outcome, and wake the threads that wait; return False if it has one already."""
        with SETTLING:
            condition = self._made_condition
            if condition is None:
                return self._take(outcome, state, number)
        with condition:
            if not self._take(outcome, state, number):
                return False
            for waiter in self._waiters:
                if state == CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                else:
                    (waiter.add_result if self._exception is None else waiter.add_exception)(self)
            condition.notify_all()
        return True

    def _take_out(self) -> None:
        """Take its results out of those of many; all threads that ask get the same objects."""
        with SETTLING:
            if self._together is not None:
                self._result = self._together.of(self.place)
                self._together = None

    def _take(self, outcome: Outcome, state: str, number: int) -> bool:
        if self._state in OVER:
            return False
        if isinstance(outcome, BaseException):
            self._exception = outcome
        elif isinstance(outcome, dict):
            self._result = outcome
        else:
            self._together, self.place = outcome, number
        self._state, self._owner = state, None
        if self._sleepers:
            self._wake()
        return True

    def _invoke_callbacks(self) -> None:
        """Run the callbacks; each is taken out of the list once, by the thread that comes first."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            is_ours = isinstance(callback, Telling)
            told = None if is_ours else let_go()
            try:
                callback(self)
            except BaseException:  # no exception of a client's code may reach the engine
                logging.getLogger("cellrt").exception("a callback of %r raised", self)
            if not is_ours:
                hold(told)


def finish_together(ended: Iterable[tuple[Results, int, RequestFuture]]) -> None:
    """End futures, each with its number in results of many; called by the engine, once.

    Futures that were cancelled stay cancelled.
    """
    others: list[tuple[Results, int, RequestFuture]] = []
    with SETTLING:
        for results, number, future in ended:
            if future._made_condition is not None or future._callbacks is not None:
                others.append((results, number, future))
            elif future._state == PENDING:
                future._together, future.place = results, number
                future._state, future._owner = FINISHED, None
                if future._sleepers or future.word_at:  # most are waited for by nobody yet
                    future._wake()
            else:  # the thread that settled it may have been interrupted before it woke the others
                future._wake()
    for results, number, future in others:
        future._settle(results, FINISHED, number)
        future._wake()
        future._invoke_callbacks()


def as_awaitable(future: RequestFuture) -> asyncio.Future[Result]:
    """Wrap a future for the running event loop; cancelling the wrapper cancels the request.

    Raise RequestError in a future's callback, where the loop would wait for its own thread.
    """
    future._refuse_to_wait()
    loop = asyncio.get_running_loop()
    wrapper: asyncio.Future[Result] = loop.create_future()
    mailbox = mailbox_of(loop)

    def copy() -> None:
        error = future.error()
        if wrapper.done():
            return
        if error is not None:
            wrapper.set_exception(error)
        else:
            wrapper.set_result(future.result())

    def ended(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no coroutine waits there any more
            mailbox.put(copy)

    def left(made: asyncio.Future[Result]) -> None:
        if made.cancelled():
            future.cancel()

    wrapper.add_done_callback(left)
    future.add_done_callback(Telling(ended))
    return wrapper
