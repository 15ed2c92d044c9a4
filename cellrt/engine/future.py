"""What a client holds while its request runs: a future."""

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
"""Held to make a future's condition, and to settle a future that has none. A collection inside may cancel another."""


class Results(Protocol):
    """Results of many requests."""

    def of(self, number: int) -> Result:
        """Those of one of them; asked for once."""

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Those of some of them, each in memory of its own; each asked for once."""


class PackedResults(Results, Protocol):
    """Those that lie in memory as bytes."""

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """Of each result of a request: which it is, its rows (-1: one without a row dimension), and its bytes."""


Outcome = Result | BaseException | Results


class Owner(Protocol):
    """What a future must know of its engine."""

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early, if it has not ended."""

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback, where waiting for the engine would never end."""

    def have_told(self) -> None:
        """Has a turn tell of what is answered, and was not told."""


class Telling(partial[object]):
    """A callback of ours: it tells somebody and is over, so that nobody need wake before it."""


class RequestFuture(Future[Result]):
    """A request's future, as ``concurrent.futures`` has them, and it can be awaited. Safe from any thread.

    ``cancel`` ends it at once with ``cellrt.CancelledError``; the engine then drops what is left of the request.
    Callbacks run in a thread of the engine (after ``cancel``: of the caller). They should be short, and waiting there
    for a request that has not ended raises RequestError.
    """

    # The base makes a condition for every future and locks it at every call, which is a good part of what a small
    # request costs. Here a thread that asks for the result sleeps by itself, and a condition is made for those who wait
    # for several futures. What most futures never have is an attribute of the class until they do.
    #
    # Compiled code may answer the request: then the results are with the owner as soon as a word says so
    # (``native/answer_word.py``), and whoever looks first takes that in, a thread of the client or a turn.

    _state = PENDING
    _result: Result | None = None
    _exception: BaseException | None = None
    _made_condition: threading.Condition | None = None
    _sleepers: Sequence[Sleeper] = ()
    """Of each thread that waits for the end."""
    word_at = 0
    """The address of the word in front of the results, in memory that the owner keeps; 0: there is none."""
    _callbacks: list[Callable[[Future[Result]], object]] | None = None
    _together: Results | None = None
    """Has the results until somebody asks for them."""

    def __init__(self, owner: Owner | None, place: int = 0, number: int = 0) -> None:
        self._owner = owner
        self.place = place
        """Its number among the requests of its owner; later among the results that it is part of."""
        self.number = number
        """The request's number in its engine, as timelines have it."""

    @property
    def _waiters(self) -> list[Any]:
        """Who waits for several futures, as the base has it."""
        waiters: list[Any] = self.__dict__.setdefault("_made_waiters", [])
        return waiters

    @_waiters.setter
    def _waiters(self, _: list[Any]) -> None:
        """The base's own is not needed."""

    @property
    def _condition(self) -> threading.Condition:
        """What the base, ``wait`` and ``as_completed`` of ``concurrent.futures`` hold while they look at the future."""
        self._refuse_to_wait()
        self._have_told()
        with SETTLING:
            if self._made_condition is None:
                self._made_condition = threading.Condition()
            return self._made_condition

    @_condition.setter
    def _condition(self, _: threading.Condition) -> None:
        """The base's own is not needed."""

    def __repr__(self) -> str:
        self.done()
        return f"RequestFuture({self._state.lower().replace('_', ' ')})"

    def done(self) -> bool:
        """Whether the request has ended."""
        if self._state in OVER:
            return True
        owner = self._owner  # it keeps the word where it is
        if owner is None or not self.word_at or not is_there(self.word_at):
            return self._state in OVER
        self._take_in(owner)
        return True

    def cancelled(self) -> bool:
        """Whether ``cancel`` ended it."""
        return self._state == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """Always False: from its submission on a request may run or be cancelled."""
        return False

    def result(self, timeout: float | None = None) -> Result:
        """The results; waits for them at most ``timeout`` seconds. Raises the request's error, or TimeoutError."""
        if self._state not in OVER:
            self._wait(timeout)
        if self._together is not None:  # before the result, which takes its place
            self._take_out()
        if self._result is not None:
            return self._result
        try:
            raise self._exception or RuntimeError("a future ended without an outcome")
        finally:
            del self  # or the error, the frames that it went through and the future would hold each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The request's error, or None; waits for its end at most ``timeout`` seconds, or raises TimeoutError.

        Raises CancelledError if the request was cancelled, as any future does.
        """
        self._wait(timeout)
        if self.cancelled() and self._exception is not None:
            try:
                raise self._exception
            finally:
                del self  # as of ``result``
        return self._exception

    def error(self) -> BaseException | None:
        """The error of a request that has ended, CancelledError included; None if it has not, or has results."""
        return self._exception

    def untaken(self) -> tuple[Results, int] | None:
        """The results that its own are part of, and its number there; None if it has taken them out, or has none."""
        self.done()
        together = self._together
        return None if together is None else (together, self.place)

    def add_done_callback(self, fn: Callable[[Future[Result]], object]) -> None:
        """Calls ``fn(self)`` when the request has ended, in the engine's thread, or at once if it has."""
        self.__dict__.setdefault("_callbacks", []).append(fn)
        self._have_told()
        if self._state in OVER:
            self._invoke_callbacks()

    def cancel(self) -> bool:
        """Ends the request with CancelledError; False if it has ended otherwise."""
        owner = self._owner
        if not self.done() and self._settle(
            CancelledError("the request was cancelled by its client"), CANCELLED_AND_NOTIFIED
        ):
            if owner is not None:
                owner.ask_to_cancel(self)
            self._invoke_callbacks()
        return self.cancelled()

    def finish(self, outcome: Result | BaseException) -> bool:
        """Ends the future; called by the engine, once. False if the client had cancelled it before."""
        if not self._settle(outcome, FINISHED):
            return False
        self._invoke_callbacks()
        return True

    def __await__(self) -> Generator[Any, None, Result]:
        """The results; cancelling the awaiting task cancels the request."""
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
                if self.done():  # who ends it after this look finds the sleeper in the list
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
        """Have a turn tell of the end, as others than threads that sleep wait for it."""
        owner = self._owner
        if owner is not None and self.word_at and have_told(self.word_at):
            self._take_in(owner)

    def _take_in(self, owner: Any) -> None:
        """Take in that compiled code has answered the request: its owner has the results. A turn calls back."""
        self._settle(owner, FINISHED)

    def _wake(self) -> None:
        """Wakes who waits for the end; called once, after it."""
        for sleeper in tuple(self._sleepers):
            sleeper.wake()

    def _refuse_to_wait(self) -> None:
        owner = self._owner
        if owner is not None and not self.done():
            owner.refuse_in_callback()

    def _settle(self, outcome: Outcome, state: str, number: int = 0) -> bool:
        """Gives the future its outcome, unless it has one, and wakes whoever waits."""
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
        """Takes its results out of those that came together; all threads that ask get the same."""
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
        """Each callback is taken out once, by whichever thread comes first."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            is_ours = isinstance(callback, Telling)
            told = None if is_ours else let_go()
            try:
                callback(self)
            except BaseException:  # whatever a client's own code raises, it must not reach the engine
                logging.getLogger("cellrt").exception("a callback of %r raised", self)
            if not is_ours:
                hold(told)


def finish_together(ended: Iterable[tuple[Results, int, RequestFuture]]) -> None:
    """Ends futures with results, each by its number among these; called by the engine, once. What was cancelled stays
    so."""
    others: list[tuple[Results, int, RequestFuture]] = []
    with SETTLING:
        for results, number, future in ended:
            if future._made_condition is not None or future._callbacks is not None:
                others.append((results, number, future))
            elif future._state == PENDING:
                future._together, future.place = results, number
                future._state, future._owner = FINISHED, None
                future._wake()
            else:  # who took its results in may have been interrupted before it woke others
                future._wake()
    for results, number, future in others:
        future._settle(results, FINISHED, number)
        future._wake()
        future._invoke_callbacks()


def as_awaitable(future: RequestFuture) -> asyncio.Future[Result]:
    """Wraps a future for the running event loop; cancelling the wrapper cancels the request.

    Raises RequestError in a future's callback, where the loop would wait for its own thread.
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
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            mailbox.put(copy)

    def left(made: asyncio.Future[Result]) -> None:
        if made.cancelled():
            future.cancel()

    wrapper.add_done_callback(left)
    future.add_done_callback(Telling(ended))
    return wrapper
