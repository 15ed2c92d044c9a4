"""An LSTM under more load than it can carry, with deadlines: the share of sentences done in time, by policy.

Sentences of Europarl's lengths arrive by a Poisson process, 0.8 and 1.5 times as many as the engine does at most. Each
must be done within a time that is drawn, between ``PATIENCE`` times what it takes by itself in full tasks, ``MORE``
steps added. "nothing is dropped": the engine is told no deadline, computes all, and what comes late does not count. The
others drop what is late (``deadline=``), or also what has not begun when its own time is all that is left
(``schedule_by=``, simulated alone). A task has at most ``MAX_BATCH`` rows: where all that waits fits in a task no order
matters, and under overload all are late.

``engines``: an engine of one worker for each way, in a process of its own each, and the client in this one; they take
turns, a round each. The model is heavy, so that its steps are the limit; how long one takes is measured before each
round, and load and deadlines go by it. How late the client hands in is a row. A round in which that was more than
``MOST_LATE`` of the deadlines is done again, and after ``TRIES`` the benchmark fails.
``simulated``: the same sentences played on the scheduler with a virtual clock, beside a loop in plain Python
(``overload_played.py``): what the order itself gives, on any machine.

The longer a round, in steps, the more wait: compare what was measured for as many. A simulated round has 4,000.

In time, in parts of all sentences; of their worth, 1 by the length of each; and of their words, of which 1 by the load
is all that anybody can do. Medians of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks import workloads
from benchmarks.options import Options, tell
from benchmarks.overload_model import INPUT, MAX_BATCH
from benchmarks.overload_played import LOOPED, STEP_S, WAYS, Shares, Way, Work, draw_work, loop, play, shares
from benchmarks.plots import can_draw
from benchmarks.record import Recorder, Row

PARTS = ("engines", "simulated")
LOADS = (0.8, 1.5)
MODEL, MODELS = "heavy", "benchmarks.overload_model"
WAVES = 8
"""Full tasks' worth of sentences of the mean length, by which the time of a step is measured."""
MOST_LATE, TRIES = 0.05, 3
"""The lateness that 99 in 100 sentences may have when they are submitted, in parts of their deadlines."""
METRICS = ("done in time", "their worth", "their words")
ENGINES, SIMULATED, LOOP = "engines", "simulated", "a loop in plain Python"


@dataclass(frozen=True)
class Plan:
    """The amount of measuring: so many rounds at each load, of so many seconds of arrivals each."""

    rounds: dict[float, int]
    seconds: float


FULL = Plan({0.8: 1, 1.5: 3}, 12.0)
QUICK = Plan({1.5: 1}, 6.0)
SIMULATION = Plan(dict.fromkeys(LOADS, 3), 12.0)


def run(recorder: Recorder, options: Options) -> None:
    """Every way under every load."""
    if options.has("simulated"):
        run_simulated(recorder, replace(SIMULATION, seconds=1.5) if options.quick else SIMULATION)
    if options.has("engines"):
        run_engines(recorder, QUICK if options.quick else FULL)
    if options.plot is not None:
        draw(recorder.rows, options.plot)


def run_simulated(recorder: Recorder, plan: Plan) -> None:
    """Measure the scheduler by itself, and the loop in plain Python."""
    for load, rounds in plan.rounds.items():
        works = [draw_work(load, STEP_S, plan.seconds, seed) for seed in range(rounds)]
        for way in WAYS:
            record(recorder, SIMULATED, way, load, [play(way, work) for work in works])
            if way.policy in LOOPED:
                record(recorder, LOOP, way, load, [loop(way, work) for work in works])
            tell(f"simulated, load {load}: {way.name}")


def run_engines(recorder: Recorder, plan: Plan) -> None:
    """Engines in processes of their own, which take turns."""
    ways = [way for way in WAYS if not way.must_begin]
    with ExitStack() as ends:
        engines = {way: ends.enter_context(start(way)) for way in ways}
        for engine in engines.values():
            time_of_a_step(engine)  # so all are warm
        steps_s: list[float] = []
        for load, rounds in plan.rounds.items():
            found: dict[Way, list[Shares]] = {way: [] for way in ways}
            for seed in range(rounds):
                steps_s.append(time_of_a_step(engines[ways[0]]))
                work = draw_work(load, steps_s[-1], plan.seconds, seed)
                sentences = workloads.sentences(work.lengths, INPUT, seed)
                for way in ways:
                    found[way].append(serve_in_time(engines[way], way, work, sentences))
                    tell(f"load {load}, round {seed + 1} of {rounds}: {way.name}")
            for way, each in found.items():
                record(recorder, ENGINES, way, load, each)
            late = max(one.client_late for each in found.values() for one in each)
            recorder.add(ENGINES, "the client was late, at most", 100 * late, "% of a deadline", load=load)
        step_ms, spread = 1e3 * float(np.median(steps_s)), float(1e3 * np.ptp(steps_s))
        recorder.add(ENGINES, "a step of a full task", step_ms, "ms", spread=spread)
        recorder.add(ENGINES, "a round", 1e3 * plan.seconds / step_ms, "steps")


def start(way: Way) -> cellrt.EngineProcess:
    """Start the engine of a way, with the model."""
    engine = cellrt.EngineProcess(1, policy=way.policy, max_queue=1 << 20)
    try:
        engine.register(f"{MODELS}:{MODEL}")
    except BaseException:
        engine.close()
        raise
    tell(f"started: {way.name}")
    return engine


def time_of_a_step(engine: cellrt.EngineProcess) -> float:
    """Return how many seconds a step of a full task takes: sentences of one length leave no row of any task empty."""
    lengths = workloads.fixed_lengths(WAVES * MAX_BATCH)
    sentences = workloads.sentences(lengths, INPUT, 9)
    load = workloads.closed_loop(lambda k: engine.submit(MODEL, sentences[k]), len(sentences), len(sentences))
    return load.duration_s / (WAVES * workloads.EUROPARL_MEAN)


def serve(engine: cellrt.EngineProcess, way: Way, work: Work, sentences: Sequence[torch.Tensor]) -> Shares:
    """Have an engine do the work. What is due is handed in together; the client sleeps until the next is."""
    count = len(sentences)
    ends_s, late_s = np.full(count, np.inf), np.zeros(count)
    futures: list[Future[Any]] = []
    start = time.perf_counter()

    def note(k: int, future: Future[Any]) -> None:
        if future.exception() is None:
            ends_s[k] = time.perf_counter() - start

    for k, due_s in enumerate(work.arrivals_s.tolist()):
        while (now_s := time.perf_counter() - start) < due_s:
            time.sleep(due_s - now_s)
        late_s[k] = now_s - due_s
        how = {"deadline": max(1e-6, work.within_s[k] - late_s[k])} if way.drops else {}
        if way.must_begin:
            how["schedule_by"] = max(1e-6, work.begin_s[k] - late_s[k])
        future = engine.submit(MODEL, sentences[k], **how)
        future.add_done_callback(partial(note, k))
        futures.append(future)
    if wait(futures, 300).not_done:
        raise RuntimeError(f"{way.name}: not all have ended after five minutes")
    return shares(work, ends_s, float(np.percentile(late_s / work.within_s, 99)))


def serve_in_time(engine: cellrt.EngineProcess, way: Way, work: Work, sentences: Sequence[torch.Tensor]) -> Shares:
    """Do the same, again if the client was late. Raise RuntimeError if it always is."""
    for _ in range(TRIES):
        found = serve(engine, way, work, sentences)
        if found.client_late <= MOST_LATE:
            return found
        tell(f"{way.name}: again, as the client handed in {found.client_late:.1%} of a deadline late")
    raise RuntimeError(f"{way.name}: the client is late: it is measured, and not the engine")


def record(recorder: Recorder, case: str, way: Way, load: float, rounds: Sequence[Shares]) -> None:
    """Add the medians of rounds, and how far they differ."""
    for metric, values in zip(METRICS, np.array(rounds).T):
        spread = float(100 * np.ptp(values))
        recorder.add(case, metric, 100 * float(np.median(values)), "%", way=way.name, load=load, spread=spread)


def bars(rows: Sequence[Row], case: str, metric: str) -> dict[str, float]:
    """Return what was measured of a case under the highest load, by way."""
    own = [row for row in rows if (row["case"], row["metric"], row.get("load")) == (case, metric, LOADS[-1])]
    return {str(row["way"]): float(str(row["value"])) for row in own}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw what was done in time under the highest load: bars by way, of engines and as simulated."""
    cases = [case for case in (ENGINES, SIMULATED) if bars(rows, case, METRICS[0])]
    if not cases or not can_draw():
        return
    from matplotlib.figure import Figure

    names = [way.name for way in WAYS if any(way.name in bars(rows, case, METRICS[0]) for case in cases)]
    figure = Figure(figsize=(5.5 * len(cases), 3.6), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False, sharey=True)[0], cases):
        for k, metric in enumerate(METRICS):
            found = bars(rows, case, metric)
            axes.barh([names.index(way) + 0.27 * (k - 1) for way in found], list(found.values()), 0.25, label=metric)
        axes.set(title=f"{case}, {LOADS[-1]} times the peak", xlabel="in time, %")
        axes.set_yticks(range(len(names)), names)
    figure.axes[0].invert_yaxis()
    figure.axes[-1].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72)
