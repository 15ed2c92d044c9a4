"""Turns: one loop, and one thread at a time that takes a turn of it (docs/decisions/0011).

A *turn* takes in what happened, admits, schedules, launches and replies. A worker takes one after each task, so that it
launches its own next task and answers its clients without waking another thread; the timekeeper takes one for
deadlines, cancellations and commands. Clients never do: a turn is not interrupted by their signals. Who finds the turn
taken leaves its news; the holder looks for news after giving the turn back.

Crossings between threads, and what each guarantees:

- the inbox (anybody to the holder): a deque, because ``extend`` hands in many or none, whatever interrupts it;
- the gate (clients and whoever stops the loop): what is handed in while it is held is seen before the end, what comes
  later is refused;
- the alarm (anybody to the timekeeper): every item is a look at the inbox and at the next deadline;
- the workers' own queues, counters and finished lists: see ``worker/base.py``.

A forked process has none of the threads: there every engine is stopped from the start, and nobody waits for it.
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
"""How often somebody looks who must have the turn, while another thread has it."""


class Call(Generic[T]):
    """A function to be called in a turn, with a client that waits for its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = Awaited()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Calls the function; called in a turn."""
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        self._done.say()

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error; called when there will be no turn for it."""
        self._error = error
        self._done.say()

    def result(self, timeout: float | None) -> T:
        """What the function returned or raised. Raises TimeoutError after ``timeout`` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the engine did not come to it within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


class Turns:
    """Who has the turn, and how others leave their news.

    Args:
        workers: those whose threads take turns too; the list may change in a turn.
        words: say who has the turn, also to compiled code that takes turns (``worker/turn_words.py``).
        step: one turn.
        tell: as much of it as tells clients what has ended.
        has_arrivals: whether requests came that no turn has seen and that are not in the inbox.
        next_moment_s: seconds until a turn is due though nothing happens; None: never.
        end: called once, after the last turn, with why there is no other.
        abandon: has everything end soon and waits for nothing; for the exit of the program.
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
        """Whether this is a forked process, which has none of the threads."""
        self.words = words
        self._workers, self._step, self._tell, self._has_arrivals = workers, step, tell, has_arrivals
        self._next_moment_s, self._end = next_moment_s, end
        self._inbox: deque[object] = deque()
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._holder = -1
        self.was_interrupted = False
        """Whether an exception may have kept a client from saying what it had handed in."""
        self._thread = ServiceThread(self._keep_time, "cellrt-timekeeper", abandon)
        _OPEN.add(self)

    def start(self) -> None:
        """Starts the timekeeper."""
        self._thread.start()

    def join(self, timeout: float | None) -> bool:
        """Waits for the end of the timekeeper; False if it has not come in so many seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def refuse_in_callback(self) -> None:
        """Raises RequestError if the calling thread has the turn: then it is in a future's callback, and would wait for
        itself. Raises EngineClosedError in a forked process, where it would wait for nobody."""
        if self.is_parents:
            raise EngineClosedError(str(self.stopped))
        if self.is_held_here:
            raise RequestError("a future's callback cannot wait for its engine: call this from another thread")

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._holder == threading.get_ident()

    def hand_in(self, items: Sequence[object], is_urgent: bool) -> None:
        """Hands in all items or none, under the gate; an idle worker takes the turn, or if they are urgent anybody.

        Raises EngineClosedError. An exception of a signal's handler leaves them handed in or not, and the inbox whole.
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
        """Has a worker that is idle look for news; False if none is."""
        for worker in self._workers:  # noqa: SIM110 - a generator costs more than all that it looks at
            if worker.wake():
                return True
        return False

    def command(self, function: Callable[[], None]) -> None:
        """Has a function called in a turn, from any thread; it is dropped if there will be none."""
        if self.stopped is None:
            self._inbox.append(function)
            self.words[NEWS] = 1
            self._alarm.put(None)

    def call(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Calls a function in a turn and returns its result; raises what it raises, and as ``ask`` does."""
        return self.ask(Call(function), timeout)

    def ask(self, call: Call[T], timeout: float | None = None) -> T:
        """Hands in a call and waits for its result. Raises EngineClosedError, TimeoutError, and RequestError in a
        callback."""
        self.refuse_in_callback()
        with self.gate:
            if self.stopped is not None:
                raise EngineClosedError(str(self.stopped))
            self._inbox.append(call)
            self.words[NEWS] = 1
        self._alarm.put(None)
        return call.result(timeout)

    def wake(self) -> None:
        """Has the timekeeper take a turn; from any thread."""
        self._alarm.put(None)

    def note_end(self) -> None:
        """Has a turn look at the workers, since one has ended: another turn, if one is being taken; from any thread."""
        self.command(self._forget)  # a message: an alarm alone finds the turn taken, and is over

    def has_news(self) -> bool:
        """Whether a turn would find something: safe from any thread."""
        if self._inbox or self._has_arrivals():
            return True
        for worker in self._workers:  # noqa: SIM110 - a generator costs more than all that it looks at
            if worker.has_finished():
                return True
        return False

    def has_messages(self) -> bool:
        """Whether something was handed in that no turn has seen."""
        return bool(self._inbox)

    def take_messages(self) -> Iterator[object]:
        """What was handed in since the last turn, and during this; called in a turn."""
        while self._inbox:
            yield self._inbox.popleft()

    def take(self, how: int = NOT_HELD) -> bool:
        """Takes the turn unless another thread has it (then False); called by workers and the timekeeper.

        A worker stops after two turns in a row, for the sake of its tasks, and leaves further news to the timekeeper.

        Args:
            how: HELD if compiled code of this thread has taken the turn already; ANSWERS if besides all that is left of
                it is to tell clients.
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
                self.words[NUM_TURNS] += 1  # at its end: who read the tables' addresses in it reads them again
                self._release()
            if self.stopped is not None or not self.has_news():
                return True
        self._alarm.put(None)
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the turn, once no other thread has it, from everybody else."""
        while not self._acquire():
            time.sleep(AGAIN_S)
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> bool:
        """Takes the turn unless another thread has it, who then looks for news when it has given it back."""
        if replaced(self.words, TURN, 0, 1):
            return True
        stored(self.words, NEWS, 1)
        return bool(replaced(self.words, TURN, 0, 1))

    def _release(self) -> None:
        stored(self.words, TURN, 0)

    def stop(self, reason: CellrtError) -> None:
        """Has the timekeeper end the loop after the turn that runs; from any thread."""
        with self.gate:
            if self.stopped is None:
                self.stopped = reason
        self._alarm.put(None)

    def forget_fork(self) -> None:
        """In a forked process: leaves the engine to the parent."""
        self.gate = threading.RLock()  # a thread that is not here may have held it
        self.stopped = EngineClosedError("this engine is the parent's: make an engine in each process")
        self.is_parents = True

    def _keep_time(self) -> None:
        """The timekeeper: takes a turn at each deadline and alarm, until ``stop``; then ends what is left."""
        while self.stopped is None:
            with suppress(Empty):
                self._alarm.get(timeout=self._next_moment_s())
            self.take()
        with self.held():
            self.words[BY_HAND] = ALWAYS  # compiled code decides nothing any more
            self._holder = threading.get_ident()
            self._end(self.stopped)
            self._holder = -1
        # Nothing here holds the engine any more: it goes with its last user.
        self._step = self._tell = self._forget
        self._has_arrivals = self._has_none
        self._next_moment_s = self._never
        self._end = self._forget
        self._thread.stop = None
        self._inbox.clear()

    @staticmethod
    def _forget(*_: object) -> None:
        """In place of what a closed engine did."""

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


# The futures of all engines share a lock, those of an engine that the forked process makes too.
os.register_at_fork(before=SETTLING.acquire, after_in_parent=SETTLING.release, after_in_child=_forget_all)
