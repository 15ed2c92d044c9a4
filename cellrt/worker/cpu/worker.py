"""The CPU worker: its thread runs tasks itself, one after the other, and takes the manager's turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.task_layout import H_GOES_ON
from cellrt.definition.modes import use_torch_threads
from cellrt.worker.base import Done, Worker
from cellrt.worker.blame import Failure
from cellrt.worker.cell_type import CellType
from cellrt.worker.cpu.executor import Executor

TURN_EVERY_NS = 300_000
"""Tasks that were given together and take less are run without a turn between them."""
MOST_WAITING = 4
"""A busy machine makes a task take at most so many times its own time; beyond, it is the cell that waits."""


class CpuWorker(Worker):
    """Runs tasks in order on one thread.

    Args:
        executor: what runs a task.
        take_turns, has_news, ended, name: see ``Worker``.
        num_threads: torch threads of this worker; torch keeps one number for threads that start later, too.
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
        super().__init__(take_turns, has_news, ended, name)
        self._executor = executor
        self._num_threads = num_threads

    def forget(self, cell_type: CellType) -> None:
        """See ``Worker.forget``."""
        self._executor.forget(cell_type.id)

    def _serve(self) -> None:
        use_torch_threads(self._num_threads)
        since_ns = 0  # when the first task began after which no turn was taken, or 0
        while (item := self._next()) is not None:
            if item.task >= 0:
                done = Done(item.task, *run_timed(self._executor, item.type_id, item.buffer, self._num_threads))
                self._finish(done)
                since_ns = since_ns or done.start_ns
                goes_on = item.buffer[H_GOES_ON] or done.end_ns - since_ns < TURN_EVERY_NS
                if goes_on and not self._queue.empty():
                    continue
            since_ns = 0
            self._take_turns()


def run_timed(
    executor: Executor, type_id: int, buffer: NDArray[np.int32], num_threads: int
) -> tuple[int, int, int, list[Failure]]:
    """Runs a task: its start, its end and what it took, as ``Done`` has them, and its failures.

    What it took is the thread's own time, as what waiting adds is not the task's; near what passed, as a cell may wait
    for something itself.
    """
    start_ns, start_busy_ns = time.perf_counter_ns(), time.thread_time_ns()
    failures = executor.execute(type_id, buffer)
    end_ns, busy_ns = time.perf_counter_ns(), time.thread_time_ns() - start_busy_ns
    passed_ns = end_ns - start_ns
    return start_ns, end_ns, max(busy_ns, passed_ns // MOST_WAITING) if num_threads == 1 else passed_ns, failures
