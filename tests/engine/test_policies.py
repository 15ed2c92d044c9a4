"""Policies and priorities change who is served first, and nobody waits for ever."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from cellrt.core.scheduling.policy import Policy
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.engine.engine import Engine
from tests.core.policies import BROKEN
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells

PLAIN, _, LOOP = make_cells(max_batch=1)
ONE_TASK = SchedulerSettings(max_tasks_to_submit=1, runs=False, max_wait_s=math.inf)
CHAIN = chain_model("chain", PLAIN)


class Order:
    """Notes in which order futures end."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._lock = threading.Lock()

    def watch(self, name: str, future) -> None:
        def note(_: object) -> None:
            with self._lock:
                self.ended.append(name)

        future.add_done_callback(note)


def held_engine(gate: Gate, policy: Policy | str, **options) -> tuple[Engine, object]:
    """An engine with one worker, which is inside the gate: what is submitted now is ordered once it opens."""
    options.setdefault("settings", ONE_TASK)
    engine = small_engine(1, policy=policy, queue_depth=1, **options)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    future = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    return engine, future


def ends_of(policy: Policy | str, jobs: list[tuple[str, int, int]], **options) -> list[str]:
    """Order in which jobs (name, steps, priority) end that were submitted in this order, all before any could run."""
    gate, order = Gate(WAIT_S), Order()
    engine, held = held_engine(gate, policy, **options)
    futures = []
    for name, steps, priority in jobs:
        futures.append(engine.submit("chain", torch.ones(steps, WIDTH), priority=priority))
        order.watch(name, futures[-1])
    engine.check()  # a turn: all of them are admitted, or wait for room
    gate.open.set()
    for future in [held, *futures]:
        future.result(WAIT_S)
    close_and_check(engine)
    return order.ended


def test_first_come_first_served():
    jobs = [("long", 6, 1), ("short", 1, 1), ("middle", 3, 1)]
    assert ends_of("first-come-first-served", jobs) == ["long", "short", "middle"]
    assert ends_of("batchmaker", jobs) == ["long", "short", "middle"]


def test_shortest_job_first():
    jobs = [("long", 9, 1), ("short", 1, 1), ("middle", 4, 1)]
    assert ends_of("shortest-job-first", jobs) == ["short", "middle", "long"]


def test_the_priority_of_a_request_comes_before_the_policy():
    jobs = [("low", 1, 0), ("normal", 1, 1), ("high", 9, 3)]
    assert ends_of("batchmaker", jobs) == ["high", "normal", "low"]
    assert ends_of("shortest-job-first", jobs) == ["high", "normal", "low"]


@pytest.mark.parametrize("policy", ["batchmaker", "shortest-job-first"])
def test_priority_and_policy_order_those_that_wait_for_room(policy):
    one_at_a_time = Limits(
        max_requests=1, max_nodes=4096, max_values=8192, max_links=32_768, max_subgraphs=2048, max_tasks=8
    )
    jobs = [("low", 2, 0), ("long", 7, 1), ("short", 1, 1), ("high", 9, 3)]
    ended = ends_of(policy, jobs, limits=one_at_a_time)
    by_policy = ["short", "long"] if policy == "shortest-job-first" else ["long", "short"]
    assert ended == ["high", *by_policy, "low"]


def test_a_long_request_does_not_starve_under_shortest_job_first():
    """Short requests keep coming, each sent when the one before ends; the long one ends all the same."""
    gate = Gate(WAIT_S)
    engine, held = held_engine(gate, "shortest-job-first")
    long = engine.submit("chain", torch.ones(20, WIDTH))
    most, sent, ended = 3000, [2], threading.Event()
    stop = threading.Event()

    def next_short(_: object = None) -> None:
        if long.done() or sent[0] >= most or stop.is_set():
            ended.set()
            return
        sent[0] += 1
        engine.submit("chain", torch.ones(1, WIDTH)).add_done_callback(next_short)

    next_short()
    next_short()  # two streams of them, so that one is always waiting
    gate.open.set()
    try:
        long.result(WAIT_S)
        assert sent[0] < most, "the long request ended only when no short ones came any more"
    finally:
        stop.set()
    held.result(WAIT_S)
    assert ended.wait(WAIT_S)
    assert engine.drain(WAIT_S)
    close_and_check(engine)


def test_a_request_of_the_lowest_priority_does_not_starve():
    gate, order = Gate(WAIT_S), Order()
    engine, held = held_engine(gate, "batchmaker", settings=SchedulerSettings(1, runs=False, max_wait_s=0.0))
    low = engine.submit("chain", torch.ones(2, WIDTH), priority=0)
    order.watch("low", low)
    high = [engine.submit("chain", torch.ones(2, WIDTH), priority=3) for _ in range(40)]
    for future in high:
        order.watch("high", future)
    engine.check()
    gate.open.set()
    for future in [held, low, *high]:
        future.result(WAIT_S)
    assert order.ended.index("low") < len(high) / 2
    close_and_check(engine)


def latest(waiting, asked):
    for k in range(waiting.size):
        waiting[k].score = -waiting[k].sequence


def test_a_policy_of_ones_own():
    jobs = [("first", 2, 1), ("second", 2, 1), ("third", 2, 1)]
    assert ends_of(Policy("latest first", latest), jobs) == ["third", "second", "first"]


@pytest.mark.parametrize(
    ("steps", "ended"),
    [(1, ["soon", "middle", "late", "none"]), (2, ["soon", "late", "middle", "none"])],
    ids=["done in one task", "begun, and then due when it must be done"],
)
def test_the_earliest_deadline_goes_first_whether_it_is_to_begin_or_to_be_done(steps, ended):
    gate, order = Gate(WAIT_S), Order()
    engine, held = held_engine(gate, "earliest-deadline-first")
    futures = []
    times = {"none": {}, "late": {"deadline": 2 * WAIT_S}, "soon": {"deadline": WAIT_S}}
    times["middle"] = {"schedule_by": 1.5 * WAIT_S, "deadline": 3 * WAIT_S}
    for name, how in times.items():
        futures.append(engine.submit("chain", torch.ones(steps, WIDTH), **how))
        order.watch(name, futures[-1])
    engine.check()
    gate.open.set()
    for future in [held, *futures]:
        future.result(WAIT_S)
    close_and_check(engine)
    assert order.ended == ended


def test_a_policy_that_raises_costs_its_order_alone_and_is_told():
    jobs = [("first", 2, 1), ("second", 2, 1), ("third", 2, 1)]
    assert ends_of(BROKEN, jobs) == ["first", "second", "third"]
