"""A stand-in for ``torch.cuda`` without a GPU: ``CudaDevice`` runs on it as it is, over memory of the CPU.

Operations are done at once, and noted under the stream that they were queued on. Two accesses to the same bytes, one of
them a write, must be ordered by their stream, by events or by what the host waited for: else a real device may run them
in any order, and ``races`` says which they were. (Torch's own sanitizer does this for whole tensors of a real device;
here blocks of one ring belong to several streams.) Captures are recorded and repeated. What torch 2.11 refuses is
refused: a capture that reads a value on the host fails, and its pool goes on recording until somebody ends that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stub_accesses import Ranges, accesses_of, overlap, returns_of, written_by
from benchmarks.stub_driver import StubCounter, StubDriver

HOST_READS = frozenset(
    {torch.ops.aten.is_nonzero, torch.ops.aten.item, torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}
)
MOST_KEPT = 64
"""Accesses of one memory that are kept before those that everybody waited for are dropped."""
Clock = dict[int, int]


class Access(NamedTuple):
    """One operation's bytes of one memory."""

    stream: int
    number: int
    is_write: bool
    ranges: Ranges
    name: str


class StubStream:
    """A stand-in for ``torch.cuda.Stream``.

    Torch before 2.13 leaves weak references to one behind, so nobody may make one.
    """

    __slots__ = ("_stub", "clock", "cuda_stream", "device")

    def __init__(self, stub: StubCuda, device: object = None, number: int | None = None) -> None:
        self._stub = stub
        self.device = torch.device("cuda", stub.index_of(device))
        self.cuda_stream = stub.next_stream() if number is None else number
        self.clock = stub.clocks.setdefault(self.cuda_stream, {})

    def wait_event(self, event: StubEvent) -> None:
        """Order the stream's later work after the event."""
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: StubStream) -> None:
        """Order the stream's later work after the other stream's present work."""
        _merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        """Order the host's later work after the stream's present work."""
        self._stub.host_waits(self.clock)

    def query(self) -> bool:
        """Return True: everything is done at once."""
        return True


class StubEvent:
    """A stand-in for ``torch.cuda.Event``."""

    def __init__(self, stub: StubCuda, *_: object, **__: object) -> None:
        self._stub, self.clock = stub, Clock()
        self.cuda_event = 0

    def record(self, stream: StubStream | None = None) -> None:
        """Put it behind what a stream has."""
        self.clock = dict((stream or self._stub.current_stream()).clock)
        self.cuda_event = self.cuda_event or self._stub.handle_of(self)

    def wait(self, stream: StubStream | None = None) -> None:
        """Order a stream's later work after the event."""
        (stream or self._stub.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return True: everything is done at once."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Order the host's later work after the event."""
        self._stub.host_waits(self.clock)

    def elapsed_time(self, other: StubEvent) -> float:
        """Return milliseconds, of no meaning."""
        return 1.0


class StubGraph:
    """A stand-in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, stub: StubCuda) -> None:
        self._stub = stub
        self.operations: list[Callable[[], None]] = []
        self.has_failed = False
        self._pool: object = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Raise RuntimeError where the pool is still recorded to."""
        if pool in self._stub.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._stub.recording.add(pool)
        self._pool = pool
        self._stub.local.capture = self

    def capture_end(self) -> None:
        """Raise RuntimeError where something was refused."""
        self._stub.local.capture = None
        if self.has_failed:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._stub.recording.discard(self._pool)
        self._stub.num_captured += 1

    def replay(self) -> None:
        """Do again what was recorded."""
        for operation in self.operations:
            operation()

    def raw_cuda_graph_exec(self) -> int:
        """Return the number that a driver launches it by."""
        return self._stub.handle_of(self)

    def reset(self) -> None:
        """Forget it."""
        self.operations.clear()


class StubCuda:
    """``torch.cuda`` and what happened on it. Use ``installed``.

    Args:
        num_streams: how many different streams there are, as torch hands out those of a pool in turns.
        has_driver: whether compiled code finds the driver's functions.
    """

    def __init__(self, num_streams: int = 32, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.clocks: dict[int, Clock] = {}
        self.races: list[str] = []
        self.recording: set[object] = set()
        self.driver_bytes = 0
        """Memory of the device that torch does not know of."""
        self.num_captured = 0
        self.local = threading.local()
        self._lock = threading.Lock()
        self._host = Clock()
        self._accesses: dict[int, list[Access]] = {}
        self._alive: dict[int, torch.UntypedStorage] = {}
        self.num_launched = 0
        """Graphs that compiled code launched."""
        self._handles: dict[int, Any] = {}
        self._number = 0
        self._num_streams, self._made = num_streams, 0
        self._pools = 0

    @contextmanager
    def installed(self) -> Iterator[StubCuda]:
        """Take the place of ``torch.cuda``'s functions while it lasts."""
        names: dict[str, Any] = {
            "Stream": lambda device=None, **_: StubStream(self, device),
            "Event": lambda *args, **options: StubEvent(self, *args, **options),
            "CUDAGraph": lambda *_, **__: StubGraph(self),
            "device": self.device,
            "stream": self.stream,
            "current_stream": lambda device=None: self.current_stream(device),
            "current_device": lambda: self._state()[0],
            "graph_pool_handle": self._pool,
            "memory_reserved": lambda device=None: 0,
            "mem_get_info": lambda device=None: ((80 << 30) - self.driver_bytes, 80 << 30),
        }
        ended = patch("torch._C._cuda_endAllocateToPool", self._end_allocating, create=True)
        plain = patch("cellrt.worker.device.counters.page_locked", lambda size: torch.zeros(size, dtype=torch.uint8))
        functions = StubDriver(self)
        driver = patch("cellrt.worker.device.cuda.find_driver", lambda: functions.driver if self.has_driver else None)
        counter = patch("cellrt.worker.device.counters.CopiedCounter", lambda _: StubCounter(self))
        asleep = patch("torch.cuda._sleep", lambda cycles: None, create=True)
        with patch.multiple(torch.cuda, **names), asleep, ended, plain, driver, counter:
            yield self

    @property
    def is_capturing(self) -> bool:
        """True while this thread captures."""
        return getattr(self.local, "capture", None) is not None

    def next_stream(self) -> int:
        """Return the handle of a stream of the pool, in turns."""
        self._made += 1
        return 1 + (self._made - 1) % self._num_streams

    def stream_of(self, handle: int) -> StubStream:
        """Return the stream of that handle."""
        return StubStream(self, number=handle)

    def handle_of(self, made: object) -> int:
        """Return a number by which a driver's function finds an event or a graph."""
        self._handles[id(made)] = made
        return id(made)

    def of_handle(self, handle: int) -> Any:
        """Return the object with this handle."""
        return self._handles[handle]

    def host_waits(self, clock: Clock) -> None:
        """All that is queued from now on comes after it."""
        _merge(self._host, clock)

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        """Make a device current inside the context, as ``torch.cuda.device`` does, and note operations."""
        state = self._state()
        before, state[0] = state[0], self.index_of(device)
        mode = _Noting(self) if not getattr(self.local, "is_noting", False) else None
        try:
            if mode is None:
                yield
            else:
                self.local.is_noting = True
                with mode:
                    yield
        finally:
            state[0] = before
            if mode is not None:
                self.local.is_noting = False

    @contextmanager
    def stream(self, stream: StubStream) -> Iterator[None]:
        """Make a stream current inside the context, as ``torch.cuda.stream`` does."""
        state = self._state()
        index = stream.device.index
        before = state[0], state[1].get(index)
        state[0], state[1][index] = index, stream
        try:
            yield
        finally:
            state[0] = before[0]
            if before[1] is None:
                del state[1][index]
            else:
                state[1][index] = before[1]

    def current_stream(self, device: object = None) -> StubStream:
        """Return the current stream of a device, as ``torch.cuda.current_stream`` does."""
        index, streams = self._state()
        index = index if device is None else self.index_of(device)
        found: StubStream | None = streams.get(index)
        return found or StubStream(self, torch.device("cuda", index), number=0)

    @staticmethod
    def index_of(device: object) -> int:
        """Return the number of a device; the CPU plays the first."""
        index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
        return int(index) if isinstance(index, int) else 0

    def note(self, reads: list[tuple[int, Ranges]], writes: list[tuple[int, Ranges]], name: str) -> None:
        """Note what an operation does on the current stream, and find what it races with."""
        with self._lock:
            self._note(self.current_stream(), reads, writes, name)

    def _note(
        self, stream: StubStream, reads: list[tuple[int, Ranges]], writes: list[tuple[int, Ranges]], name: str
    ) -> None:
        self._number += 1
        _merge(stream.clock, self._host)
        stream.clock[stream.cuda_stream] = self._number
        for given, is_write in ((reads, False), (writes, True)):
            for memory, ranges in given:
                made = Access(stream.cuda_stream, self._number, is_write, ranges, name)
                kept = self._accesses.setdefault(memory, [])
                for other in kept:
                    is_conflict = (is_write or other.is_write) and other.number != self._number
                    if is_conflict and not _is_after(stream.clock, other) and overlap(other.ranges, ranges):
                        self.races.append(
                            f"{name} on stream {made.stream} and {other.name} on stream {other.stream} are not ordered"
                        )
                kept.append(made)
                if len(kept) > MOST_KEPT:
                    kept[:] = [access for access in kept if not all(_is_after(c, access) for c in self.clocks.values())]

    def keep(self, memory: torch.UntypedStorage) -> None:
        """Keep memory from being used again for something else, which would look like a race."""
        with self._lock:
            self._alive.setdefault(memory.data_ptr(), memory)

    def memory_at(self, address: int, num_bytes: int) -> tuple[int, Ranges]:
        """Return the memory, among all that was seen, to which these bytes belong."""
        with self._lock:
            known = list(self._alive.items())
        for first, memory in known:
            if first <= address < first + memory.nbytes():
                return first, (np.array([address]), np.array([address + num_bytes]))
        return address, (np.array([address]), np.array([address + num_bytes]))

    def _state(self) -> list[Any]:
        """Return the thread's device, and its stream on each."""
        if not hasattr(self.local, "state"):
            self.local.state = [0, {}]
        state: list[Any] = self.local.state
        return state

    def _pool(self) -> tuple[int, int]:
        self._pools += 1
        return (0, self._pools)

    def _end_allocating(self, device: int, pool: object) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.discard(pool)


class _Noting(TorchDispatchMode):
    """Notes the operations of a thread, and records them while it captures."""

    def __init__(self, stub: StubCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stub = stub

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        capture: StubGraph | None = getattr(self._stub.local, "capture", None)
        if capture is not None and function.overloadpacket in HOST_READS:
            capture.has_failed = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        if any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in returns_of(function)
        ) and _share_memory(made, (args, kwargs)):
            return result  # a view
        written = written_by(function, args, kwargs)
        stub = self._stub
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                stub.keep(value.untyped_storage())

        def note() -> None:
            with torch._C._DisableTorchDispatch():
                stub.note(*accesses_of(function, args, kwargs, written, made), str(function))

        if capture is None:
            note()
        else:

            def again() -> None:
                note()
                new = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
                for old, value in zip(made, new):
                    if all(old is not given for given in written):
                        old.copy_(value)

            capture.operations.append(_without_mode(again))
        return result


def _share_memory(made: list[torch.Tensor], given: object) -> bool:
    """Return whether what was made lies in what was given: ``to`` and ``reshape`` say they may be views, and may
    copy.
    """
    memory = [value for value in torch.utils._pytree.tree_leaves(given) if isinstance(value, torch.Tensor)]
    places = {value.untyped_storage().data_ptr() for value in memory}
    return all(value.untyped_storage().data_ptr() in places for value in made)


def _without_mode(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            function()

    return call


def _is_after(clock: Clock, access: Access) -> bool:
    return clock.get(access.stream, -1) >= access.number


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, -1), number)
