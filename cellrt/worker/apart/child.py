"""The process of a worker: it runs the tasks that the engine puts in its ring, one after the other.

It ends with the process that started it, however that ends: the socket between them closes then.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.task_layout import TaskView
from cellrt.definition.modes import use_torch_threads
from cellrt.errors import CellError
from cellrt.worker.apart.cells import load_type
from cellrt.worker.apart.pool import Segment, mapped
from cellrt.worker.apart.shared_arenas import MappedArenas
from cellrt.worker.apart.task_ring import BEGUN, COMPLETED, LAUNCHED, READY, RING_BYTES, Record, Result, Slot, TaskRing
from cellrt.worker.cell_type import CellType
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.worker import run_timed
from cellrt.worker.failed_rows import Failure, describe_error
from cellrt.worker.python_process import end_with, importing

log = logging.getLogger("cellrt")


class Child:
    """The loop of a worker's process.

    Args:
        location, num_locations: the worker's location, and how many there are.
        num_threads: the number of threads that torch uses.
        pool, own_pool: descriptors of the engine's pool and of the worker's, which begins with the ring.
        bell, back: eventfds that wake this process and the engine.
    """

    def __init__(
        self, location: int, num_locations: int, num_threads: int, pool: int, own_pool: int, bell: int, back: int
    ) -> None:
        self._pool, self._own_pool, self._bell, self._back = pool, own_pool, bell, back
        self._num_threads = num_threads
        use_torch_threads(num_threads)
        self._ring = TaskRing(mapped(own_pool, Segment(0, RING_BYTES)))
        self._arenas: Sequence[MappedArenas] = [MappedArenas(pool) for _ in range(num_locations)]
        self._types: dict[int, CellType] = {}
        self._known: dict[int, int] = {}
        """The offset of the description of each known type."""
        self._slots: dict[int, Slot] = {}
        self._executors: dict[int, Executor] = {}
        """Executors by the location whose tasks they run: this worker's, and those of dead workers without a successor
        yet.
        """
        self._executor(location).load()

    def run(self) -> None:
        """Run tasks for ever."""
        ring = self._ring
        ring.increment(READY)
        os.eventfd_write(self._back, 1)
        while True:
            while ring[BEGUN] == ring[LAUNCHED]:
                os.eventfd_read(self._bell)
            number = ring[BEGUN]
            ring.increment(BEGUN)
            ring.write_result(number, self._run(number))
            ring.increment(COMPLETED)
            os.eventfd_write(self._back, 1)

    def _run(self, number: int) -> Result:
        record = self._ring.read(number)
        if not record.num_words:
            return self._load(record)
        slot = self._slot(Segment(record.slot_offset, record.slot_bytes))
        buffer = np.frombuffer(slot.words, np.int32, record.num_words)
        try:
            retries = self._know(record.type_id, Segment(record.type_offset, record.type_bytes)).retries
        except BaseException as error:
            return self._refuse(slot, buffer, error)
        before = retries.count
        executor = self._executor(record.location)
        start_ns, end_ns, busy_ns, failures = run_timed(executor, record.type_id, buffer, self._num_threads)
        return Result(start_ns, end_ns, busy_ns, retries.count - before, slot.put_failures(failures))

    def _load(self, record: Record) -> Result:
        """Load everything that the tasks of a type need."""
        try:
            self._know(record.type_id, Segment(record.type_offset, record.type_bytes))
            self._executor(record.location).prepare(record.type_id)
        except BaseException as error:  # its tasks try again, and fail of it; or it is given up by now
            log.debug("a cell was not loaded: %s", describe_error(error))
        return Result(0, 0, 0, 0, 0)

    def _executor(self, location: int) -> Executor:
        if location not in self._executors:
            self._executors[location] = Executor(location, list(self._arenas), self._types)
        return self._executors[location]

    def _refuse(self, slot: Slot, buffer: NDArray[np.int32], error: BaseException) -> Result:
        """Fail all rows of a task whose cell cannot be loaded here."""
        rows = TaskView(buffer).has_failed
        rows[:] = 1
        said = CellError(f"the worker's process cannot load the cell: {describe_error(error)}")
        return Result(0, 0, 0, 0, slot.put_failures([Failure(row, said) for row in range(len(rows))]))

    def _slot(self, segment: Segment) -> Slot:
        if segment.offset not in self._slots:
            self._slots[segment.offset] = Slot(segment, mapped(self._own_pool, segment))
        return self._slots[segment.offset]

    def _know(self, type_id: int, segment: Segment) -> CellType:
        if self._known.get(type_id) != segment.offset:
            for executor in self._executors.values():
                executor.forget(type_id)
            self._types.pop(type_id, None)
            with importing():
                self._types[type_id] = load_type(self._pool, segment, self._arenas)
            self._known[type_id] = segment.offset
        return self._types[type_id]


def main() -> None:
    """Run the process: ``python -c "..." LIFELINE`` and the arguments of ``Child``."""
    lifeline, *numbers = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent process handles it
    end_with(socket.socket(fileno=lifeline))
    gc.freeze()  # else a collection of what cells keep would go through all that is imported, in the middle of a task
    Child(*numbers).run()
