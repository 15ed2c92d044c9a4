"""An LSTM under more load than it can carry, with deadlines: the share of sentences done in time, by policy.

Sentences of Europarl's lengths arrive by a Poisson process, 1.5 times as many as the engine does at most, and each must
be done within a time that is drawn, ``WITHIN_S``. "nothing is dropped": the engine is told no deadline, computes all,
and what comes late does not count. The others drop what is late (``deadline=``), or also what has not begun by half of
its time (``schedule_by=``). One engine a way, with the same settings and limits, which take turns, a round each. A task
has at most ``MAX_BATCH`` rows: where all that waits fits in a task no order matters, and under overload all are late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.chain import Cellrt
from benchmarks.options import Options, tell
from benchmarks.record import Recorder
from cellrt.definition.modes import torch_threads

PARTS = ("europarl",)
LOADS = (0.8, 1.5)
WITHIN_S = (0.03, 0.3)
INPUT, IN_FLIGHT, MAX_BATCH = 64, 512, 64


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
    Way("utility (DAS)", "deadline-aware-utility"),
    Way("utility (DAS), must begin", "deadline-aware-utility", must_begin=True),
)


@dataclass(frozen=True)
class Work:
    """Sentences, when they arrive, and how long after that each must be done, in seconds."""

    sentences: Sequence[torch.Tensor]
    arrivals_s: list[float]
    within_s: list[float]


def draw_work(rate: float, seconds: float, seed: int) -> Work:
    """So many sentences a second, for so long."""
    count = max(16, round(rate * seconds))
    sentences = workloads.sentences(workloads.europarl_lengths(count, seed), INPUT, seed)
    within_s = np.random.default_rng(seed).uniform(*WITHIN_S, count)
    return Work(sentences, workloads.poisson_arrivals(rate, count, seed).tolist(), within_s.tolist())


def in_time(server: Cellrt, way: Way, work: Work) -> tuple[float, float]:
    """The share of the sentences that was done in time, and the same of their worth, 1 by the length of each."""
    futures, ends = [], np.full(len(work.sentences), np.inf)

    def note(k: int) -> Any:
        def told(future: Any) -> None:
            if future.exception() is None:
                ends[k] = time.perf_counter()

        return told

    start = time.perf_counter()
    for k, (sentence, arrival_s, within_s) in enumerate(zip(work.sentences, work.arrivals_s, work.within_s)):
        time.sleep(max(0.0, start + arrival_s - time.perf_counter()))
        left_s = max(1e-6, start + arrival_s + within_s - time.perf_counter())
        how: Any = {"deadline": left_s} if way.drops else {}
        if way.must_begin:
            how["schedule_by"] = left_s / 2
        future = server.engine.submit("lstm", sentence, **how)
        future.add_done_callback(note(k))
        futures.append(future)
    wait(futures, 120)
    done = ends <= start + np.array(work.arrivals_s) + np.array(work.within_s)
    worth = 1 / np.array([len(sentence) for sentence in work.sentences])
    return float(done.mean()), float(worth[done].sum() / worth.sum())


def run(recorder: Recorder, options: Options) -> None:
    """Every way under every load."""
    hidden, rounds, seconds = options.hidden[:1] or (256,), 1 if options.quick else 3, 1.0 if options.quick else 5.0
    lstm = torch.nn.LSTM(INPUT, hidden[0]).eval().requires_grad_(False)
    with torch_threads(1):
        servers = {way: Cellrt(lstm, policy=way.policy, max_batch=MAX_BATCH) for way in WAYS}
        try:
            peak = _peak(servers[WAYS[0]], 1000 if options.quick else 4000)
            recorder.add("LSTM, Europarl-like", "most at once", peak, "sentences/s", hidden=hidden[0])
            for load in LOADS:
                works = [draw_work(load * peak, seconds, seed) for seed in range(rounds)]
                found: dict[Way, list[tuple[float, float]]] = {way: [] for way in WAYS}
                for work in works:
                    for way in WAYS:
                        found[way].append(in_time(servers[way], way, work))
                        tell(f"load {load}: {way.name}")
                for way, shares in found.items():
                    done, worth = np.mean(shares, axis=0)
                    recorder.add("LSTM, Europarl-like", "done in time", 100 * done, "%", way=way.name, load=load)
                    recorder.add("LSTM, Europarl-like", "utility", 100 * worth, "%", way=way.name, load=load)
        finally:
            for server in servers.values():
                server.close()


def _peak(server: Cellrt, count: int) -> float:
    """Sentences a second with many in flight, handed in one by one as the others are."""
    sentences = workloads.sentences(workloads.europarl_lengths(count, 9), INPUT, 9)
    load = workloads.closed_loop(lambda k: server.engine.submit("lstm", sentences[k]), count, IN_FLIGHT)
    return load.throughput
