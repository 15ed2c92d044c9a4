"""What coroutines of one loop ask between two of its rounds is handed in together, and comes out as if it were not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cellrt.engine.engine import Engine
from cellrt.errors import CellrtError, OverloadError, RequestError, SessionError, UnknownModelError
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, small_engine
from tests.process import models
from tests.process.helpers import start, steps
from tests.steps import WIDTH

MANY = 20


@pytest.fixture(scope="module", params=[small_engine, start], ids=["here", "apart"])
def engine(request) -> Iterator[Any]:
    with request.param(max_queue=MANY) as made:
        made.register(models.chain, warm_up=False)
        made.register(models.kept, warm_up=False)
        yield made


@pytest.fixture
def bulks(engine, monkeypatch) -> list[int]:
    """How many requests were handed in together, each time."""
    counts: list[int] = []
    submit = engine._submit_collected

    def counted(model, requests, *how):
        counts.append(len(requests))
        return submit(model, requests, *how)

    monkeypatch.setattr(engine, "_submit_collected", counted)
    return counts


async def all_of(asked: list[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), WAIT_S)


async def test_those_of_many_coroutines_go_together(engine, bulks):
    expected = engine.submit("chain", steps(3)).result(WAIT_S)["last"]
    results = await all_of([engine.infer("chain", steps(3)) for _ in range(MANY)])
    assert bulks == [MANY] and all(torch.equal(result["last"], expected) for result in results)


async def test_those_of_many_sessions_go_together(engine, bulks):
    sessions = [engine.session("kept") for _ in range(MANY)]
    first = await all_of([session.infer(steps(1)) for session in sessions])
    second = await all_of([session.infer(steps(1)) for session in sessions])
    assert bulks == [MANY] * 2 * isinstance(engine, Engine)  # of another process each goes by itself, in its order
    assert all(torch.equal(one["last"], first[0]["last"]) for one in first)
    assert not torch.equal(first[0]["last"], second[0]["last"])
    for session in sessions:
        session.close()


async def test_those_of_one_session_go_in_their_order(engine):
    together, apart = engine.session("kept"), engine.session("kept")
    asked = [steps(1, float(number)) for number in range(5)]
    expected = [apart.submit(x).result(WAIT_S)["last"] for x in asked]
    results = await all_of([together.infer(x, priority=number % 2) for number, x in enumerate(asked)])
    assert all(torch.equal(result["last"], one) for result, one in zip(results, expected))


@pytest.mark.parametrize("between", ["reset", "submit", "export"])
async def test_what_is_called_later_comes_later(engine, between):
    session, other = engine.session("kept"), engine.session("kept")
    expected = other.submit(steps(1)).result(WAIT_S)["last"]
    first = asyncio.create_task(session.infer(steps(1)))
    await asyncio.sleep(0)  # the task has asked, and the loop has not come round
    if between == "reset":
        session.reset()
        assert torch.equal((await session.infer(steps(1)))["last"], expected)
    elif between == "submit":
        second = session.submit(steps(1))
        assert not torch.equal(second.result(WAIT_S)["last"], expected)
    else:
        again = engine.session("kept", state=session.export())
        assert not torch.equal(again.submit(steps(1)).result(WAIT_S)["last"], expected)
    assert torch.equal((await first)["last"], expected)


async def test_each_hears_of_its_own_mistake(engine):
    wrong = [number % 4 == 1 for number in range(8)]
    asked = [engine.infer("chain", torch.ones(2, WIDTH + is_wrong)) for is_wrong in wrong]
    found = await all_of(asked)
    assert [isinstance(one, RequestError) for one in found] == wrong
    assert all(isinstance(one, dict) for one, is_wrong in zip(found, wrong) if not is_wrong)


async def test_as_many_as_have_places_are_taken(engine):
    found = await all_of([engine.infer("chain", steps(200)) for _ in range(MANY + 5)])
    refused = [one for one in found if isinstance(one, CellrtError)]
    assert {type(one) for one in refused} <= {OverloadError} and len(refused) <= 5


async def test_a_session_that_is_closed_fails_alone(engine):
    sessions = [engine.session("kept") for _ in range(4)]
    sessions[2].close()
    found = await all_of([session.infer(steps(1)) for session in sessions])
    assert [isinstance(one, SessionError) for one in found] == [False, False, True, False]


async def test_who_is_cancelled_before_is_never_handed_in(engine, bulks):
    tasks = [asyncio.create_task(engine.infer("chain", steps(2))) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await all_of(tasks)
    assert bulks == [3] and [isinstance(one, asyncio.CancelledError) for one in found] == [True, False] * 3
    assert engine.drain(WAIT_S)


def test_loops_of_several_threads_do_not_mix(engine):
    def ask() -> bool:
        async def go() -> list[Any]:
            return await all_of([engine.infer("chain", steps(1)) for _ in range(5)])

        return all(isinstance(result, dict) for _ in range(5) for result in asyncio.run(go()))

    async def many() -> list[bool]:
        return await asyncio.gather(*[asyncio.to_thread(ask) for _ in range(3)])

    assert asyncio.run(asyncio.wait_for(many(), WAIT_S)) == [True] * 3


async def test_who_waits_for_a_place_comes_behind_what_was_asked_before(engine):
    session, other = engine.session("kept"), engine.session("kept")
    expected = [other.submit(steps(1)).result(WAIT_S)["last"] for _ in range(2)]
    found = await all_of([session.infer(steps(1)), session.infer(steps(1), wait=True)])
    assert all(torch.equal(result["last"], one) for result, one in zip(found, expected))


async def test_two_handles_of_one_session_go_in_order(engine):
    first, second = engine.session("kept", "twice"), engine.session("kept", "twice")
    other = engine.session("kept")
    expected = [other.submit(steps(1)).result(WAIT_S)["last"] for _ in range(2)]
    found = await all_of([first.infer(steps(1), deadline=WAIT_S), second.infer(steps(1))])
    assert all(torch.equal(result["last"], one) for result, one in zip(found, expected))
    first.close()


async def test_a_wrong_argument_is_told_to_who_gave_it(engine):
    found = await all_of(
        [
            engine.infer("chain", steps(1), deadline=True),
            engine.infer("chain", steps(1), deadline=1.0, priority=1),
            engine.infer("chain", steps(1), deadline=1.0, priority=[1]),
            engine.infer(["chain"], steps(1)),
        ]
    )
    assert [type(one) for one in found] == [RequestError, dict, RequestError, UnknownModelError]


class PanicError(BaseException):
    """What some extension modules raise."""


async def test_whatever_an_unfolder_raises_nobody_waits_for_ever():
    def unfold(graph: Any, x: Any) -> Any:
        if x.shape[0] == 3:
            raise PanicError
        return models.chain.function(graph, x)

    with small_engine() as engine:
        engine.register(Unfolder("panics", unfold, steps(2)), warm_up=False)
        engine.register(models.kept, warm_up=False)
        session = engine.session("kept")
        found = await all_of(
            [engine.infer("panics", steps(3)), engine.infer("panics", steps(3)), session.infer(steps(1))]
        )
        assert [type(one) for one in found] == [PanicError, PanicError, dict]


async def test_a_loop_that_drains_has_handed_in_what_its_coroutines_asked(engine):
    task = asyncio.create_task(engine.infer("chain", steps(1)))
    await asyncio.sleep(0)
    assert engine.drain(WAIT_S)
    await asyncio.sleep(0.01)
    assert task.done() and task.result()
