"""A stand-in for a GPU: its order of events on two threads of the CPU, to test the code around it.

Like a GPU it runs a task long after the task was submitted, copies inputs only then, and delivers results later
still; so memory that is rewritten too early, or read too early, gives wrong results here too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch

from cellrt.definition.modes import use_torch_threads
from cellrt.worker.device.capturable import Capturable
from cellrt.worker.device.device import Captured, Device, Work, nothing
from cellrt.worker.service_thread import ServiceThread
from cellrt.worker.torch_state import HOST_THREADS

SYNCHRONIZE_S = 60.0


class DryDeviceError(RuntimeError):
    """An error that a cell raises to simulate a device that fails."""


class DryDevice(Device):
    """A simulated device, whose arenas are plain CPU memory.

    Args:
        delay_s: the time between submission and execution, and between execution and the arrival of results.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.torch_device = torch.device("cpu")
        self.num_captured = 0
        self._delay_s = delay_s
        self._failure: BaseException | None = None
        self._compute: SimpleQueue[tuple[Work, bool] | None] = SimpleQueue()
        self._download: SimpleQueue[tuple[Work, float] | None] = SimpleQueue()
        self._counts = [0, 0]
        self._submitted = [0, 0]
        self._in_flight: deque[tuple[bool, int]] = deque()
        self._num_completed = 0
        for name, run in (("compute", self._run_compute), ("download", self._run_download)):
            ServiceThread(run, f"cellrt-dry-{name}").start()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return plain host memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def entered(self) -> AbstractContextManager[object]:
        """Do nothing: the device's thread computes."""
        return nullcontext()

    def submit(self, work: Work, has_download: bool) -> None:
        """Pass the task to the compute thread."""
        self.check()
        self._submitted[has_download] += 1
        self._in_flight.append((has_download, self._submitted[has_download]))
        self._compute.put((work, has_download))

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, on the compute thread."""
        target.copy_(source)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Pass the copy to the download thread."""
        self._download.put((lambda: _copy(target, source), self._delay_s))

    def num_completed(self) -> int:
        """Return the number of completed tasks.

        Like a CUDA device, it counts tasks with a download and tasks without one apart, as they end on two streams.
        """
        while self._in_flight and self._counts[self._in_flight[0][0]] >= self._in_flight[0][1]:
            self._in_flight.popleft()
            self._num_completed += 1
        return self._num_completed

    def check(self) -> None:
        """Raise the error that ended the compute thread."""
        if self._failure is not None:
            raise self._failure

    def is_fatal(self, error: BaseException) -> bool:
        """Return whether an error is a DryDeviceError; other errors are the cell's."""
        return isinstance(error, DryDeviceError)

    def capture(self, work: Work, ends_task: bool = False, before: Work = nothing) -> Captured:
        """Return the work itself. It must read from the same addresses each time, and may not look at values."""
        before()
        with Capturable(self.torch_device):
            work()
        self.num_captured += 1
        return Captured(work)

    def settle(self) -> None:
        """Do nothing: this is the thread that computes."""

    def memory_in_use(self) -> int:
        """Return a kilobyte for each capture, so that budgets can be tested."""
        return self.num_captured << 10

    def fetch(self, arena: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of another location's arena."""
        return arena.index_select(0, rows)

    def beside(self) -> AbstractContextManager[Work]:
        """Do nothing; there is nothing to wait for."""
        return nullcontext(lambda: None)

    def synchronize(self) -> None:
        """Wait until both threads have done all their work."""
        for queue in (self._compute, self._download):
            reached = threading.Event()
            if queue is self._compute:
                self._compute.put((reached.set, False))
                self._submitted[False] += 1
                self._in_flight.append((False, self._submitted[False]))
            else:
                self._download.put((reached.set, 0.0))
            end_s = time.monotonic() + SYNCHRONIZE_S
            while not reached.wait(0.05):
                self.check()
                if time.monotonic() > end_s:
                    raise TimeoutError(f"the device is not done within {SYNCHRONIZE_S} s")

    def close(self) -> None:
        """End both threads after their work."""
        self._compute.put(None)
        self._download.put(None)

    @torch.inference_mode()
    def _run_compute(self) -> None:
        use_torch_threads(HOST_THREADS)
        try:
            while (item := self._compute.get()) is not None:
                work, has_download = item
                if self._delay_s:
                    time.sleep(self._delay_s)
                work()
                if has_download:
                    self._download.put((lambda: self._count(True), 0.0))
                else:
                    self._count(False)
        except BaseException as error:  # the device is lost, whatever it was
            self._failure = error

    @torch.inference_mode()
    def _run_download(self) -> None:
        while (item := self._download.get()) is not None:
            work, delay_s = item
            if delay_s:
                time.sleep(delay_s)
            work()

    def _count(self, has_download: bool) -> None:
        self._counts[has_download] += 1


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
