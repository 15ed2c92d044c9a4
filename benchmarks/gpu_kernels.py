"""Kernels against two floors: the bytes they must move at the bandwidth of a copy, and their operations at the rate of
a large matrix product, both measured on the same device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_timing import time_captured
from benchmarks.record import Recorder
from cellrt.kernels.gate_weights import Precision
from cellrt.kernels.tiles import choose_tile
from cellrt.kernels.tuning_cases import OPERATIONS, Case, Use


class Floors(NamedTuple):
    """The best rates of the device."""

    bytes_per_s: float
    operations_per_s: dict[torch.dtype, float]


def measure_floors(recorder: Recorder, device: torch.device) -> Floors:
    """Return a copy of a gigabyte, and products of 8192 x 8192 in TF32 and bfloat16; tiny ones on a CPU."""
    on_gpu = device.type == "cuda"
    source = torch.zeros((1 << 30 if on_gpu else 1 << 16) // 4, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.numel() * 4 / time_captured(partial(target.copy_, source), device)
    recorder.add("copy on the device", "bandwidth", rate / 1e9, "GB/s")
    side, rates = 8192 if on_gpu else 64, {}
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / time_captured(partial(torch.matmul, a, b), device)
        recorder.add(f"product {dtype}", "rate", rates[dtype] / 1e12, "TFLOP/s")
    return Floors(rate, rates)


class Cost(NamedTuple):
    """The cost of a step that multiplies inputs as wide as its state.

    It counts the rows read and written for each row of the step, and squares of weights.
    """

    rows: int
    squares: int


COSTS = {"lstm_step": Cost(5, 8), "gru_step": Cost(3, 6), "tree_lstm_step": Cost(7, 15)}


def measure_kernels(
    recorder: Recorder, device: torch.device, floors: Floors, operations: Sequence[str] = OPERATIONS
) -> None:
    """Measure steps, and a gather as torch does it, at several numbers of rows."""
    hidden, sizes = (1024, (1, 8, 64, 256, 512, 1024)) if device.type == "cuda" else (8, (1, 4))
    for dtype in (torch.float32, torch.bfloat16):
        for operation in operations:
            for rows in sizes:
                work, num_bytes, operations_made = step_call(operation, dtype, hidden, rows, device)
                floor_s = max(num_bytes / floors.bytes_per_s, operations_made / floors.operations_per_s[dtype])
                _add(recorder, f"{operation} {dtype}", rows, time_captured(work, device), floor_s)
        for rows in sizes:
            values = torch.zeros(4 * rows, hidden, dtype=dtype, device=device)
            index = torch.randperm(4 * rows, device=device)[:rows]
            seconds = time_captured(partial(values.index_select, 0, index), device)
            floor_s = 2 * rows * hidden * dtype.itemsize / floors.bytes_per_s
            _add(recorder, f"index_select {dtype}", rows, seconds, floor_s)


def step_call(
    operation: str, dtype: torch.dtype, hidden: int, rows: int, device: torch.device
) -> tuple[Callable[[], object], float, float]:
    """Return a step of so many rows with the tile that it takes, float32 by TF32: the call, the bytes it must move and
    its operations.
    """
    precision: Precision = "tf32" if dtype == torch.float32 else "ieee"
    case = Case(Use(operation, dtype, precision, hidden, True), rows, str(device))
    tile, cost = choose_tile(operation, case.weights, rows, precision), COSTS[operation]
    num_bytes = (cost.rows * rows * hidden + cost.squares * hidden * hidden) * dtype.itemsize
    return partial(case.launch, tile), num_bytes, 2.0 * rows * cost.squares * hidden * hidden


def _add(recorder: Recorder, case: str, rows: int, seconds: float, floor_s: float) -> None:
    recorder.add(case, "time", seconds * 1e6, "us", rows=rows)
    recorder.add(case, "floor / time", floor_s / seconds, "ratio", rows=rows)
