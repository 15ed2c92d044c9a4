"""The time of requests of a client in another process, of whichever cellrt is imported; ``against.py`` runs this file.

A chain of 24 steps of a cell that does nothing, compiled, whose graph is known by a key: one at a time (the median
time, and the processor time of both processes together), and many submitted one by one (the processor time of the
client's process, and of the engine's).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cellrt
from benchmarks.client_models import SHORT_REQUEST

MODEL = "benchmarks.client_models:chain"
LONE, EACH, SAMPLES = 500, 3_000, 5


def processor_us(pid: int) -> float:
    """Return the microseconds of processor time that the threads of a process have had."""
    folder = Path(f"/proc/{pid}/task")
    return sum(int((folder / thread / "schedstat").read_text().split()[0]) for thread in os.listdir(folder)) / 1e3


def measure() -> list[float]:
    """Return the figures, medians of some samples."""
    with cellrt.EngineProcess(1, max_queue=1 << 16, compile="wait") as engine:
        engine.register(MODEL)
        pids = os.getpid(), engine.pid

        def used(call: Callable[[], object], count: int) -> list[float]:
            before = [processor_us(pid) for pid in pids]
            call()
            return [(processor_us(pid) - start) / count for pid, start in zip(pids, before)]

        def lone() -> list[float]:
            times = []

            def ask() -> None:
                for _ in range(LONE):
                    begin_s = time.perf_counter()
                    engine.submit("chain", SHORT_REQUEST).result()
                    times.append(1e6 * (time.perf_counter() - begin_s))

            both = sum(used(ask, LONE))
            return [statistics.median(times), both]

        def each() -> list[float]:
            def ask() -> None:
                futures: list[Any] = [engine.submit("chain", SHORT_REQUEST) for _ in range(EACH)]
                for future in futures:
                    future.result()

            return used(ask, EACH)

        lone(), each()
        gc.collect()
        gc.freeze()
        samples = [[*lone(), *each()] for _ in range(SAMPLES)]
    return [statistics.median(column) for column in zip(*samples)]


if __name__ == "__main__":
    print(json.dumps(measure()))
