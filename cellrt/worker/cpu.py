"""The CPU worker: a thread with the task queue, in-progress queue and completion counter of a GPU worker.

Crossings between threads: ``launch`` is called by the manager and puts a task in a queue; the thread runs tasks in that order and,
after each, adds one to the counter and calls ``notify``; ``poll`` is called by the manager and pops the in-progress queue as
far as the counter says (BatchMaker section 2.5). The buffer of a task belongs to the worker from launch to completion.
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

from cellrt.executor import Executor, Failure


class Done(NamedTuple):
    """A completed task."""

    task: int
    start_ns: int
    end_ns: int
    failures: list[Failure]


class CpuWorker:
    """Runs tasks in order on one thread.

    Args:
        executor: what runs a task.
        notify: called from the worker's thread after each task, and when the thread ends.
        num_threads: torch threads of this worker; torch keeps one number for threads that start later, too.
        name: of the thread.
    """

    def __init__(self, executor: Executor, notify: Callable[[], None], num_threads: int, name: str) -> None:
        self._executor = executor
        self._notify = notify
        self._num_threads = num_threads
        self._queue: SimpleQueue[tuple[int, int, NDArray[np.int32]] | None] = SimpleQueue()
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
        """Puts a task in the queue; called by the manager."""
        self._in_progress.append(task)
        self._queue.put((task, type_id, buffer))

    def poll(self) -> list[Done]:
        """Takes the tasks that the counter says are done, in order; called by the manager."""
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

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while (item := self._queue.get()) is not None:
                task, type_id, buffer = item
                start_ns = time.perf_counter_ns()
                failures = self._executor.execute(type_id, buffer)
                self._finished.append(Done(task, start_ns, time.perf_counter_ns(), failures))
                self._counter += 1
                self._notify()
        except BaseException as error:  # a worker that dies is reported, whatever killed it
            self.error = error
        finally:
            self._notify()
