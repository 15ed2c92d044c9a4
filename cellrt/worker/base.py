"""What every worker is: a thread with a task queue, an in-progress queue and a completion counter.

Crossings between threads: ``launch`` is called by the holder of the manager's turn and puts a task in a queue; the
thread runs tasks in that order and, for each one done, adds one to the counter and asks for the turn; ``poll`` is
called in a turn and pops the in-progress queue as far as the counter says (BatchMaker section 2.5). ``wake`` is
called by clients: a worker says that it is idle *before* it looks for news a last time, and a client leaves its
news before it looks for an idle worker, so one of them sees the other. The buffer of a task belongs to the
worker from launch to completion.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.notices import Notices
from cellrt.worker.blame import Failure
from cellrt.worker.cell_type import CellType
from cellrt.worker.service_thread import ServiceThread


class Done(NamedTuple):
    """A completed task."""

    task: int
    start_ns: int
    end_ns: int
    busy_ns: int
    """Time that the worker spent on it: what waiting for a processor or the interpreter lock adds is not the task's."""
    failures: list[Failure]


class Launch(NamedTuple):
    """A task to run; ``task`` < 0 only wakes the worker."""

    task: int
    type_id: int
    buffer: NDArray[np.int32]


WAKE = Launch(-1, 0, np.empty(0, np.int32))

NOT_HELD, HELD, ANSWERS = range(3)
"""How a worker comes to a turn: without it, with it, or with it and only to tell clients of answers."""


class Unfinished(NamedTuple):
    """What a worker that died leaves behind, each in the order of launching."""

    begun: list[Launch]
    """Tasks that it began: it died in one of them, or with them on its device."""
    waiting: list[Launch]
    """Tasks that it never looked at."""


class Worker(ABC):
    """A worker's queues and thread.

    A worker that died can be replaced by another of its location: the rows lie in arenas that are none of its own, no
    task writes a row that it reads, and what it did not finish is launched again as it is.

    Args:
        take_turns: takes the manager's turn, if no other thread has it; told one of the words above.
        has_news: whether a turn would find something.
        ended: called when the thread ends.
        name: of the thread.
    """

    check_every_s: float | None = None
    """How often somebody must ask whether it is alive while tasks are outstanding; None: it tells when it ends."""
    is_replaceable = True
    """Whether, after its death, another can take its place and go on with its arenas."""

    def __init__(
        self, take_turns: Callable[[int], bool], has_news: Callable[[], bool], ended: Callable[[], None], name: str
    ) -> None:
        self._take_turns = take_turns
        self._has_news = has_news
        self._ended = ended
        self._idle: deque[object] = deque()
        """While the thread waits, or is about to: a token that is new each time."""
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
        """Starts the thread."""
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """What it counted besides tasks, by name; any thread may ask."""
        return {}

    @property
    def num_outstanding(self) -> int:
        """Tasks launched and not yet polled."""
        return len(self._in_progress)

    def is_alive(self) -> bool:
        """Whether the thread runs and no task killed it."""
        return self.error is None and not self._has_ended

    @property
    def is_there(self) -> bool:
        """Whether it can run tasks by now."""
        return True

    def learn(self, types: Iterable[CellType]) -> None:  # noqa: B027 - most have nothing to load
        """Has the worker load what tasks of new types need, before the first comes; in a turn."""

    def has_learned(self) -> bool:
        """Whether all that it was to learn is loaded."""
        return True

    def stand_in(self, location: int, launches: Sequence[Launch]) -> Callable[[], bool] | None:
        """Takes tasks of another location, whose worker has died; in a turn.

        Returns what says, in a turn, whether they have ended, by completion or with this worker; None: it takes none.
        """
        return None

    def begin_after(self, has_ended: Callable[[], bool]) -> None:
        """Has the worker take no tasks until those have ended that another has taken in its place; in a turn."""
        raise NotImplementedError

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """Puts a task in the queue; called by the holder of the turn."""
        launch = Launch(task, type_id, buffer)
        self._in_progress.append(launch)
        self._tell(launch)

    def wake(self) -> bool:
        """Wakes the worker to take a turn if it is idle; False if it is not."""
        if not self._idle:
            return False
        try:
            token = self._idle[0]
        except IndexError:
            return False
        self._tell(WAKE)  # first: a client that is interrupted in between leaves a worker that wakes
        try:  # noqa: SIM105 - to suppress costs a microsecond
            self._idle.remove(token)
        except ValueError:  # it woke, and may wait again already: that takes another to wake it
            pass
        return True

    def rest(self, seconds: float) -> None:
        """Has the worker, which has nothing to do, wait so long: no client wakes it, then it takes a turn itself.

        Called by the holder of the turn; what is launched is run at once, as ever.
        """
        self._rests_until_s = time.monotonic() + seconds
        self.wake()  # if it waits for clients: it goes on waiting, but not for ever

    def has_finished(self) -> bool:
        """Whether there is a completed task to poll."""
        return self._popped < self._counter

    def has_completed(self) -> bool:
        """Whether any task of it was completed, and polled."""
        return self._popped > 0

    def take_notices(self) -> Notices | None:
        """What the scheduler says of tasks that the worker has taken in itself; called by the holder of the turn."""
        return None

    def poll(self) -> list[Done]:
        """Takes the tasks that the counter says are done, in order; called by the holder of the turn."""
        done = []
        while self._popped < self._counter:
            self._in_progress.popleft()
            done.append(self._finished.popleft())
            self._popped += 1
        return done

    def forget(self, cell_type: CellType) -> None:  # noqa: B027 - most have nothing to forget
        """Drops what was kept for a cell type that is no more, and maybe never had a task; its number may come to mean
        another."""

    def take_unfinished(self) -> Unfinished:
        """Takes the tasks that a worker did not finish: once it died (``error`` says of what) and was polled."""
        waiting = self._take_waiting()
        left = list(self._in_progress)
        self._in_progress.clear()
        return Unfinished(left[: len(left) - len(waiting)], waiting)

    def end(self) -> None:
        """Lets the thread end after its queue."""
        self._tell(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; returns whether it came in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _tell(self, item: Launch | None) -> None:
        """Puts something in the queue; None: the end."""
        self._queue.put(item)

    def _take_waiting(self) -> list[Launch]:
        """Takes the tasks out of the queue."""
        waiting = []
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None and item.task >= 0:
                waiting.append(item)
        return waiting

    def _finish(self, done: Done) -> None:
        """Hands a completed task to whoever polls; called by the thread."""
        self._finished.append(done)
        self._counter += 1

    def _next(self) -> Launch | None:
        """The next task; waits for one, after a last look for news.

        If another thread has the turn, the news are its business: it looks again when it gives the turn back.
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
        """The thread. A worker that dies is reported, whatever killed it."""
        try:
            self._serve()
        except BaseException as error:
            self.error = error if self.error is None else self.error
        finally:
            self._has_ended = True
            self._ended()

    @abstractmethod
    def _serve(self) -> None:
        """Runs tasks until the queue says None."""
