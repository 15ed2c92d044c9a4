"""Times of calls in a bare loop."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def medians_us(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median times of calls that take turns, in an order drawn anew each time: what one leaves in the caches helps or
    hinders all others alike."""
    draw, names = random.Random(0), list(calls)
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or not all(samples.values()):
        for name in draw.sample(names, len(names)):
            start = time.perf_counter_ns()
            calls[name]()
            samples[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(values) / 1e3 for name, values in samples.items()}
