"""Ways for a host to learn how far a stream of a CUDA device is (``benchmarks/gpu_completion.py`` compares them).

- "signal": a kernel of one thread adds 1 to a count and stores it to a word of pinned memory, which the host reads
  without a call (BatchMaker section 2.5);
- "copy": the count is added to by torch and copied there, which takes two launches but no Triton;
- "event": an event is recorded, and queried.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from cellrt.errors import DefinitionError
from cellrt.worker.failed_rows import describe_error


class Counter(Protocol):
    """A counter of how far a stream is."""

    def send(self) -> None:
        """Queue one more count on the current stream."""

    def completed(self) -> int:
        """Return the number of counts that the stream has reached."""


class CopiedCounter:
    """A counter by an addition on the device and a copy to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = page_locked(8).view(torch.int64)
        self._word.zero_()
        self._view = self._word.numpy()

    def send(self) -> None:
        """Queue a count with two launches; may be captured."""
        self._count += 1
        self._word.copy_(self._count, non_blocking=True)

    def completed(self) -> int:
        """Return the count in host memory."""
        return int(self._view[0])


class EventCounter:
    """A counter by CUDA events, in order."""

    def __init__(self) -> None:
        self._waiting: deque[torch.cuda.Event] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._num_reached = 0

    def send(self) -> None:
        """Record an event; cannot be captured."""
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record()
        self._waiting.append(event)

    def completed(self) -> int:
        """Return the number of reached events, after queries of the oldest."""
        while self._waiting and self._waiting[0].query():
            self._spare.append(self._waiting.popleft())
            self._num_reached += 1
        return self._num_reached


def page_locked(num_bytes: int) -> torch.Tensor:
    """Return host memory ``[num_bytes]`` uint8 that asynchronous copies may read and write."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def counter_maker(kind: str | None, device: torch.device) -> Callable[[], Counter]:
    """Return a function that makes counters: "signal", "copy" or "event"; None takes "signal" if that works here, else
    "copy".

    It waits for the device. Raise DefinitionError for other words.
    """
    if kind == "signal" or (kind is None and _can_signal(device)):
        return lambda: _signal(device)
    if kind in (None, "copy"):
        return lambda: CopiedCounter(device)
    if kind == "event":
        return EventCounter
    raise DefinitionError(f"completion: expected 'signal', 'copy' or 'event', got {kind!r}")


def _signal(device: torch.device) -> Counter:
    from cellrt.kernels.signal import Signal

    return Signal(device)


def _can_signal(device: torch.device) -> bool:
    """Return whether a signal arrives: Triton needs a C compiler to launch the kernel, which a
    bare machine may lack.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        signal = _signal(device)
        signal.send()
        torch.cuda.current_stream(device).synchronize()
        if signal.completed() == 1:
            return True
        said = "its signal did not arrive"
    except Exception as error:
        said = describe_error(error)
    logging.getLogger("cellrt").warning("%s counts its tasks by copies, not by the signal kernel: %s", device, said)
    return False
