"""The next requests of many sessions, handed in together: each goes on from its own state, whoever else is there."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.definition.define import cell
from cellrt.engine.futures import Futures
from cellrt.engine.session import Session
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import CancelledError, CellError, RequestError, RequestTooLargeError, SessionError, UnknownModelError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import RAISE, WIDTH, Door, Gate, make_cells

PLAIN, WITH_STEPS, _ = make_cells()


def keeping(name: str, made: Any, key: Any = None) -> Unfolder:
    """A chain that keeps its state; the request is ``[steps, 2]``."""
    example = torch.zeros(2, WIDTH)
    return Unfolder(name, lambda graph, x: {"h": graph.chain(made, keep=True, x=x).h}, example, key=key)


MODELS = [keeping("plain", PLAIN), keeping("keyed", WITH_STEPS, key=len)]


def step(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, WIDTH), value)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 16), workers=st.integers(1, 3), resident=st.sampled_from([None, 0, 2]))
def test_each_goes_on_from_its_own_state(model: Unfolder, seed: int, workers: int, resident: int | None) -> None:
    """Rounds of some sessions, which may be busy or evicted; requests of several lengths, of which some fail."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    engine = small_engine(workers, sessions=SessionLimits(max_resident=resident), arena_bytes=1 << 14, debug=True)
    engine.register(model, warm_up=False)
    sessions: list[tuple[Session, list[Any]]] = [(engine.session(model.name), []) for _ in range(draw.randint(1, 6))]
    waiting = []
    for _ in range(draw.randint(1, 8)):
        its = draw.sample(sessions, draw.randint(1, len(sessions)))
        longest = draw.choice((1, 3))
        requests = [torch.randn(draw.randint(1, longest), WIDTH) for _ in its]
        fails = [draw.random() < 0.1 for _ in its]
        for x, wrong in zip(requests, fails):
            x[0, 0] = RAISE if wrong else x[0, 0]
        futures = engine.submit_many(model.name, requests, sessions=[session for session, _ in its])
        for future, x, wrong, (session, state) in zip(futures, requests, fails, its):
            waiting.append((future, None if wrong else run_one_by_one(model, x, state)))
            if draw.random() < 0.1:
                session.reset()
                state.clear()
    for future, expected in waiting:
        if expected is None:
            assert isinstance(error_of(future), CellError)
        else:
            assert_same(future.result(WAIT_S), expected)
    for session, _ in sessions:
        session.close()
    close_and_check(engine)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 16))
def test_those_that_are_cancelled_leave_the_others_and_their_sessions(seed: int) -> None:
    draw = random.Random(seed)
    engine = small_engine(2, debug=True)
    engine.register(MODELS[0], warm_up=False)
    sessions = [engine.session("plain") for _ in range(5)]
    for _ in range(4):
        futures = engine.submit_many("plain", [step() for _ in sessions], sessions=sessions)
        gone = draw.sample(range(5), draw.randint(0, 5))
        for number in gone:
            futures[number].cancel()
        for number, session in enumerate(sessions):
            error = error_of(futures[number])
            assert error is None or (number in gone and isinstance(error, CancelledError))
            session.reset()
    results = engine.submit_many("plain", [step() for _ in sessions], sessions=sessions).results(WAIT_S)
    assert all(result["h"].tolist() == [[1.0, 1.0]] for result in results)
    for session in sessions:
        session.close()
    close_and_check(engine)


def test_all_of_sessions_that_are_free_are_one_admission_and_one_task() -> None:
    with small_engine() as engine:
        engine.register(MODELS[1], warm_up=False)
        sessions = [engine.session("keyed") for _ in range(8)]
        for rounds in range(1, 4):
            engine.submit_many("keyed", [step()] * 8, sessions=sessions).results(WAIT_S)
            assert engine.statistics()["cells"]["AddWithSteps"]["tasks"] == rounds


def test_who_waits_for_its_session_holds_up_nobody_else() -> None:
    gate = Gate(WAIT_S)
    door = cell(Door(gate), {"x": (WIDTH,)}, name="door", max_batch=1)
    example = torch.zeros(1, WIDTH)
    gated = Unfolder("gated", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=[door(x=x[0])]).h}, example)
    with small_engine(2) as engine:
        engine.register(gated, warm_up=False)
        slow, *others = [engine.session("gated") for _ in range(4)]
        first = engine.submit_many("gated", [step(1.0), step(0.0)], sessions=[slow, others[0]])
        assert gate.entered.wait(WAIT_S)
        second = engine.submit_many("gated", [step(0.0)] * 4, sessions=[slow, *others])
        assert [second[number].result(WAIT_S)["h"][0, 0].item() for number in (1, 2, 3)] == [1.5, 1.0, 1.0]
        assert not first[0].done() and not second[0].done()
        gate.open.set()
        assert [result["h"][0, 0].item() for result in first.results(WAIT_S)] == [2.0, 1.0]
        assert second[0].result(WAIT_S)["h"][0, 0].item() == 2.0


def test_sessions_that_began_before_their_model_was_replaced_go_on_with_the_old_one() -> None:
    old = keeping("model", PLAIN)
    new = Unfolder("model", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x[:1]).h}, torch.zeros(2, WIDTH))
    with small_engine() as engine:
        engine.register(old, warm_up=False)
        before = engine.session("model", "before")
        engine.register(new, warm_up=False, replace=True)
        after = engine.session("model", "after")
        x = torch.ones(3, WIDTH)
        results = engine.submit_many("model", [x, x], sessions=[after, before]).results(WAIT_S)
        assert [len(result["h"]) for result in results] == [1, 3]
        assert engine.session("model", "before").submit(x).result(WAIT_S)["h"].shape == (
            3,
            WIDTH,
        )  # the one that is open
        with pytest.raises(RequestError, match="request 3 of 3"):
            engine.submit_many("model", [x, x, "x"], sessions=[after, before, engine.session("model")])
        engine.unregister("model")
        engine.register(new, warm_up=False)
        assert engine.session("model", "before").submit(x).result(WAIT_S)["h"].tolist() == [[1.0, 1.0]]  # a new one


def test_mistakes_are_named_and_nothing_is_submitted() -> None:
    with small_engine(max_queue=3) as engine, small_engine() as other:
        for each in (engine, other):
            each.register(MODELS[0], warm_up=False)
            each.register(MODELS[1], warm_up=False)
        one, two, strange, wrong = (
            engine.session("plain", "a"),
            engine.session("plain", "b"),
            other.session("plain"),
            engine.session("keyed"),
        )
        requests = [step(), step()]
        for sessions, told in (
            ([one], "one for each of 2 requests, got 1"),
            ([one, one], "is there twice, at indices 0 and 1"),
            ([one, engine.session("plain", "a")], "twice"),
            ([one, strange], r"sessions\[1\]: .* is one of another engine"),
            ([one, wrong], r"sessions\[1\]: .* not one of model 'plain'"),
            ([one, "b"], r"sessions\[1\]: .* got str"),
            (one, "one for each request, got Session"),
        ):
            with pytest.raises(RequestError, match=told):
                engine.submit_many("plain", requests, sessions=sessions)
        with pytest.raises(RequestError, match="x"):
            engine.submit_many("plain", [step(), torch.ones(1, 3)], sessions=[one, two])
        more = [engine.session("plain") for _ in range(2)]
        with pytest.raises(RequestTooLargeError, match="takes 3"):
            engine.submit_many("plain", [step()] * 4, sessions=[one, two, *more])
        two.close()
        with pytest.raises(SessionError, match="closed"):
            engine.submit_many("plain", requests, sessions=[one, two])
        assert len(engine.submit_many("plain", [], sessions=[])) == 0
        with pytest.raises(UnknownModelError):
            engine.submit_many("unknown", [], sessions=[])
        assert one.submit(step()).result(WAIT_S)["h"].tolist() == [[1.0, 1.0]]  # as a new session's


async def test_all_are_awaited_together() -> None:
    with small_engine() as engine:
        engine.register(MODELS[0], warm_up=False)
        sessions = [engine.session("plain") for _ in range(3)]
        futures = engine.submit_many("plain", [step(float(k)) for k in range(3)], sessions=sessions)
        assert isinstance(futures, Futures)
        results = await asyncio.wait_for(futures, WAIT_S)
        assert [result["h"][0, 0].item() for result in results] == [0.0, 1.0, 2.0]
        assert [result is future.result(0) for future, result in zip(futures, results)] == [True] * 3


async def test_a_task_that_awaits_all_and_is_cancelled_cancels_them() -> None:
    gate = Gate(WAIT_S)
    with small_engine() as engine:
        engine.register(gate.unfolder, warm_up=False)
        engine.register(MODELS[0], warm_up=False)
        blocker = engine.submit(gate.unfolder.name, torch.ones(WIDTH))
        assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
        futures = engine.submit_many("plain", [step()] * 2)

        async def wait() -> object:
            return await futures

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(future.cancelled() for future in futures)
        gate.open.set()
        assert await blocker is not None


async def test_the_first_error_is_raised_when_all_have_ended() -> None:
    with small_engine() as engine:
        engine.register(MODELS[0], warm_up=False)
        futures = engine.submit_many("plain", [step(), step(RAISE), step()])
        with pytest.raises(CellError):
            await futures
        assert all(future.done() for future in futures)


async def test_those_that_are_awaited_may_be_cancelled_by_hand() -> None:
    """The engine has not heard of it yet: the loop goes on meanwhile."""
    with small_engine() as engine:
        engine.register(MODELS[0], warm_up=False)
        with engine._manager.turns.held():  # no turn meanwhile: nothing ends by itself
            futures = engine.submit_many("plain", [step()] * 3)
            for future in futures:
                future.cancel()
            task = asyncio.create_task(futures._gather())
            await asyncio.sleep(0)
            engine._manager.turns.wake()
        with pytest.raises(CancelledError):
            await asyncio.wait_for(task, WAIT_S)


async def test_no_future_is_made_for_those_that_are_awaited_together() -> None:
    gate = Gate(WAIT_S)
    with small_engine() as engine:
        engine.register(gate.unfolder, warm_up=False)
        futures = engine.submit_many(gate.unfolder.name, [torch.ones(WIDTH)] * 4)
        task = asyncio.create_task(futures._gather())
        assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
        gate.open.set()
        assert len(await asyncio.wait_for(task, WAIT_S)) == 4
        ((outcomes, _),) = futures._parts
        assert not outcomes._futures
