"""The interface of all workers: a thread with a task queue, an in-progress queue and a completion counter.

The threads meet as follows. ``launch`` is called by the holder of the manager's turn and puts a task in a queue. The
worker's thread runs tasks in that order; for each one done it adds one to the counter and asks for the turn. ``poll``
is called in a turn and pops the in-progress queue as far as the counter says (BatchMaker section 2.5). ``wake`` is
called by clients. A worker says that it is idle *before* it looks for news a last time, and a client leaves its news
before it looks for an idle worker, so one of them sees the other. The buffer of a task belongs to the worker from
launch to completion.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.notices import Notices
from cellrt.worker.cell_type import CellType
from cellrt.worker.failed_rows import Failure
from cellrt.worker.service_thread import ServiceThread


class Done(NamedTuple):
    """A completed task."""

    task: int
    start_ns: int
    end_ns: int
    busy_ns: int
    """The time that the worker spent on the task, without its waits for a processor or the interpreter lock."""
    failures: list[Failure]


class Launch(NamedTuple):
    """A task to run; ``task`` < 0 only wakes the worker."""

    task: int
    type_id: int
    buffer: NDArray[np.int32]


WAKE = Launch(-1, 0, np.empty(0, np.int32))

NOT_HELD, HELD, ANSWERS = range(3)
"""The state in which a worker's thread calls ``take_turns``: without the turn, with it, or with it only to answer."""


class Unfinished(NamedTuple):
    """The unfinished tasks of a worker that died, each list in the order of launching."""

    begun: list[Launch]
    """The tasks that it began: it died while it ran one of them, or while its device did."""
    waiting: list[Launch]
    """The tasks that it had not begun."""


class Worker(ABC):
    """A worker's queues and thread.

    A worker that died can be replaced by another of its location: the arenas with the rows are not its own, no task
    writes a row that it reads, and its unfinished tasks are launched again unchanged.

    Args:
        take_turns: takes the manager's turn, if no other thread has it; it is called with NOT_HELD, HELD or ANSWERS.
        has_news: returns whether a turn would find something to do.
        ended: called when the thread ends.
        name: the thread's name.
    """

    check_every_s: float | None = None
    """The seconds between checks whether it is alive, while tasks are outstanding; None if it reports its own end."""
    rest_address = 0
    """The address of a word; if the word is ASLEEP (``turn_words.py``), clients call ``wake``. 0: there is none.

    A worker that replaces this one has the same address.
    """
    is_replaceable = True
    """True if another worker can replace it after its death, and use its arenas."""

    def __init__(
        self, take_turns: Callable[[int], bool], has_news: Callable[[], bool], ended: Callable[[], None], name: str
    ) -> None:
        self._take_turns = take_turns
        self._has_news = has_news
        self._ended = ended
        self._idle: deque[object] = deque()
        """A new token while the thread waits or is about to wait; else empty."""
        self._queue: SimpleQueue[Launch | None] = SimpleQueue()
        self._in_progress: deque[Launch] = deque()
        self._finished: deque[Done] = deque()
        self._counter = 0
        self._popped = 0
        self._rests_until_s = 0.0
        self._has_ended = False
        self._thread = ServiceThread(self._run, name)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Return counts of things other than tasks, by name. Any thread may call this."""
        return {}

    @property
    def num_outstanding(self) -> int:
        """The number of tasks launched and not yet polled."""
        return len(self._in_progress)

    def is_alive(self) -> bool:
        """Return whether the thread runs and no task killed it."""
        return self.error is None and not self._has_ended

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """Put a task in the queue; called by the holder of the turn."""
        launch = Launch(task, type_id, buffer)
        self._in_progress.append(launch)
        self._tell(launch)

    def wake(self) -> bool:
        """Wake the worker to take a turn if it is idle, and return whether it was."""
        if not self._idle:
            return False
        try:
            token = self._idle[0]
        except IndexError:
            return False
        self._tell(WAKE)  # before the removal: if this thread is interrupted in between, the worker still wakes
        try:  # noqa: SIM105 - to suppress costs a microsecond
            self._idle.remove(token)
        except ValueError:  # it woke, and may wait again already, with a new token
            pass
        return True

    def rest(self, seconds: float) -> None:
        """Let the idle worker wait for this many seconds, in which no client wakes it, and then take a turn itself.

        Called by the holder of the turn. Tasks that are launched meanwhile run at once.
        """
        self._rests_until_s = time.monotonic() + seconds
        self.wake()  # it may be waiting without a limit: let it begin again, with this one

    def has_finished(self) -> bool:
        """Return whether there is a completed task to poll."""
        return self._popped < self._counter

    def has_completed(self) -> bool:
        """Return whether any of its tasks was completed and polled."""
        return self._popped > 0

    def take_notices(self) -> Notices | None:
        """Take the scheduler's notices of tasks that the worker completed itself; called by the holder of the turn."""
        return None

    def poll(self) -> list[Done]:
        """Take the tasks that the counter says are done, in order; called by the holder of the turn."""
        done = []
        while self._popped < self._counter:
            self._in_progress.popleft()
            done.append(self._finished.popleft())
            self._popped += 1
        return done

    def forget(self, cell_type: CellType) -> None:  # noqa: B027 - most have nothing to forget
        """Forget a removed cell type, as its number may be used for another. It may have had no task here."""

    def take_unfinished(self) -> Unfinished:
        """Take the tasks that a worker did not finish, after it died (``error`` has the reason) and was polled."""
        waiting = self._take_waiting()
        left = list(self._in_progress)
        self._in_progress.clear()
        return Unfinished(left[: len(left) - len(waiting)], waiting)

    def end(self) -> None:
        """Let the thread end after its queue."""
        self._tell(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end and return whether it came in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _tell(self, item: Launch | None) -> None:
        """Put a task in the queue; None ends the thread."""
        self._queue.put(item)

    def _take_waiting(self) -> list[Launch]:
        """Take the tasks out of the queue."""
        waiting = []
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None and item.task >= 0:
                waiting.append(item)
        return waiting

    def _finish(self, done: Done) -> None:
        """Add a completed task to those that ``poll`` takes; called by the thread."""
        self._finished.append(done)
        self._counter += 1

    def _next(self) -> Launch | None:
        """Return the next task, or None at the end. Look for news once more before waiting for a task.

        If another thread has the turn, it handles the news, as it looks for news when it gives the turn back.
        """
        while self._queue.empty():
            if self._rests_until_s:
                try:
                    return self._queue.get(timeout=max(0.0, self._rests_until_s - time.monotonic()))
                except Empty:
                    if self._rests_until_s <= time.monotonic():
                        self._rests_until_s = 0.0
                        self._take_turns(NOT_HELD)
                    continue
            self._idle.clear()
            self._idle.append(object())
            if not self._has_news() or not self._take_turns(NOT_HELD):
                break
        item = self._queue.get()
        self._idle.clear()
        return item

    def _run(self) -> None:
        """Run the thread. A worker that dies is reported, whatever the error."""
        try:
            self._serve()
        except BaseException as error:
            self.error = error if self.error is None else self.error
        finally:
            self._has_ended = True
            self._ended()

    @abstractmethod
    def _serve(self) -> None:
        """Run tasks until the queue has None."""
