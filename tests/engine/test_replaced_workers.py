"""A CPU worker that dies of a fault of its own is replaced: what it ran fails once, everything else goes on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.errors import DeviceError, EngineClosedError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import DIE, WIDTH, chain_model, let_rows_kill, loop_model, make_cells

PLAIN, RUNS, COUNT = make_cells()
CHAIN, LOOP = chain_model("chain", RUNS), loop_model("loop", COUNT)
KEPT = Unfolder("kept", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x).h}, torch.zeros(2, WIDTH))
STEPS, DEADLY = torch.ones(3, WIDTH), torch.full((1, WIDTH), DIE)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_next_request_is_served(monkeypatch, workers):
    let_rows_kill(monkeypatch, forever=False)
    engine = small_engine(workers)
    engine.register(CHAIN, warm_up=False)
    for _ in range(5):
        error = error_of(engine.submit("chain", DEADLY))
        assert type(error) is DeviceError and isinstance(error.__cause__, SystemExit)
        assert_same(engine.submit("chain", STEPS).result(WAIT_S), run_one_by_one(CHAIN, STEPS))
    engine.check()
    close_and_check(engine)


def test_sessions_keep_their_state(monkeypatch):
    let_rows_kill(monkeypatch, forever=False)
    engine = small_engine()
    for model in (CHAIN, KEPT):
        engine.register(model, warm_up=False)
    session, state = engine.session("kept"), []
    for _ in range(2):
        assert_same(session.submit(STEPS).result(WAIT_S), run_one_by_one(KEPT, STEPS, state))
        assert type(error_of(engine.submit("chain", DEADLY))) is DeviceError
    assert_same(session.submit(STEPS).result(WAIT_S), run_one_by_one(KEPT, STEPS, state))
    close_and_check(engine)


def test_a_worker_that_dies_again_and_again_is_given_up(monkeypatch):
    let_rows_kill(monkeypatch, forever=False)
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    ends = []
    for _ in range(20):
        try:
            ends.append(type(error_of(engine.submit("chain", DEADLY))))
        except EngineClosedError:
            break
    else:
        pytest.fail("a worker that never completes a task is replaced for ever")
    assert set(ends) == {DeviceError} and len(ends) == 4
    close_and_check(engine)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(20))
@given(
    deadly=st.lists(st.booleans(), min_size=1, max_size=16),
    lengths=st.lists(st.integers(1, 6), min_size=16, max_size=16),
    workers=st.integers(1, 2),
)
def test_only_what_a_dead_worker_had_begun_fails(deadly, lengths, workers):
    with pytest.MonkeyPatch.context() as monkeypatch:
        let_rows_kill(monkeypatch, forever=False)
        engine = small_engine(workers)
        engine.register(CHAIN, warm_up=False)
        try:
            for is_deadly, length in zip(deadly, lengths):
                x = torch.ones(length, WIDTH)
                if is_deadly:
                    x[-1] = DIE
                outcome = engine.submit("chain", x)
                if is_deadly:
                    assert type(error_of(outcome)) is DeviceError
                    assert_same(engine.submit("chain", STEPS).result(WAIT_S), run_one_by_one(CHAIN, STEPS))
                else:
                    assert_same(outcome.result(WAIT_S), run_one_by_one(CHAIN, x))
            engine.check()
        finally:
            close_and_check(engine)
