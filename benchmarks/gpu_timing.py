"""How long work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def time_captured(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of work, as one CUDA graph on a GPU, after a warm-up."""
    work()
    if device.type != "cuda":
        return time_calls(work, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    return time_calls(graph.replay, device)


def time_calls(work: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Median seconds of one call; on a GPU between events."""
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
