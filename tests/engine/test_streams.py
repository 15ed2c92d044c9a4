"""Streams: every result comes, however the stream is read, and reading on after the end ends."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from cellrt.errors import CancelledError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, make_cells

_, RUNS, _ = make_cells()
STEPS = torch.ones(4, WIDTH) * torch.arange(1, 5)[:, None]
LAST = Unfolder("last", lambda graph, x: {"last": graph.chain(RUNS, x=x).last.h}, torch.zeros(2, WIDTH))
BOTH = Unfolder(
    "both",
    lambda graph, x: {"last": (chain := graph.chain(RUNS, x=x)).last.h, "h": chain.h},
    torch.zeros(2, WIDTH),
)


@pytest.fixture
def engine():
    made = small_engine()
    for model in (LAST, BOTH):
        made.register(model, warm_up=False)
    yield made
    close_and_check(made)


def test_results_without_steps_come_together_at_the_end(engine):
    assert_same(dict(*list(engine.stream("last", STEPS))), run_one_by_one(LAST, STEPS))
    *steps, end = engine.stream("both", STEPS)
    expected = run_one_by_one(BOTH, STEPS)
    assert_same({"h": torch.stack([step["h"] for step in steps])}, {"h": expected["h"]})
    assert_same(end, {"last": expected["last"]})


def test_longer_results_give_their_further_steps_after_the_shortest(engine):
    def unfold(graph, x):
        return {"long": graph.chain(RUNS, x=x).h, "short": graph.chain(RUNS, x=x[:2]).h}

    model = Unfolder("uneven", unfold, torch.zeros(3, WIDTH))
    engine.register(model, warm_up=False)
    items, expected = list(engine.stream("uneven", STEPS)), run_one_by_one(model, STEPS)
    assert [sorted(item) for item in items] == [["long", "short"]] * 2 + [["long"]] * 2
    for name, value in expected.items():
        assert_same({name: torch.stack([item[name] for item in items if name in item])}, {name: value})


def test_next_gives_one_item(engine):
    stream = engine.stream("both", STEPS)
    assert_same(next(stream), {"h": run_one_by_one(BOTH, STEPS)["h"][0]})
    assert_same(stream.result(WAIT_S), run_one_by_one(BOTH, STEPS))


def test_a_stream_that_is_over_stays_over(engine):
    stream = engine.stream("both", STEPS)
    assert len(list(stream)) == 5
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)


async def test_an_awaited_stream_that_is_over_stays_over(engine):
    stream = engine.stream("both", STEPS)
    async with asyncio.timeout(WAIT_S):
        assert len([item async for item in stream]) == 5
        assert [item async for item in stream] == []


def test_two_readers_share_the_items_and_both_come_to_the_end(engine):
    stream = engine.stream("both", STEPS)
    read: list[object] = []
    threads = [threading.Thread(target=lambda: read.extend(stream)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(read) == 5


def test_a_cancelled_stream_raises(engine):
    gate = Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    stream = engine.stream("both", STEPS)
    stream.close()
    with pytest.raises(CancelledError):
        list(stream)
    gate.open.set()
    held.result(WAIT_S)
