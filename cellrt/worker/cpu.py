"""The CPU worker: a thread with the task queue, in-progress queue and completion counter of a GPU worker.

Crossings between threads: ``launch`` is called by the holder of the manager's turn and puts a task in a queue;
the thread runs tasks in that order and, after each, adds one to the counter and asks for the turn; ``poll`` is
called in a turn and pops the in-progress queue as far as the counter says (BatchMaker section 2.5). ``wake`` is
called by clients: a worker says that it is idle *before* it looks for news a last time, and a client leaves its
news before it looks for an idle worker, so one of them sees the other. The buffer of a task belongs to the
worker from launch to completion.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.batch import Failure
from cellrt.executor import Executor


class Done(NamedTuple):
    """A completed task."""

    task: int
    start_ns: int
    end_ns: int
    busy_ns: int
    """Time that the thread ran: what waiting for a processor or the interpreter lock adds is not the task's."""
    failures: list[Failure]


class Launch(NamedTuple):
    """A task to run; ``task`` < 0 only wakes the worker."""

    task: int
    type_id: int
    buffer: NDArray[np.int32]


WAKE = Launch(-1, 0, np.empty(0, np.int32))


class CpuWorker:
    """Runs tasks in order on one thread.

    Args:
        executor: what runs a task.
        take_turns: takes the manager's turn, if no other thread has it; called after each task and when woken.
        has_news: whether a turn would find something.
        ended: called when the thread ends.
        num_threads: torch threads of this worker; torch keeps one number for threads that start later, too.
        name: of the thread.
    """

    def __init__(
        self,
        executor: Executor,
        take_turns: Callable[[], bool],
        has_news: Callable[[], bool],
        ended: Callable[[], None],
        num_threads: int,
        name: str,
    ) -> None:
        self._executor = executor
        self._take_turns = take_turns
        self._has_news = has_news
        self._ended = ended
        self._is_idle = False
        self._num_threads = num_threads
        self._queue: SimpleQueue[Launch | None] = SimpleQueue()
        self._in_progress: deque[int] = deque()
        self._finished: deque[Done] = deque()
        self._counter = 0
        self._popped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def num_outstanding(self) -> int:
        """Tasks launched and not yet polled."""
        return len(self._in_progress)

    def is_alive(self) -> bool:
        """Whether the thread runs and no task killed it."""
        return self.error is None and self._thread.is_alive()

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """Puts a task in the queue; called by the holder of the turn."""
        self._in_progress.append(task)
        self._queue.put(Launch(task, type_id, buffer))

    def wake(self) -> bool:
        """Wakes the worker to take a turn if it is idle; False if it is not."""
        if not self._is_idle:
            return False
        self._is_idle = False
        self._queue.put(WAKE)
        return True

    def has_finished(self) -> bool:
        """Whether there is a completed task to poll."""
        return self._popped < self._counter

    def poll(self) -> list[Done]:
        """Takes the tasks that the counter says are done, in order; called by the holder of the turn."""
        done = []
        while self._popped < self._counter:
            self._in_progress.popleft()
            done.append(self._finished.popleft())
            self._popped += 1
        return done

    def close(self, timeout_s: float) -> bool:
        """Lets the thread end after its queue; returns whether it did in time."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _next(self) -> Launch | None:
        """The next task; waits for one, after a last look for news.

        If another thread has the turn, the news are its business: it looks again when it gives the turn back.
        """
        while self._queue.empty():
            self._is_idle = True
            if not self._has_news() or not self._take_turns():
                break
        item = self._queue.get()
        self._is_idle = False
        return item

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while (item := self._next()) is not None:
                if item.task >= 0:
                    start_ns, busy_ns = time.perf_counter_ns(), time.thread_time_ns()
                    failures = self._executor.execute(item.type_id, item.buffer)
                    end_ns = time.perf_counter_ns()
                    busy_ns = time.thread_time_ns() - busy_ns if self._num_threads == 1 else end_ns - start_ns
                    self._finished.append(Done(item.task, start_ns, end_ns, busy_ns, failures))
                    self._counter += 1
                self._take_turns()
        except BaseException as error:  # a worker that dies is reported, whatever killed it
            self.error = error
        finally:
            self._ended()
