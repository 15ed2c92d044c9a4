"""What a session has after a request of it failed, was cancelled or left, and after its worker died."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellrt.errors import CancelledError, CellError, DeviceError, SessionError
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import SMALL, WAIT_S, close_and_check, error_of, small_engine
from tests.engine.models import DIE, RAISE, WIDTH, Gate, let_rows_kill
from tests.engine.test_sessions import LOOP, PLAIN, RUNS, WITH_STEPS, keeping, steps, sum_after


@pytest.mark.parametrize("made", [PLAIN, WITH_STEPS], ids=["plain", "steps"])
def test_a_request_that_fails_leaves_the_state_before_the_failure(made):
    engine = small_engine()
    model = keeping("model", made)
    engine.register(model, warm_up=False)
    session = engine.session("model")
    session.submit(steps(2)).result(WAIT_S)
    failing = session.submit(torch.cat([steps(1, RAISE), steps(3)]))
    after = session.submit(steps(1))
    with pytest.raises(CellError):
        failing.result(WAIT_S)
    assert torch.equal(after.result(WAIT_S)["h"][-1], sum_after(3))
    close_and_check(engine)


def test_a_cancelled_request_leaves_the_state_of_its_last_completed_step():
    gate = Gate(WAIT_S)
    engine = small_engine(1, queue_depth=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(RUNS, warm_up=False)
    session = engine.session("runs")
    session.submit(steps(2)).result(WAIT_S)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    cancelled, after = session.submit(steps(5)), session.submit(steps(1))
    assert cancelled.cancel()
    assert type(error_of(cancelled)) is CancelledError
    gate.open.set()
    assert torch.equal(after.result(WAIT_S)["h"][-1], sum_after(3))
    held.result(WAIT_S)
    close_and_check(engine)


def test_a_stream_that_is_left_keeps_the_steps_that_were_done():
    engine = small_engine()
    engine.register(Unfolder("endless", lambda g, x: {"n": g.loop(LOOP, max_steps=10_000, keep=True, x=x, at=-1).n},
                             torch.zeros(WIDTH)), warm_up=False)  # fmt: skip
    session = engine.session("endless")
    with session.stream(torch.ones(WIDTH)) as stream:
        seen = [int(step["n"]) for step, _ in zip(stream, range(3))]
    assert seen == [1, 2, 3]
    with session.stream(torch.ones(WIDTH)) as stream:
        assert int(next(iter(stream))["n"]) >= 4
    close_and_check(engine)


def test_a_dead_worker_ends_the_sessions_whose_state_it_had(monkeypatch):
    let_rows_kill(monkeypatch, forever=True)
    engine = small_engine(2)
    engine.register(RUNS, warm_up=False)
    sessions = [engine.session("runs") for _ in range(8)]
    for future in [session.submit(steps(1)) for session in sessions]:
        future.result(WAIT_S)
    assert isinstance(engine.submit("runs", steps(1, DIE)).exception(WAIT_S), DeviceError)
    outcomes = []
    for session in sessions:
        try:
            outcomes.append(torch.equal(session.submit(steps(1)).result(WAIT_S)["h"][-1], sum_after(2)))
        except SessionError as error:
            assert "lost its state" in str(error)
            outcomes.append(None)
    assert None in outcomes and set(outcomes) <= {None, True}
    close_and_check(engine)


def test_state_lost_while_a_request_waits_for_admission_is_an_error_and_never_zeros(monkeypatch):
    let_rows_kill(monkeypatch, forever=True)
    gates = [Gate(WAIT_S), Gate(WAIT_S)]
    engine = small_engine(2, limits=replace(SMALL, max_requests=2), queue_depth=1)
    for k, gate in enumerate(gates):
        engine.register(Unfolder(f"gate{k}", gate.unfolder.function, gate.unfolder.example), warm_up=False)
    engine.register(RUNS, warm_up=False)
    held = [engine.submit("gate0", torch.ones(WIDTH))]
    assert gates[0].entered.wait(WAIT_S)
    sessions = [engine.session("runs") for _ in range(4)]
    for session in sessions:
        session.submit(steps(1)).result(WAIT_S)  # at the other worker
    held.append(engine.submit("gate1", torch.ones(WIDTH)))
    assert gates[1].entered.wait(WAIT_S)
    # The gates take both places of the tables, so the others wait; the deadly request is the first to be admitted.
    deadly = engine.submit("runs", steps(2, DIE), priority=3)
    waiting = [session.submit(steps(1)) for session in sessions]
    gates[1].open.set()
    assert isinstance(error_of(deadly), DeviceError)
    gates[0].open.set()
    for future in held:
        future.result(WAIT_S)
    for future in waiting:
        error = error_of(future)
        assert isinstance(error, SessionError), (error, future)
    close_and_check(engine)
