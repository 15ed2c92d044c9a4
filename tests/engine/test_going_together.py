"""Requests that were submitted one by one go on together from the next turn on: each as if it had come alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.engine.engine import Engine
from cellrt.errors import CancelledError, CellError, DeadlineError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import SMALL, WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import RAISE, WIDTH, Gate, chain_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)


def unroll(graph, request):
    """As a chain, by hand: the graphs of any two lengths have nothing in common, and are answered alike."""
    h = torch.zeros(WIDTH)
    for row in request:
        h = PLAIN(x=row, h=h).h
    return {"last": h}


MODELS = {"chain": CHAIN, "unrolled": Unfolder("unrolled", unroll, torch.zeros(2, WIDTH))}
FEW_ROWS = 2048
"""Bytes of an arena that holds few requests at once, so that the others wait."""


def steps(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + value


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """While one is inside the engine's only worker is held up, and what is submitted waits for one turn."""
    gate = Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    yield
    gate.open.set()


REQUEST = st.tuples(
    st.sampled_from(["chain", "chain", "unrolled"]),
    st.integers(1, 5),  # length
    st.sampled_from([1, 1, 1, 2]),  # priority
    st.sampled_from([None, None, None, 100.0, 1e-4]),  # seconds
    st.sampled_from([1, 1, 1, 3]),  # handed in together
)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(20))
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=30),
    cancelled=st.sets(st.integers(0, 29)),
    failing=st.sets(st.integers(0, 29), max_size=3),
    max_requests=st.sampled_from([2, 7, 64]),
    arena_bytes=st.sampled_from([FEW_ROWS, 65_536]),
    policy=st.sampled_from(["batchmaker", "shortest-job-first"]),
)
def test_each_ends_once_with_what_it_gives_alone(asked, cancelled, failing, max_requests, arena_bytes, policy):
    limits = Limits(**{**vars(SMALL), "max_requests": max_requests})
    engine = small_engine(limits=limits, arena_bytes=arena_bytes, policy=policy)
    ends: list[int] = []
    given_: list[tuple[str, torch.Tensor, float | None]] = []
    futures = []
    try:
        for model in MODELS.values():
            engine.register(model, warm_up=False)
        with held(engine):
            for number, (name, length, priority, deadline, count) in enumerate(asked):
                requests = [steps(length, number + place / 8) for place in range(count)]
                if number in failing:
                    requests[0][-1, 0] = RAISE
                if count == 1:
                    made = [engine.submit(name, requests[0], priority=priority, deadline=deadline)]
                else:
                    made = list(engine.submit_many(name, requests, priority=priority, deadline=deadline))
                for place, future in enumerate(made, len(futures)):
                    future.add_done_callback(lambda _, place=place: ends.append(place))
                if number in cancelled:
                    made[0].cancel()
                futures += made
                given_ += [(name, request, deadline) for request in requests]
        for future, (name, request, deadline) in zip(futures, given_):
            error = error_of(future)
            if error is None:
                assert_same(future.result(), run_one_by_one(MODELS[name], request))
            elif isinstance(error, DeadlineError):
                assert deadline is not None
            else:
                assert isinstance(error, CancelledError) or (isinstance(error, CellError) and request[-1, 0] == RAISE)
        assert engine.drain(WAIT_S)
        engine.check()
        assert sorted(ends) == list(range(len(futures)))
        counts = engine.statistics()
        assert counts["done"] + sum(counts["errors"].values()) == len(futures) + 1  # and the gate's
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_those_of_one_turn_are_admitted_in_one_call_whatever_their_lengths(model):
    admitted: list[int] = []
    with small_engine(trace=True) as engine:  # by the door each would be admitted by itself
        engine.register(model, warm_up=False)
        admit_many = engine._processor.admit_many
        engine._processor.admit_many = lambda template, sequences, *rest: (
            admitted.append(len(sequences)) or admit_many(template, sequences, *rest)
        )
        with held(engine):
            futures = [engine.submit(model.name, steps(length)) for length in (2, 3, 3, 4)]
        for future, length in zip(futures, (2, 3, 3, 4)):
            assert_same(future.result(WAIT_S), run_one_by_one(model, steps(length)))
    assert admitted == [1, 4]


def test_they_end_in_the_order_of_their_arrival_where_one_fits_at_a_time():
    limits = Limits(**{**vars(SMALL), "max_requests": 1})
    ends: list[int] = []
    with small_engine(limits=limits, settings=SchedulerSettings(runs=False), queue_depth=1) as engine:
        for model in MODELS.values():
            engine.register(model, warm_up=False)
        with held(engine):
            for number, name in enumerate(["chain", "unrolled", "unrolled", "chain", "chain"]):
                future = engine.submit(name, steps(1 + number % 3))
                future.add_done_callback(lambda _, number=number: ends.append(number))
    assert ends == list(range(5))


def test_one_that_has_ended_keeps_nothing_while_those_beside_it_run():
    gate = Gate(WAIT_S)
    with small_engine(2) as engine:
        engine.register(gate.unfolder, warm_up=False)
        gate.open.set()
        engine.submit("gate", torch.ones(WIDTH)).result(WAIT_S)
        gate.open.clear()
        gate.entered.clear()
        entered = gate.entered
        pause = threading.Event()

        def together() -> list[weakref.ref]:
            """Both wait for the same turn: the first is answered at once, the second held up."""
            engine._manager.turns.command(lambda: pause.wait(WAIT_S))
            quick = engine.submit("gate", torch.zeros(WIDTH))
            made.append(engine.submit("gate", torch.ones(WIDTH)))
            pause.set()
            quick.result(WAIT_S)
            return [weakref.ref(quick)]

        made: list[object] = []
        (quick,) = together()
        assert entered.wait(WAIT_S)
        gc.collect()
        assert quick() is None
        gate.open.set()


def test_each_of_many_graphs_handed_in_together_has_its_result():
    with small_engine() as engine:
        engine.register(MODELS["unrolled"], warm_up=False)
        requests = [steps(1 + number % 5, number) for number in range(12)]
        made = engine.submit_many("unrolled", requests)
        last = made[-1]
        for result, request in zip(made.results(WAIT_S), requests):
            assert_same(result, run_one_by_one(MODELS["unrolled"], request))
        assert_same(last.result(), run_one_by_one(MODELS["unrolled"], requests[-1]))
