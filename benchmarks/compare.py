"""Several servers on the same requests: closed loops for throughput, open loops for latency against load.

Rounds are interleaved, server after server, and medians are reported, so that a slow moment of the machine
does not fall on one of them. Every server is first checked to give the reference's answers. A server whose
name begins with "cellrt" is ours; the others are peers.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import cellrt
from benchmarks import workloads
from benchmarks.bare_loop import BareLoop
from benchmarks.record import Recorder, percentiles

OURS = "cellrt"
NUM_CHECKED = 8
CONCURRENCIES = (64, 512)
TIMEOUT_S = 300.0
HOPELESS = 1.5
"""A load this many times a server's own peak is not put on it: the latencies would only tell how long it lasted."""


class Submitting(Protocol):
    """A server: whoever submits is not who computes."""

    def submit(self, request: Any) -> Future[Any]:
        """Start one request."""

    def close(self) -> None:
        """End the server."""


Server = Submitting | BareLoop
"""A server that is compared."""

Makers = Mapping[str, Callable[[], Server]]
MakeCell = Callable[..., cellrt.Cell]
"""Makes a cell of a module, as ``cellrt.cell`` does."""
Check = Callable[[str, Sequence[Any]], None]
"""Gets a server's name and its answers to the first ``NUM_CHECKED`` requests; raises where they are wrong."""


@dataclass(frozen=True)
class Plan:
    """The length of a comparison: rounds of closed loops of about ``sample_s`` seconds, then ``open_s`` at each load.

    ``loads`` are fractions of the best peer's closed-loop peak.
    """

    rounds: int
    sample_s: float
    loads: tuple[float, ...]
    open_s: float
    concurrencies: tuple[int, ...] = CONCURRENCIES

    def sample_size(self, rate: float, concurrency: int) -> int:
        """Return the number of requests of a closed loop for a server of about this rate.

        They last ``sample_s`` seconds, but are at least as many as are in flight, unless these would take five times as
        long.
        """
        return max(16, int(rate * self.sample_s), min(concurrency, int(5 * rate * self.sample_s)))


QUICK = Plan(rounds=1, sample_s=1.0, loads=(0.3, 0.7), open_s=2.0)
FULL = Plan(rounds=3, sample_s=2.0, loads=(0.1, 0.3, 0.5, 0.7, 0.9), open_s=2.0)


@dataclass(frozen=True)
class Point:
    """One server under one open-loop load: requests/s and the 90th percentile of the latency in ms."""

    case: str
    server: str
    throughput: float
    p90: float


@dataclass(frozen=True)
class Comparison:
    """The results of ``compare``: each server's highest closed-loop throughput in requests/s, and the open loops."""

    peaks: dict[str, float]
    points: list[Point]


def compare(
    recorder: Recorder, case: str, makers: Makers, requests: Sequence[Any], plan: Plan, check: Check
) -> Comparison:
    """Measure every server on ``requests`` (again and again where they do not suffice) and record the rows."""
    made: dict[str, Server] = {}
    num_stages = len(makers) * (1 + plan.rounds * (len(plan.concurrencies) + len(plan.loads)))
    with progress(case, num_stages) as advance:
        try:
            for name, make in makers.items():
                made[name] = make()
            rates: dict[str, float] = {}
            for name, server in made.items():
                advance(name)
                rates[name] = _warm_up(name, server, requests, plan, check)
                if isinstance(server, BareLoop):
                    recorder.add(case, f"{name}: computing", server.threads, "threads")
            peaks = _closed_loops(recorder, case, made, requests, plan, rates, advance)
            points: list[Point] = []
            best = max((peak for name, peak in peaks.items() if not is_ours(name)), default=max(peaks.values()))
            for load in plan.loads:
                able = {name: server for name, server in made.items() if load * best <= HOPELESS * peaks[name]}
                for name in [name for name in made if name not in able]:
                    for _ in range(plan.rounds):
                        advance(name)
                    print(f"{case}: {name} cannot carry {load * best:,.0f}/s; its peak is {peaks[name]:,.0f}")
                points += _open_loops(recorder, case, able, requests, load, load * best, plan, advance)
        finally:
            for server in made.values():
                server.close()
    return Comparison(peaks, points)


def is_ours(name: str) -> bool:
    """Return whether a server of this name is cellrt."""
    return name.startswith(OURS)


def closed(server: Server, requests: Sequence[Any], count: int, concurrency: int) -> workloads.Load:
    """Drive a server with ``count`` requests, a fixed number of them in flight."""
    if isinstance(server, BareLoop):
        return server.closed_loop(requests, count, concurrency)
    return workloads.closed_loop(
        lambda k: server.submit(requests[k % len(requests)]), count, concurrency, timeout_s=TIMEOUT_S
    )


def opened(server: Server, requests: Sequence[Any], arrivals: workloads.Seconds) -> workloads.Load:
    """Drive a server with requests at these times."""
    if isinstance(server, BareLoop):
        return server.open_loop(requests, arrivals)
    return workloads.open_loop(lambda k: server.submit(requests[k % len(requests)]), arrivals, timeout_s=TIMEOUT_S)


def answers(server: Server, requests: Sequence[Any]) -> list[Any]:
    """Return a server's answers to requests that all arrive at once."""
    if isinstance(server, BareLoop):
        return server.answers(requests)
    futures = [server.submit(request) for request in requests]
    return [future.result(TIMEOUT_S) for future in futures]


def loops_per_second(once: Callable[[], None], seconds: float) -> float:
    """Return how often ``once`` runs in a second, one loop a core at the same time, one torch thread each.

    Each loop runs it at least once.
    """
    counts = [0] * (os.cpu_count() or 1)
    end = time.perf_counter() + seconds

    def loop(worker: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while not counts[worker] or time.perf_counter() < end:
                once()
                counts[worker] += 1

    threads = [threading.Thread(target=loop, args=(k,)) for k in range(len(counts))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a bar of ``total`` stages on a terminal; what is yielded is called at the start of each, with its name.

    There is none on a bare machine without ``rich``.
    """
    if importlib.util.find_spec("rich") is None:
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=total)
        num_begun = 0

        def advance(name: str) -> None:
            nonlocal num_begun
            bar.update(task, completed=num_begun, description=f"{title}: {name}")
            num_begun += 1

        yield advance


def _warm_up(name: str, server: Server, requests: Sequence[Any], plan: Plan, check: Check) -> float:
    """Check a server's answers and return a first guess of its throughput in requests/s."""
    check(name, answers(server, requests[:NUM_CHECKED]))
    rate = closed(server, requests, 32, 32).throughput
    return closed(server, requests, plan.sample_size(rate, 64), 64).throughput


def _closed_loops(
    recorder: Recorder,
    case: str,
    made: Mapping[str, Server],
    requests: Sequence[Any],
    plan: Plan,
    rates: dict[str, float],
    advance: Callable[[str], None],
) -> dict[str, float]:
    """Record throughput with a fixed number of requests in flight; return the highest of each server."""
    peaks: dict[str, float] = {}
    for concurrency in plan.concurrencies:
        samples: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(plan.rounds):
            for name, server in made.items():
                advance(name)
                count = plan.sample_size(rates[name], concurrency)
                rates[name] = closed(server, requests, count, concurrency).throughput
                samples[name].append(rates[name])
        for name, values in samples.items():
            median = statistics.median(values)
            recorder.add(case, f"{name}: closed loop of {concurrency}", median, "requests/s")
            peaks[name] = max(peaks.get(name, 0.0), median)
    return peaks


def _open_loops(
    recorder: Recorder,
    case: str,
    made: Mapping[str, Server],
    requests: Sequence[Any],
    load: float,
    rate: float,
    plan: Plan,
    advance: Callable[[str], None],
) -> list[Point]:
    """Record latencies of Poisson arrivals at one rate, the same arrivals for every server of a round."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for seed in range(plan.rounds):
        arrivals = workloads.poisson_arrivals(rate, max(50, int(rate * plan.open_s)), seed)
        for name, server in made.items():
            advance(name)
            outcome = opened(server, requests, arrivals)
            found = percentiles(np.asarray(outcome.latencies_s) * 1e3)
            figures[name].append({**found, "throughput": outcome.throughput})
    points = []
    for name, rounds in figures.items():
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for quantile in ("p50", "p90", "p99"):
            recorder.add(case, f"{name}: {quantile} at {load:.0%} of the best peer's peak", medians[quantile], "ms")
        points.append(Point(case, name, medians["throughput"], medians["p90"]))
    return points


def draw(points: Sequence[Point], path: Path) -> None:
    """90th-percentile latency against throughput, a panel a case (as BatchMaker's Figure 2.7)."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(point.case for point in points))
    if not cases:
        return
    figure = Figure(figsize=(6 * len(cases), 4.5), layout="constrained")
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases):
        for name in dict.fromkeys(point.server for point in points):
            mine = [point for point in points if (point.case, point.server) == (case, name)]
            panel.plot(
                [point.throughput for point in mine],
                [point.p90 for point in mine],
                marker="o",
                linewidth=2.5 if is_ours(name) else 1,
                label=name,
            )
        panel.set(title=case, xlabel="throughput (requests/s)", ylabel="p90 latency (ms)", yscale="log")
        panel.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
