"""Drives the servers of a figure: the highest throughput, latency against load, and where the latency comes from.

Requests arrive as a Poisson process whatever the server does, at fractions of the throughput that the same server
reached with a fixed number of requests in flight (BatchMaker 2.7.1 sweeps the rate). So every curve runs from a light
load to the server's own limit, and takes a known time. Client and servers share one process, and Python's lock: a row's
``late_ms`` is by how much the most delayed request was sent too late, which its latency includes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.compare import Check
from benchmarks.record import Recorder, percentiles
from cellrt.engine.engine import Engine

T = TypeVar("T")
WAIT_S = 60.0
"""No request may take longer: the figure fails, and the others go on."""
NUM_CHECKED = 4
LEAST_REQUESTS = 20
LONG_S = 5.0
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
        self.engine, self._model = engine, model
        self._num_tasks = 0

    def submit(self, request: Any) -> Future[Any]:
        """Submit a request; the future's result is a dict of tensors on the host."""
        return self.engine.submit(self._model, request)

    def starts(self) -> list[float]:
        """Return the start of each request's first task."""
        tasks = self.engine.timeline().tasks
        first: dict[int, float] = {}
        for task in tasks[self._num_tasks :]:
            for request in task.requests:
                first[request] = min(task.start_s, first.get(request, task.start_s))
        self._num_tasks = len(tasks)
        return [first[request] for request in sorted(first)]

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


@dataclass(frozen=True)
class Pace:
    """The length of a panel: for each server a warm-up, and in each round ``sample_s + len(loads) * open_s``.

    Attributes:
        sample_s: seconds of the closed loop that finds the peak.
        loads: fractions of a server's own peak.
        open_s: seconds at each load.
        most_s: where a panel takes longer, the rest of it is left out and its figure fails.
        rounds: in which the servers take turns; medians count. More than one is for a machine that others use.
    """

    sample_s: float
    loads: tuple[float, ...]
    open_s: float
    most_s: float
    rounds: int = 1


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

    def common(self, server: str) -> dict[str, str]:
        """Return the columns of a server's rows."""
        return {"figure": self.figure, "panel": self.title, "server": server}


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


class Turns:
    """The servers of a panel, which take turns while there is time.

    ``once`` and ``medians`` raise TimeoutError where there is none.
    """

    def __init__(self, servers: Mapping[str, Server], panel: Panel, pace: Pace) -> None:
        self._servers, self._panel, self._pace = servers, panel, pace
        self._end_s = time.monotonic() + pace.most_s

    def once(self, measure: Callable[..., T], *more: Any) -> dict[str, T]:
        """Return what is measured of each server; ``measure`` gets its name, the server and ``more``."""
        found = {}
        for name, server in self._servers.items():
            if time.monotonic() > self._end_s:
                case, most_s = self._panel.case, self._pace.most_s
                raise TimeoutError(f"{case}: not done within {most_s} s; {name} and what follows are left out")
            found[name] = measure(name, server, *more)
        return found

    def medians(self, measure: Callable[[str, Server, int], Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return medians over rounds of what ``measure`` gives, by server; it gets the number of the round, too."""
        rounds = [self.once(measure, k) for k in range(self._pace.rounds)]
        return {
            name: {key: float(np.median([found[name][key] for found in rounds])) for key in rounds[0][name]}
            for name in self._servers
        }


def sweep(recorder: Recorder, panel: Panel, servers: Mapping[str, Server], pace: Pace) -> None:
    """Record each server's peak, and the median, 90th and 99th percentile of its latency at each load.

    Raise TimeoutError where that takes too long.
    """
    turns = Turns(servers, panel, pace)
    rates = turns.once(lambda name, server: warm_up(server, panel))
    peaks = turns.medians(lambda name, server, _: {"peak": sample_peak(server, panel, rates[name], pace.sample_s)})
    for name, found in peaks.items():
        metric = f"{name}: closed loop of {panel.concurrency}"
        recorder.add(panel.case, metric, found["peak"], "requests/s", **panel.common(name))
        print(f"{panel.case}: {name}: peak {found['peak']:,.0f}/s", flush=True)
    for load in pace.loads:

        def latencies(name: str, server: Server, seed: int, load: float = load) -> dict[str, float]:
            return latencies_at(server, panel, load * peaks[name]["peak"], pace.open_s, seed)

        for name, found in turns.medians(latencies).items():
            extra = {**panel.common(name), **{key: round(found[key], 3) for key in ("rate", "throughput", "late_ms")}}
            for quantile in ("p50", "p90", "p99"):
                metric = f"{name}: {quantile} at {load:.0%} of its peak"
                recorder.add(panel.case, metric, found[quantile], "ms", quantile=quantile, **extra)
            print(f"{panel.case}: {name}: p90 {found['p90']:.2f} ms at {found['throughput']:,.0f}/s", flush=True)


def split(recorder: Recorder, panel: Panel, servers: Mapping[str, Server], pace: Pace) -> None:
    """Record quantiles of queueing and computation time, all servers under the same low load.

    Queueing lasts from a request's arrival to the start of its first task or batch, computation from there to the
    answer (section 2.7.3). Raise TimeoutError where measuring them takes too long.
    """
    turns = Turns(servers, panel, pace)
    rate = LOW_LOAD * min(turns.once(lambda name, server: find_peak(server, panel, pace.sample_s)).values())
    turns.once(lambda name, server: server.starts())
    rounds = [turns.once(_times_at, panel, rate, 3 * pace.open_s / pace.rounds, k) for k in range(pace.rounds)]
    for name in servers:
        queueing_s, computation_s = np.concatenate([found[name] for found in rounds], axis=1)
        for title, values_s in (("(a) queueing time", queueing_s), ("(b) computation time", computation_s)):
            common = {"figure": panel.figure, "panel": title, "server": name, "throughput": round(rate, 1)}
            values = np.percentile(values_s * 1e3, QUANTILES)
            for quantile, value in zip(QUANTILES, values, strict=True):
                metric = f"{name}: {title[4:]}, p{quantile}"
                recorder.add(panel.case, metric, value, "ms", quantile=quantile, **common)
            print(
                f"{panel.case}: {name}: {title[4:]}: p50 {np.median(values):.2f}, p99 {values[-1]:.2f} ms", flush=True
            )


def find_peak(server: Server, panel: Panel, sample_s: float) -> float:
    """Return requests/s with ``panel.concurrency`` in flight, after a warm-up."""
    return sample_peak(server, panel, warm_up(server, panel), sample_s)


def warm_up(server: Server, panel: Panel) -> float:
    """Return about how many requests/s it serves, after more and more in flight (kernels, captures).

    That ends with as many as there will be, or before what would take long.
    """
    size, rate = 1, math.inf
    while 2 * size < rate * LONG_S:
        rate = _closed(server, panel, 2 * size, size)
        if size == panel.concurrency:
            break
        size = min(4 * size, panel.concurrency)
    return rate


def sample_peak(server: Server, panel: Panel, rate: float, sample_s: float) -> float:
    """Return requests/s with ``panel.concurrency`` in flight, for some seconds at about this rate."""
    enough, most = int(rate * sample_s), int(5 * rate * sample_s)
    count = min(max(3 * panel.concurrency, enough), max(panel.concurrency, most))
    return _closed(server, panel, count, panel.concurrency)


def latencies_at(server: Server, panel: Panel, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Return percentiles of the latency in ms under Poisson arrivals, the throughput, and how late they were sent."""
    outcome = open_load(server.submit, panel, rate, seconds, seed)
    figures = percentiles(np.asarray(outcome.latencies_s) * 1e3)
    return {**figures, "rate": rate, "throughput": outcome.throughput, "late_ms": outcome.max_send_delay_s * 1e3}


def _times_at(
    name: str, server: Server, panel: Panel, rate: float, seconds: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the queueing and the computation time of each request, in seconds."""
    ends = _Ends(server)
    outcome = open_load(ends.submit, panel, rate, seconds, seed)
    starts = server.starts()
    if len(starts) != len(ends.times_s):
        raise RuntimeError(f"{name} tells when {len(starts)} of {len(ends.times_s)} requests began")
    computation_s = np.array(ends.times_s) - np.array(starts)
    return outcome.latencies_s - computation_s, computation_s


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


def _closed(server: Server, panel: Panel, count: int, concurrency: int) -> float:
    requests = panel.requests
    load = workloads.closed_loop(lambda k: server.submit(requests[k % len(requests)]), count, concurrency, WAIT_S)
    return load.throughput


def open_load(
    submit: Callable[[Any], Future[Any]], panel: Panel, rate: float, seconds: float, seed: int = 3
) -> workloads.Load:
    """Send requests of a panel for so many seconds, as a Poisson process of this rate."""
    requests, count = panel.requests, max(LEAST_REQUESTS, int(rate * seconds))
    arrivals: NDArray[np.float64] = workloads.poisson_arrivals(rate, count, seed)
    return workloads.open_loop(lambda k: submit(requests[k % len(requests)]), arrivals, WAIT_S)
