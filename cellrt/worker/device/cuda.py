"""A CUDA device through torch. See ``device.py`` for what each method promises.

A task is noticed to be done in one of three ways (``benchmarks/gpu_completion.py`` compares them):

- "signal": a kernel of one thread adds 1 to a count and stores it to a word of pinned memory, which the host reads
  without a call (BatchMaker section 2.5);
- "copy": the count is added to by torch and copied there, which takes two launches but no Triton;
- "event": an event is recorded, and asked about.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch

from cellrt.errors import DefinitionError
from cellrt.worker.blame import describe_error
from cellrt.worker.device.device import Device, Work

SMALL_BYTES = 64 << 10
"""Uploads up to this size go on the compute stream itself: the copy costs less than ordering two streams."""
FATAL_WORDS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "an illegal memory")


class Counter(Protocol):
    """Counts what a stream has reached."""

    def send(self) -> None:
        """Puts one more count behind what the current stream holds."""

    def completed(self) -> int:
        """How many counts the stream has reached."""


class CopiedCounter:
    """Counts by an addition on the device and a copy to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._view = self._word.numpy()

    def send(self) -> None:
        """Two launches."""
        self._count += 1
        self._word.copy_(self._count, non_blocking=True)

    def completed(self) -> int:
        """Reads host memory."""
        return int(self._view[0])


class EventCounter:
    """Counts by CUDA events, in order."""

    def __init__(self) -> None:
        self._waiting: deque[torch.cuda.Event] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._num_reached = 0

    def send(self) -> None:
        """Records an event."""
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record()
        self._waiting.append(event)

    def completed(self) -> int:
        """Asks the oldest events."""
        while self._waiting and self._waiting[0].query():
            self._spare.append(self._waiting.popleft())
            self._num_reached += 1
        return self._num_reached


def make_counter(kind: str | None, device: torch.device) -> Counter:
    """A counter: "signal", "copy" or "event"; None takes the first of them that is there.

    Raises DefinitionError for other words.
    """
    kind = kind or ("signal" if importlib.util.find_spec("triton") else "copy")
    if kind == "signal":
        from cellrt.kernels.signal import Signal

        return Signal(device)
    if kind == "copy":
        return CopiedCounter(device)
    if kind == "event":
        return EventCounter()
    raise DefinitionError(f"completion: expected 'signal', 'copy' or 'event', got {kind!r}")


class CudaDevice(Device):
    """Args:
    name: "cuda:0" or so.
    completion: see ``make_counter``.
    """

    def __init__(self, name: str, completion: str | None = None) -> None:
        self.torch_device = torch.device(name)
        self._compute, self._up, self._down = (torch.cuda.Stream(self.torch_device) for _ in range(3))
        self._peers: dict[torch.device, torch.cuda.Stream] = {}
        with torch.cuda.device(self.torch_device):
            self._uploaded, self._computed = torch.cuda.Event(), torch.cuda.Event()
            self._counters = [make_counter(completion, self.torch_device) for _ in range(2)]
            torch.cuda.current_stream().synchronize()
        self._submitted = [0, 0]
        self._in_flight: deque[tuple[bool, int]] = deque()
        self._num_completed = 0
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def entered(self) -> AbstractContextManager[object]:
        """This thread computes on this device's compute stream."""
        return self._enter()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            yield

    def submit(self, work: Work, has_download: bool) -> None:
        """Queues the kernels and copies of a task, then its signal on the stream that ends it."""
        self._submitted[has_download] += 1
        self._in_flight.append((has_download, self._submitted[has_download]))
        with torch.inference_mode():
            work()
            if has_download:
                with torch.cuda.stream(self._down):
                    self._counters[True].send()
            else:
                self._counters[False].send()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A large copy overlaps with the tasks before: its memory is nobody else's."""
        if source.numel() * source.element_size() <= SMALL_BYTES:
            target.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            self._uploaded.record()
        self._compute.wait_event(self._uploaded)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Overlaps with the tasks behind."""
        self._computed.record()
        self._down.wait_event(self._computed)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)

    def num_completed(self) -> int:
        """Reads two words of pinned memory, unless completion is by events."""
        if self._in_flight:
            reached = [counter.completed() for counter in self._counters]
            while self._in_flight and reached[self._in_flight[0][0]] >= self._in_flight[0][1]:
                self._in_flight.popleft()
                self._num_completed += 1
        return self._num_completed

    def check(self) -> None:
        """An error of any earlier kernel comes up in this call."""
        self._compute.query()

    def is_fatal(self, error: BaseException) -> bool:
        """Errors of CUDA and its libraries, and running out of memory."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        accelerator = getattr(torch, "AcceleratorError", None)
        if accelerator is not None and isinstance(error, accelerator):
            return True
        return isinstance(error, RuntimeError) and any(words in describe_error(error) for words in FATAL_WORDS)

    def capture(self, work: Work) -> Work:
        """A CUDA graph. All graphs share their memory: they run one after the other, and nothing of one outlives it."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def settle(self) -> None:
        """Waits for the compute stream."""
        self._compute.synchronize()

    def memory_in_use(self) -> int:
        """What torch's allocator holds, captures included."""
        return torch.cuda.memory_reserved(self.torch_device)

    def fetch(self, arena: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Gathers on a stream of our own at the other device, whose tasks that made the rows are known to be done.

        The copy between devices runs there too; torch has our compute stream wait for it.
        """
        other = arena.device
        fetched = torch.empty((len(rows), *arena.shape[1:]), dtype=arena.dtype, device=self.torch_device)
        stream = self._peers.get(other)
        if stream is None:
            stream = self._peers[other] = torch.cuda.Stream(other)
        with torch.cuda.stream(stream):
            values = arena.index_select(0, rows.to(other, non_blocking=True))
            with torch.cuda.device(self.torch_device):
                fetched.copy_(values, non_blocking=True)
        return fetched

    def synchronize(self) -> None:
        """Waits for the three streams."""
        for stream in (self._compute, self._up, self._down):
            stream.synchronize()

    def close(self) -> None:
        """Streams and memory go with the object."""
