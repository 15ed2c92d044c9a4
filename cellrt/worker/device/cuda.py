"""A CUDA device through torch, with the methods of ``device.py`` and the counters of ``counters.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.worker.device import counters
from cellrt.worker.device.capturable import Capturable
from cellrt.worker.device.compilations import COMPILATIONS
from cellrt.worker.device.device import Captured, Device, Work, nothing
from cellrt.worker.device.driver import find_driver
from cellrt.worker.device.streams import STREAMS, capturing
from cellrt.worker.failed_rows import describe_error

SMALL_BYTES = 64 << 10
"""The largest upload on the compute stream itself: such a copy costs less than ordering two streams."""
HEAD_START_CYCLES = 5_000_000
"""Cycles of the device's clock, 2 to 4 ms: the time that the host needs to launch a step call by call."""
FATAL_WORDS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "an illegal memory")


class CudaDevice(Device):
    """A CUDA device.

    Args:
        name: "cuda:0" or so.
        completion: see ``counter_maker``.
        direct: have compiled code launch captured work, by the driver's functions.
    """

    def __init__(self, name: str, completion: str | None = None, direct: bool = True) -> None:
        self.torch_device = torch.device(name)
        COMPILATIONS.watch_triton()
        self._compute, self._up, self._down = (STREAMS.take(self.torch_device, self) for _ in range(3))
        self._peers: dict[torch.device, torch.cuda.Stream] = {}
        with torch.cuda.device(self.torch_device):
            self._uploaded, self._computed = torch.cuda.Event(), torch.cuda.Event()
            make = counters.counter_maker(completion, self.torch_device)
            self._counters = [make() for _ in range(2)]
            torch.cuda.current_stream().synchronize()
        self._submitted = [0, 0]
        self._in_flight: deque[tuple[bool, int]] = deque()
        self._num_completed = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._driver = find_driver() if direct and not isinstance(self._counters[True], counters.EventCounter) else None
        self._direct: NDArray[np.int64] | None = None
        self._ends: list[Captured] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked host memory."""
        return counters.page_locked(num_bytes)

    def entered(self) -> AbstractContextManager[object]:
        """Let this thread compute on this device's compute stream."""
        return self._enter()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            yield

    def submit(self, work: Work, has_download: bool) -> None:
        """Queue the kernels and copies of a task, then its signal on the stream that ends it."""
        self.note_launched(has_download)
        with torch.inference_mode():
            work()
            if has_download:
                with torch.cuda.stream(self._down):
                    self._counters[True].send()
            else:
                self._counters[False].send()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the device. A large copy overlaps with the tasks before, none of which uses its memory."""
        if source.numel() * source.element_size() <= SMALL_BYTES:
            target.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            self._uploaded.record()
        self._compute.wait_event(self._uploaded)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the host, overlapping with the tasks after this one."""
        self._computed.record()
        self._down.wait_event(self._computed)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)

    def num_completed(self) -> int:
        """Return the number of completed tasks, by reading two words of pinned memory, unless
        completion is by events.
        """
        if self._in_flight:
            reached = [counter.completed() for counter in self._counters]
            while self._in_flight and reached[self._in_flight[0][0]] >= self._in_flight[0][1]:
                self._in_flight.popleft()
                self._num_completed += 1
        return self._num_completed

    def check(self) -> None:
        """Raise an error of any earlier kernel, which this call reports."""
        self._compute.query()

    def is_fatal(self, error: BaseException) -> bool:
        """Return whether an error is one of CUDA and its libraries, or of memory that ran out."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        accelerator = getattr(torch, "AcceleratorError", None)
        if accelerator is not None and isinstance(error, accelerator):
            return True
        return isinstance(error, RuntimeError) and any(words in describe_error(error) for words in FATAL_WORDS)

    def capture(self, work: Work, ends_task: bool = False, before: Work = nothing) -> Captured:
        """Return a CUDA graph of the work.

        All graphs share their memory: they run one after the other, and no result of one is used by another. Where
        random
        numbers are drawn torch must prepare each replay, so there is no handle.
        """
        before()
        with Capturable(self.torch_device) as seen:
            work()
        before()
        has_handle = self._driver is not None and not seen.is_random
        return self._capture(work, has_handle and ends_task, has_handle)

    def _capture(self, work: Work, ends_task: bool, has_handle: bool) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with capturing():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                    if ends_task:
                        self._counters[False].send()
                finally:
                    graph.capture_end()
            except BaseException:
                self._leave_pool()
                raise
        return Captured(graph.replay, graph.raw_cuda_graph_exec() if has_handle else 0, work)

    @property
    def direct(self) -> NDArray[np.int64] | None:
        """The addresses for compiled code, made at the first use, which captures the end of a task."""
        if self._driver is None or self._direct is not None:
            return self._direct
        for has_download, stream in ((True, self._down), (False, self._compute)):
            with torch.cuda.stream(stream), torch.inference_mode():
                self._ends.append(self._capture(self._counters[has_download].send, False, True))
        self._uploaded.record(self._up)
        self._computed.record(self._compute)
        streams = [stream.cuda_stream for stream in (self._compute, self._up, self._down)]
        events = [event.cuda_event for event in (self._uploaded, self._computed)]
        handles = [end.handle for end in self._ends]
        self._direct = np.array([*self._driver, *streams, *events, *handles], np.int64)
        return self._direct

    def note_launched(self, has_download: bool) -> None:
        """Count a task that compiled code launched (see ``Device.note_launched``)."""
        self._submitted[has_download] += 1
        self._in_flight.append((has_download, self._submitted[has_download]))

    def make_event(self) -> torch.cuda.Event:
        """Return an event that was recorded once, as an event has no address before."""
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def _leave_pool(self) -> None:
        """Change the pool after a failed capture: torch 2.11 goes on recording to it, and refuses the next capture
        there.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.torch_device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def settle(self) -> None:
        """Wait for the compute stream."""
        self._compute.synchronize()

    def memory_in_use(self) -> int:
        """Return all bytes that are not free, in any use: the driver's part of a graph is in no count of torch's."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def fetch(self, arena: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows whose tasks are known to be done; those of a worker on this device are read on the compute
        stream.

        At another device they are gathered on a stream of our own. That waits for the earlier use of the copy's memory,
        and
        the compute stream waits for the copy.
        """
        other = arena.device
        if other == self.torch_device:
            return arena.index_select(0, rows.to(other, non_blocking=True))
        fetched = torch.empty((len(rows), *arena.shape[1:]), dtype=arena.dtype, device=self.torch_device)
        stream = self._peers.get(other)
        if stream is None:
            stream = self._peers[other] = STREAMS.take(other, self)
        stream.wait_stream(self._compute)
        with torch.cuda.stream(stream):
            values = arena.index_select(0, rows.to(other, non_blocking=True))
            fetched.copy_(values, non_blocking=True)  # torch copies on the current stream of the source
        self._compute.wait_stream(stream)
        return fetched

    @contextmanager
    def beside(self) -> Iterator[Work]:
        """Let this thread compute on this device, on a stream that is not the worker's."""
        with torch.cuda.device(self.torch_device):
            yield lambda: torch.cuda.current_stream(self.torch_device).synchronize()

    def elapsed(self, work: Work) -> float:
        """Return the seconds of work on the device, by events.

        The device is kept busy before, until all is launched.
        """
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        work()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def synchronize(self) -> None:
        """Wait for the three streams."""
        for stream in (self._compute, self._up, self._down):
            stream.synchronize()

    def close(self) -> None:
        """Release the streams, unless a task is still on them: then they are released with the object, as its memory
        is.
        """
        with suppress(RuntimeError):  # of a device that is lost
            self.num_completed()
            if not self._in_flight:
                STREAMS.release(self)
