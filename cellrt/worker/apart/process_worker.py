"""The worker whose tasks run in a process of their own; this is its part in the engine's process.

The holder of the turn writes a task to the process's ring and writes to its eventfd. The process runs the task, counts
it as completed and writes to the eventfd of the thread here, which waits for that and takes the manager's turn. The
thread also learns at once when the process dies. System calls that do not block keep the interpreter's lock: to get it
back takes long where a client is busy in Python.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.task_layout import TaskView
from cellrt.errors import DeviceError, InternalError
from cellrt.worker.apart.cells import SharedCells
from cellrt.worker.apart.pool import Segment, SharedPool
from cellrt.worker.apart.shared_arenas import SharedArenas
from cellrt.worker.apart.task_ring import (
    BEGUN,
    CAPACITY,
    COMPLETED,
    LAUNCHED,
    READY,
    RING_BYTES,
    Record,
    Slot,
    TaskRing,
)
from cellrt.worker.base import NOT_HELD, Done, Launch, Unfinished, Worker
from cellrt.worker.cell_type import CellType
from cellrt.worker.python_process import PythonProcess

COMMAND = "from cellrt.worker.apart.child import main; main()"
END_S = 5.0
"""The time that the process has to end before it is killed."""
NO_TASK, NOWHERE, _NOTHING = -1, Segment(0, 0), np.empty(0, np.int32)
"""The fields of a record that loads a type."""
_LIBRARY = ctypes.PyDLL(None)
"""The C library, called with the interpreter's lock held."""


class _Taken(NamedTuple):
    """A record in use: its slot, if it is a task, and the location of the worker whose task it is."""

    slot: Slot | None
    location: int


class ProcessWorker(Worker):
    """A worker that runs tasks in order in a process.

    Args:
        location: the worker's location.
        arenas: by location, all in the pool of ``cells``.
        types: the engine's cell types, by id.
        cells: the cells of ``types``.
        take_turns, has_news, ended, name: see ``Worker``.
        num_threads: torch threads of the process.
    """

    def __init__(
        self,
        location: int,
        arenas: Sequence[SharedArenas],
        types: Mapping[int, CellType],
        cells: SharedCells,
        take_turns: Callable[[int], bool],
        has_news: Callable[[], bool],
        ended: Callable[[], None],
        num_threads: int,
        name: str,
    ) -> None:
        super().__init__(take_turns, has_news, ended, name)
        self._arenas, self._types, self._cells = arenas, types, cells
        self._arguments = location, len(arenas), num_threads
        self._pool = SharedPool()
        self._ring = TaskRing(self._pool.map(self._pool.allocate(RING_BYTES)))
        self._free: list[Slot] = []
        self._taken: deque[_Taken] = deque()
        """The record of each task in progress."""
        self._learned_at = 0
        """The number of completed records from which on the types given to ``learn`` are loaded."""
        self._has_ended_elsewhere: Callable[[], bool] | None = None
        self._was_removed = False
        self._bell, self._back = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for fd in (self._bell, self._back):  # closed only when no thread can write to them any more
            weakref.finalize(self, os.close, fd)
        self._is_ending = False
        self._python: PythonProcess | None = None
        self.learn(types.values())

    @property
    def process_id(self) -> int | None:
        """The id of the process; None before the start."""
        return None if self._python is None else self._python.process.pid

    @property
    def num_outstanding(self) -> int:
        """The number of outstanding tasks (see ``Worker``); the most there may be while the process is not ready."""
        return len(self._in_progress) if self.is_there and self.has_learned() and self._may_begin() else CAPACITY

    @property
    def is_there(self) -> bool:
        """True once the process is ready (see ``Worker.is_there``)."""
        return bool(self._ring[READY])

    def learn(self, types: Iterable[CellType]) -> None:
        """Have the process load types (see ``Worker.learn``).

        Those without room in the ring are loaded by their first task.
        """
        for cell_type in list(types)[: CAPACITY // 2 - len(self._in_progress)]:
            self._write(Launch(NO_TASK, cell_type.id, _NOTHING), None, self._arguments[0])
            self._learned_at = self._ring[LAUNCHED]

    def has_learned(self) -> bool:
        """Return whether the types are loaded (see ``Worker.has_learned``)."""
        return self._ring[COMPLETED] >= self._learned_at

    def stand_in(self, location: int, launches: Sequence[Launch]) -> Callable[[], bool] | None:
        """Take tasks of a dead worker (see ``Worker.stand_in``); None if this worker has many tasks itself."""
        if self.num_outstanding + len(launches) > CAPACITY // 2:
            return None
        for launch in launches:
            self._launch(launch, location)
        end = self._ring[LAUNCHED]
        return lambda: self._popped >= end or self._was_removed

    def begin_after(self, has_ended: Callable[[], bool]) -> None:
        """Wait for tasks that another worker runs (see ``Worker.begin_after``)."""
        self._has_ended_elsewhere = has_ended

    def _may_begin(self) -> bool:
        if self._has_ended_elsewhere is not None and self._has_ended_elsewhere():
            self._has_ended_elsewhere = None
        return self._has_ended_elsewhere is None

    def start(self) -> None:
        """Start the process, without waiting for it."""
        fds = [self._cells.pool.fd, self._pool.fd, self._bell, self._back]
        self._python = PythonProcess(COMMAND, [*self._arguments, *fds], fds)
        super().start()

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """Write a task to the ring (see ``Worker.launch``)."""
        self._launch(Launch(task, type_id, buffer), self._arguments[0])

    def _launch(self, launch: Launch, location: int) -> None:
        slot = self._take_slot(len(launch.buffer))
        slot.words[: len(launch.buffer)] = launch.buffer.data
        self._write(launch, slot, location)

    def _write(self, launch: Launch, slot: Slot | None, location: int) -> None:
        """Write a record into the ring; without a slot, of a type that is to be loaded."""
        if len(self._in_progress) == CAPACITY:
            raise InternalError(f"a worker was given more than {CAPACITY} tasks")
        described = self._cells.segment_of(self._types[launch.type_id], self._arenas)
        segment = NOWHERE if slot is None else slot.segment
        record = Record(launch.type_id, *described, *segment, len(launch.buffer), location)
        self._ring.write(self._ring[LAUNCHED], record)
        self._in_progress.append(launch)
        self._taken.append(_Taken(slot, location))
        self._ring.increment(LAUNCHED)
        _ring(self._bell)

    def has_finished(self) -> bool:
        """Return whether there is a completed task to poll (see ``Worker.has_finished``)."""
        return self._popped < self._ring[COMPLETED]

    def poll(self) -> list[Done]:
        """Return the completed tasks in order (see ``Worker.poll``)."""
        done = []
        while self.has_finished():
            launch, (slot, _) = self._in_progress.popleft(), self._taken.popleft()
            if slot is not None:
                done.append(self._done_of(self._popped, launch, slot))
            self._popped += 1
        return done

    def forget(self, cell_type: CellType) -> None:
        """Forget a type (see ``Worker.forget``); the process forgets it when its number comes to mean another."""
        self._cells.forget(cell_type)

    def take_unfinished(self) -> Unfinished:
        """Return the tasks that a dead worker did not finish (see ``Worker.take_unfinished``)."""
        unfinished, num_begun = Unfinished([], []), self._ring[BEGUN] - self._popped
        for index, (launch, (slot, location)) in enumerate(zip(self._in_progress, self._taken)):
            if slot is not None:  # tasks of another worker are not passed on a second time
                is_over = index < num_begun or location != self._arguments[0]
                (unfinished.begun if is_over else unfinished.waiting).append(launch)
        self._in_progress.clear()
        self._taken.clear()
        self._was_removed = True
        return unfinished

    def _take_slot(self, num_words: int) -> Slot:
        """Return a slot for this number of words. Free the unused slots that are too small."""
        while self._free:
            slot = self._free.pop()
            if len(slot.words) >= num_words:
                return slot
            self._pool.free(slot.segment)
        segment = self._pool.allocate(Slot.bytes_for(num_words))
        return Slot(segment, self._pool.map(segment))

    def _done_of(self, number: int, launch: Launch, slot: Slot) -> Done:
        """Return a completed task with its result and failures, and copy its words back."""
        result, buffer = self._ring.read_result(number), launch.buffer
        buffer.data[:] = slot.words[: len(buffer)]
        failed = np.flatnonzero(TaskView(buffer).has_failed).tolist() if result.failure_bytes else ()
        failures = slot.take_failures(result.failure_bytes, failed)
        if result.num_retries and launch.type_id in self._types:
            self._types[launch.type_id].retries.count += result.num_retries
        self._free.append(slot)
        return Done(launch.task, result.start_ns, result.end_ns, result.busy_ns, failures)

    def _tell(self, item: Launch | None) -> None:
        self._is_ending = self._is_ending or item is None
        _ring(self._back)

    def _serve(self) -> None:
        poll = select.poll()
        try:
            if self._python is None:
                raise InternalError("a worker's thread began before its process")
            for fd in (self._back, self._python.lifeline.fileno()):
                poll.register(fd, select.POLLIN)
            while not self._is_ending:
                if not self._has_taken_news():
                    self._wait(poll)
                    self._take_turns(NOT_HELD)
            self._end_process()
        except BaseException:
            self._end_process()
            raise

    def _has_taken_news(self) -> bool:
        """Mark the worker as idle if it has no task, and take the turn if there is news by then; return whether it did.

        A task that the process has not completed will still write to the eventfd. A completed task that was not polled
        yet may have written to it already. Then waiting for it could last for ever, as another thread may poll it.
        """
        if self._ring[COMPLETED] < self._ring[LAUNCHED]:
            return False
        self._idle.append(object())
        if not self._has_news() or not self._take_turns(NOT_HELD):
            return False
        self._idle.clear()
        return True

    def _wait(self, poll: select.poll) -> None:
        """Wait for a task's end, a wake-up, or the end of a rest. Raise DeviceError if the process has ended."""
        left_s, self._rests_until_s = self._rests_until_s - time.monotonic(), 0.0
        events = poll.poll(math.ceil(1e3 * left_s) if left_s > 0 else None)
        self._idle.clear()
        _silence(self._back)
        if any(fd != self._back for fd, _ in events) and not self._is_ending:
            raise DeviceError(f"its process ended {self._why_ended()}")

    def _why_ended(self) -> str:
        status = self._end_process()
        return f"by signal {-status}" if status < 0 else f"with status {status}"

    def _end_process(self) -> int:
        """End the process, and wait for it; return its status."""
        return 0 if self._python is None else self._python.end(END_S)


def _ring(fd: int) -> None:
    _LIBRARY.eventfd_write(fd, ctypes.c_uint64(1))


def _silence(fd: int) -> None:
    _LIBRARY.eventfd_read(fd, ctypes.byref(ctypes.c_uint64()))
