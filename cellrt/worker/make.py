"""Construction of an engine's workers, by the names of their devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from cellrt.core.processor import Processor
from cellrt.core.state.tables import num_flags
from cellrt.errors import DefinitionError
from cellrt.native.row_types import Rows, new_table
from cellrt.worker.arenas import Arenas
from cellrt.worker.base import Worker
from cellrt.worker.cell_type import CellType
from cellrt.worker.cores import num_cores
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.run_tasks import LAUNCHED_TASK
from cellrt.worker.cpu.worker import CpuWorker
from cellrt.worker.device.cuda_worker import CudaWorker
from cellrt.worker.device.device import Device
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.dry import DryDevice
from cellrt.worker.device.executor import DeviceExecutor, DeviceOptions
from cellrt.worker.device.placement import Placements

CPU = "cpu"
CPU_QUEUE_DEPTH, DEVICE_QUEUE_DEPTH = 1, 4
"""The tasks that a worker is given ahead: a device must not idle while the host is busy elsewhere."""
DEVICE_LOOPS_AHEAD = 1
"""The tasks that a loop is ahead of the first whose stop is not known: while one runs, the next is queued."""
MAX_CPU_WORKERS = 30


def device_names(workers: int | Sequence[str] | None) -> list[str]:
    """Return the device of each worker: "cpu", "cuda:0", or "dry", a stand-in for a GPU in tests.

    Raise DefinitionError for other names, workers of several kinds, and devices that this machine does not have.
    """
    if workers is None or isinstance(workers, int):
        return ["cpu"] * (min(MAX_CPU_WORKERS, num_cores()) if workers is None else workers)
    names = ["cuda:0" if name == "cuda" else name for name in workers]
    for name in names:
        if name == "cpu:process":
            raise DefinitionError(f"workers: {name!r} was removed: use cellrt.EngineProcess")
        if not re.fullmatch(r"cpu|dry|cuda:\d+", name):
            raise DefinitionError(f"workers: expected 'cpu', 'cuda:0' or so, got {name!r}")
        if name.startswith("cuda") and int(name[5:]) >= torch.cuda.device_count():
            raise DefinitionError(f"workers: no {name!r} here; torch sees {torch.cuda.device_count()} CUDA devices")
    if len({name.rstrip("0123456789") for name in names}) > 1:
        raise DefinitionError(f"workers: expected devices of one kind, got {names}")
    return names


def loops_ahead(name: str, wanted: int | None, queue_depth: int) -> int:
    """Return the tasks that loops go ahead on workers of that name: ``wanted``, or by default as the device needs it.

    Raise DefinitionError for a CPU's, which know the stop when the task is done.
    """
    if name.startswith(CPU):
        if wanted:
            raise DefinitionError(f"loops_ahead: expected 0 or None with CPU workers, got {wanted}")
        return 0
    return min(DEVICE_LOOPS_AHEAD, queue_depth - 1) if wanted is None else wanted


def open_device(name: str, options: DeviceOptions) -> Device | None:
    """Return the device of that name; None for the CPU."""
    if name.startswith("cpu"):
        return None
    device: Device
    if name == "dry":
        device = DryDevice(options.dry_delay_s)
    else:
        from cellrt.worker.device.cuda import CudaDevice

        device = CudaDevice(name, options.completion, options.direct)
    device.placements = Placements(device.torch_device, options.forms)
    return device


def memory_of(devices: Sequence[Device | None]) -> Callable[[], int] | None:
    """Return a function for the bytes of device memory that each worker may take; None for workers in host memory."""
    own = Counter(
        device.torch_device for device in devices if device is not None and device.torch_device.type == "cuda"
    )
    if not own:
        return None
    return lambda: min(torch.cuda.mem_get_info(device)[0] // count for device, count in own.items())


def make_arenas(devices: Sequence[Device | None]) -> list[Arenas]:
    """Return arenas for the rows of the host and of each worker."""
    return [Arenas(), *(Arenas() if device is None else DeviceArenas(device.torch_device) for device in devices)]


def worker_maker(
    devices: Sequence[Device | None],
    options: DeviceOptions,
    arenas: list[Arenas],
    types: Mapping[int, CellType],
    processor: Processor,
    words: Rows[int],
    queue_depth: int,
    take_turns: Callable[[int], bool],
    has_news: Callable[[], bool],
    ended: Callable[[], None],
    num_threads: int,
) -> Callable[[int], Worker]:
    """Return a function that makes the worker of a location, which is not started; the arguments are those of
    ``Worker``.
    """

    launched = new_table(len(devices) * processor.limits.max_tasks, LAUNCHED_TASK)

    def make(location: int) -> Worker:
        name, device = f"cellrt-worker-{location}", devices[location - 1]
        if device is None:
            executor = Executor(location, arenas, types)
            how = take_turns, has_news, ended, num_threads, name
            return CpuWorker(executor, processor, words, location, queue_depth, launched, *how)
        return CudaWorker(
            DeviceExecutor(location, arenas, types, device, options, num_flags(processor.limits)),
            options,
            take_turns,
            has_news,
            ended,
            name,
        )

    return make
