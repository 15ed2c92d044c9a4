"""The ways in which a host learns that a GPU's task is done: signal, copied count, events, callbacks (BatchMaker 2.5).

For each way: what the host pays to ask for it, how long one short task takes from submission until the host knows,
and what a task costs when a thousand are queued.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.options import Options
from benchmarks.record import Recorder
from cellrt.worker.device.cuda import CudaDevice
from cellrt.worker.device.device import Device
from cellrt.worker.device.dry import DryDevice

PARTS: tuple[str, ...] = ()
LIMIT_S = 30.0


class HostCallbacks:
    """Counts by functions that the driver calls on a thread of its own, while the stream waits."""

    def __init__(self) -> None:
        self._num_reached = 0
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._reach)
        self._runtime = ctypes.CDLL(_loaded("libcudart"))

    def send(self) -> None:
        """Queue the function behind what the current stream holds. Raise RuntimeError if the runtime refuses."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self._runtime.cudaLaunchHostFunc(stream, self._function, None)
        if code:
            raise RuntimeError(f"cudaLaunchHostFunc returned {code}")

    def completed(self) -> int:
        """Return how many callbacks were called."""
        return self._num_reached

    def _reach(self, _: object) -> None:
        self._num_reached += 1


def run(recorder: Recorder, options: Options) -> None:
    """Measure each way on the first GPU, or the device "dry" alone where there is none."""
    measure(recorder, "cuda:0" if torch.cuda.is_available() else "dry", 100 if options.quick else 1000)


def measure(recorder: Recorder, device: str, count: int) -> None:
    """Measure each way that the device has, on so many tasks."""
    for name, open_device in _ways(device).items():
        with _closing(open_device()) as opened:
            _measure(recorder, name, opened, count)


def _ways(device: str) -> dict[str, Callable[[], Device]]:
    if device == "dry":
        return {"dry": DryDevice}
    ways: dict[str, Callable[[], Device]] = {
        kind: functools.partial(CudaDevice, device, kind) for kind in ("signal", "copy", "event")
    }
    return ways | {"callback": functools.partial(_with_callbacks, device)}


def _with_callbacks(name: str) -> CudaDevice:
    device = CudaDevice(name, "copy")
    device._counters = [HostCallbacks(), HostCallbacks()]
    return device


@contextmanager
def _closing(device: Device) -> Iterator[Device]:
    with device.entered():
        yield device
        device.synchronize()
    device.close()


def _measure(recorder: Recorder, name: str, device: Device, count: int) -> None:
    values = torch.zeros(1024, device=device.torch_device)

    def work() -> None:
        values.add_(1.0)

    submitted = device.num_completed()

    def submit(times: int) -> None:
        nonlocal submitted
        for _ in range(times):
            device.submit(work, False)
        submitted += times

    def wait() -> None:
        end = time.perf_counter() + LIMIT_S
        while device.num_completed() < submitted:
            if time.perf_counter() > end:
                raise TimeoutError(f"{name}: not done within {LIMIT_S} s")

    submit(10)
    wait()
    trips, hosts, queues = [], [], []
    for _ in range(count):
        start = time.perf_counter()
        submit(1)
        hosts.append(time.perf_counter() - start)
        wait()
        trips.append(time.perf_counter() - start)
    for _ in range(3):
        start = time.perf_counter()
        submit(count)
        wait()
        queues.append((time.perf_counter() - start) / count)
    recorder.add(name, "submission", statistics.median(hosts) * 1e6, "us")
    recorder.add(name, "submission to notice", statistics.median(trips) * 1e6, "us")
    recorder.add(name, "a task of many in the queue", statistics.median(queues) * 1e6, "us")


def _loaded(library: str) -> str:
    """Return the file of a library that this process has loaded. Raise RuntimeError if it has not."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split()[-1]
        if library in path:
            return path
    raise RuntimeError(f"{library} is not loaded")
