"""A fault of the engine's own: everybody is told, with the story of the request, and nothing hangs."""

from __future__ import annotations

import pytest
import torch

from cellrt import errors
from cellrt.engine.requests import Requests
from cellrt.engine.statistics import Statistics
from cellrt.errors import CellrtError, EngineClosedError, InternalError, http_status
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, error_of, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.waiting import until

CHAIN = chain_model("chain", make_cells()[0])
STEPS = torch.ones(2, WIDTH)


def break_at_the_next_completion(monkeypatch) -> None:
    """Of an engine with a timeline, whose turns in Python see all completions."""

    def fail(self, notices):
        raise ZeroDivisionError("a fault of the engine's own")

    monkeypatch.setattr(Requests, "take_notices", fail)


def test_every_request_gets_an_error_that_tells_its_story(monkeypatch):
    engine, gate = small_engine(queue_depth=1, trace=True), Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    futures = [engine.submit("gate", torch.ones(WIDTH)), engine.submit("chain", STEPS)]
    assert gate.entered.wait(WAIT_S)
    engine.check()  # a turn, in which both are admitted
    break_at_the_next_completion(monkeypatch)
    gate.open.set()
    for sequence, future in enumerate(futures, 1):
        error = error_of(future)
        assert type(error) is InternalError and isinstance(error.__cause__, ZeroDivisionError)
        assert f"request {sequence} admitted" in str(error)
    assert "launched" in str(error_of(futures[0]))
    engine.close(WAIT_S)


def test_whoever_compiled_code_answered_has_the_results_though_counting_them_fails(monkeypatch):
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)

    def fail(self, *_):
        raise ZeroDivisionError("a fault of the engine's own")

    monkeypatch.setattr(Statistics, "count_done", fail)
    assert_same(engine.submit("chain", STEPS).result(WAIT_S), run_one_by_one(CHAIN, STEPS))
    until(lambda: not engine.has_workers(), "it is counted, and the engine fails")
    with pytest.raises(EngineClosedError, match="a fault of the engine's own"):
        engine.submit("chain", STEPS)
    engine.close(WAIT_S)


def test_an_engine_that_failed_refuses_and_does_not_say_that_it_drained(monkeypatch):
    engine = small_engine(trace=True)
    engine.register(CHAIN, warm_up=False)
    break_at_the_next_completion(monkeypatch)
    assert type(error_of(engine.submit("chain", STEPS))) is InternalError
    assert not engine.has_workers()  # whoever looks after it starts another
    with pytest.raises(EngineClosedError, match="a fault of the engine's own"):
        engine.submit("chain", STEPS)
    with pytest.raises(EngineClosedError):
        engine.check()
    assert not engine.drain(WAIT_S)
    engine.close(WAIT_S)
    assert engine.statistics()["unfinished"] == 0


def test_a_broken_rule_is_told_with_what_happened_before():
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    engine.submit("chain", STEPS).result(WAIT_S)
    engine._processor.tables.settings["num_live"] += 1
    with pytest.raises(InternalError, match="1 requests counted, 0 live; what happened before:\n.*request 1 admitted"):
        engine.check()
    engine._processor.tables.settings["num_live"] -= 1
    engine.close(WAIT_S)


def test_every_error_has_an_http_status():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CellrtError)]
    assert len(kinds) == 13
    for kind in kinds:
        assert 400 <= http_status(kind("why")) < 600
    assert http_status(errors.OverloadError("full")) == 429
    assert http_status(type("OfAUser", (errors.RequestError,), {})("own")) == 400
    assert http_status(ValueError("not ours")) == 500
