"""Clients beside the engine: in its process and in processes of their own, idle or busy in Python.

The cells cost nothing. ``task``: what a task of 8 rows takes from launch to launch, beside an idle and a busy client.
``open``: requests of 24 steps at random times from 1 to 8 clients, of which one may be busy; then the others' times are
shown. They count from when a request was due, so the longest is the longest pause that anybody met. ``bulk``: how many
requests a second. ``freeze``: the same with and without frozen objects. ``wake``: what the ways to wake another
process cost. ``soak``: ten minutes of ``open``.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cellrt
from benchmarks.client_load import Busy, Keeping, Load, send_from_processes, send_from_threads
from benchmarks.client_models import LONG, LONG_REQUEST, SHORT_REQUEST, chain
from benchmarks.options import Options
from benchmarks.record import Recorder, percentiles
from benchmarks.wake import round_trips
from cellrt.core.state.settings import SchedulerSettings

PARTS = ("task", "bulk", "open", "freeze", "wake", "soak")
MODEL = "benchmarks.client_models:chain"
SAME, OWN = "same process", "own process"
ROWS = 8
MANY = 250
NUM_CLIENTS = (1, 2, 4, 8)
RATE = 500.0
FAST_RATE = 5_000.0
SHORT_SWITCH_S = 0.0005


@contextmanager
def serving(form: str, **options: Any) -> Iterator[Any]:
    """Yield an engine of one worker in this process or in its own, with the model."""
    if form == SAME:
        with cellrt.Engine(1, max_queue=1 << 16, **options) as engine:
            engine.register(chain)
            yield engine
    else:
        with cellrt.EngineProcess(1, max_queue=1 << 16, **options) as client:
            client.register(MODEL)
            yield client


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Yield the interpreter's switch interval while one is inside."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def task_us(engine: Any, rounds: int) -> float:
    """Return the median over rounds of the time between the tasks of long chains, which end together."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for future in engine.submit_many("chain", [LONG_REQUEST] * ROWS):
            future.result()
        times.append(1e6 * (time.perf_counter() - start) / LONG)
    return statistics.median(times[1:])


def processor_s(pid: int) -> float:
    """Return the processor time that a process has had, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_task(recorder: Recorder, quick: bool) -> None:
    """Record the host's time of a task, beside an idle and a busy client.

    For an engine with a process of its own, record it also without the time in which the process waited.
    """
    settings, rounds = SchedulerSettings(runs=False), 8 if quick else 24
    with serving(SAME, settings=settings) as here, serving(OWN, settings=settings) as there:
        for engine in (here, there):
            task_us(engine, 2)
        for name in ("idle", "busy"):
            with Busy(name == "busy"):
                recorder.add("task", SAME, task_us(here, rounds), "us/task", client=name)
                before_s = processor_s(there.pid)
                recorder.add("task", OWN, task_us(there, rounds), "us/task", client=name)
                used_us = 1e6 * (processor_s(there.pid) - before_s) / (rounds + 1) / LONG
            recorder.add("task", f"{OWN}: its processor time", used_us, "us/task", client=name)
        with Busy(True), switching(SHORT_SWITCH_S):
            value = task_us(here, rounds)
        recorder.add("task", f"{SAME}, switch interval 0.5 ms", value, "us/task", client="busy")


def run_bulk(recorder: Recorder, quick: bool) -> None:
    """Throughput of one client, and the latency of one request at a time."""
    count, rounds = (2_000, 3) if quick else (10_000, 5)
    with serving(SAME) as here, serving(OWN) as there:
        found: dict[str, list[tuple[float, float, float]]] = {SAME: [], OWN: []}
        for _ in range(rounds + 1):
            found[SAME].append(bulk_of(here, count))
            found[OWN].append(bulk_of(there, count))
    for form, rows in found.items():
        each, many, alone = (statistics.median(column) for column in zip(*rows[1:]))
        recorder.add("bulk", f"{form}: submit each", each, "requests/s")
        recorder.add("bulk", f"{form}: submit_many of {MANY}", many, "requests/s")
        recorder.add("bulk", f"{form}: one at a time", alone, "us")


def bulk_of(engine: Any, count: int) -> tuple[float, float, float]:
    """Return requests a second, submitted each by itself and in bulk, and microseconds of one at a time."""
    start = time.perf_counter()
    for future in [engine.submit("chain", SHORT_REQUEST) for _ in range(count)]:
        future.result()
    each = count / (time.perf_counter() - start)
    start = time.perf_counter()
    for futures in [engine.submit_many("chain", [SHORT_REQUEST] * MANY) for _ in range(count // MANY)]:
        for future in futures:
            future.result()
    many = count // MANY * MANY / (time.perf_counter() - start)
    alone = []
    for _ in range(count // 20):
        start = time.perf_counter()
        engine.submit("chain", SHORT_REQUEST).result()
        alone.append(1e6 * (time.perf_counter() - start))
    return each, many, statistics.median(alone)


def open_loop(form: str, engine: Any, loads: list[Load]) -> dict[str, float]:
    """Return one open loop: percentiles in ms over all clients that are not busy, or over the one that there is."""
    latencies = send_from_threads(engine, loads) if form == SAME else send_from_processes(engine.address, loads)
    idle = [one for one, load in zip(latencies, loads) if not load.is_busy] or latencies
    return percentiles([1e3 * latency for one in idle for latency in one])


def record_open(recorder: Recorder, case: str, form: str, loads: list[Load], rounds: list[dict[str, float]]) -> None:
    """Add the medians of rounds, and the longest of all."""
    client = "one busy" if any(load.is_busy for load in loads) else "idle"
    rate = sum(load.rate for load in loads)
    found = {name: statistics.median(one[name] for one in rounds) for name in ("p50", "p90", "p99")}
    found["longest"] = max(one["max"] for one in rounds)
    for name, value in found.items():
        recorder.add(case, f"{form}: {name}", value, "ms", clients=len(loads), client=client, rate=rate)


def loads_of(count: int, rate: float, seconds: float, is_one_busy: bool) -> list[Load]:
    """Return the loads of that many clients with one rate together."""
    return [Load(rate / count, seconds, 7 + place, is_one_busy and not place) for place in range(count)]


def run_open(recorder: Recorder, quick: bool) -> None:
    """Latencies of 1 to 8 clients: medians over rounds, in which both forms take turns."""
    seconds, num_rounds = (2.0, 1) if quick else (4.0, 5)
    cases = [(count, RATE, is_one_busy) for count in NUM_CLIENTS for is_one_busy in (False, True)]
    with serving(SAME) as here, serving(OWN) as there:
        forms = ((SAME, here), (OWN, there))
        for form, engine in forms:
            open_loop(form, engine, loads_of(1, RATE, 1.0, False))
        for count, rate, is_one_busy in [*cases, (1, FAST_RATE, False)]:
            loads = loads_of(count, rate, seconds, is_one_busy)
            rounds = [[open_loop(form, engine, loads) for form, engine in forms] for _ in range(num_rounds)]
            for (form, _), found in zip(forms, zip(*rounds)):
                record_open(recorder, "open", form, loads, list(found))


def run_freeze(recorder: Recorder, quick: bool) -> None:
    """Record an open loop in a process whose objects are frozen, or not, and which keeps ever more of them, like a
    cache.

    The engine is in that process or in one of its own.
    """
    loads = loads_of(1, RATE, 4.0, False)
    for form in (SAME, OWN):
        for is_frozen in (True, False):
            with serving(form, freeze=is_frozen) as engine:
                send_from_threads(engine, loads_of(1, RATE, 1.0, False))
                rounds = []
                for _ in range(1 if quick else 5):
                    with Keeping():
                        (latencies,) = send_from_threads(engine, loads)
                    rounds.append(percentiles([1e3 * latency for latency in latencies]))
                record_open(recorder, f"freeze={is_frozen}", form, loads, rounds)


def run_soak(recorder: Recorder, quick: bool) -> None:
    """Record a long open loop of four clients, of which one is busy."""
    loads = loads_of(4, RATE, 20.0 if quick else 600.0, True)
    for form in (OWN, SAME):
        with serving(form) as engine:
            record_open(recorder, "soak", form, loads, [open_loop(form, engine, loads)])


def run_wake(recorder: Recorder, quick: bool) -> None:
    """Record the time of a byte's way to another process and back, by each way to wake it."""
    for pause_s in (0.0, 0.003):
        for name, microseconds in round_trips(200 if quick else 2000, pause_s).items():
            recorder.add("wake", name, microseconds, "us", pause_ms=1e3 * pause_s)


def run(recorder: Recorder, options: Options) -> None:
    """Measure each part; the ten minutes only if they are asked for."""
    gc.collect()
    for name, part in (
        ("wake", run_wake),
        ("task", run_task),
        ("bulk", run_bulk),
        ("open", run_open),
        ("freeze", run_freeze),
    ):
        if options.has(name):
            part(recorder, options.quick)
    if "soak" in options.only:
        run_soak(recorder, options.quick)
