"""A request that must begin by some time ends if it has not, and goes on if it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cellrt
from cellrt import DeadlineError, Engine, RequestError
from cellrt.core.state.settings import SchedulerSettings
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Door, Gate, chain_model, make_cells

PLAIN, *_ = make_cells(max_batch=1)
CHAIN = chain_model("chain", PLAIN)
SOON_S = 0.05
HELD, FREE, X = torch.ones(WIDTH), torch.zeros(WIDTH), torch.ones(1, WIDTH)


class HeldStep(Door):
    """A step that waits at a gate where its input is 1."""

    def __call__(self, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"h": h + super().__call__(x)}


@pytest.fixture
def gate() -> Gate:
    return Gate(WAIT_S)


@pytest.fixture
def engine(gate: Gate) -> Iterator[Engine]:
    """An engine whose worker has one task at a time, each of one row."""
    settings = SchedulerSettings(max_tasks_to_submit=1, runs=False)
    made = small_engine(1, queue_depth=1, settings=settings)
    made.register(gate.unfolder, warm_up=False, max_queue=4)
    made.register(CHAIN, warm_up=False)
    yield made
    gate.open.set()
    close_and_check(made)


def hold(engine: Engine, gate: Gate) -> cellrt.RequestFuture:
    """Have the worker inside the gate until it opens."""
    future = engine.submit("gate", HELD)
    assert gate.entered.wait(WAIT_S)
    return future


def test_what_has_not_begun_by_then_ends_and_what_waits_beside_it_goes_on(engine: Engine, gate: Gate) -> None:
    held, late = hold(engine, gate), engine.submit("chain", torch.ones(3, WIDTH), schedule_by=SOON_S)
    in_time = engine.submit("chain", torch.ones(3, WIDTH), schedule_by=WAIT_S)
    with pytest.raises(DeadlineError, match=r"model 'chain': not begun within 0\.05 s"):
        late.result(WAIT_S)
    assert not held.done()
    gate.open.set()
    assert in_time.result(WAIT_S)["last"].tolist() == [1.75] * WIDTH


def wait_until_over(engine: Engine) -> None:
    """Wait until the time by which what was submitted before had to begin is over."""
    with pytest.raises(DeadlineError):
        engine.submit("chain", X, schedule_by=2 * SOON_S).result(WAIT_S)


def test_what_has_begun_by_then_goes_on(engine: Engine, gate: Gate) -> None:
    begun = engine.submit("gate", HELD, schedule_by=SOON_S)
    assert gate.entered.wait(WAIT_S)
    wait_until_over(engine)
    assert not begun.done()
    gate.open.set()
    begun.result(WAIT_S)


def test_of_requests_that_go_together_each_must_begin(engine: Engine, gate: Gate) -> None:
    first, *others = engine.submit_many("gate", [HELD, FREE, FREE], schedule_by=SOON_S)
    for other in others:
        assert type(other.exception(WAIT_S)) is DeadlineError
    assert not first.done()
    gate.open.set()
    first.result(WAIT_S)


def test_what_has_begun_must_be_done_all_the_same(engine: Engine, gate: Gate) -> None:
    begun = engine.submit("gate", HELD, schedule_by=SOON_S, deadline=3 * SOON_S)
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(DeadlineError, match="not done within 0.15 s"):
        begun.result(WAIT_S)


def test_a_request_waits_for_a_place_no_longer_than_until_it_must_begin(engine: Engine, gate: Gate) -> None:
    hold(engine, gate)
    engine.submit_many("gate", [FREE] * 3)
    with pytest.raises(DeadlineError, match="waited for a place"):
        engine.submit("gate", FREE, schedule_by=SOON_S, deadline=WAIT_S, wait=True)


async def test_a_coroutine_waits_no_longer_either(engine: Engine, gate: Gate) -> None:
    hold(engine, gate)
    engine.submit_many("gate", [FREE] * 3)
    with pytest.raises(DeadlineError, match="waited for a place"):
        await engine.infer("gate", FREE, schedule_by=SOON_S, wait=True)


def test_a_request_of_a_session_waits_for_the_one_before_no_longer(gate: Gate) -> None:
    engine = small_engine(1, queue_depth=1)
    step = cellrt.cell(HeldStep(gate), {"x": (WIDTH,), "h": (WIDTH,)}, name="kept")
    kept = cellrt.Unfolder("kept", lambda graph, x: {"h": graph.chain(step, keep=True, x=x).last.h}, X)
    engine.register(kept, warm_up=False)
    session = engine.session("kept")
    first = session.submit(X)
    assert gate.entered.wait(WAIT_S)
    late, last = session.submit(torch.zeros(1, WIDTH), schedule_by=SOON_S), session.submit(torch.zeros(1, WIDTH))
    assert type(late.exception(WAIT_S)) is DeadlineError
    gate.open.set()
    first.result(WAIT_S)
    last.result(WAIT_S)
    session.close()
    close_and_check(engine)


def test_times_of_requests_that_have_ended_take_no_memory(engine: Engine) -> None:
    for _ in range(300):
        engine.submit("chain", X, schedule_by=WAIT_S, deadline=WAIT_S).result(WAIT_S)
    assert len(engine._manager.requests._deadlines) < 200


@pytest.mark.parametrize("schedule_by", [0, -1.0, float("nan"), "soon", True])
def test_what_is_no_time_is_refused(engine: Engine, schedule_by: object) -> None:
    with pytest.raises(RequestError, match="schedule_by"):
        engine.submit("chain", X, schedule_by=schedule_by)
