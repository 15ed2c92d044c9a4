"""The share of time in which a GPU runs a kernel or copy, on its own timeline, by CUPTI and torch's profiler.

What the host saw would count every wait between two kernels of a task as work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def busy_share(work: Callable[[], object], device: torch.device) -> float:
    """Return the share of the time from the first kernel or copy of ``work`` to the last in which one was running.

    ``work`` returns when the host has seen its end. Raise RuntimeError if the profiler saw nothing on the device.
    """
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize(device)
    spans = [
        (float(event.time_range.start), float(event.time_range.end))
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and event.device_index == (device.index or 0)
    ]
    if not spans:
        raise RuntimeError(f"the profiler saw nothing on {device}: is CUPTI there, and is nobody else profiling?")
    return covered(spans) / float(max(end for _, end in spans) - min(start for start, _ in spans))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that spans cover together; where several overlap, once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
