"""A client may be interrupted anywhere: an exception out of a signal's handler costs its own call alone.

CPython runs signal handlers after calls and at the beginning of functions. A profile function is called at the same
places, so the tests raise from one at every place in turn, and need no signals.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from cellrt.definition.cell import CURRENT_GRAPH
from cellrt.engine.engine import Engine
from cellrt.engine.future import RequestFuture
from cellrt.engine.manager import Manager
from cellrt.engine.places import Size
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, chain_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)
KEPT = Unfolder("kept", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x).h}, torch.zeros(2, WIDTH))
STEPS = torch.ones(2, WIDTH)
MOST_PLACES = 5_000


class InterruptError(BaseException):
    """What the handler raises."""


def interrupted_at(place: int, call: Callable[[], object]) -> bool:
    """Makes a call, interrupted at its ``place``-th place; False if it has not so many."""
    seen = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == place:
                raise InterruptError

    try:
        sys.setprofile(look)
        call()
    except InterruptError:
        return True
    finally:
        sys.setprofile(None)
    return False


def submit_one(engine: Engine) -> object:
    return engine.submit("chain", STEPS)


def submit_many(engine: Engine) -> object:
    return engine.submit_many("chain", [STEPS] * 3, deadline=WAIT_S)


def submit_and_cancel(engine: Engine) -> object:
    return engine.submit("chain", STEPS).cancel()


def submit_in_a_session(engine: Engine) -> object:
    return engine.session("kept", "a").submit(STEPS)


def drain(engine: Engine) -> object:
    return engine.submit("chain", STEPS) and engine.drain(WAIT_S)


def count(engine: Engine) -> object:
    return engine.statistics()


def export_a_session(engine: Engine) -> object:
    session = engine.session("kept", "b")
    session.submit(STEPS)
    return session.export()


CALLS = [submit_one, submit_many, submit_and_cancel, submit_in_a_session, drain, count, export_a_session]


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_place_leaves_the_engine_whole(call):
    engine = small_engine()
    for model in (CHAIN, KEPT):
        engine.register(model, warm_up=False)
    call(engine)
    place = 1
    while interrupted_at(place, lambda: call(engine)):
        assert CURRENT_GRAPH.get(None) is None, f"a cell that is called now would write to a graph, at {place}"
        place += 1
        assert place < MOST_PLACES
        if place % 16 == 0:
            assert engine.drain(WAIT_S), f"a place in the queue was lost at {place}"
            assert engine.statistics()["unfinished"] == 0
    assert place > 50
    assert torch.equal(engine.submit("chain", STEPS).result(WAIT_S)["last"], torch.full((WIDTH,), 1.5))
    close_and_check(engine)


def test_a_drain_is_over_when_places_of_who_was_interrupted_are_counted_anew(monkeypatch):
    engine, heal = small_engine(), Manager._heal

    def heal_late(self):
        time.sleep(0.1)
        heal(self)

    monkeypatch.setattr(Manager, "_heal", heal_late)
    with engine._manager.turns.gate:
        engine._manager.places.take(Size(1, 1))  # and then it never came
        engine._manager.turns.was_interrupted = True
    assert engine.drain(WAIT_S)
    assert engine.statistics()["unfinished"] == 0
    close_and_check(engine)


def test_a_future_that_is_interrupted_while_it_is_cancelled_ends_once():
    place, is_interrupted = 1, True
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    while is_interrupted:
        called: list[RequestFuture] = []
        future = engine.submit("chain", STEPS)
        future.add_done_callback(called.append)
        is_interrupted = interrupted_at(place, future.cancel)
        assert engine.drain(WAIT_S)
        assert called == [future] or (is_interrupted and future.cancelled())
        assert future.done()
        place += 1
    close_and_check(engine)


@pytest.fixture
def engine():
    made = small_engine()
    for model in (CHAIN, KEPT):
        made.register(model, warm_up=False)
    yield made
    close_and_check(made)


def of_a_c_function(*_: object, **__: object) -> object:
    """As Python tells that a C function went on after a signal's handler had raised in it."""
    raise SystemError("<built-in function made> returned a result with an exception set") from KeyboardInterrupt()


@pytest.mark.parametrize("call", [submit_one, submit_many, submit_in_a_session])
def test_an_interrupt_that_comes_as_a_system_error_reaches_the_client_as_it_is(engine, monkeypatch, call):
    for owner, name in ((engine._submission, "_enqueue"), (Graph, "chain")):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(engine._submission, "_fast_path", None)
            patched.setattr(owner, name, of_a_c_function)
            call(engine)
    assert engine.drain(WAIT_S)


def test_a_system_error_of_another_kind_stays_what_it_is(engine, monkeypatch):
    def broken(*_: object) -> object:
        raise SystemError("bad argument to internal function")

    monkeypatch.setattr(engine._submission, "_fast_path", None)
    monkeypatch.setattr(engine._submission, "_enqueue", broken)
    with pytest.raises(SystemError, match="bad argument"):
        submit_one(engine)
