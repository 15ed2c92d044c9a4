"""The interface of a device for its worker: memory, streams in order, copies, and a count of the completed tasks.

A device has three streams. *Compute* runs tasks one after the other. *Upload* carries inputs, and compute waits for
those that it needs. *Download* carries results after the work that made them, and compute does not wait. ``submit`` is
the only way to use them: all that a task does is one function, whose operations are queued in order. Nothing here
waits for the device, apart from ``synchronize``, ``settle`` and ``time``.

There are two implementations: ``CudaDevice`` and, with the same order of events on threads of the CPU, ``DryDevice``.
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
"""The number of timed runs of work; the fastest counts."""


def nothing() -> None:
    """Do nothing."""


class Captured(NamedTuple):
    """Captured work: ``replay`` repeats it, inside ``work``.

    With a ``handle`` compiled code launches it instead of a replay. ``work`` is the captured work: objects that it made
    before are read at every replay, and must live as long.
    """

    replay: Work
    handle: int = 0
    work: Work = nothing


class DoneEvent(Protocol):
    """An event that compiled code uses by its address."""

    cuda_event: int


class Device(ABC):
    """A device for its worker's thread. Only that thread calls it, apart from ``place`` and memory."""

    torch_device: torch.device
    placements: Placements
    """The cells placed here; the code that opens the device chooses their forms."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory ``[num_bytes]`` uint8 that asynchronous copies may read and write."""

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]:
        """Let this thread's operations go to the compute stream within the block."""

    @abstractmethod
    def submit(self, work: Work, has_download: bool) -> None:
        """Queue the operations of a task behind all that was submitted before, and count it once they are done.

        ``work`` may be called now or later on another thread; its writes to host memory are there once the task is
        counted.
        ``has_download``: the task is done when its downloads are. Raise what ``check`` raises, and what ``work`` raises
        if it
        is called now.
        """

    @abstractmethod
    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pinned memory to the device before the operations that follow, inside ``work``."""

    @abstractmethod
    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy device memory to pinned memory, after the operations before, inside ``work``."""

    @abstractmethod
    def num_completed(self) -> int:
        """Return the number of completed tasks, in order of submission, without a call to the device where possible."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the device has failed."""

    @abstractmethod
    def is_fatal(self, error: BaseException) -> bool:
        """Return whether an error that a cell raised means that the device is lost, rather than
        that the cell is wrong.
        """

    @abstractmethod
    def capture(self, work: Work, ends_task: bool = False, before: Work = nothing) -> Captured:
        """Record the operations of work, which are repeated at the same addresses.

        It must have run before. Raise an error if it has an operation that cannot be recorded. ``ends_task``: work with
        a
        ``handle`` also counts a task that has no download. ``before`` is called before each call of ``work``.
        """

    @property
    def direct(self) -> NDArray[np.int64] | None:
        """The addresses with which compiled code launches captured work (``launch.py``); None: only ``submit`` launches
        it.
        """
        return None

    def note_launched(self, has_download: bool) -> None:  # noqa: B027 - most have no such tasks
        """Count a task that compiled code launched, like those that were submitted."""

    def make_event(self) -> DoneEvent:
        """Return an event that compiled code records and waits for, where ``direct`` is there."""
        raise InternalError("this device launches nothing directly")

    def elapsed(self, work: Work) -> float:
        """Return the seconds of this work on the device, without the host's part in launching it; within ``beside``."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def time(self, work: Work) -> float:
        """Return the seconds until the device has done this work, which must have run before; inside ``work``.

        It waits for it.
        """
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
        """Wait until the compute stream has done all its work, inside ``work``."""

    @abstractmethod
    def memory_in_use(self) -> int:
        """Return the allocated bytes of device memory."""

    @abstractmethod
    def fetch(self, arena: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (int64, pinned) of an arena of another device, on this one; inside ``work``.

        They are gathered where they are; the compute stream waits for the copy.
        """

    @abstractmethod
    def beside(self) -> AbstractContextManager[Work]:
        """Let this (any) thread compute on the device within the block, apart from the worker's tasks.

        The block gets a function that waits for this computation.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was submitted."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and streams; nothing is submitted after this."""
