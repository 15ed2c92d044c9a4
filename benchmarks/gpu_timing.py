"""The time that work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WAKE_S = 0.5
SHORT_S = 2e-4
"""Work that takes less is repeated in its graph: launching one, and the events around it, take some 10 us."""
REPEATS = 20


def wake(device: torch.device) -> None:
    """Keep a GPU busy for a while: its clock, low at rest, takes long to rise."""
    if device.type != "cuda":
        return
    values, end_s = torch.randn(4096, 4096, device=device), time.perf_counter() + WAKE_S
    while time.perf_counter() < end_s:
        torch.mm(values, values)
        torch.cuda.synchronize(device)


def captured(work: Callable[[], object], device: torch.device, repeats: int = 1) -> Callable[[], object]:
    """Work so many times over as one CUDA graph on a GPU, after a warm-up; elsewhere as it is."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                work()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def time_captured(work: Callable[[], object], device: torch.device) -> float:
    """Return seconds of work, in one CUDA graph on a GPU.

    Short work is repeated there, so that what it reads may be in the device's cache.
    """
    work()
    once_s = time_calls(captured(work, device), device)
    if device.type != "cuda" or once_s > SHORT_S:
        return once_s
    return time_calls(captured(work, device, REPEATS), device) / REPEATS


def time_calls(work: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Return the median seconds of one call; on a GPU between events."""
    samples = []
    for k in range(times + 3):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            seconds = float(first.elapsed_time(last)) / 1e3
        else:
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
        if k >= 3:
            samples.append(seconds)
    return float(statistics.median(samples))
