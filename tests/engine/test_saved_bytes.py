"""States of sessions that are not at a worker take no more host memory than they may; and what they take is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.engine import sessions as engine_sessions
from cellrt.engine.engine import Engine
from cellrt.engine.session import Session
from cellrt.engine.session_limits import WHEN_FULL, SessionLimits
from cellrt.errors import DefinitionError, OverloadError, SessionError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import WIDTH, make_cells
from tests.engine.paged_models import WIDTH as PAGED
from tests.engine.test_room_of_sessions import appending

STATE_BYTES, ROW_BYTES = 4 * WIDTH, 4 * PAGED
RUNS = Unfolder("runs", lambda graph, x: {"h": graph.chain(make_cells()[1], keep=True, x=x).h}, torch.zeros(2, WIDTH))
GROWS = appending(1, keep=True, max_batch=8, max_batch_rows=8)


@contextmanager
def engine_of(model: Unfolder, limits: SessionLimits, **options: Any) -> Iterator[Engine]:
    engine = small_engine(1, sessions=limits, debug=True, **options)
    try:
        engine.register(model, warm_up=False)
        yield engine
    finally:
        close_and_check(engine)


def step(session: Session, count: int = 1) -> torch.Tensor:
    made = session.submit(torch.ones(count, WIDTH if session.model == "runs" else PAGED)).result(WAIT_S)
    return next(iter(made.values()))[-1]


def bytes_of(engine: Engine) -> dict[str, int]:
    return engine.statistics()["sessions"]["bytes"]


def test_beyond_the_limit_those_idle_longest_are_closed_and_told_why():
    limits = SessionLimits(max_resident=0, max_saved_bytes=3 * STATE_BYTES)
    with engine_of(RUNS, limits) as engine:
        first, second, *others = sessions = [engine.session("runs", str(k)) for k in range(4)]
        for session in (first, second, first, *others):  # the second has been idle longest
            last = step(session)
        assert bytes_of(engine) == {"host": 0, "worker 1": 0, "saved": 3 * STATE_BYTES}
        with pytest.raises(SessionError, match="session '1' .* has expired: .*SessionLimits.max_saved_bytes"):
            second.submit(torch.ones(1, WIDTH))
        assert engine.statistics()["sessions"]["closed_for_memory"] == 1
        assert torch.equal(step(sessions[3]), 1 + 0.5 * last)
        assert torch.equal(step(engine.session("runs", "1")), last), "its id is free, for one that is new"


def test_what_a_session_saved_counts_until_it_comes_back_or_ends():
    with engine_of(RUNS, SessionLimits(max_resident=1)) as engine:
        first, second = engine.session("runs"), engine.session("runs")
        step(first), step(second)
        assert bytes_of(engine) == {"host": 0, "worker 1": STATE_BYTES, "saved": STATE_BYTES}
        first.reset()
        assert second.export() and bytes_of(engine)["saved"] in (0, STATE_BYTES)
        first.restore(second.export())
        assert bytes_of(engine)["saved"] == STATE_BYTES
        step(first)
        assert bytes_of(engine) == {"host": 0, "worker 1": STATE_BYTES, "saved": STATE_BYTES}, "the other gave way"
        for session in (first, second):
            session.close()
        assert bytes_of(engine) == {"host": 0, "worker 1": 0, "saved": 0}


def test_a_state_larger_than_the_limit_is_not_taken():
    with engine_of(RUNS, SessionLimits(max_resident=0, max_saved_bytes=STATE_BYTES - 1)) as engine:
        session = engine.session("runs", "a")
        session.submit(torch.ones(1, WIDTH)).result(WAIT_S)
        with pytest.raises(SessionError, match="has expired: .* 8 more were to go there, and they may take 7"):
            session.submit(torch.ones(1, WIDTH))
    with engine_of(RUNS, SessionLimits()) as engine, engine.session("runs") as session:
        step(session)
        state = session.export()
    for when_full in ("close", "refuse"):
        limits = SessionLimits(max_saved_bytes=STATE_BYTES - 1, when_full=when_full)
        with engine_of(RUNS, limits) as engine:
            with pytest.raises(OverloadError, match="max_saved_bytes"):
                engine.session("runs", "b", state=state)
            assert engine.statistics()["sessions"]["open"] == 0


def test_pages_count_by_the_rows_in_them():
    with engine_of(GROWS, SessionLimits(), page_bytes=1) as engine:
        first, second = engine.session("append"), engine.session("append")
        step(first, 50)
        assert bytes_of(engine)["worker 1"] == 50 * ROW_BYTES
        step(second, 40)  # of 64 pages
        assert bytes_of(engine) == {"host": 0, "worker 1": 40 * ROW_BYTES, "saved": 50 * ROW_BYTES}


def test_refusing_keeps_every_state_and_costs_the_request_that_finds_no_page():
    limits = SessionLimits(max_saved_bytes=1, when_full="refuse")
    with engine_of(GROWS, limits, page_bytes=1) as engine:  # 64 pages at the worker and at the host each
        kept, other = engine.session("append", "kept"), engine.session("append", "other")
        step(kept, 40)
        assert step(other, 20) is not None
        told = error_of(other.submit(torch.ones(30, PAGED)))
        assert type(told) is OverloadError and "SessionLimits.max_saved_bytes" in str(told)
        assert engine.statistics()["sessions"]["open"] == 2 and bytes_of(engine)["saved"] == 0
        other.close()
        assert step(kept, 20) is not None


def test_refusing_costs_the_request_that_finds_no_row():
    limits = SessionLimits(max_saved_bytes=1, when_full="refuse")
    with engine_of(RUNS, limits, arena_bytes=64 * STATE_BYTES) as engine:  # 64 rows at the worker
        sessions = [engine.session("runs") for _ in range(100)]
        ends = [error_of(session.submit(torch.ones(1, WIDTH))) for session in sessions]
        refused = [error for error in ends if error is not None]
        assert 0 < len(refused) < 60 and {type(error) for error in refused} == {OverloadError}
        assert all("SessionLimits.max_saved_bytes" in str(error) for error in refused)
        for session, error in zip(sessions, ends):
            if error is None:
                session.close()
                break
        assert step(sessions[-1]) is not None


def test_a_quarter_of_the_free_memory_is_the_limit_by_default(monkeypatch):
    for free, expected in ((1000, 250), (0, 1), (None, 1 << 30)):
        monkeypatch.setattr(engine_sessions, "free_bytes", lambda free=free: free)
        with engine_of(RUNS, SessionLimits()) as engine:
            assert engine.statistics()["sessions"]["max_saved_bytes"] == expected


@pytest.mark.parametrize("wrong", [{"max_saved_bytes": 0}, {"max_saved_bytes": 1.5}, {"when_full": "drop"}])
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        SessionLimits(**wrong)


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 1 << 16),
    workers=st.integers(1, 3),
    resident=st.sampled_from([None, 0, 2]),
    states=st.integers(1, 4),
    when_full=st.sampled_from(WHEN_FULL),
)
def test_each_answer_goes_on_from_the_state_before_or_says_that_there_was_no_room(
    seed, workers, resident, states, when_full
):
    draw = random.Random(seed)
    limits = SessionLimits(max_resident=resident, max_saved_bytes=states * STATE_BYTES, when_full=when_full)
    engine = small_engine(workers, sessions=limits, arena_bytes=1, debug=True)
    try:
        engine.register(RUNS, warm_up=False)
        sessions = [(engine.session("runs"), []) for _ in range(6)]
        for _ in range(draw.randint(1, 24)):
            session, state = draw.choice(sessions)
            x = torch.randn(draw.randint(1, 6), WIDTH)
            try:
                made = session.submit(x).result(WAIT_S)
            except (SessionError, OverloadError) as error:
                assert "max_saved_bytes" in str(error)
            else:
                assert_same(made, run_one_by_one(RUNS, x, state))
            assert bytes_of(engine)["saved"] <= states * STATE_BYTES
    finally:
        close_and_check(engine)


def test_the_metrics_have_the_bytes_by_place():
    metrics = pytest.importorskip("cellrt.serve.metrics")
    with engine_of(RUNS, SessionLimits(max_resident=1)) as engine:
        for _ in range(3):
            step(engine.session("runs"))
        families = metrics.EngineMetrics(engine.statistics() | {"clients": 1}, []).collect()
        found = {sample.labels["place"]: sample.value for one in families if one.name == "cellrt_session_bytes"
                 for sample in one.samples}  # fmt: skip
    assert found == {"host": 0, "worker 1": STATE_BYTES, "saved": 2 * STATE_BYTES}
