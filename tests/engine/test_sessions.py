"""Sessions through the engine: order, state across requests, eviction, time-out, moving, and every way to fail."""

from __future__ import annotations

import asyncio
import math
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.cells import GRUCell, LSTMCell
from cellrt.core.state.settings import Limits
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import (
    DefinitionError,
    OverloadError,
    RequestError,
    SessionError,
    UnknownModelError,
)
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import SMALL, WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, make_cells
from tests.waiting import until

PLAIN, WITH_STEPS, LOOP = make_cells()


def keeping(name: str, made) -> Unfolder:
    """A chain that keeps its state; the request is ``[steps, 2]``."""
    return Unfolder(name, lambda graph, x: {"h": graph.chain(made, keep=True, x=x).h}, torch.zeros(2, WIDTH))


def lstm(size: int = 4, hidden: int = 8, seed: int = 0):
    torch.manual_seed(seed)
    return cell(LSTMCell(size, hidden), {"x": (size,), "h": (hidden,), "c": (hidden,)})


def stacked(graph: Graph, x):
    """An LSTM under a GRU, each keeping its state."""
    below = graph.chain(LSTM, keep=True, x=x)
    return {"h": graph.chain(GRU, keep=True, x=below.h).h}


def by_hand(graph: Graph, x):
    """The same LSTM, called step by step."""
    before = state = graph.state(LSTM)
    for row in x:
        state = LSTM(x=row, h=state.h, c=state.c)
    graph.keep(before, state)
    return {"h": state.h}


LSTM = lstm()
GRU = cell(GRUCell(8, 6), {"x": (8,), "h": (6,)})
EXAMPLE = torch.zeros(2, 4)
LSTM_MODEL = Unfolder("lstm", lambda graph, x: {"h": graph.chain(LSTM, keep=True, x=x).h}, EXAMPLE)
COUNT_MODEL = Unfolder(
    "count",
    lambda graph, x: {"n": (loop := graph.loop(LOOP, max_steps=2, keep=True, x=x, at=-1)).n, "h": loop.last.h},
    torch.zeros(WIDTH),
)
MODELS = [LSTM_MODEL, Unfolder("stacked", stacked, EXAMPLE), Unfolder("by_hand", by_hand, EXAMPLE)]
RUNS = keeping("runs", WITH_STEPS)


def steps(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, WIDTH), value)


def sum_after(count: int, start: float = 0.0) -> torch.Tensor:
    """State of the adding cell after ``count`` steps of ones."""
    for _ in range(count):
        start = 1 + 0.5 * start
    return torch.full((WIDTH,), start)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 1 << 16), workers=st.integers(1, 3), resident=st.sampled_from([None, 0, 2]))
def test_requests_of_a_session_continue_from_each_other(model, seed, workers, resident):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    engine = small_engine(workers, sessions=SessionLimits(max_resident=resident), arena_bytes=1 << 14)
    engine.register(model, warm_up=False)
    sessions = [(engine.session(model.name), []) for _ in range(draw.randint(1, 5))]
    waiting = []
    for _ in range(draw.randint(1, 16)):
        session, state = draw.choice(sessions)
        x = torch.randn(draw.randint(1, 6), 4)
        waiting.append((session.submit(x), run_one_by_one(model, x, state)))
    for future, expected in waiting:
        assert_same(future.result(WAIT_S), expected)
    for session, _ in sessions:
        session.close()
    assert engine.statistics()["sessions"]["open"] == 0
    close_and_check(engine)


def test_a_loop_goes_on_from_its_last_step():
    with small_engine() as engine:
        engine.register(COUNT_MODEL, warm_up=False)
        session = engine.session("count", "a")
        x = torch.ones(WIDTH)
        assert [session.submit(x).result(WAIT_S)["n"].tolist() for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]
        assert engine.submit("count", x).result(WAIT_S)["n"].tolist() == [1, 2]


def test_leaving_with_closes_the_session_and_drops_its_state():
    with small_engine() as engine:
        engine.register(COUNT_MODEL, warm_up=False)
        x = torch.ones(WIDTH)
        with engine.session("count", "a") as session:
            session.submit(x)
        with pytest.raises(SessionError, match="session 'a' of model 'count' is closed"):
            session.submit(x)
        with pytest.raises(ZeroDivisionError), engine.session("count", "a") as again:
            assert again.submit(x).result(WAIT_S)["n"].tolist() == [1, 2]
            raise ZeroDivisionError
        assert engine.statistics()["sessions"]["open"] == 0


def test_closing_a_session_that_ends_before_its_turn_comes_is_quiet():
    with small_engine() as engine:
        gate, x = Gate(WAIT_S), torch.ones(WIDTH)
        held = lambda graph, x: {**COUNT_MODEL(graph, x), "held": gate.unfolder(graph, x)}  # noqa: E731
        engine.register(Unfolder("held", held, torch.zeros(WIDTH)), warm_up=False)
        with engine.session("held") as session:
            future = session.submit(x)
            assert gate.entered.wait(WAIT_S)
            engine.unregister("held")  # ends it after what it was asked
            threading.Timer(0.05, gate.open.set).start()
        assert future.result(WAIT_S)


def test_a_session_may_outlive_its_engine():
    engine = small_engine()
    engine.register(COUNT_MODEL, warm_up=False)
    with engine.session("count") as session:
        engine.close()
    assert "count" in repr(session)


@pytest.mark.parametrize("id", [7, ""])
def test_what_is_no_id_is_refused(id):
    with small_engine() as engine:
        engine.register(COUNT_MODEL, warm_up=False)
        with pytest.raises(RequestError, match=f"session of model 'count': expected a str as id, got {id!r}"):
            engine.session("count", id)
        assert engine.statistics()["sessions"]["open"] == 0


def test_the_same_id_is_the_same_session_and_another_model_has_its_own():
    with small_engine() as engine:
        engine.register(RUNS, warm_up=False)
        engine.register(keeping("other", PLAIN), warm_up=False)
        engine.session("runs", "a").submit(steps(2)).result(WAIT_S)
        assert torch.equal(engine.session("runs", "a").submit(steps(1)).result(WAIT_S)["h"][-1], sum_after(3))
        assert torch.equal(engine.session("other", "a").submit(steps(1)).result(WAIT_S)["h"][-1], sum_after(1))
        assert engine.session("runs").id != engine.session("runs").id


def test_state_is_evicted_and_comes_back_bit_for_bit():
    engine = small_engine(2, sessions=SessionLimits(max_resident=1))
    engine.register(LSTM_MODEL, warm_up=False)
    alone = small_engine(1)
    alone.register(LSTM_MODEL, warm_up=False)
    sessions = [(engine.session("lstm"), alone.session("lstm"), torch.randn(3, 4)) for _ in range(6)]
    for first, second, x in sessions:
        first.submit(x).result(WAIT_S)
        second.submit(x).result(WAIT_S)
    counts = engine.statistics()["sessions"]
    assert (counts["open"], counts["resident"], counts["evictions"]) == (6, 1, 5)
    for first, second, x in sessions:
        assert first.export() == second.export()
        assert torch.equal(first.submit(x[:1]).result(WAIT_S)["h"], second.submit(x[:1]).result(WAIT_S)["h"])
    close_and_check(engine)
    close_and_check(alone)


def test_more_sessions_than_rows_are_served():
    engine = small_engine(1, arena_bytes=64 * WIDTH * 4)  # 64 rows at the worker
    engine.register(RUNS, warm_up=False)
    sessions = [engine.session("runs") for _ in range(300)]
    for round_ in range(2):
        futures = [session.submit(steps(1)) for session in sessions]
        for future in futures:
            assert torch.equal(future.result(WAIT_S)["h"][-1], sum_after(round_ + 1))
    assert engine.statistics()["sessions"]["evictions"] > 0
    close_and_check(engine)


def test_an_exported_state_goes_on_in_another_engine():
    first, second = small_engine(), small_engine()
    for engine in (first, second):
        engine.register(LSTM_MODEL, warm_up=False)
    x = torch.randn(4, 4)
    here = first.session("lstm", "a")
    here.submit(x)
    state = here.export()
    there = second.session("lstm", "b", state=state)
    assert there.export() == state
    assert torch.equal(there.submit(x).result(WAIT_S)["h"], here.submit(x).result(WAIT_S)["h"])
    close_and_check(first)
    close_and_check(second)


def test_a_state_of_other_weights_or_no_state_is_refused():
    other = lstm(seed=1)
    with small_engine() as engine:
        engine.register(LSTM_MODEL, warm_up=False)
        engine.register(Unfolder("other", lambda g, x: {"h": g.chain(other, keep=True, x=x).h}, EXAMPLE), warm_up=False)
        state = engine.session("other", "a").export()
        with pytest.raises(SessionError, match="other cells or weights"):
            engine.session("lstm", "a", state=state)
        with pytest.raises(SessionError, match="not a session's state"):
            engine.session("lstm", "b", state=b"nonsense")
        assert engine.statistics()["sessions"]["open"] == 1


def test_reset_begins_anew_after_the_requests_before_it():
    with small_engine() as engine:
        engine.register(RUNS, warm_up=False)
        session = engine.session("runs")
        before = session.submit(steps(3))
        session.reset()
        assert torch.equal(before.result(WAIT_S)["h"][-1], sum_after(3))
        assert torch.equal(session.submit(steps(1)).result(WAIT_S)["h"][-1], sum_after(1))


def test_an_idle_session_expires_and_says_so():
    engine = small_engine(1, sessions=SessionLimits(idle_timeout_s=0.05))
    engine.register(RUNS, warm_up=False)
    session = engine.session("runs", "a")
    session.submit(steps(1)).result(WAIT_S)
    until(lambda: not engine.statistics()["sessions"]["open"], "the session expires")
    with pytest.raises(SessionError, match="expired"):
        session.submit(steps(1))
    assert torch.equal(engine.session("runs", "a").submit(steps(1)).result(WAIT_S)["h"][-1], sum_after(1))
    close_and_check(engine)


def test_too_many_sessions_are_refused_until_one_is_closed():
    with small_engine(1, sessions=SessionLimits(max_sessions=2)) as engine:
        engine.register(RUNS, warm_up=False)
        first, _ = engine.session("runs", "a"), engine.session("runs", "b")
        with pytest.raises(OverloadError, match="2 sessions are open"):
            engine.session("runs", "c")
        first.close()
        assert engine.session("runs", "c").submit(steps(1)).result(WAIT_S)
        with pytest.raises(SessionError, match="closed"):
            first.submit(steps(1))


def test_tables_without_room_for_a_session_refuse_its_request():
    limits = Limits(**{**vars(SMALL), "max_sessions": 1})
    engine = small_engine(1, limits=limits)
    engine.register(RUNS, warm_up=False)
    engine.session("runs", "a").submit(steps(1)).result(WAIT_S)
    assert isinstance(engine.session("runs", "b").submit(steps(1)).exception(WAIT_S), OverloadError)
    close_and_check(engine)


def test_mistakes_are_named_where_they_are_made():
    def half(graph: Graph, x):
        state = graph.state(LSTM)
        return {"h": LSTM(x=x[0], h=state.h, c=state.c).h}

    def backwards(graph: Graph, x):
        return {"h": graph.chain(LSTM, keep=True, reverse=True, x=x).h}

    for function, message in ((half, "never kept"), (backwards, "backwards")):
        with pytest.raises(RequestError, match=message):
            run_one_by_one(Unfolder("wrong", function, EXAMPLE), EXAMPLE)
    with small_engine() as engine:
        engine.register(Unfolder("plain", lambda graph, x: {"h": graph.chain(LSTM, x=x).h}, EXAMPLE), warm_up=False)
        with pytest.raises(RequestError, match="keeps no state"):
            engine.session("plain")
        with pytest.raises(UnknownModelError):
            engine.session("unknown")


async def test_sessions_work_from_asyncio():
    with small_engine() as engine:
        engine.register(RUNS, warm_up=False)
        sessions = [engine.session("runs", str(k)) for k in range(8)]
        results = await asyncio.gather(*(session.infer(steps(k + 1)) for k, session in enumerate(sessions)))
        assert all(torch.equal(result["h"][-1], sum_after(k + 1)) for k, result in enumerate(results))


@pytest.mark.slow
def test_ten_thousand_sessions_live_at_once():
    """State of Silero's size: h and c of 128 floats; half of it evicted on the way."""
    hidden = 128
    big = cell(LSTMCell(8, hidden), {"x": (8,), "h": (hidden,), "c": (hidden,)})
    model = Unfolder("big", lambda graph, x: {"h": graph.chain(big, keep=True, x=x).last.h}, torch.zeros(1, 8))
    engine = small_engine(2, limits=Limits(), arena_bytes=64 << 20, max_queue=20_000,
                          sessions=SessionLimits(max_resident=5_000))  # fmt: skip
    engine.register(model)
    sessions = [engine.session("big", str(k)) for k in range(10_000)]
    inputs = torch.randn(10_000, 2, 1, 8)
    for k in range(2):
        futures = [session.submit(x[k]) for session, x in zip(sessions, inputs)]
        results = [future.result(120)["h"] for future in futures]
    statistics = engine.statistics()["sessions"]
    assert statistics["open"] == 10_000 and statistics["resident"] <= 5_000 and statistics["evictions"] >= 5_000
    for k in range(0, 10_000, 997):
        state: list[torch.Tensor] = []
        for x in inputs[k]:
            expected = run_one_by_one(model, x, state)
        torch.testing.assert_close(results[k], expected["h"], rtol=1e-5, atol=1e-5)
    close_and_check(engine)


def test_state_of_single_numbers_is_exported_evicted_and_restored():
    counting = cell(
        lambda n, by: {"n": n + by}, {"n": rows(dtype=torch.int64), "by": rows(dtype=torch.int64)}, name="sum"
    )
    model = Unfolder("sum", lambda graph, x: {"n": graph.chain(counting, keep=True, by=x).last.n}, [1, 2])
    engine = small_engine(sessions=SessionLimits(max_resident=1))
    engine.register(model)
    first, second = engine.session("sum"), engine.session("sum")
    for session in (first, second, first):
        session.submit([1, 2, 3]).result(WAIT_S)
    third = engine.session("sum", state=first.export())
    assert [s.submit([10]).result(WAIT_S)["n"].item() for s in (first, second, third)] == [22, 16, 22]
    close_and_check(engine)


def test_a_callback_cannot_wait_for_its_engine():
    gate, refused, submitted = Gate(WAIT_S), [], []
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    engine.register(RUNS, warm_up=False)
    session = engine.session("runs")
    session.submit(steps(1)).result(WAIT_S)

    def call(_):
        other = engine.submit("runs", steps(2))
        waits = (session.export, session.close, engine.drain, engine.close, engine.check, other.result, other.exception)
        for wait in waits:
            try:
                wait()
            except RequestError as error:
                refused.append(str(error))
        submitted.append(other)

    held = engine.submit("gate", torch.ones(WIDTH))
    held.add_done_callback(call)
    gate.open.set()
    held.result(WAIT_S)
    assert engine.drain(WAIT_S)
    assert len(refused) == 7 and all("callback" in text for text in refused)
    submitted[0].result(WAIT_S)
    session.close()
    session.close()
    close_and_check(engine)


def test_a_session_that_must_be_open_is_never_a_new_one() -> None:
    engine = small_engine()
    engine.register(keeping("kept", PLAIN), warm_up=False)
    for _ in range(2):
        with pytest.raises(SessionError, match="session 'a' of model 'kept' is not open"):
            engine.session("kept", "a", must_be_open=True)
        opened = engine.session("kept", "a")
        engine.session("kept", "a", must_be_open=True).submit(torch.ones(1, WIDTH)).result(WAIT_S)
        opened.close()
    assert engine.statistics()["sessions"]["open"] == 0
    close_and_check(engine)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"idle_timeout_s": math.inf}, "idle_timeout_s: expected seconds"),
        ({"idle_timeout_s": 0}, "idle_timeout_s: expected seconds"),
        ({"max_sessions": 0}, "max_sessions: expected a positive integer"),
        ({"max_resident": -1}, "max_resident: expected an integer from 0 on"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(DefinitionError, match=message):
        SessionLimits(**wrong)
