"""Requests that are handed in together: each gets what it gets alone, in order, and ends once, come what may."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.errors import CancelledError, CellError, DeadlineError, EngineClosedError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import SMALL, WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import RAISE, WIDTH, Gate, chain_model, make_cells

PLAIN, *_ = make_cells()
PLAIN_CHAIN = chain_model("plain", PLAIN)
KEYED = Unfolder("keyed", PLAIN_CHAIN.function, PLAIN_CHAIN.example, key=len)
FEW_ROWS = 2048
"""Bytes of an arena that holds few requests at once, so that the others wait."""


def steps(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + value


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(15))
@given(
    bulks=st.lists(
        st.tuples(
            st.sampled_from(["plain", "keyed"]),
            st.lists(st.integers(1, 6), max_size=30),  # lengths: one template each
            st.integers(0, 3),  # priority
            st.sampled_from([None, None, 100.0, 1e-4]),  # seconds
        ),
        min_size=1,
        max_size=5,
    ),
    cancelled=st.sets(st.integers(0, 149)),
    failing=st.sets(st.integers(0, 149), max_size=3),
    max_requests=st.sampled_from([2, 7, 64]),
    arena_bytes=st.sampled_from([FEW_ROWS, 65_536]),
    policy=st.sampled_from(["batchmaker", "shortest-job-first"]),
    workers=st.integers(1, 2),
)
def test_each_of_a_bulk_ends_once_with_what_it_gives_alone(
    bulks, cancelled, failing, max_requests, arena_bytes, policy, workers
):
    limits = Limits(**{**vars(SMALL), "max_requests": max_requests})
    engine = small_engine(workers, limits=limits, arena_bytes=arena_bytes, policy=policy)
    ends: list[int] = []
    try:
        for model in (PLAIN_CHAIN, KEYED):
            engine.register(model, warm_up=False)
        futures, requests = [], []
        for name, lengths, priority, deadline in bulks:
            batch = [steps(length, len(requests) + place) for place, length in enumerate(lengths)]
            for place, request in enumerate(batch):
                if len(requests) + place in failing:
                    request[-1, 0] = RAISE
            made = engine.submit_many(name, batch, priority=priority, deadline=deadline)
            assert len(made) == len(batch)
            for number, future in enumerate(made, len(futures)):
                future.add_done_callback(lambda _, number=number: ends.append(number))
            futures += made
            requests += [(request, deadline) for request in batch]
        for number in cancelled:
            if number < len(futures):
                futures[number].cancel()
        for number, (future, (request, deadline)) in enumerate(zip(futures, requests)):
            error = error_of(future)
            if error is None:
                assert number not in failing
                assert_same(future.result(), run_one_by_one(PLAIN_CHAIN, request))
            elif isinstance(error, CancelledError):
                assert number in cancelled
            elif isinstance(error, DeadlineError):
                assert deadline is not None
            else:
                assert isinstance(error, CellError)
                assert number in failing
        assert engine.drain(WAIT_S)
        engine.check()
        assert sorted(ends) == list(range(len(futures)))
        counts = engine.statistics()
        assert counts["done"] + sum(counts["errors"].values()) == len(futures)
    finally:
        close_and_check(engine)


def ends_in_order(lengths: list[int], priorities: list[int], max_requests: int) -> list[tuple[int, int]]:
    """The (bulk, number) of requests as they end, where a task has one row and one request fits in the tables."""
    gate = Gate(WAIT_S)
    limits = Limits(**{**vars(SMALL), "max_requests": max_requests})
    engine = small_engine(limits=limits, settings=SchedulerSettings(runs=False), queue_depth=1)
    ends: list[tuple[int, int]] = []
    try:
        engine.register(gate.unfolder, warm_up=False)
        engine.register(KEYED, warm_up=False)
        engine.submit("gate", torch.ones(WIDTH))
        assert gate.entered.wait(WAIT_S)
        for bulk, (length, priority) in enumerate(zip(lengths, priorities)):
            for number, future in enumerate(engine.submit_many("keyed", [steps(length)] * 5, priority=priority)):
                future.add_done_callback(lambda _, one=(bulk, number): ends.append(one))
        gate.open.set()
        assert engine.drain(WAIT_S)
    finally:
        close_and_check(engine)
    return ends


def test_what_does_not_fit_waits_and_keeps_its_order():
    assert ends_in_order([2, 3], [1, 1], max_requests=1) == [(bulk, number) for bulk in (0, 1) for number in range(5)]


def test_a_bulk_of_higher_priority_is_admitted_before_one_that_waits_in_part():
    ends = ends_in_order([2, 2], [0, 3], max_requests=2)
    for bulk in (0, 1):
        assert [one for one in ends if one[0] == bulk] == [(bulk, number) for number in range(5)]
    assert ends.index((1, 4)) < ends.index((0, 4))


def test_results_come_in_the_order_of_the_requests_whatever_their_graphs():
    engine = small_engine()
    engine.register(KEYED, warm_up=False)
    requests = [steps(1 + k % 3, k) for k in range(20)]
    for request, future in zip(requests, engine.submit_many("keyed", requests)):
        assert_same(future.result(WAIT_S), run_one_by_one(PLAIN_CHAIN, request))
    close_and_check(engine)


def test_tensors_are_copied_before_submit_returns():
    gate = Gate(WAIT_S)
    engine = small_engine(queue_depth=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(KEYED, warm_up=False)
    engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    request, array = steps(3), steps(3).numpy()
    expected = run_one_by_one(PLAIN_CHAIN, steps(3))
    futures = []
    for _ in range(3):  # not unfolded any more from the third on
        futures += [engine.submit("keyed", request), engine.submit("keyed", array)]
        futures += engine.submit_many("keyed", [request] * 3) + engine.submit_many("keyed", [array] * 3)
    request.fill_(77.0)
    array.fill(77.0)
    gate.open.set()
    for future in futures:
        assert_same(future.result(WAIT_S), expected)
    close_and_check(engine)


def test_results_of_requests_that_ended_together_share_no_memory():
    engine = small_engine()
    engine.register(KEYED, warm_up=False)
    first, second = [future.result(WAIT_S) for future in engine.submit_many("keyed", [steps(2)] * 2)]
    expected = run_one_by_one(PLAIN_CHAIN, steps(2))
    for value in first.values():
        assert value.untyped_storage().nbytes() == value.nbytes
        value.fill_(-1.0)
    assert_same(second, expected)
    close_and_check(engine)


def test_all_threads_that_ask_for_a_result_get_the_same():
    engine = small_engine()
    engine.register(KEYED, warm_up=False)
    for _ in range(20):
        future = engine.submit_many("keyed", [steps(2)] * 2)[1]
        with ThreadPoolExecutor(3) as pool:
            got = [asked.result(WAIT_S) for asked in [pool.submit(future.result, WAIT_S) for _ in range(3)]]
        assert all(one is got[0] for one in got)
    close_and_check(engine)


def test_a_wrong_request_in_a_bulk_has_none_of_it_submitted():
    engine = small_engine()
    engine.register(KEYED, warm_up=False)
    for _ in range(2):
        engine.submit("keyed", steps(2)).result(WAIT_S)
    for wrong in (torch.zeros(2, WIDTH + 1), torch.zeros(2, WIDTH, dtype=torch.int64), [1, 2], "ab"):
        with pytest.raises(RequestError) as alone:
            PLAIN_CHAIN.record(engine._models["keyed"], wrong)
        with pytest.raises(RequestError) as raised:
            engine.submit_many("keyed", [steps(2), wrong, steps(2)])
        assert str(raised.value) == "request 2 of 3 (index 1): " + str(alone.value).replace("'plain'", "'keyed'")
    assert engine.statistics()["unfinished"] == 0
    assert engine.statistics()["done"] == 2
    close_and_check(engine)


def test_an_engine_that_closes_in_the_middle_ends_all_of_a_bulk():
    gate = Gate(WAIT_S)
    limits = Limits(**{**vars(SMALL), "max_requests": 4})
    engine = small_engine(limits=limits, queue_depth=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(KEYED, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    futures = engine.submit_many("keyed", [steps(2)] * 10)
    threading.Timer(0.1, gate.open.set).start()
    close_and_check(engine)
    assert all(isinstance(error_of(future), EngineClosedError) for future in (held, *futures))
