"""What a client's own code may do in a callback: raise anything, submit, cancel; but not wait for the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable

import pytest
import torch

from cellrt.engine.engine import Engine
from cellrt.errors import RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells

CELL = make_cells()[0]
CHAIN = chain_model("chain", CELL)
STEPS = torch.ones(2, WIDTH)
KEPT = Unfolder("kept", lambda graph, x: {"h": graph.chain(CELL, keep=True, x=x).h}, STEPS)


@pytest.fixture
def engine():
    made = small_engine()
    made.register(CHAIN, warm_up=False)
    yield made
    close_and_check(made)


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, ValueError])
def test_whatever_a_callback_raises_costs_nobody_anything(engine, kind, caplog):
    def callback(_: object) -> None:
        raise kind("a client's own")

    futures = engine.submit_many("chain", [STEPS] * 8)
    futures[0].add_done_callback(callback)
    engine.submit("chain", STEPS).add_done_callback(callback)
    assert all(future.result(WAIT_S) for future in futures)
    assert engine.drain(WAIT_S)
    assert engine.submit("chain", STEPS).result(WAIT_S)
    assert "a client's own" in caplog.text


WAITS: dict[str, Callable[[Engine], object]] = {
    "result": lambda engine: engine.submit("chain", STEPS).result(),
    "exception": lambda engine: engine.submit("chain", STEPS).exception(),
    "a stream": lambda engine: list(engine.stream("chain", STEPS)),
    "concurrent.futures.wait": lambda engine: concurrent.futures.wait([engine.submit("chain", STEPS)]),
    "as_completed": lambda engine: list(concurrent.futures.as_completed([engine.submit("chain", STEPS)])),
    "asyncio.run": lambda engine: asyncio.run(engine.infer("chain", STEPS)),
    "drain": lambda engine: engine.drain(),
    "close": lambda engine: engine.close(),
    "check": lambda engine: engine.check(),
    "register": lambda engine: engine.register(chain_model("other", CELL)),
    "unregister": lambda engine: engine.unregister("chain"),
    "a session from a state": lambda engine: engine.session("kept", state=b""),
}


def gate_of(engine: Engine) -> Gate:
    gate = Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    return gate


def errors_in_a_callback(engine: Engine, gate: Gate, how: str) -> list[BaseException]:
    """What is raised where it is done in a callback; the gate opens."""
    errors: list[BaseException] = []

    def callback(_: object) -> None:
        try:
            WAITS[how](engine)
        except BaseException as error:
            errors.append(error)

    held = engine.submit("gate", torch.ones(WIDTH))
    held.add_done_callback(callback)
    gate.open.set()
    assert engine.drain(WAIT_S)
    return errors


@pytest.mark.parametrize("how", WAITS)
def test_waiting_in_a_callback_raises_instead_of_waiting_for_ever(engine, how):
    engine.register(KEPT, warm_up=False)
    errors = errors_in_a_callback(engine, gate_of(engine), how)
    assert [type(error) for error in errors] == [RequestError], errors
    assert "callback" in str(errors[0])
    assert engine.submit("chain", STEPS).result(WAIT_S)  # nothing of it has happened
    assert engine.statistics()["sessions"]["open"] == 0


@pytest.mark.parametrize("how", ["register", "unregister"])
def test_a_callback_that_meets_a_registration_waits_for_none(engine, how):
    gate, has_begun, may_end = gate_of(engine), threading.Event(), threading.Event()

    def unfold(graph: Graph, request: torch.Tensor) -> dict[str, object]:
        has_begun.set()
        may_end.wait(WAIT_S)
        return {"h": graph.chain(CELL, x=request).h}

    slow = Unfolder("slow", unfold, STEPS)
    thread = threading.Thread(target=lambda: engine.register(slow, warm_up=False))
    thread.start()
    assert has_begun.wait(WAIT_S)
    errors = errors_in_a_callback(engine, gate, how)
    assert [type(error) for error in errors] == [RequestError], errors
    assert engine.submit("chain", STEPS).result(WAIT_S)
    may_end.set()
    thread.join(WAIT_S)
    assert engine.submit("slow", STEPS).result(WAIT_S)


def test_waiting_for_a_place_in_a_callback_raises():
    engine = small_engine(max_queue=1)
    engine.register(CHAIN, warm_up=False)
    outcomes: list[object] = []

    def callback(_: object) -> None:
        engine.submit("chain", STEPS)
        try:
            engine.submit("chain", STEPS, wait=True)
        except RequestError as error:
            outcomes.append(error)

    gate = Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    held.add_done_callback(callback)
    gate.open.set()
    assert engine.drain(WAIT_S)
    assert len(outcomes) == 1 and "callback" in str(outcomes[0])
    close_and_check(engine)


def test_what_has_ended_may_be_looked_at_in_a_callback(engine):
    seen: list[object] = []
    engine.submit("chain", STEPS).add_done_callback(
        lambda future: seen.append((future.result(), concurrent.futures.wait([future]).done == {future}))
    )
    assert engine.drain(WAIT_S)
    assert len(seen) == 1 and seen[0][1]


def test_drain_waits_for_a_turn_however_long_a_callback_takes():
    gate, engine = Gate(WAIT_S), small_engine(1, queue_depth=1)
    for model in (gate.unfolder, CHAIN):
        engine.register(model, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    held.add_done_callback(lambda _: time.sleep(1.2))
    others = engine.submit_many("chain", [STEPS] * 4)
    gate.open.set()
    held.result(WAIT_S)
    assert engine.drain()
    assert [other.exception(WAIT_S) for other in others] == [None] * 4
    close_and_check(engine)
