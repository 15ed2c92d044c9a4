"""The worker of a device that works on its own: tasks are submitted back to back, and counted when they are done.

There is one thread for each device. It submits every task that it is given at once, so the device's queue holds
several; it reads the completion counter, writes the results, and takes the manager's turn, which launches the next
tasks before the device runs dry. It never waits for the device, and waits on its queue only when nothing is in flight.

Crossings between threads: those of ``base.py``. The watchdog: the thread itself finds a task in flight that takes far
too long. If the thread is stuck in a call of the device, ``is_alive`` finds that, which the holder of the turn calls at
least once a second; from then on no result of the lost device reaches rows that other tasks have by now.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from cellrt.definition.modes import use_torch_threads
from cellrt.worker.base import NOT_HELD, Done, Launch, Worker
from cellrt.worker.cell_type import CellType
from cellrt.worker.device.executor import DeviceExecutor, DeviceOptions
from cellrt.worker.device.in_flight import InFlight
from cellrt.worker.torch_state import HOST_THREADS

SPIN_S = 100e-6
"""The seconds for which an idle thread polls the counter without sleeping."""
NAP_S = 20e-6
CHECK_S = 5e-3
"""The seconds between two checks whether the device has failed, while a task is in flight."""
BEGIN_FACTOR = 60
"""The limit of submitting a task, as a multiple of the watchdog's: kernels are compiled and tuned on the way."""
SLACK = 100
"""The limit of a task, as a multiple of the longest of its cell type so far."""


class HungError(RuntimeError):
    """A task did not end within the watchdog's limit."""


class CudaWorker(Worker):
    """A worker that runs tasks in order on a device.

    Args:
        executor: runs the tasks on the device.
        options: has the watchdog's limit.
        take_turns, has_news, ended, name: see ``Worker``.
    """

    check_every_s = 1.0
    is_replaceable = False

    def __init__(
        self,
        executor: DeviceExecutor,
        options: DeviceOptions,
        take_turns: Callable[[int], bool],
        has_news: Callable[[], bool],
        ended: Callable[[], None],
        name: str,
    ) -> None:
        super().__init__(take_turns, has_news, ended, name)
        self._executor, self._device = executor, executor.device
        self._hang_ns = int(options.hang_s * 1e9)
        self._waiting: deque[Launch] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._num_collected = 0
        self._last_end_ns = 0
        self._longest_ns: dict[int, int] = {}
        self._since_ns = 0
        """The time since which the oldest task in flight is the oldest."""
        self._begun_since_ns: int | None = None
        """The time since which the thread has been submitting a task; ``_life`` guards it together with ``error``."""
        self._life = threading.Lock()
        self._is_closing = False
        self.host_ns = 0
        """The time that the thread spent on submitting and collecting tasks, and on the manager's turns."""
        self.busy_ns = 0
        """The time during which a task was on the device, as far as the thread saw: not how busy the device was."""

    @property
    def num_tasks(self) -> int:
        """The number of tasks that were collected so far."""
        return self._num_collected

    def is_alive(self) -> bool:
        """Return whether the thread runs, no task killed it, and it is not stuck in submitting one."""
        since_ns = self._begun_since_ns
        if since_ns is not None and time.perf_counter_ns() - since_ns > BEGIN_FACTOR * self._hang_ns:
            with self._life:
                if self._begun_since_ns == since_ns and self.error is None:
                    self.error = HungError("the device does not take a task")
        return super().is_alive()

    def counts(self) -> dict[str, int]:
        """Return counts by name.

        They are ``replayed`` and ``eager`` tasks, those that were ``unfused`` though their cell has a fused form, those
        whose
        plain form measured faster (``plain_faster``), the counts of captures (see ``Captures``), ``compilations``
        while
        serving, and cells that are ``not_compiled`` though ``DeviceOptions(compiled=True)`` asks for it.
        """
        return self._executor.counts()

    def forget(self, cell_type: CellType) -> None:
        """Forget a cell type (see ``Worker.forget``)."""
        self._longest_ns.pop(cell_type.id, None)
        self._executor.forget(cell_type)

    def _take_waiting(self) -> list[Launch]:
        waiting = [*self._waiting, *super()._take_waiting()]
        self._waiting.clear()
        return waiting

    def _serve(self) -> None:
        use_torch_threads(HOST_THREADS)
        with self._device.entered():
            try:
                while self.error is None and not (self._is_closing and not self._in_flight and not self._waiting):
                    self._step()
            finally:
                self._device.close()

    def _step(self) -> None:
        """Submit waiting tasks, collect completed ones, and take the turn if there is news; else rest."""
        start_ns = time.perf_counter_ns()
        self._take_queue()
        has_begun, has_ended = self._begin_waiting(), self._collect_done()
        takes_turn = has_ended or self._has_news()
        if takes_turn:
            self._take_turns(NOT_HELD)
        if has_begun or takes_turn:
            self.host_ns += time.perf_counter_ns() - start_ns
        else:
            self._rest()

    def _take_queue(self) -> None:
        """Take launches out of the queue; wait for one if there is nothing at all to do."""
        while not self._queue.empty() or not (self._in_flight or self._waiting or self._is_closing):
            item = self._next()
            if item is None:
                self._is_closing = True
            elif item.task >= 0:
                self._waiting.append(item)
            else:
                return  # woken to take a turn

    def _begin_waiting(self) -> bool:
        has_begun = False
        while self._waiting and self.error is None:
            self._begun_since_ns = time.perf_counter_ns()
            try:
                begun = self._executor.begin(self._waiting[0])
            finally:
                with self._life:
                    self._begun_since_ns = None
            if begun is None:  # the rings are full: a task in flight must end first
                break
            if not self._in_flight:
                self._since_ns = time.perf_counter_ns()
            self._waiting.popleft()
            self._in_flight.append(begun)
            has_begun = True
        return has_begun

    def _collect_done(self) -> bool:
        """Collect the tasks that the counter says are done; raise HungError if one should have been."""
        num_completed = self._device.num_completed()
        if num_completed == self._num_collected:
            if self._in_flight:
                self._check_hung()
            return False
        while self._num_collected < num_completed and self.error is None:
            self._collect(self._in_flight.popleft())
            self._num_collected += 1
        return True

    def _check_hung(self) -> None:
        """Raise HungError if the oldest task in flight takes longer than the watchdog allows."""
        longest_ns = self._longest_ns.get(self._in_flight[0].launch.type_id, 0)
        limit_ns = max(self._hang_ns, SLACK * longest_ns)
        if time.perf_counter_ns() - self._since_ns > limit_ns:
            raise HungError(f"a task did not end within {limit_ns / 1e9:.1f} s")

    def _collect(self, task: InFlight) -> None:
        end_ns = time.perf_counter_ns()
        start_ns = max(task.begun_ns, self._last_end_ns)  # behind the task before, on an in-order stream
        self._last_end_ns = end_ns
        self.busy_ns += end_ns - start_ns
        failures = self._executor.collect(task)
        type_id, elapsed_ns = task.launch.type_id, end_ns - start_ns
        self._longest_ns[type_id] = max(elapsed_ns, self._longest_ns.get(type_id, 0))
        self._since_ns = end_ns
        self._finish(Done(task.launch.task, start_ns, end_ns, elapsed_ns, failures))

    def _rest(self) -> None:
        """Wait a little for the device: poll the counter for a while, then sleep between two looks."""
        start = time.perf_counter()
        check_at = start + CHECK_S
        while self._in_flight and self._device.num_completed() == self._num_collected:
            if not self._queue.empty() or self._has_news() or self.error is not None:
                return
            now = time.perf_counter()
            if now > check_at:
                self._device.check()
                self._check_hung()
                check_at = now + CHECK_S
            time.sleep(0 if now - start < SPIN_S else NAP_S)
