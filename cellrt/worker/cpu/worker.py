"""The CPU worker: its thread runs tasks itself, one after the other, and takes the manager's turns.

Launched tasks lie in a ring, which compiled code works off (``run_tasks.py``); Python runs the tasks that it cannot.
When there is nothing to do the thread sleeps in compiled code too, and is woken by a thread that has news or a task for
it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.notices import Notices
from cellrt.core.state.task_layout import H_GOES_ON
from cellrt.definition.modes import use_torch_threads
from cellrt.native.futex import MAY_SPIN, NS, roused, woken
from cellrt.native.row_types import Rows, new_table
from cellrt.worker.base import ANSWERS, HELD, NOT_HELD, Done, Launch, Unfinished, Worker
from cellrt.worker.cell_type import CellType
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.run_tasks import (
    AGAIN,
    ANSWERS_HELD,
    ENDED,
    IN_PYTHON,
    MOST_WAITING,
    TURN_HELD,
    TURN_WANTED,
    TURNS,
    Launched,
    run_tasks,
)
from cellrt.worker.failed_rows import Failure
from cellrt.worker.turn_words import (
    ASLEEP,
    AWAKE,
    BEGUN,
    COMPLETED,
    ENDS,
    FINISHED,
    LAUNCHED,
    NUM_NOTICES,
    NUM_TURNS,
    REST,
    TAKEN_IN,
    line_of,
)

HOW = {TURN_HELD: HELD, ANSWERS_HELD: ANSWERS, TURN_WANTED: NOT_HELD}
TURN_EVERY_NS = 300_000
"""The time between turns, in nanoseconds: tasks launched together that take less run without a turn between them."""


class CpuWorker(Worker):
    """A worker that runs tasks in order on one thread.

    Args:
        executor: runs a task.
        processor: the scheduler of these tasks; compiled code takes turns on its tables.
        words: the engine's turn words (``turn_words.py``).
        location: the worker's location: 1, 2, ...
        queue_depth: the tasks that it may have before the next is formed.
        launched: the rings of all workers, one after the other.
        take_turns, has_news, ended, name: see ``Worker``.
        num_threads: torch threads of this worker; torch keeps one number for threads that start later, too.
    """

    def __init__(
        self,
        executor: Executor,
        processor: Processor,
        words: Rows[int],
        location: int,
        queue_depth: int,
        launched: Rows[Launched],
        take_turns: Callable[[int], bool],
        has_news: Callable[[], bool],
        ended: Callable[[], None],
        num_threads: int,
        name: str,
    ) -> None:
        super().__init__(take_turns, has_news, ended, name)
        self._executor, self._processor, self._num_threads = executor, processor, num_threads
        self._words, self._line = words, line_of(location)
        self._rest_at = self._line + REST
        self.rest_address = int(words[self._rest_at : self._rest_at + 1].ctypes.data)
        size = len(launched) // processor.num_workers
        self._all_launched, self._launched = launched, launched[(location - 1) * size : location * size]
        self._turns = new_table(1, TURNS)
        how = processor.num_workers, queue_depth, num_threads == 1, TURN_EVERY_NS
        self._turns[0] = location, self._line, *how, 0, 0, size, 0, 0, MAY_SPIN, 0
        self._task_ids = np.zeros(processor.limits.max_tasks, np.int32)
        self._notices = processor.make_notices()
        self._failures: dict[int, list[Failure]] = {}
        """The failures of tasks, by the number of the task among all that were launched."""
        self._buffers: dict[tuple[int, int], NDArray[np.int32]] = {}
        """The arrays of buffers, by address and size: to make one takes longer than a small task."""
        self._at: object = None
        self._first = self._count(COMPLETED)

    @property
    def num_outstanding(self) -> int:
        """The number of tasks launched and not yet taken in (``Worker.num_outstanding``)."""
        return self._count(LAUNCHED) - self._count(TAKEN_IN)

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """Put a task in the ring (``Worker.launch``)."""
        at = self._count(LAUNCHED)
        buffer_at = buffer.__array_interface__["data"][0]
        self._launched[at % len(self._launched)] = task, type_id, buffer_at, buffer.size, 0, 0, 0, 0, 0
        self._buffers[buffer_at, buffer.size] = buffer
        self._words[self._line + LAUNCHED] = at + 1
        roused(self._words, self._rest_at, AWAKE)

    def wake(self) -> bool:
        """Wake the thread if it sleeps (``Worker.wake``)."""
        at = self._rest_at
        return self._words.item(at) == ASLEEP and bool(woken(self._words, at, ASLEEP, AWAKE))

    def rest(self, seconds: float) -> None:
        """Let the worker wait for this many seconds (``Worker.rest``)."""
        self._turns[0]["away_until_ns"] = time.perf_counter_ns() + int(NS * seconds)
        self.wake()

    def end(self) -> None:
        """Let the thread end after its tasks (``Worker.end``)."""
        self._words[self._line + ENDS] = 1
        roused(self._words, self._rest_at, AWAKE)

    def has_finished(self) -> bool:
        """Return whether there is a completed task to poll (``Worker.has_finished``)."""
        return self._count(TAKEN_IN) < self._count(FINISHED)

    def has_completed(self) -> bool:
        """Return whether any of its tasks was completed (``Worker.has_completed``)."""
        return self._count(COMPLETED) > self._first

    def poll(self) -> list[Done]:
        """Take the completed tasks in order (``Worker.poll``)."""
        done = []
        for at in range(self._count(TAKEN_IN), self._count(FINISHED)):
            row = self._launched[at % len(self._launched)]
            times = int(row["start_ns"]), int(row["end_ns"]), int(row["busy_ns"])
            done.append(Done(int(row["task"]), *times, self._failures.pop(at, [])))
            self._words[self._line + TAKEN_IN] = at + 1
            self._words[self._line + COMPLETED] += 1
        return done

    def take_notices(self) -> Notices | None:
        """Take the notices of tasks completed in compiled turns (``Worker.take_notices``)."""
        count = self._count(NUM_NOTICES)
        if not count:
            return None
        self._words[self._line + NUM_NOTICES] = 0
        return Notices(self._notices[:count])

    def take_unfinished(self) -> Unfinished:
        """Take the tasks that a dead worker did not finish (``Worker.take_unfinished``)."""
        first, begun, end = (self._count(which) for which in (TAKEN_IN, BEGUN, LAUNCHED))
        left = [self._launch_at(at) for at in range(first, end)]
        for which in (BEGUN, FINISHED, TAKEN_IN):
            self._words[self._line + which] = end
        return Unfinished(left[: begun - first], left[begun - first :])

    def forget(self, cell_type: CellType) -> None:
        """Forget a cell type (``Worker.forget``)."""
        self._executor.forget(cell_type.id)

    def _count(self, which: int) -> int:
        return int(self._words[self._line + which])

    def _launch_at(self, at: int) -> Launch:
        row = self._launched[at % len(self._launched)]
        return Launch(
            int(row["task"]), int(row["type_id"]), self._buffer_at(int(row["buffer_at"]), int(row["buffer_ints"]))
        )

    def _buffer_at(self, address: int, size: int) -> NDArray[np.int32]:
        made = self._buffers.get((address, size))
        if made is None:
            made = np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(address))
            self._buffers[address, size] = made
        return made

    def _serve(self) -> None:
        use_torch_threads(self._num_threads)
        while (answer := self._work_off()) != ENDED:
            if answer == IN_PYTHON:
                self._run_in_python()
            elif answer != AGAIN:
                self._take_turns(HOW[answer])

    def _work_off(self) -> int:
        """Run launched tasks as far as compiled code can; return why it came back."""
        self._turns[0]["num_turns"] = self._words[NUM_TURNS]  # before the addresses: tables change in turns
        self._turns[0]["turn_every_ns"] = TURN_EVERY_NS
        if len(self._notices) < self._processor.num_notices:
            self._notices = self._processor.make_notices()
        at, executor = self._processor.at, self._executor
        if at is not self._at and not self.num_outstanding:
            self._at = at
            self._buffers.clear()
        where = self._words, self._turns, self._all_launched, executor.cells, executor.scratch
        return int(run_tasks(at, *where, self._task_ids, self._notices))

    def _run_in_python(self) -> None:
        """Run the task that was begun last."""
        at = self._count(BEGUN) - 1
        row = self._launched[at % len(self._launched)]
        buffer = self._buffer_at(int(row["buffer_at"]), int(row["buffer_ints"]))
        times = run_timed(self._executor, int(row["type_id"]), buffer, self._num_threads)
        row["start_ns"], row["end_ns"], row["busy_ns"], failures = times
        row["goes_on"], row["has_failures"] = buffer[H_GOES_ON], bool(failures)
        if failures:
            self._failures[at] = failures
        self._words[self._line + FINISHED] = at + 1


def run_timed(
    executor: Executor, type_id: int, buffer: NDArray[np.int32], num_threads: int
) -> tuple[int, int, int, list[Failure]]:
    """Run a task; return its start, its end and its busy time, as ``Done`` has them, and its failures.

    The busy time is the thread's own time, without its waits. It is at least a share of the time that passed, as a cell
    may wait for something itself.
    """
    start_ns, start_busy_ns = time.perf_counter_ns(), time.thread_time_ns()
    failures = executor.execute(type_id, buffer)
    end_ns, busy_ns = time.perf_counter_ns(), time.thread_time_ns() - start_busy_ns
    passed_ns = end_ns - start_ns
    return start_ns, end_ns, max(busy_ns, passed_ns // MOST_WAITING) if num_threads == 1 else passed_ns, failures
