"""CPU workers as threads and as processes, with eager and compiled cells, beside a client that is idle or busy.

``task``: what a task of one step of 8 rows takes from launch to launch. ``load``: groups of 8 requests, two groups a
worker, each sent anew when it is done: requests a second, and the groups' times. Both with the engine in the client's
process and in its own; all forms take turns in each round, and medians over rounds are shown. The last rows are what
goes into the page of decisions.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks.client_load import Busy
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.worker_models import SERVED, Served
from cellrt.core.state.settings import SchedulerSettings

PARTS = ("task", "load")
THREADS, PROCESSES = "threads", "processes"
NAMES = {THREADS: "cpu", PROCESSES: "cpu:process"}
FORMS = {
    THREADS: (THREADS, False),
    PROCESSES: (PROCESSES, False),
    "threads, engine apart": (THREADS, True),
    "processes, engine apart": (PROCESSES, True),
}
"""The forms of workers: threads or processes, and whether the engine has a process of its own."""
ROWS = 8
GROUPS = 2
"""The numbers of requests in flight, for each worker."""
WAIT_S = 120.0


@contextmanager
def engines(forms: list[str], workers: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield an engine of each form with all models, which has answered once."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for form in forms:
            kind, is_apart = FORMS[form]
            make: Any = cellrt.EngineProcess if is_apart else cellrt.Engine
            found[form] = engine = stack.enter_context(make([NAMES[kind]] * workers, **options))
            for served in SERVED:
                engine.register(served.path if is_apart else served.model)
        for served in SERVED:
            check(found, served, workers)
        yield found


def check(found: dict[str, Any], served: Served, workers: int) -> None:
    """Raise AssertionError where forms answer differently; afterwards all workers have met the model."""
    requests = [served.request] * ROWS * GROUPS * workers
    answers = {
        form: [future.result(WAIT_S) for future in engine.submit_many(served.model.name, requests)]
        for form, engine in found.items()
    }
    first, *others = answers.values()
    for one, other in itertools.product(first[:1], (answer for each in others for answer in each)):
        for name, value in one.items():
            if not torch.allclose(value, other[name], rtol=1e-4, atol=1e-5):
                raise AssertionError(f"{served.model.name}: {name!r} differs between {', '.join(answers)}")


def step_us(engine: Any, served: Served, rounds: int) -> float:
    """Return the median time of a step of one group at a time."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for future in engine.submit_many(served.model.name, [served.request] * ROWS):
            future.result(WAIT_S)
        times.append(1e6 * (time.perf_counter() - start) / served.steps)
    return statistics.median(times)


def load(engine: Any, served: Served, groups: int, seconds: float) -> tuple[float, list[float]]:
    """Keep so many groups in flight for a while; return requests a second, and the time of each group in ms."""
    times: list[float] = []
    flying: deque[tuple[float, list[Any]]] = deque()
    start = now = time.perf_counter()
    while now - start < seconds:
        while len(flying) < groups:
            flying.append((time.perf_counter(), engine.submit_many(served.model.name, [served.request] * ROWS)))
        began, futures = flying.popleft()
        for future in futures:
            future.result(WAIT_S)
        now = time.perf_counter()
        times.append(1e3 * (now - began))
    spent = now - start
    for _, futures in flying:
        for future in futures:
            future.result(WAIT_S)
    return len(times) * ROWS / spent, times


def run_task(recorder: Recorder, options: Options, workers: int, forms: list[str]) -> None:
    """Record the host's time of a task, in medians over rounds."""
    settings, rounds = SchedulerSettings(runs=False), 3 if options.quick else 5
    with engines(forms, workers, settings=settings) as found:
        for served, client in itertools.product(SERVED, ("idle", "busy")):
            times: dict[str, list[float]] = {form: [] for form in forms}
            with Busy(client == "busy"):
                for _ in range(rounds):
                    for form, engine in found.items():
                        times[form].append(step_us(engine, served, 3))
            for form, values in times.items():
                extra = {"workers": workers, "client": client}
                recorder.add(served.model.name, f"{form}: task", statistics.median(values), "us", **extra)


def run_load(recorder: Recorder, options: Options, workers: int, forms: list[str]) -> None:
    """Throughput and the groups' times, in medians over rounds."""
    seconds, rounds = (0.5, 2) if options.quick else (1.0, 5)
    with engines(forms, workers) as found:
        for served, client in itertools.product(SERVED, ("idle", "busy")):
            rates: dict[str, list[float]] = {form: [] for form in forms}
            times: dict[str, list[float]] = {form: [] for form in forms}
            with Busy(client == "busy"):
                for _ in range(rounds):
                    for form, engine in found.items():
                        rate, each = load(engine, served, GROUPS * workers, seconds)
                        rates[form].append(rate)
                        times[form] += each
            for form in forms:
                extra, case = {"workers": workers, "client": client}, served.model.name
                p50, p99 = np.percentile(times[form], [50, 99])
                recorder.add(case, f"{form}: rate", statistics.median(rates[form]), "requests/s", **extra)
                recorder.add(case, f"{form}: p50", float(p50), "ms", **extra)
                recorder.add(case, f"{form}: p99", float(p99), "ms", **extra)


def markdown(recorder: Recorder) -> list[str]:
    """Return the table of the page of decisions: a line a case, a column a form."""
    cells: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for row in recorder.rows:
        form, _, metric = str(row["metric"]).partition(": ")
        what = "task, us" if metric == "task" else "requests/s; p50, p99 ms"
        key: tuple[object, ...] = (row["case"], row["workers"], row["client"], what)
        value = float(str(row["value"]))
        cells.setdefault(key, {}).setdefault(form, []).append(f"{value:,.0f}" if value >= 20 else f"{value:.2g}")
    lines = [f"| cell | workers | client | | {' | '.join(FORMS)} |", "| --- " * (4 + len(FORMS)) + "|"]
    for key, by_form in cells.items():
        found = ["; ".join([values[0], ", ".join(values[1:])][: len(values)]) for values in by_form.values()]
        lines.append(f"| {' | '.join(map(str, key))} | {' | '.join(found)} |")
    return lines


def run(recorder: Recorder, options: Options) -> None:
    """Run the parts for 1 and 2 workers."""
    forms = [THREADS, PROCESSES] if options.quick else list(FORMS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for workers in (1, 2):
        if options.has("task") and workers == 1:
            run_task(recorder, options, workers, forms)
        if options.has("load"):
            run_load(recorder, options, workers, forms)
    torch.set_num_threads(before)
    print("\n".join(markdown(recorder)))
