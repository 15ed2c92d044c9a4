"""Sentences with deadlines under more load than can be carried: what arrives, and what of it is done by which order.

``play`` has the scheduler do it with a virtual clock (``core/simulate.py``); ``loop`` is a loop in plain Python that
knows nothing of it, whose order is the policy's at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.overload_model import MAX_BATCH
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP

PATIENCE, MORE = (1.5, 8.0), 8
MARGIN = 1.15
"""The margin of a request: it must begin so many times its own time before its deadline."""
STEP_S = 3e-3
"""A step of a full task, in seconds, where nothing is measured."""


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
    """The parts of all requests that were done in time, and how late the client was, in parts of the deadlines
    (p99).
    """

    sentences: float
    worth: float
    words: float
    client_late: float = 0.0


def draw_work(load: float, step_s: float, seconds: float, seed: int) -> Work:
    """Return sentences for so long, in parts of what tasks of ``MAX_BATCH`` rows do at most whose steps take so
    long.
    """
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


def play(way: Way, work: Work, settings: SchedulerSettings | None = None) -> Shares:
    """Play the work by the scheduler with a virtual clock."""
    processor = Processor(1, settings=settings, policy=POLICIES[way.policy])
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


def loop(way: Way, work: Work, fair_every: int = 0) -> Shares:
    """Play the work by a loop that takes a step of the first ``MAX_BATCH`` in a policy's order, again and again.

    Every ``fair_every``-th step is in the order of arrival, like the scheduler's bound on waiting. 0: none.
    """
    count = len(work.lengths)
    lengths, arrivals_s = work.lengths.tolist(), work.arrivals_s.tolist()
    due_s, begin_by_s = (work.arrivals_s + work.within_s).tolist(), (work.arrivals_s + work.begin_s).tolist()
    left, ends_s, waiting, sent, steps, now = list(lengths), np.full(count, np.inf), list[int](), 0, 0, 0.0
    first_due_s = [min(pair) for pair in zip(due_s, begin_by_s)] if way.must_begin else due_s
    order = orders(lengths, lambda k: first_due_s[k] if left[k] == lengths[k] else due_s[k])[way.policy]
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
        steps += 1
        is_fair = fair_every > 0 and steps % fair_every == 0
        taken = (waiting if is_fair else order(waiting))[:MAX_BATCH]
        now += _cost(0, len(taken), 1)
        for k in taken:
            left[k] -= 1
            if left[k] == 0:
                ends_s[k] = now
        waiting = [k for k in waiting if left[k] > 0]
    return shares(work, ends_s)


Order = Callable[[list[int]], list[int]]


def orders(lengths: Sequence[int], due_s: Callable[[int], float]) -> dict[str, Order]:
    """Return the orders of policies that ``loop`` knows, of what waits by its number, given by when each is due now."""
    return {
        "first-come-first-served": lambda waiting: waiting,
        "shortest-job-first": lambda waiting: sorted(waiting, key=lengths.__getitem__),
        "earliest-deadline-first": lambda waiting: sorted(waiting, key=due_s),
    }


LOOPED = frozenset(orders([], float))
"""The policies that ``loop`` knows."""
