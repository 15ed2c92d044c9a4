"""What compiled code has answered is the client's at once; a turn in Python counts it, and tells whom it must."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator

import pytest
import torch

from cellrt.engine.engine import Engine
from cellrt.errors import CancelledError, DeadlineError
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, error_of, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.waiting import until

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)


def steps(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + value


@pytest.fixture
def gate() -> Gate:
    return Gate(WAIT_S)


@pytest.fixture
def engine(gate: Gate) -> Iterator[Engine]:
    with small_engine() as made:
        made.register(CHAIN, warm_up=False)
        made.register(gate.unfolder, warm_up=False)
        yield made
        made.check()


def test_a_future_that_nobody_waited_for_has_its_results(engine):
    future = engine.submit("chain", steps(3))
    until(future.done, "it has ended")
    assert_same(future.result(), run_one_by_one(CHAIN, steps(3)))


def test_a_callback_is_called_once_whenever_it_is_added(engine, gate):
    called: list[object] = []
    early, late = engine.submit("gate", torch.ones(WIDTH)), engine.submit("chain", steps(1))
    early.add_done_callback(called.append)
    assert gate.entered.wait(WAIT_S)
    gate.open.set()
    until(lambda: called == [early], "the first callback was called")
    until(late.done, "the other has ended")
    late.add_done_callback(called.append)
    assert called == [early, late]


def test_several_threads_wait_for_one_request(engine, gate):
    future = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = [pool.submit(future.result, WAIT_S) for _ in range(3)]
        until(lambda: len(future._sleepers) == 3, "all wait")
        gate.open.set()
        for result in results:
            assert_same(result.result(WAIT_S), future.result())


def test_who_gave_up_waiting_may_wait_again(engine, gate):
    future = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    gate.open.set()
    assert future.result(WAIT_S)


def test_a_thread_that_waits_is_told_of_a_cancellation(engine, gate):
    future = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(future.result, WAIT_S)
        until(lambda: bool(future._sleepers), "it waits")
        assert future.cancel()
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
    gate.open.set()


def test_one_that_has_ended_cannot_be_cancelled(engine):
    future = engine.submit("chain", steps(2))
    until(future.done, "it has ended")
    assert not future.cancel()
    assert_same(future.result(), run_one_by_one(CHAIN, steps(2)))


def test_the_ways_of_concurrent_futures_and_asyncio_wait_for_them(engine):
    futures = [engine.submit("chain", steps(1 + k % 3, k)) for k in range(6)]
    done, _ = concurrent.futures.wait(futures[:3], WAIT_S)
    assert done == set(futures[:3])

    async def wait() -> list[dict[str, torch.Tensor]]:
        return [await future for future in futures[3:]]

    for k, result in enumerate(asyncio.run(wait()), 3):
        assert_same(result, run_one_by_one(CHAIN, steps(1 + k % 3, k)))


def test_what_was_answered_is_counted_before_anybody_reads_the_counts(engine):
    for k in range(1, 40):
        engine.submit("chain", steps(1)).result(WAIT_S)
        counts = engine.statistics()
        assert (counts["done"], counts["unfinished"]) == (k, 0)


def test_a_place_is_free_again_as_soon_as_its_client_has_the_results():
    with small_engine(max_queue=1) as engine:
        engine.register(CHAIN, warm_up=False)
        for k in range(50):
            assert_same(engine.submit("chain", steps(2, k)).result(WAIT_S), run_one_by_one(CHAIN, steps(2, k)))


def test_one_with_a_deadline_is_answered_without_python_or_late(engine, gate):
    for k in range(40):
        result = engine.submit("chain", steps(3, k), deadline=WAIT_S).result(WAIT_S)
        assert_same(result, run_one_by_one(CHAIN, steps(3, k)))
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    late = [engine.submit("chain", steps(2), **{which: 0.02}) for which in ("deadline", "schedule_by")]
    for future in late:
        assert isinstance(error_of(future), DeadlineError)
    assert not held.done()
    gate.open.set()
    assert held.result(WAIT_S)
    assert not len(engine._manager.requests._deadlines) or engine.drain(WAIT_S)


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_one_of_a_bulk_is_told_though_another_is_held(engine, gate, is_asked_before):
    futures = engine.submit_many("gate", [torch.zeros(WIDTH), torch.ones(WIDTH)])
    first = futures[0] if is_asked_before else None
    assert gate.entered.wait(WAIT_S)
    assert (first or futures[0]).result(WAIT_S)
    assert not futures[1].done()
    gate.open.set()
    assert futures[1].result(WAIT_S)


def test_a_bulk_wakes_its_client_when_the_last_has_ended(engine):
    for count in (2, 40, 300):
        requests = [steps(1 + k % 3, k % 7) for k in range(count)]
        for request, result in zip(requests, engine.submit_many("chain", requests).results(WAIT_S), strict=True):
            assert_same(result, run_one_by_one(CHAIN, request))
    assert engine.statistics()["unfinished"] == 0
