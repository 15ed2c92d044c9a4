"""Kernels against two floors: the bytes they must move at the bandwidth of a copy, and their operations at the rate of
a large matrix product, both measured on the same device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_cells import FusedLSTM
from benchmarks.gpu_timing import time_captured
from benchmarks.record import Recorder
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.lstm_step import lstm_step


class Floors(NamedTuple):
    """What the device does at its best."""

    bytes_per_s: float
    operations_per_s: dict[torch.dtype, float]


def measure_floors(recorder: Recorder, device: torch.device) -> Floors:
    """A copy of a gigabyte, and products of 8192 x 8192 in TF32 and bfloat16; tiny ones on a CPU."""
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


def measure_kernels(recorder: Recorder, device: torch.device, floors: Floors) -> None:
    """The LSTM step, and a gather as torch does it, at several numbers of rows."""
    hidden, sizes = (1024, (1, 8, 64, 256, 512, 1024)) if device.type == "cuda" else (8, (1, 4))
    for dtype in (torch.float32, torch.bfloat16):
        module = FusedLSTM(hidden, dtype).to(device).requires_grad_(False)
        for rows in sizes:
            work, num_bytes, operations = lstm_step_call(module, rows)
            floor_s = max(num_bytes / floors.bytes_per_s, operations / floors.operations_per_s[dtype])
            _add(recorder, f"lstm_step {dtype}", rows, time_captured(work, device), floor_s)
        for rows in sizes:
            values = torch.zeros(4 * rows, hidden, dtype=dtype, device=device)
            index = torch.randperm(4 * rows, device=device)[:rows]
            seconds = time_captured(partial(values.index_select, 0, index), device)
            floor_s = 2 * rows * hidden * dtype.itemsize / floors.bytes_per_s
            _add(recorder, f"index_select {dtype}", rows, seconds, floor_s)


def _add(recorder: Recorder, case: str, rows: int, seconds: float, floor_s: float) -> None:
    recorder.add(case, "time", seconds * 1e6, "us", rows=rows)
    recorder.add(case, "floor / time", floor_s / seconds, "ratio", rows=rows)


def lstm_step_call(module: FusedLSTM, rows: int) -> tuple[Callable[[], object], float, float]:
    """A step of so many rows: the call, the bytes it must move and its operations."""
    weight = module.weight_hh
    hidden, dtype, device = weight.shape[1], weight.dtype, weight.device
    x, h, c = (torch.zeros(2 * rows, hidden, dtype=dtype, device=device) for _ in range(3))
    read, write = torch.arange(2 * rows, device=device).view(2, -1)
    packed = module.packed()

    def work() -> None:
        lstm_step(
            packed,
            x=ArenaRows(x, read),
            h=ArenaRows(h, read),
            c=ArenaRows(c, read),
            h_out=ArenaRows(h, write),
            c_out=ArenaRows(c, write),
            precision=module.precision,
        )

    num_bytes = (5 * rows * hidden + 8 * hidden * hidden) * dtype.itemsize
    return work, num_bytes, 2.0 * rows * 8 * hidden * hidden
