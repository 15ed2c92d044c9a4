"""Streams: every result comes, however the stream is read, and reading on after the end ends."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
import torch

import cellrt
from cellrt.definition.define import cell
from cellrt.engine.together import NOTHING, SMALL_BYTES, STEP_BYTES, Part, Together
from cellrt.errors import CancelledError, CellError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, Door, Gate, make_cells

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


def test_steps_before_the_task_that_fails_come_before_its_error():
    engine = small_engine(settings=cellrt.SchedulerSettings(runs=False))

    def count(left: torch.Tensor) -> dict[str, torch.Tensor]:
        if (left == 2).any():
            raise ValueError("two")
        return {"left": left - 1, "stop": left <= 1}

    cell = cellrt.cell(count, {"left": cellrt.token}, name="count")

    def unfold(graph, number):
        return {"left": graph.loop(cell, left=number, until="stop", max_steps=9).left}

    engine.register(Unfolder("count", unfold, 1))
    stream = engine.stream("count", 5)
    assert [int(next(stream)["left"]) for _ in range(3)] == [4, 3, 2]
    with pytest.raises(CellError, match="two"):
        next(stream)
    close_and_check(engine)


def test_streams_of_many_shapes_are_read_side_by_side(engine):
    lengths = [1, 4, 2, 3, 4, 1]
    streams = [engine.stream("both", STEPS[:length]) for length in lengths]
    for length, stream in zip(lengths, streams):
        *steps, end = stream
        expected = run_one_by_one(BOTH, STEPS[:length])
        assert_same({"h": torch.stack([step["h"] for step in steps])}, {"h": expected["h"]})
        assert_same(end, {"last": expected["last"]})


async def test_tasks_that_read_streams_of_one_loop_get_each_its_own(engine):
    async def read(length: int) -> list[dict[str, torch.Tensor]]:
        return [item async for item in engine.stream("both", STEPS[:length])]

    async with asyncio.timeout(WAIT_S):
        every = await asyncio.gather(*(read(length) for length in (4, 2, 4, 1)))
    assert [len(items) for items in every] == [5, 3, 5, 2]
    assert_same(every[1][-1], {"last": run_one_by_one(BOTH, STEPS[:2])["last"]})


@pytest.mark.parametrize("width", [1, STEP_BYTES, SMALL_BYTES])
def test_a_stream_that_was_read_still_has_its_result_however_large(engine, width):
    cell = cellrt.cell(lambda x, h: {"h": x + h}, {"x": (width,), "h": (width,)}, name="wide")

    def unfold(graph, x):
        chain = graph.chain(cell, x=x)
        return {"h": chain.h, "last": chain.last.h}

    model = Unfolder("wide", unfold, torch.zeros(2, width))
    engine.register(model, warm_up=False)
    x = torch.arange(3.0)[:, None].expand(3, width)
    stream = engine.stream("wide", x)
    *steps, end = stream
    expected = run_one_by_one(model, x)
    assert_same({"h": torch.stack([step["h"] for step in steps]), **end}, expected)
    end["last"].zero_()
    assert_same(stream.result(WAIT_S), expected)


async def test_tasks_that_share_a_stream_share_the_items_and_all_come_to_the_end(engine):
    gate = Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    stream = engine.stream("both", STEPS)

    async def read() -> int:
        return len([item async for item in stream])

    async with asyncio.timeout(WAIT_S):
        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)  # all wait by now
        gate.open.set()
        counts = await asyncio.gather(*readers)
    assert sum(counts) == 5
    held.result(WAIT_S)


class Memory(bytearray):
    """One that can be watched."""


def test_a_step_that_was_read_is_not_kept_for_those_who_read_later():
    steps = [Memory(2 * STEP_BYTES) for _ in range(2)]
    first = weakref.ref(steps[0])
    part = Part("h", NOTHING, [memoryview(step) for step in steps], (), torch.float32, (-1,), 4)
    together = Together([part])
    del steps
    assert together.of(0)["h"].shape == (STEP_BYTES // 2,)
    assert first() is None
    assert together.bytes_of(1)[0][:2] == (0, STEP_BYTES // 2)


def test_who_gave_up_waiting_in_a_loop_that_closed_does_not_end_the_stream_for_others() -> None:
    gate = Gate(WAIT_S)
    door = cell(Door(gate), {"x": (WIDTH,)}, name="door", max_batch=1)
    model = Unfolder("gated", lambda graph, x: {"h": graph.chain(RUNS, x=[door(x=x[0]), x[1]]).h}, STEPS)
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        stream = engine.stream("gated", torch.ones(2, WIDTH))
        assert gate.entered.wait(WAIT_S)

        async def wait_shortly() -> None:
            await asyncio.wait_for(anext(stream), 0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(wait_shortly())
        gate.open.set()
        assert len(list(stream)) == 2


@pytest.mark.parametrize("wrong", ["16", 0, 2.5, True])
def test_an_allowance_of_unread_steps_that_makes_no_sense_is_refused(engine, wrong):
    with pytest.raises(RequestError, match="max_unread: expected a positive integer"):
        engine.stream("last", STEPS, max_unread=wrong)
    assert_same(engine.submit("last", STEPS).result(WAIT_S), run_one_by_one(LAST, STEPS))
