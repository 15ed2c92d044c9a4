"""Many requests with a bounded number in flight, and coroutines that wait for places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from cellrt.errors import CellError, CellrtError, DeadlineError, EngineClosedError, OverloadError, RequestError
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import RAISE, WIDTH, Gate, chain_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)
BAD = torch.full((2, WIDTH), RAISE)


def request(number: int) -> torch.Tensor:
    return torch.full((1 + number % 5, WIDTH), number / 8)


@pytest.fixture
def engine():
    made = small_engine(2, max_queue=40)
    made.register(CHAIN, warm_up=False)
    yield made
    close_and_check(made)


class Counted:
    """Requests one by one, with the most that were taken beyond those whose results were seen."""

    def __init__(self, count: int) -> None:
        self.count, self.num_taken, self.num_seen, self.most = count, 0, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            self.num_taken += 1
            self.most = max(self.most, self.num_taken - self.num_seen)
            yield request(number)


@pytest.mark.parametrize("in_flight", [1, 7, 39, 200])
def test_results_come_in_the_order_of_the_requests_and_few_are_in_flight(engine, in_flight):
    source = Counted(150)
    for number, result in enumerate(engine.map("chain", source, max_in_flight=in_flight)):
        assert_same(result, run_one_by_one(CHAIN, request(number)))
        source.num_seen += 1
    assert source.num_seen == 150
    assert source.most <= in_flight
    assert engine.statistics()["done"] == 150


def test_as_they_come_each_comes_once_with_its_number(engine):
    seen = {}
    for number, result in engine.map("chain", Counted(99), max_in_flight=16, ordered=False):
        assert number not in seen
        assert_same(result, run_one_by_one(CHAIN, request(number)))
        seen[number] = result
    assert sorted(seen) == list(range(99))


async def test_the_same_for_a_coroutine_from_either_kind_of_iterable(engine):
    async def requests():
        for number in range(50):
            await asyncio.sleep(0)
            yield request(number)

    for source in (requests(), Counted(50)):
        number = 0
        async for result in engine.map_async("chain", source, max_in_flight=8):
            assert_same(result, run_one_by_one(CHAIN, request(number)))
            number += 1
        assert number == 50
    pairs = [pair async for pair in engine.map_async("chain", Counted(50), max_in_flight=8, ordered=False)]
    assert sorted(number for number, _ in pairs) == list(range(50))


def with_bad(*bad: int) -> Iterator[object]:
    """Requests of which some fail: in a cell, or already when they are unfolded."""
    for number in range(20):
        yield (BAD if number % 2 else "no request") if number in bad else request(number)


def test_an_error_is_raised_at_its_place_and_ends_the_rest(engine):
    results = engine.map("chain", with_bad(4, 9))
    for number in range(4):
        assert_same(next(results), run_one_by_one(CHAIN, request(number)))
    with pytest.raises(RequestError):
        next(results)
    assert list(results) == []
    assert engine.drain(WAIT_S)


@pytest.mark.parametrize("ordered", [True, False])
def test_errors_as_items(engine, ordered):
    items = list(engine.map("chain", with_bad(4, 9), return_errors=True, ordered=ordered))
    by_number = dict(enumerate(items)) if ordered else dict(items)
    assert len(by_number) == 20
    errors = {number: type(item) for number, item in by_number.items() if isinstance(item, CellrtError)}
    assert errors == {4: RequestError, 9: CellError}


def test_leaving_the_iteration_cancels_what_is_in_flight():
    gate = Gate(WAIT_S)
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    results = engine.map("gate", [torch.ones(WIDTH)] * 8, max_in_flight=8)
    gate.open.set()
    next(results)
    results.close()
    assert engine.drain(WAIT_S)
    counts = engine.statistics()
    assert counts["done"] + counts["errors"].get("CancelledError", 0) == 8
    close_and_check(engine)


def test_a_bar_is_shown_when_asked_for(engine, capsys):
    assert len(list(engine.map("chain", [request(1)] * 3, progress="words"))) == 3
    shown = capsys.readouterr().err
    assert "words" in shown
    assert "3/3" in shown
    assert len(list(engine.map("chain", [request(1)] * 3))) == 3
    assert capsys.readouterr().err == ""


def test_wrong_arguments_are_named(engine):
    with pytest.raises(RequestError, match="max_in_flight"):
        engine.map("chain", [], max_in_flight=0)
    with pytest.raises(RequestError, match="iterable of requests, got int"):
        engine.map("chain", 3)
    with pytest.raises(RequestError, match="iterable of requests, got int"):
        engine.map_async("chain", 3)


async def test_a_map_in_a_callback_raises_instead_of_waiting_for_itself():
    gate = Gate(WAIT_S)
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    raised = []

    def callback(_):
        try:
            list(engine.map("gate", [torch.ones(WIDTH)]))
        except RequestError as error:
            raised.append(error)

    engine.submit("gate", torch.ones(WIDTH)).add_done_callback(callback)
    gate.open.set()
    assert engine.drain(WAIT_S)
    assert "callback" in str(raised[0])
    close_and_check(engine)


async def test_coroutines_wait_for_places_in_their_order():
    gate = Gate(WAIT_S)
    engine = small_engine(max_queue=2)
    engine.register(gate.unfolder, warm_up=False)
    x = torch.ones(WIDTH)
    order: list[int] = []

    async def ask(number: int) -> None:
        await engine.infer("gate", x, wait=True)
        order.append(number)

    tasks = [asyncio.create_task(ask(number)) for number in range(12)]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadError):
        engine.submit("gate", x)
    with pytest.raises(DeadlineError):
        await engine.infer("gate", x, wait=True, deadline=0.02)
    tasks[5].cancel()
    gate.open.set()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    assert order == [number for number in range(12) if number != 5]
    close_and_check(engine)


async def test_who_waits_for_a_place_is_told_when_the_engine_closes():
    gate = Gate(WAIT_S)
    engine = small_engine(max_queue=1)
    engine.register(gate.unfolder, warm_up=False)
    first = engine.submit("gate", torch.ones(WIDTH))
    task = asyncio.create_task(engine.infer("gate", torch.ones(WIDTH), wait=True))
    await asyncio.sleep(0.02)
    closing = asyncio.get_running_loop().run_in_executor(None, engine.close)
    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(task, WAIT_S)
    gate.open.set()
    await closing
    assert isinstance(first.error(), EngineClosedError)


class SourceError(Exception):
    """Of a source of requests."""


@pytest.mark.parametrize("ordered", [True, False])
def test_a_slow_source_is_not_asked_for_more_while_there_are_results(engine, ordered):
    source = Counted(60)
    for _ in engine.map("chain", (time.sleep(0.003) or each for each in source), ordered=ordered):
        source.num_seen += 1
    assert source.num_seen == 60
    assert source.most < 30


def raising(count: int) -> Iterator[torch.Tensor]:
    yield from map(request, range(count))
    raise SourceError


@pytest.mark.parametrize("count", [0, 1, 10, 64, 100])
def test_what_a_source_gave_before_it_raised_is_answered_first(engine, count):
    seen = []
    with pytest.raises(SourceError):
        seen.extend(engine.map("chain", raising(count)))
    assert len(seen) == count


async def test_what_an_async_source_gave_before_it_raised_is_answered_first(engine):
    async def source():
        for each in range(70):
            yield request(each)
        raise SourceError

    seen = []
    with pytest.raises(SourceError):
        async for each in engine.map_async("chain", source()):
            seen.append(each)
    assert len(seen) == 70


async def test_requests_may_depend_on_results_before_them(engine):
    seen = asyncio.Semaphore(0)

    async def source():
        for number in range(5):
            yield request(number)
            await seen.acquire()

    async with asyncio.timeout(WAIT_S):
        count = 0
        async for _ in engine.map_async("chain", source()):
            count += 1
            seen.release()
    assert count == 5


async def test_an_async_source_ends_with_its_map(engine):
    ended = asyncio.Event()

    async def source():
        try:
            yield request(0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    results = engine.map_async("chain", source())
    async with asyncio.timeout(WAIT_S):
        await anext(results)
        await results.aclose()
        await ended.wait()


async def test_a_source_that_is_cancelled_ends_its_map(engine):
    async def source():
        yield request(0)
        raise asyncio.CancelledError

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(asyncio.CancelledError):
            async for _ in engine.map_async("chain", source()):
                pass


def test_requests_that_wait_together_have_one_deadline():
    gate = Gate(WAIT_S)
    engine = small_engine(max_queue=20)
    engine.register(gate.unfolder, warm_up=False)
    held = engine.submit_many("gate", [torch.ones(WIDTH)] * 20)
    start = time.monotonic()
    found = list(engine.map("gate", [torch.ones(WIDTH)] * 20, deadline=0.2, return_errors=True))
    assert time.monotonic() - start < 2  # not 20 times the deadline
    assert [type(error) for error in found] == [DeadlineError] * 20 and len(set(map(id, found))) == 20
    gate.open.set()
    held.results(WAIT_S)
    close_and_check(engine)
