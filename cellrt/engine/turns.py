"""Turns: one scheduling loop, of which one thread at a time runs a pass (docs/decisions/0011).

A *turn* is one pass: it reads the news, admits, schedules, launches and replies. A worker takes a turn after each task,
so that it launches its own next task and answers its clients without waking another thread. The timekeeper, a thread,
takes turns for deadlines, cancellations and commands. Clients take none, so that their signals interrupt no turn. A
thread that finds the turn taken leaves its news; the holder checks for news after it has released the turn.

Threads meet at these places, with these guarantees:

- The inbox, from any thread to the holder of the turn: a deque, as ``extend`` adds all items or none if interrupted.
- The gate, a lock of clients and of ``stop``: items that are handed in under it are read before the loop ends, and
  later ones are refused.
- The alarm, from any thread to the timekeeper: for each item it checks the inbox and the next deadline.
- The queues, counters and finished lists of workers: see ``worker/base.py``.

A forked process has none of the threads. There every engine is stopped from the start, and no call waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from cellrt.engine.awaited import Awaited
from cellrt.engine.future import SETTLING
from cellrt.errors import CellrtError, EngineClosedError, InternalError, RequestError
from cellrt.native.atomics import replaced, stored
from cellrt.native.row_types import Rows
from cellrt.worker.base import ANSWERS, NOT_HELD, Worker
from cellrt.worker.service_thread import ServiceThread
from cellrt.worker.turn_words import ALWAYS, BY_HAND, NEWS, NUM_TURNS, TURN

T = TypeVar("T")

AGAIN_S = 0.0002
"""The seconds between two attempts of a thread that must have the turn, while another thread has it."""


class Call(Generic[T]):
    """A function that is called in a turn, and for whose result a client waits."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = Awaited()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function; called in a turn."""
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        self._done.say()

    def fail(self, error: BaseException) -> None:
        """End the call with an error; called when no turn will run it."""
        self._error = error
        self._done.say()

    def result(self, timeout: float | None) -> T:
        """Return or raise what the function did. Raise TimeoutError after ``timeout`` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the engine did not come to it within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


class Turns:
    """The turn, which one thread at a time has, and the inbox in which other threads leave their news.

    Args:
        workers: the workers, whose threads take turns, too; the list may change in a turn.
        words: memory that says whether the turn is taken, also to compiled code (``worker/turn_words.py``).
        step: runs one turn.
        tell: runs only the part of a turn that notifies clients of what has ended.
        has_arrivals: returns whether requests came that no turn has seen and that are not in the inbox.
        next_moment_s: returns the seconds until a turn is due even without news; None: never.
        end: called once, after the last turn, with the error that ended the loop.
        abandon: ends everything soon, without waiting; called when the program exits.
    """

    def __init__(
        self,
        workers: list[Worker],
        words: Rows[int],
        step: Callable[[], None],
        tell: Callable[[], None],
        has_arrivals: Callable[[], bool],
        next_moment_s: Callable[[], float | None],
        end: Callable[[CellrtError], None],
        abandon: Callable[[], None],
    ) -> None:
        self.gate = threading.RLock()  # reentrant: a callback may submit
        self.stopped: CellrtError | None = None
        self.is_parents = False
        """True in a forked process, which has none of the threads."""
        self.words = words
        self._workers, self._step, self._tell, self._has_arrivals = workers, step, tell, has_arrivals
        self._next_moment_s, self._end = next_moment_s, end
        self._inbox: deque[object] = deque()
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._holder = -1
        self.was_interrupted = False
        """True if an exception interrupted a client that was handing in, so that counts may be wrong."""
        self._thread = ServiceThread(self._keep_time, "cellrt-timekeeper", abandon)
        _OPEN.add(self)

    def start(self) -> None:
        """Start the timekeeper."""
        self._thread.start()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of the timekeeper; return False if it has not ended in this many seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def refuse_in_callback(self) -> None:
        """Raise RequestError if the calling thread has the turn: in a future's callback it would wait for itself.

        Raise EngineClosedError in a forked process, where no thread would answer.
        """
        if self.is_parents:
            raise EngineClosedError(str(self.stopped))
        if self.is_held_here:
            raise RequestError("a future's callback cannot wait for its engine: call this from another thread")

    @property
    def is_held_here(self) -> bool:
        """True if the calling thread has the turn."""
        return self._holder == threading.get_ident()

    def hand_in(self, items: Sequence[object], is_urgent: bool) -> None:
        """Put all items or none into the inbox, under the gate, and wake an idle worker to take a turn.

        If no worker is idle and the items are urgent, wake the timekeeper. Raise EngineClosedError. After an exception
        of a signal's handler all items are in the inbox, or none.
        """
        try:
            if self.stopped is not None:
                raise EngineClosedError(str(self.stopped))
            self._inbox.extend(items)
            self.words[NEWS] = 1
            if self.wake_a_worker():
                return
            # A worker that is busy takes a turn when its task ends. A deadline cannot wait for that.
            if is_urgent:
                self._alarm.put(None)
        except BaseException:
            self.was_interrupted = True
            self._alarm.put(None)
            raise

    def wake_a_worker(self) -> bool:
        """Have an idle worker look for news; return False if none is idle."""
        for worker in self._workers:  # noqa: SIM110 - a generator costs more than all that it looks at
            if worker.wake():
                return True
        return False

    def command(self, function: Callable[[], None]) -> None:
        """Have a function called in a turn, from any thread; it is dropped if there is no other turn."""
        if self.stopped is None:
            self._inbox.append(function)
            self.words[NEWS] = 1
            self._alarm.put(None)

    def call(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Call a function in a turn and return its result. Raise the function's error, or those of ``ask``."""
        return self.ask(Call(function), timeout)

    def ask(self, call: Call[T], timeout: float | None = None) -> T:
        """Hand in a call and wait for its result.

        Raise EngineClosedError, TimeoutError, and RequestError in a future's callback.
        """
        self.refuse_in_callback()
        with self.gate:
            if self.stopped is not None:
                raise EngineClosedError(str(self.stopped))
            self._inbox.append(call)
            self.words[NEWS] = 1
        self._alarm.put(None)
        return call.result(timeout)

    def wake(self) -> None:
        """Have the timekeeper take a turn; from any thread."""
        self._alarm.put(None)

    def note_end(self) -> None:
        """Have a turn that begins after this call check the workers, as one has ended; from any thread."""
        self.command(self._forget)  # an alarm alone would be lost if the turn is taken

    def has_news(self) -> bool:
        """Return whether a turn would find something to do; safe from any thread."""
        if self._inbox or self._has_arrivals():
            return True
        for worker in self._workers:  # noqa: SIM110 - a generator costs more than all that it looks at
            if worker.has_finished():
                return True
        return False

    def has_messages(self) -> bool:
        """Return whether the inbox has items that no turn has read."""
        return bool(self._inbox)

    def take_messages(self) -> Iterator[object]:
        """Yield the items of the inbox, also those that arrive meanwhile; called in a turn."""
        while self._inbox:
            yield self._inbox.popleft()

    def take(self, how: int = NOT_HELD) -> bool:
        """Take the turn and run it; return False if another thread has it. Called by workers and the timekeeper.

        A thread takes at most two turns in a row, so that a worker's tasks do not wait; the timekeeper does the rest.

        Args:
            how: HELD if compiled code of this thread has the turn already; ANSWERS if so, and clients are all that is
                left to notify.
        """
        for _ in range(2):
            if not (how or self._acquire()):
                return False
            is_whole, how = how != ANSWERS, NOT_HELD
            self._holder = threading.get_ident()
            try:
                if is_whole:
                    self.words[NEWS] = 0
                if self.stopped is None:
                    (self._step if is_whole else self._tell)()
            except BaseException as error:  # a bug: all requests end rather than hang
                failure = InternalError(f"the engine failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                logging.getLogger("cellrt").critical("the engine failed", exc_info=error)
                self.stop(failure)
            finally:
                self._holder = -1
                self.words[NUM_TURNS] += 1  # at the end: what read the tables' addresses in this turn reads them again
                self._release()
            if self.stopped is not None or not self.has_news():
                return True
        self._alarm.put(None)
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the turn within the block; wait until no other thread has it."""
        while not self._acquire():
            time.sleep(AGAIN_S)
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> bool:
        """Take the turn, or leave news for the thread that has it; return whether it was taken."""
        if replaced(self.words, TURN, 0, 1):
            return True
        stored(self.words, NEWS, 1)
        return bool(replaced(self.words, TURN, 0, 1))

    def _release(self) -> None:
        stored(self.words, TURN, 0)

    def stop(self, reason: CellrtError) -> None:
        """Have the timekeeper end the loop after the current turn; from any thread."""
        with self.gate:
            if self.stopped is None:
                self.stopped = reason
        self._alarm.put(None)

    def forget_fork(self) -> None:
        """Leave the engine to the parent process; called in a forked one."""
        self.gate = threading.RLock()  # a thread that is not here may have held it
        self.stopped = EngineClosedError("this engine is the parent's: make an engine in each process")
        self.is_parents = True

    def _keep_time(self) -> None:
        """Take a turn at each deadline and alarm, until ``stop``; then end what is left. The timekeeper runs this."""
        while self.stopped is None:
            with suppress(Empty):
                self._alarm.get(timeout=self._next_moment_s())
            self.take()
        with self.held():
            self.words[BY_HAND] = ALWAYS  # compiled code takes no more turns
            self._holder = threading.get_ident()
            self._end(self.stopped)
            self._holder = -1
        # From here on nothing refers to the engine, so it is freed with its last user.
        self._step = self._tell = self._forget
        self._has_arrivals = self._has_none
        self._next_moment_s = self._never
        self._end = self._forget
        self._thread.stop = None
        self._inbox.clear()

    @staticmethod
    def _forget(*_: object) -> None:
        """Do nothing, in place of a closed engine's functions."""

    @staticmethod
    def _never() -> float | None:
        return None

    @staticmethod
    def _has_none() -> bool:
        return False


_OPEN: weakref.WeakSet[Turns] = weakref.WeakSet()


def _forget_all() -> None:
    SETTLING.release()
    for turns in list(_OPEN):
        turns.forget_fork()


# The futures of all engines share a lock, also those of engines that the forked process makes.
os.register_at_fork(before=SETTLING.acquire, after_in_parent=SETTLING.release, after_in_child=_forget_all)
