"""Times of calls in a bare loop."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def medians_us(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[str, float]:
    """Return the median times of calls that take turns, in an order drawn anew each time: what one leaves in the caches
    helps or hinders all others alike.

    The clock counts nanoseconds: ``time.thread_time_ns`` leaves out when others had the processor.
    """
    draw, names = random.Random(0), list(calls)
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or not all(samples.values()):
        for name in draw.sample(names, len(names)):
            start = clock()
            calls[name]()
            samples[name].append(clock() - start)
    return {name: statistics.median(values) / 1e3 for name, values in samples.items()}
