"""Sessions that are leased: compiled code goes on with them, and whatever else they are asked keeps its place."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.engine.requests import Requests
from cellrt.engine.session import Session
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import CancelledError, CellError, DeviceError, SessionError
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, close_and_check, error_of, small_engine
from tests.engine.models import DIE, RAISE, WIDTH, Gate, let_rows_kill, make_cells
from tests.waiting import until


def plus(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    if x.device.type != "meta" and (x == RAISE).any():
        raise ValueError("told to")
    return {"h": x + h}


DEADLY, *_ = make_cells()
PLAIN = cell(plus, {"x": (WIDTH,), "h": (WIDTH,)}, name="plus")
RUNS = Unfolder("runs", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x).last.h}, torch.zeros(1, WIDTH))


def made(workers: int = 1, **options: Any) -> Engine:
    engine = small_engine(workers, **options)
    engine.register(RUNS, warm_up=False)
    return engine


def add(session: Session, value: float = 1.0, **options: Any) -> Any:
    """Has a session add a number to its sum."""
    return session.submit(torch.full((1, WIDTH), float(value)), **options)


def total(future: Any) -> float:
    return float(future.result(WAIT_S)["h"][0])


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each group had that Python took in."""
    found: list[int] = []
    accept = Requests.accept

    def counting(self: Requests, group: Any) -> None:
        found.append(group.count)
        accept(self, group)

    monkeypatch.setattr(Requests, "accept", counting)
    return found


def test_steps_of_a_session_are_taken_without_python_from_its_second_on(accepted: list[int]) -> None:
    with made() as engine:
        session = engine.session("runs")
        assert [total(add(session, k)) for k in range(1, 30)] == [k * (k + 1) / 2 for k in range(1, 30)]
        sessions = [session, engine.session("runs"), engine.session("runs")]
        one = torch.ones(1, WIDTH)
        for k in range(1, 6):
            results = engine.submit_many("runs", [one] * 3, sessions=sessions).results(WAIT_S)
            assert [float(result["h"][0]) for result in results] == [435 + k, k, k]
    assert accepted == [1, 3]


def test_what_is_asked_in_a_hurry_is_answered_in_order() -> None:
    with made() as engine:
        sessions = [engine.session("runs") for _ in range(3)]
        futures = [[add(session) for session in sessions] for _ in range(100)]
        for k, its in enumerate(futures, 1):
            assert [total(future) for future in its] == [k] * 3
        engine.check()


def test_exports_and_resets_come_between_the_requests_that_they_were_asked_between() -> None:
    with made() as engine:
        session, other = engine.session("runs"), engine.session("runs")
        for k in range(1, 20):
            futures = [add(session) for _ in range(3)]
            other.restore(session.export())
            session.reset()
            after = add(session, 5.0)
            assert [total(future) for future in futures] == [1, 2, 3] if k == 1 else [6, 7, 8]
            assert total(add(other)) == total(futures[-1]) + 1 and total(after) == 5.0
        session.close()
        with pytest.raises(SessionError):
            add(session)


def test_a_session_that_was_used_last_is_evicted_last() -> None:
    with made(sessions=SessionLimits(max_resident=3)) as engine:
        first, *others = [engine.session("runs") for _ in range(3)]
        for session in (first, *others):
            total(add(session))
        for _ in range(20):
            total(add(first))
        engine.statistics()
        total(add(engine.session("runs")))
        evicted = [session._record.saved is not None for session in (first, *others)]
        assert evicted == [False, True, False]
        assert total(add(others[0])) == 2


def test_a_session_that_is_used_does_not_expire() -> None:
    with made(sessions=SessionLimits(idle_timeout_s=0.2)) as engine:
        session = engine.session("runs")
        end_s = time.monotonic() + 0.6
        count = 0
        while time.monotonic() < end_s:
            count += 1
            assert total(add(session)) == count
            time.sleep(0.01)
        until(lambda: not engine.statistics()["sessions"]["open"], "it expires when it is idle")


def test_one_that_fails_or_is_cancelled_gives_its_session_back() -> None:
    with made() as engine:
        session = engine.session("runs")
        sum_before = total(add(session))
        for _ in range(5):
            assert isinstance(error_of(add(session, RAISE)), CellError)
            sum_before += 1
            assert total(add(session)) == sum_before
            future = add(session)
            future.cancel()
            error = error_of(future)
            assert isinstance(error, CancelledError)
            now = total(add(session))
            assert now in (sum_before + 1, sum_before + 2)
            sum_before = now
        engine.check()


def test_a_request_that_waits_for_its_session_ends_when_it_is_late() -> None:
    gate = Gate(WAIT_S)

    def gated(graph: Any, x: torch.Tensor) -> dict[str, Any]:
        kept = graph.chain(PLAIN, keep=True, x=x).last.h
        return {"h": kept, "passed": gate.unfolder.function(graph, x[0] * 0 + 1).output}

    with small_engine() as engine:
        gate_of_session = Unfolder("gated", gated, torch.zeros(1, WIDTH))
        engine.register(gate_of_session, warm_up=False)
        session = engine.session("gated")
        gate.open.set()
        session.submit(torch.ones(1, WIDTH)).result(WAIT_S)
        gate.open.clear()
        gate.entered.clear()
        held = session.submit(torch.ones(1, WIDTH))
        assert gate.entered.wait(WAIT_S)
        late = session.submit(torch.ones(1, WIDTH), deadline=0.02)
        assert "not done within" in str(error_of(late))
        gate.open.set()
        assert float(held.result(WAIT_S)["h"][0]) == 2.0
        assert float(session.submit(torch.ones(1, WIDTH)).result(WAIT_S)["h"][0]) == 3.0
        engine.check()


@pytest.fixture
def gate() -> Gate:
    return Gate(WAIT_S)


def busy(gate: Gate, **options: Any) -> tuple[Engine, Session]:
    """An engine whose worker is held, and a session that has been used, and may be asked by the door."""
    engine = made(**options)
    engine.register(gate.unfolder, warm_up=False)
    session = engine.session("runs")
    assert total(add(session)) == 1
    engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    return engine, session


def test_what_was_asked_before_a_model_is_unregistered_is_answered(gate: Gate) -> None:
    engine, session = busy(gate)
    with engine:
        future = add(session)
        engine.unregister("runs")
        gate.open.set()
        assert total(future) == 2
        with pytest.raises(SessionError):
            add(session)


def test_a_session_that_was_asked_in_time_does_not_expire_while_the_worker_is_busy(gate: Gate) -> None:
    engine, session = busy(gate, sessions=SessionLimits(idle_timeout_s=0.2))
    with engine:
        future = add(session)
        time.sleep(0.3)
        gate.open.set()
        assert total(future) == 2


def test_a_worker_that_dies_ends_the_sessions_that_it_had_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    let_rows_kill(monkeypatch, forever=True)
    engine = small_engine(2)
    deadly = Unfolder(
        "deadly", lambda graph, x: {"h": graph.chain(DEADLY, keep=True, x=x).last.h}, torch.zeros(1, WIDTH)
    )
    engine.register(deadly, warm_up=False)
    sessions = [engine.session("deadly") for _ in range(6)]
    for session in sessions * 2:
        add(session).result(WAIT_S)
    assert isinstance(error_of(add(sessions[0], DIE)), DeviceError)
    errors = [error_of_step(session) for session in sessions]
    assert all(error is None or isinstance(error, SessionError) for error in errors)
    assert engine.submit("deadly", torch.ones(1, WIDTH)).result(WAIT_S)
    engine.check()
    close_and_check(engine)


def error_of_step(session: Session) -> BaseException | None:
    """Why a step fails, at its submission or later; None if it does not."""
    try:
        return error_of(add(session))
    except SessionError as error:
        return error


def test_threads_with_sessions_of_their_own_get_their_own_sums() -> None:
    engine, wrong = made(2, sessions=SessionLimits(max_resident=4)), list[tuple[int, float]]()

    def talk(value: int) -> None:
        sessions = [engine.session("runs") for _ in range(3)]
        for k in range(1, 40):
            for session in sessions:
                if (given := total(add(session, value))) != k * value:
                    wrong.append((value, given))
        for session in sessions:
            session.close()

    threads = [threading.Thread(target=talk, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong
    close_and_check(engine)
