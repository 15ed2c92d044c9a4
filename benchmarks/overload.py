"""An LSTM under more load than it can carry, with deadlines: the share of sentences done in time, by policy.

Sentences of Europarl's lengths arrive by a Poisson process, 0.8 and 1.5 times as many as the engine does at most. Each
must be done within a time that is drawn, between ``PATIENCE`` times what it takes by itself in full tasks, ``MORE``
steps added. "nothing is dropped": the engine is told no deadline, computes all, and what comes late does not count. The
others drop what is late (``deadline=``), or also what has not begun when its own time is all that is left
(``schedule_by=``). One engine a way, with the same settings and limits, which take turns, a round each. A task has at
most ``MAX_BATCH`` rows: where all that waits fits in a task no order matters, and under overload all are late.

``europarl``: engines of one worker. The model is heavy, so that its steps are the limit and the client, in a thread of
its own on another core, is not: how late it hands in is a row. A round in which that was more than ``MOST_LATE`` of the
deadlines is done again, and after ``TRIES`` the benchmark fails.
``simulated``: the same sentences played on the scheduler with a virtual clock (``core/simulate.py``), beside a loop in
plain Python that knows nothing of it, whose order is the policy's at every step: what the order itself gives, on any
machine.

In time, in parts of all sentences; of their worth, 1 by the length of each; and of their words, of which 1 by the load
is all that anybody can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.chain import Cellrt
from benchmarks.options import Options, tell
from benchmarks.record import Recorder
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.ports import Port
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.definition.modes import torch_threads

PARTS = ("europarl", "simulated")
LOADS = (0.8, 1.5)
INPUT, HIDDEN, MAX_BATCH, IN_FLIGHT = 64, 1024, 64, 512
PATIENCE, MORE = (1.5, 8.0), 8
MARGIN = 1.15
"""What must begin: so many times its own time before its deadline."""
MOST_LATE, TRIES = 0.05, 5
"""Of 99 in 100 sentences: how late the client may hand in, in parts of the time within which each must be done."""
STEP_S, PLAYED_S = 3e-3, 12.0
"""Of what is simulated, a step of a full task, and how long sentences arrive."""


@dataclass(frozen=True)
class Way:
    """A policy, and which times the engine is told."""

    name: str
    policy: str
    drops: bool = True
    must_begin: bool = False


WAYS = (
    Way("first come, nothing is dropped", "first-come-first-served", drops=False),
    Way("first come", "first-come-first-served"),
    Way("first come, must begin", "first-come-first-served", must_begin=True),
    Way("shortest", "shortest-job-first"),
    Way("earliest deadline", "earliest-deadline-first"),
    Way("earliest deadline, must begin", "earliest-deadline-first", must_begin=True),
    Way("utility (DAS)", "deadline-aware-utility"),
    Way("utility (DAS), must begin", "deadline-aware-utility", must_begin=True),
)


@dataclass(frozen=True)
class Work:
    """Sentences by their lengths ``[count]``; when they arrive, within what time of that each must be done, and have
    begun, all in seconds, ``[count]``."""

    lengths: workloads.Lengths
    arrivals_s: workloads.Seconds
    within_s: workloads.Seconds
    begin_s: workloads.Seconds


class Shares(NamedTuple):
    """What was done in time, in parts of all; and how late the client was, in parts of the deadlines (99 in 100)."""

    sentences: float
    worth: float
    words: float
    client_late: float = 0.0


def draw_work(load: float, step_s: float, seconds: float, seed: int) -> Work:
    """Sentences for so long, in parts of what tasks of ``MAX_BATCH`` rows do at most whose steps take so long."""
    rate = load * MAX_BATCH / (step_s * workloads.EUROPARL_MEAN)
    count = max(16, round(rate * seconds))
    lengths = workloads.europarl_lengths(count, seed)
    within_s = np.random.default_rng(seed).uniform(*PATIENCE, count) * (lengths + MORE) * step_s
    begin_s = np.maximum(within_s - MARGIN * lengths * step_s, 1e-6)
    return Work(lengths, workloads.poisson_arrivals(rate, count, seed), within_s, begin_s)


def shares(work: Work, ends_s: NDArray[np.float64], client_late: float = 0.0) -> Shares:
    """Count what was done when it had to be, given when each was; infinity: never."""
    done = ends_s <= work.arrivals_s + work.within_s
    worth = 1 / work.lengths
    return Shares(
        float(done.mean()),
        float(worth[done].sum() / worth.sum()),
        float(work.lengths[done].sum() / work.lengths.sum()),
        client_late,
    )


def serve(server: Cellrt, way: Way, work: Work, sentences: Sequence[torch.Tensor]) -> Shares:
    """By an engine. What is due is handed in together; the client sleeps until the next is."""
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
        future = server.engine.submit("lstm", sentences[k], **how)
        future.add_done_callback(partial(note, k))
        futures.append(future)
    wait(futures, 300)
    return shares(work, ends_s, float(np.percentile(late_s / work.within_s, 99)))


def serve_in_time(server: Cellrt, way: Way, work: Work, sentences: Sequence[torch.Tensor]) -> Shares:
    """The same, again if the client was late. Raises RuntimeError if it always is."""
    for _ in range(TRIES):
        found = serve(server, way, work, sentences)
        if found.client_late <= MOST_LATE:
            return found
        tell(f"{way.name}: again, as the client handed in {found.client_late:.1%} of a deadline late")
    raise RuntimeError(f"{way.name}: the client is late: it is measured, and not the engine")


def play(way: Way, work: Work) -> Shares:
    """By the scheduler with a virtual clock."""
    processor = Processor(1, policy=POLICIES[way.policy])
    rows = int(2 * work.lengths.sum())
    processor.add_kind(rows, rows)
    cell = processor.add_type([Port(0), Port(0, carry=0)], [Port(0)], max_batch=MAX_BATCH)
    arrivals = []
    for length, at_s, within_s, begin_s in zip(work.lengths.tolist(), work.arrivals_s, work.within_s, work.begin_s):
        program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, cell, length, STEP, 0, 1, CARRY, length]
        made = np.array([*program, OP_RESULT, 2 * length, 1, 1], np.int32)
        done_s, begun_s = at_s + within_s if way.drops else None, at_s + begin_s if way.must_begin else None
        arrivals.append(Arrival(at_s, made, deadline_s=done_s, schedule_by_s=begun_s))
    played = simulate(processor, arrivals, _cost, drops_late=way.drops)
    return shares(work, np.array(played.finish_s))


def _cost(cell_type: int, rows: int, steps: int) -> float:
    return steps * STEP_S * (0.4 + 0.6 * rows / MAX_BATCH)


def loop(way: Way, work: Work) -> Shares:
    """By a loop that takes a step of the first ``MAX_BATCH`` in a policy's order, and so on."""
    count = len(work.lengths)
    lengths, arrivals_s = work.lengths.tolist(), work.arrivals_s.tolist()
    due_s, begin_by_s = (work.arrivals_s + work.within_s).tolist(), (work.arrivals_s + work.begin_s).tolist()
    left, ends_s, waiting, sent, now = list(lengths), np.full(count, np.inf), list[int](), 0, 0.0
    order = _orders(lengths, due_s)[way.policy]
    while sent < count or waiting:
        while sent < count and arrivals_s[sent] <= now:
            waiting.append(sent)
            sent += 1
        if way.drops:
            waiting = [k for k in waiting if due_s[k] > now]
        if way.must_begin:
            waiting = [k for k in waiting if left[k] < lengths[k] or begin_by_s[k] > now]
        if not waiting:
            now = arrivals_s[sent] if sent < count else now
            continue
        taken = order(waiting)[:MAX_BATCH]
        now += _cost(0, len(taken), 1)
        for k in taken:
            left[k] -= 1
            if left[k] == 0:
                ends_s[k] = now
        waiting = [k for k in waiting if left[k] > 0]
    return shares(work, ends_s)


def _orders(lengths: Sequence[int], due_s: Sequence[float]) -> dict[str, Callable[[list[int]], list[int]]]:
    """The orders of policies, of what waits by its number."""
    return {
        "first-come-first-served": lambda waiting: waiting,
        "shortest-job-first": lambda waiting: sorted(waiting, key=lengths.__getitem__),
        "earliest-deadline-first": lambda waiting: sorted(waiting, key=due_s.__getitem__),
    }


def run(recorder: Recorder, options: Options) -> None:
    """Every way under every load."""
    if options.has("simulated"):
        run_simulated(recorder, options)
    if options.has("europarl"):
        run_engines(recorder, options)


def run_simulated(recorder: Recorder, options: Options) -> None:
    """The scheduler by itself, and the loop in plain Python."""
    for load in LOADS:
        rounds = [draw_work(load, STEP_S, PLAYED_S / (8 if options.quick else 1), seed) for seed in range(3)]
        for way in WAYS:
            record(recorder, "simulated", way, load, [play(way, work) for work in rounds])
            if way.policy in _orders([], []):
                record(recorder, "a loop in plain Python", way, load, [loop(way, work) for work in rounds])
            tell(f"simulated, load {load}: {way.name}")


def run_engines(recorder: Recorder, options: Options) -> None:
    """Engines, which take turns."""
    hidden, rounds, seconds = (options.hidden or (HIDDEN,))[0], 1 if options.quick else 3, 1.0 if options.quick else 8.0
    lstm = torch.nn.LSTM(INPUT, hidden).eval().requires_grad_(False)
    with torch_threads(1):
        servers = {way: Cellrt(lstm, policy=way.policy, max_batch=MAX_BATCH, workers=1) for way in WAYS}
        try:
            peak = max(_peak(server, 200 if options.quick else 400) for server in servers.values())  # and all are warm
            step_s = MAX_BATCH / (peak * workloads.EUROPARL_MEAN)
            recorder.add("LSTM", "most at once", peak, "sentences/s", hidden=hidden, step_ms=1e3 * step_s)
            for load in LOADS:
                found: dict[Way, list[Shares]] = {way: [] for way in WAYS}
                for seed in range(rounds):
                    work = draw_work(load, step_s, seconds, seed)
                    sentences = workloads.sentences(work.lengths, INPUT, seed)
                    for way in WAYS:
                        found[way].append(serve_in_time(servers[way], way, work, sentences))
                        tell(f"load {load}: {way.name}")
                for way, each in found.items():
                    record(recorder, "LSTM", way, load, each)
                late = max(one.client_late for each in found.values() for one in each)
                recorder.add("LSTM", "the client was late, at most", 100 * late, "% of a deadline", load=load)
        finally:
            for server in servers.values():
                server.close()


def record(recorder: Recorder, case: str, way: Way, load: float, rounds: Sequence[Shares]) -> None:
    """The means of rounds, and how far they differ."""
    for metric, values in zip(("done in time", "their worth", "their words"), np.array(rounds).T):
        spread = float(100 * np.ptp(values))
        recorder.add(case, metric, 100 * float(values.mean()), "%", way=way.name, load=load, spread=spread)


def _peak(server: Cellrt, count: int) -> float:
    """Sentences a second with many in flight."""
    sentences = workloads.sentences(workloads.europarl_lengths(count, 9), INPUT, 9)
    load = workloads.closed_loop(lambda k: server.engine.submit("lstm", sentences[k]), count, IN_FLIGHT)
    return load.throughput
