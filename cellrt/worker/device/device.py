"""What a device worker asks of a device: memory, streams in order, copies, and a count of the tasks that are done.

A device has three streams. *Compute* runs tasks one after the other. *Upload* carries inputs, and compute waits for
what it needs. *Download* carries results behind the compute that made them, and compute does not wait. ``submit`` is
the only door to them: all that a task does is one function, whose operations are queued in order. Nothing here
waits for the device, apart from ``synchronize``, ``settle`` and ``time``.

Two implementations: ``CudaDevice`` and, with the same order of events on threads of the CPU, ``DryDevice``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.errors import InternalError
from cellrt.worker.device.placement import Placements

Work = Callable[[], None]

NUM_SAMPLES = 3
"""How often work runs to be timed; the fastest counts."""


def nothing() -> None:
    """Work of no effect."""


class Captured(NamedTuple):
    """What was captured: ``replay`` repeats it, inside ``work``.

    With a ``handle`` compiled code can launch it instead, and does: then it is not replayed. ``work`` is what was
    captured: what it made beforehand is read at every replay, and must live as long.
    """

    replay: Work
    handle: int = 0
    work: Work = nothing


class DoneEvent(Protocol):
    """An event by its address."""

    cuda_event: int


class Device(ABC):
    """One device as its worker's thread sees it. Only that thread calls it, apart from ``place`` and memory."""

    torch_device: torch.device
    placements: Placements
    """The cells placed here; whoever opens the device says in which forms."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory ``[num_bytes]`` uint8 that asynchronous copies may read and write."""

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]:
        """While it lasts, this thread's operations go to the compute stream."""

    @abstractmethod
    def submit(self, work: Work, has_download: bool) -> None:
        """Queues the operations of a task behind all that was submitted before, and counts it once they are done.

        ``work`` may be called now or later on another thread; what it writes on the host is there once the task is
        counted. ``has_download``: the task is done when its downloads are. Raises what ``check`` raises, and what
        ``work`` raises if it is called now.
        """

    @abstractmethod
    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Inside ``work``: copies pinned memory to the device before what follows."""

    @abstractmethod
    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Inside ``work``: copies device memory to pinned memory, after what went before."""

    @abstractmethod
    def num_completed(self) -> int:
        """Tasks that are done, in order of submission. Makes no call to the device where that can be avoided."""

    @abstractmethod
    def check(self) -> None:
        """Raises if the device has failed."""

    @abstractmethod
    def is_fatal(self, error: BaseException) -> bool:
        """Whether an error that a cell raised means that the device is lost, rather than that the cell is wrong."""

    @abstractmethod
    def capture(self, work: Work, ends_task: bool = False, before: Work = nothing) -> Captured:
        """Records the operations of work, which are repeated at the same addresses.

        It must have run before. Raises if it does something that cannot be recorded. ``ends_task``: what has a
        ``handle`` counts a task that has no download, too. ``before`` is called before each time that ``work`` is.
        """

    @property
    def direct(self) -> NDArray[np.int64] | None:
        """What compiled code needs to launch what was captured (``launch.py``); None: only ``submit`` does."""
        return None

    def note_launched(self, has_download: bool) -> None:  # noqa: B027 - most have no such tasks
        """A task was launched by compiled code: it counts like those that were submitted."""

    def make_event(self) -> DoneEvent:
        """An event that compiled code records and waits for, where ``direct`` is there."""
        raise InternalError("this device launches nothing directly")

    def elapsed(self, work: Work) -> float:
        """While ``beside`` lasts: seconds that the device has this work, without the host's part in launching it."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def time(self, work: Work) -> float:
        """Inside ``work``: seconds until the device has done this work, which must have run before. Waits for it."""
        samples = []
        for _ in range(NUM_SAMPLES):
            self.settle()
            start = time.perf_counter()
            work()
            self.settle()
            samples.append(time.perf_counter() - start)
        return min(samples)

    @abstractmethod
    def settle(self) -> None:
        """Inside ``work``: waits until the compute stream has done all that it was given."""

    @abstractmethod
    def memory_in_use(self) -> int:
        """Bytes of device memory that are allocated."""

    @abstractmethod
    def fetch(self, arena: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Inside ``work``: rows (int64, pinned) of an arena of another device, on this one.

        Gathered where they are; the compute stream waits for the copy.
        """

    @abstractmethod
    def beside(self) -> AbstractContextManager[Work]:
        """While it lasts, this thread (any) computes on the device, apart from the worker's tasks. Gives what waits for
        what was computed so."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all that was submitted."""

    @abstractmethod
    def close(self) -> None:
        """Frees threads and streams; nothing is submitted afterwards."""
