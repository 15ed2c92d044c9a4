"""The worker whose tasks run in a process of their own; here is what stays in the engine's process.

The holder of the turn writes a task to the process's ring and rings its bell; the process runs it, counts it as
completed and rings back; the thread here, which waits for that, takes the manager's turn. It also hears at once when
the process dies. What calls the system without waiting keeps the interpreter's lock: to get it back takes long where a
client is busy in Python.
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
from cellrt.worker.apart.arenas import SharedArenas
from cellrt.worker.apart.cells import SharedCells
from cellrt.worker.apart.pool import Place, SharedPool
from cellrt.worker.apart.ring import BEGUN, COMPLETED, LAUNCHED, PLACES, READY, RING_BYTES, Record, Slot, TaskRing
from cellrt.worker.base import NOT_HELD, Done, Launch, Unfinished, Worker
from cellrt.worker.cell_type import CellType
from cellrt.worker.python_process import PythonProcess

COMMAND = "from cellrt.worker.apart.child import main; main()"
END_S = 5.0
"""How long the process may take to end; then it is killed."""
NO_TASK, NOWHERE, _NOTHING = -1, Place(0, 0), np.empty(0, np.int32)
"""Of a record that has a type loaded."""
_LIBRARY = ctypes.PyDLL(None)
"""The C library, called with the interpreter's lock."""


class _Taken(NamedTuple):
    """What a record of the ring has: a slot, if it is a task, and the location whose task it is."""

    slot: Slot | None
    location: int


class ProcessWorker(Worker):
    """Runs tasks in order in a process.

    Args:
        location: of the worker.
        arenas: by location, all in the pool of ``cells``.
        types: of the engine.
        cells: those of ``types``.
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
        """Of each task in progress."""
        self._learned_at = 0
        """So many records of the ring are completed when what was to be learned is loaded."""
        self._has_ended_elsewhere: Callable[[], bool] | None = None
        self._was_buried = False
        self._bell, self._back = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for fd in (self._bell, self._back):  # not before the last who may ring
            weakref.finalize(self, os.close, fd)
        self._is_ending = False
        self._python: PythonProcess | None = None
        self.learn(types.values())

    @property
    def process_id(self) -> int | None:
        """Of the process; None before the start."""
        return None if self._python is None else self._python.process.pid

    @property
    def num_outstanding(self) -> int:
        """See ``Worker.num_outstanding``; as many as can be as long as nobody shall wait for the process."""
        return len(self._in_progress) if self.is_there and self.has_learned() and self._may_begin() else PLACES

    @property
    def is_there(self) -> bool:
        """See ``Worker.is_there``."""
        return bool(self._ring[READY])

    def learn(self, types: Iterable[CellType]) -> None:
        """See ``Worker.learn``; what finds no place in the ring is loaded by its first task."""
        for cell_type in list(types)[: PLACES // 2 - len(self._in_progress)]:
            self._write(Launch(NO_TASK, cell_type.id, _NOTHING), None, self._arguments[0])
            self._learned_at = self._ring[LAUNCHED]

    def has_learned(self) -> bool:
        """See ``Worker.has_learned``."""
        return self._ring[COMPLETED] >= self._learned_at

    def stand_in(self, location: int, launches: Sequence[Launch]) -> Callable[[], bool] | None:
        """See ``Worker.stand_in``; one that has much to do itself takes none."""
        if self.num_outstanding + len(launches) > PLACES // 2:
            return None
        for launch in launches:
            self._launch(launch, location)
        end = self._ring[LAUNCHED]
        return lambda: self._popped >= end or self._was_buried

    def begin_after(self, has_ended: Callable[[], bool]) -> None:
        """See ``Worker.begin_after``."""
        self._has_ended_elsewhere = has_ended

    def _may_begin(self) -> bool:
        if self._has_ended_elsewhere is not None and self._has_ended_elsewhere():
            self._has_ended_elsewhere = None
        return self._has_ended_elsewhere is None

    def start(self) -> None:
        """Starts the process, and waits for nothing."""
        fds = [self._cells.pool.fd, self._pool.fd, self._bell, self._back]
        self._python = PythonProcess(COMMAND, [*self._arguments, *fds], fds)
        super().start()

    def launch(self, task: int, type_id: int, buffer: NDArray[np.int32]) -> None:
        """See ``Worker.launch``."""
        self._launch(Launch(task, type_id, buffer), self._arguments[0])

    def _launch(self, launch: Launch, location: int) -> None:
        slot = self._take_slot(len(launch.buffer))
        slot.words[: len(launch.buffer)] = launch.buffer.data
        self._write(launch, slot, location)

    def _write(self, launch: Launch, slot: Slot | None, location: int) -> None:
        """Writes a record into the ring; without a slot, of a type that is to be loaded."""
        if len(self._in_progress) == PLACES:
            raise InternalError(f"a worker was given more than {PLACES} tasks")
        described = self._cells.place_of(self._types[launch.type_id], self._arenas)
        place = NOWHERE if slot is None else slot.place
        record = Record(launch.type_id, *described, *place, len(launch.buffer), location)
        self._ring.write(self._ring[LAUNCHED], record)
        self._in_progress.append(launch)
        self._taken.append(_Taken(slot, location))
        self._ring.count(LAUNCHED)
        _ring(self._bell)

    def has_finished(self) -> bool:
        """See ``Worker.has_finished``."""
        return self._popped < self._ring[COMPLETED]

    def poll(self) -> list[Done]:
        """See ``Worker.poll``."""
        done = []
        while self.has_finished():
            launch, (slot, _) = self._in_progress.popleft(), self._taken.popleft()
            if slot is not None:
                done.append(self._take_in(self._popped, launch, slot))
            self._popped += 1
        return done

    def forget(self, cell_type: CellType) -> None:
        """See ``Worker.forget``; the process forgets a type when its number comes to mean another."""
        self._cells.forget(cell_type)

    def take_unfinished(self) -> Unfinished:
        """See ``Worker.take_unfinished``."""
        unfinished, num_begun = Unfinished([], []), self._ring[BEGUN] - self._popped
        for place, (launch, (slot, location)) in enumerate(zip(self._in_progress, self._taken)):
            if slot is not None:  # another's tasks are not passed on a second time
                is_over = place < num_begun or location != self._arguments[0]
                (unfinished.begun if is_over else unfinished.waiting).append(launch)
        self._in_progress.clear()
        self._taken.clear()
        self._was_buried = True
        return unfinished

    def _take_slot(self, num_words: int) -> Slot:
        """A slot for so many words; those that have become too small are given up."""
        while self._free:
            slot = self._free.pop()
            if len(slot.words) >= num_words:
                return slot
            self._pool.free(slot.place)
        place = self._pool.allocate(Slot.bytes_for(num_words))
        return Slot(place, self._pool.map(place))

    def _take_in(self, number: int, launch: Launch, slot: Slot) -> Done:
        """A task as the process left it."""
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
        """Without a task: says that it is idle, and takes the turn if there are news by then.

        A task that the process has not completed will ring yet. One that it has completed, which nobody took in so far,
        may have rung before the last look: to wait for it would be for ever, if somebody takes it in meanwhile.
        """
        if self._ring[COMPLETED] < self._ring[LAUNCHED]:
            return False
        self._idle.append(object())
        if not self._has_news() or not self._take_turns(NOT_HELD):
            return False
        self._idle.clear()
        return True

    def _wait(self, poll: select.poll) -> None:
        """Waits for a task's end, to be woken, or as long as it rests. Raises DeviceError if the process has ended."""
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
        """Ends the process, and waits for it; returns its status."""
        return 0 if self._python is None else self._python.end(END_S)


def _ring(fd: int) -> None:
    _LIBRARY.eventfd_write(fd, ctypes.c_uint64(1))


def _silence(fd: int) -> None:
    _LIBRARY.eventfd_read(fd, ctypes.byref(ctypes.c_uint64()))
