"""Drives the servers of a figure: the highest throughput, latency against load, and where the latency comes from.

Requests arrive as a Poisson process whatever the server does, at fractions of the throughput that the same server
reached with a fixed number of requests in flight (BatchMaker 2.7.1 sweeps the rate). So every curve runs from a light
load to the server's own limit, and takes a known time. Client and servers share one process, and Python's lock: a row's
``late_ms`` is by how much the most delayed request was sent too late, which its latency includes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.compare import Check
from benchmarks.record import Recorder, percentiles
from cellrt.engine.engine import Engine

WAIT_S = 60.0
"""No request may take longer: the figure fails, and the others go on."""
NUM_CHECKED = 4
LEAST_REQUESTS = 20
LOW_LOAD = 0.3
"""The part of the weakest server's peak: the paper's 5,000 requests/s are about as much of its baselines'."""
QUANTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)


class Server(Protocol):
    """The interface of a server under load."""

    def submit(self, request: Any) -> Future[Any]:
        """Start one request."""

    def starts(self) -> list[float]:
        """Return when each request since the last call began, by ``time.perf_counter``, in order of submission.

        None may be unfinished. Only of servers that were made to trace.
        """

    def close(self) -> None:
        """End the server."""


Makers = Mapping[str, Callable[[], Server]]


class CellServer:
    """One model of an engine. ``starts`` needs an engine with ``trace=True``."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._num_tasks = 0

    def submit(self, request: Any) -> Future[Any]:
        """Submit a request; the future's result is a dict of tensors on the host."""
        return self._engine.submit(self._model, request)

    def starts(self) -> list[float]:
        """Return the start of each request's first task."""
        tasks = self._engine.timeline().tasks
        first: dict[int, float] = {}
        for task in tasks[self._num_tasks :]:
            for request in task.requests:
                first[request] = min(task.start_s, first.get(request, task.start_s))
        self._num_tasks = len(tasks)
        return [first[request] for request in sorted(first)]

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


@dataclass(frozen=True)
class Pace:
    """The length of a panel: for each server about ``2 * sample_s + len(loads) * open_s``.

    Attributes:
        sample_s: seconds of the closed loop that finds the peak.
        loads: fractions of a server's own peak.
        open_s: seconds at each load.
        most_s: where a panel takes longer, its other servers are left out and its figure fails.
    """

    sample_s: float
    loads: tuple[float, ...]
    open_s: float
    most_s: float


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        figure: its number in the paper.
        title: of the panel.
        requests: sent again and again.
        concurrency: requests in flight that fill every server's batches.
    """

    figure: str
    title: str
    requests: Sequence[Any]
    concurrency: int

    @property
    def case(self) -> str:
        """The name of the panel in the recorder's rows."""
        return f"Figure {self.figure}: {self.title}"


@contextmanager
def opened(makers: Makers, requests: Sequence[Any], check: Check) -> Iterator[dict[str, Server]]:
    """Yield the servers by name, each of which has answered the first requests as ``check`` wants; closed at the
    end.
    """
    made: dict[str, Server] = {}
    with ExitStack() as stack:
        for name, make in makers.items():
            server = made[name] = make()
            stack.callback(server.close)
            futures = [server.submit(request) for request in requests[:NUM_CHECKED]]
            check(name, [future.result(WAIT_S) for future in futures])
        yield made


def sweep(recorder: Recorder, panel: Panel, servers: Mapping[str, Server], pace: Pace) -> None:
    """Record each server's peak, and the median, 90th and 99th percentile of its latency at each load.

    Raise TimeoutError where that takes too long.
    """
    for name, server in _in_time(servers, panel, pace):
        common = {"figure": panel.figure, "panel": panel.title, "server": name}
        peak = find_peak(server, panel, pace.sample_s)
        recorder.add(panel.case, f"{name}: closed loop of {panel.concurrency}", peak, "requests/s", **common)
        shown = []
        for load in pace.loads:
            outcome = open_load(server.submit, panel, load * peak, pace.open_s)
            figures = percentiles(np.asarray(outcome.latencies_s) * 1e3)
            extra = {"throughput": round(outcome.throughput, 1), "late_ms": round(outcome.max_send_delay_s * 1e3, 3)}
            for quantile in ("p50", "p90", "p99"):
                metric = f"{name}: {quantile} at {load:.0%} of its peak"
                recorder.add(panel.case, metric, figures[quantile], "ms", quantile=quantile, **extra, **common)
            shown.append(f"{figures['p90']:.2f}")
        print(f"{panel.case}: {name}: peak {peak:,.0f}/s, p90 {' '.join(shown)} ms", flush=True)


def split(recorder: Recorder, panel: Panel, servers: Mapping[str, Server], pace: Pace) -> None:
    """Record quantiles of queueing and computation time, all servers under the same low load.

    Queueing lasts from a request's arrival to the start of its first task or batch, computation from there to the
    answer (section 2.7.3). Raise TimeoutError where measuring them takes too long.
    """
    rate = LOW_LOAD * min(find_peak(server, panel, pace.sample_s) for _, server in _in_time(servers, panel, pace))
    for name, server in _in_time(servers, panel, pace):
        server.starts()
        ends = _Ends(server)
        outcome = open_load(ends.submit, panel, rate, 3 * pace.open_s)
        starts = server.starts()
        if len(starts) != len(ends.times_s):
            raise RuntimeError(f"{name} tells when {len(starts)} of {len(ends.times_s)} requests began")
        computation_s = np.array(ends.times_s) - np.array(starts)
        queueing_s = outcome.latencies_s - computation_s
        for title, values_s in (("(a) queueing time", queueing_s), ("(b) computation time", computation_s)):
            common = {
                "figure": panel.figure,
                "panel": title,
                "server": name,
                "throughput": round(outcome.throughput, 1),
            }
            values = np.percentile(values_s * 1e3, QUANTILES)
            for quantile, value in zip(QUANTILES, values, strict=True):
                metric = f"{name}: {title[4:]}, p{quantile}"
                recorder.add(panel.case, metric, value, "ms", quantile=quantile, **common)
            print(
                f"{panel.case}: {name}: {title[4:]}: p50 {np.median(values):.2f}, p99 {values[-1]:.2f} ms", flush=True
            )


def find_peak(server: Server, panel: Panel, sample_s: float) -> float:
    """Return requests/s with ``panel.concurrency`` in flight, after a warm-up with fewer (kernels, captures)."""
    size = 1
    while size < panel.concurrency:
        _closed(server, panel, 2 * size, size)
        size *= 4
    rate = _closed(server, panel, 2 * panel.concurrency, panel.concurrency)
    enough, most = int(rate * sample_s), int(5 * rate * sample_s)
    count = min(max(3 * panel.concurrency, enough), max(panel.concurrency, most))
    return _closed(server, panel, count, panel.concurrency)


class _Ends:
    """Notes when each request ended, in order of submission."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.times_s: list[float] = []

    def submit(self, request: Any) -> Future[Any]:
        index = len(self.times_s)
        self.times_s.append(0.0)
        future = self._server.submit(request)
        future.add_done_callback(lambda _: self._end(index))
        return future

    def _end(self, index: int) -> None:
        self.times_s[index] = time.perf_counter()


def _in_time(servers: Mapping[str, Server], panel: Panel, pace: Pace) -> Iterator[tuple[str, Server]]:
    """Yield the servers, while there is time."""
    end_s = time.monotonic() + pace.most_s
    for name, server in servers.items():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{panel.case}: not done within {pace.most_s} s; {name} and what follows are left out")
        yield name, server


def _closed(server: Server, panel: Panel, count: int, concurrency: int) -> float:
    requests = panel.requests
    load = workloads.closed_loop(lambda k: server.submit(requests[k % len(requests)]), count, concurrency, WAIT_S)
    return load.throughput


def open_load(submit: Callable[[Any], Future[Any]], panel: Panel, rate: float, seconds: float) -> workloads.Load:
    """Send requests of a panel for so many seconds, as a Poisson process of this rate."""
    requests = panel.requests
    arrivals: NDArray[np.float64] = workloads.poisson_arrivals(rate, max(LEAST_REQUESTS, int(rate * seconds)), seed=3)
    return workloads.open_loop(lambda k: submit(requests[k % len(requests)]), arrivals, WAIT_S)
