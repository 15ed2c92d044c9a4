"""Clients of every sort: many threads, asyncio tasks, and streams that are read, awaited or left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import pytest
import torch

from cellrt.errors import CancelledError, CellError, EngineClosedError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import RAISE, WIDTH, Gate, chain_model, loop_model, make_cells

PLAIN, WITH_STEPS, COUNT = make_cells()
CHAIN, LOOP = chain_model("chain", PLAIN), loop_model("loop", COUNT)
KEPT = Unfolder("kept", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x).h}, torch.zeros(2, WIDTH))
STREAMED = Unfolder("streamed", lambda graph, x: {"h": graph.chain(WITH_STEPS, x=x).h}, torch.zeros(2, WIDTH))


def steps(count: int) -> torch.Tensor:
    return torch.ones(count, WIDTH) * torch.arange(1, count + 1)[:, None] / 8


@pytest.fixture
def engine():
    made = small_engine(2)
    for model in (CHAIN, LOOP, STREAMED):
        made.register(model, warm_up=False)
    yield made
    close_and_check(made)


def looped() -> Unfolder:
    def unfold(graph, request):
        loop = graph.loop(COUNT, max_steps=9, until="stop", x=request, at=99)
        return {"h": loop.h, "n": loop.n, "total": loop.last.n}

    return Unfolder("looped", unfold, torch.ones(WIDTH))


def test_many_threads_submit_at_once(engine):
    expected = {k: run_one_by_one(CHAIN, steps(k)) for k in range(1, 8)}
    barrier = threading.Barrier(8)
    problems: list[BaseException] = []

    def client(number: int) -> None:
        try:
            barrier.wait(WAIT_S)
            lengths = [1 + (number + k) % 7 for k in range(40)]
            for length in lengths[:10]:
                assert_same(engine.submit("chain", steps(length)).result(WAIT_S), expected[length])
            futures = [engine.submit("chain", steps(length)) for length in lengths[10:]]
            for length, future in zip(lengths[10:], futures):
                assert_same(future.result(WAIT_S), expected[length])
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert engine.statistics()["done"] == 320


def test_threads_register_while_others_submit(engine):
    future = engine.submit("chain", steps(3))
    models = [Unfolder(f"model{k}", CHAIN.function, CHAIN.example) for k in range(4)]
    threads = [threading.Thread(target=engine.register, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    future.result(WAIT_S)
    for model in models:
        assert_same(engine.submit(model.name, steps(3)).result(WAIT_S), run_one_by_one(CHAIN, steps(3)))


async def test_infer_from_many_tasks(engine):
    results = await asyncio.wait_for(
        asyncio.gather(*(engine.infer("chain", steps(1 + k % 7)) for k in range(50))), WAIT_S
    )
    for k, result in enumerate(results):
        assert_same(result, run_one_by_one(CHAIN, steps(1 + k % 7)))


async def test_a_future_can_be_awaited(engine):
    results = await asyncio.wait_for(asyncio.gather(*engine.submit_many("chain", [steps(2), steps(5)])), WAIT_S)
    assert_same(results[1], run_one_by_one(CHAIN, steps(5)))

    async def one() -> object:
        return await engine.submit("chain", torch.full((1, WIDTH), RAISE))

    with pytest.raises(CellError):
        await asyncio.wait_for(one(), WAIT_S)


async def test_infer_raises_the_requests_error(engine):
    with pytest.raises(CellError):
        await asyncio.wait_for(engine.infer("chain", torch.full((1, WIDTH), RAISE)), WAIT_S)
    with pytest.raises(RequestError):
        await engine.infer("chain", torch.zeros(2, WIDTH + 1))


async def test_cancelling_a_task_cancels_its_request():
    gate = Gate(WAIT_S)
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    task = asyncio.create_task(engine.infer("gate", torch.ones(WIDTH)))
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.check()  # a turn, in which the request is cancelled
    assert engine.statistics()["errors"] == {"CancelledError": 1}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.infer("chain", steps(2)), 0.01)
    gate.open.set()
    assert await asyncio.to_thread(engine.drain, WAIT_S)
    close_and_check(engine)


def test_a_stream_gives_every_step_once(engine):
    engine.register(looped(), warm_up=False)
    for model, request in (("streamed", steps(9)), ("looped", torch.ones(WIDTH))):
        unfolder = {"streamed": STREAMED, "looped": looped()}[model]
        expected = run_one_by_one(unfolder, request)
        stream = engine.stream(model, request)
        items = list(stream)
        if "total" in expected:
            assert_same(items.pop(), {"total": expected["total"]})
        names = {name for name in expected if name != "total"}
        assert all(item.keys() == names for item in items)
        assert_same(
            {name: torch.stack([item[name] for item in items]) for name in names}, {n: expected[n] for n in names}
        )
        assert_same(stream.future.result(WAIT_S), expected)


async def test_a_stream_can_be_awaited(engine):
    streams = [engine.stream("streamed", steps(1 + k)) for k in range(6)]

    async def read(stream) -> torch.Tensor:
        return torch.stack([item["h"] async for item in stream])

    results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), WAIT_S)
    for k, result in enumerate(results):
        assert_same({"h": result}, run_one_by_one(STREAMED, steps(1 + k)))


def test_a_stream_raises_the_requests_error(engine):
    request = steps(5)
    request[3] = RAISE
    with pytest.raises(CellError):
        list(engine.stream("streamed", request))


async def test_an_awaited_stream_raises_the_requests_error(engine):
    request = steps(5)
    request[0] = RAISE
    with pytest.raises(CellError):
        async with asyncio.timeout(WAIT_S):
            async for _ in engine.stream("streamed", request):
                pass


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_leaving_a_stream_cancels_its_request(how):
    gate = Gate(WAIT_S)
    engine = small_engine(1, queue_depth=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(STREAMED, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))  # so that the stream's request cannot end first
    assert gate.entered.wait(WAIT_S)
    stream = engine.stream("streamed", steps(4))
    future = stream.future
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert type(error_of(future)) is CancelledError
    gate.open.set()
    held.result(WAIT_S)
    close_and_check(engine)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_in_a_forked_process_an_engine_refuses_and_is_never_waited_for(engine):
    long = torch.ones(2000, WIDTH) / 8
    under_way, streamed = engine.submit_many("chain", [long] * 2), engine.stream("streamed", long)
    gate = engine._manager.turns.gate
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with gate:
            held.set()
            over.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(WAIT_S)
    calls = (
        lambda: engine.submit("chain", steps(1)),
        lambda: asyncio.run(engine.infer("chain", steps(1), wait=True)),
        lambda: list(engine.map("chain", [steps(1)])),
        lambda: engine.session("chain"),
        lambda: engine.register(looped()),
        under_way[0].result,
        under_way.results,
        lambda: list(streamed),
    )
    if (pid := os.fork()) == 0:
        signal.alarm(int(WAIT_S))  # a process that hangs ends by it
        refused = 0
        try:
            for call in calls:
                with pytest.raises(EngineClosedError, match="make an engine in each process"):
                    call()
                refused += 1
        finally:
            os._exit(refused)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls)
    finally:
        over.set()
    holder.join()
    streamed.close()
    assert_same(under_way[0].result(WAIT_S), run_one_by_one(CHAIN, long))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_block_of_an_engine_in_peace_and_the_parent_goes_on(engine):
    engine.register(KEPT, warm_up=False)
    session = engine.session("kept")
    under_way = engine.submit("chain", torch.ones(2000, WIDTH) / 8)
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(WAIT_S))  # a process that hangs ends by it
        status = 1
        try:
            with engine:
                session.close()
            engine.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert_same(under_way.result(WAIT_S), run_one_by_one(CHAIN, torch.ones(2000, WIDTH) / 8))
    session.submit(torch.ones(1, WIDTH)).result(WAIT_S)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_an_engine_has_no_workers_in_a_forked_process(engine):
    if (pid := os.fork()) == 0:
        status = 2
        try:
            status = int(engine.has_workers())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.has_workers()
