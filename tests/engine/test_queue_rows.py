"""Requests are refused by the rows that they have, too: of the engine and of each model, and never for good."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import cellrt
from cellrt.engine.places import Places, QueueLimit, Size

WAIT_S = 30.0
HOLD = 7.0


class Gate(threading.Event):
    """One that a cell's copy shares."""

    def __deepcopy__(self, _: object) -> Gate:
        return self


def model(name: str, gate: Gate) -> cellrt.Unfolder:
    """A chain whose first step waits for the gate."""

    def step(x: Tensor, h: Tensor) -> dict[str, Tensor]:
        if x.device.type != "meta" and (x == HOLD).any():
            gate.wait(WAIT_S)
        return {"h": x + h}

    made = cellrt.cell(step, {"x": (1,), "h": (1,)}, name=f"step of {name}")

    @cellrt.unfold(name, example=torch.zeros(2, 1))
    def unfolded(graph: cellrt.Graph, x: Tensor) -> dict[str, object]:
        return {"h": graph.chain(made, x=x).last.h}

    return unfolded


def test_rows_fill_a_queue_and_come_back_when_their_requests_end() -> None:
    gate = Gate()
    with cellrt.Engine(workers=1, max_queue_rows=20) as engine:
        engine.register(model("a", gate), max_queue_rows=12)
        engine.register(model("b", gate))
        first = engine.submit("a", torch.full((10, 1), HOLD))
        assert engine.statistics()["unfinished_rows"] == 10
        with pytest.raises(cellrt.OverloadError, match="10 rows are unfinished, model 'a' takes 12; 3 more came"):
            engine.submit("a", torch.zeros(3, 1))
        others = list(engine.submit_many("b", [torch.zeros(5, 1)] * 2))
        with pytest.raises(cellrt.OverloadError, match="20 rows are unfinished, the engine takes 20"):
            engine.submit("b", torch.zeros(1, 1))
        cancelled = others.pop()
        cancelled.cancel()
        gate.set()
        for future in (first, *others):
            future.result(WAIT_S)
        assert engine.drain(WAIT_S) and engine.statistics()["unfinished_rows"] == 0
        assert engine.submit("a", torch.zeros(12, 1)).result(WAIT_S)["h"].shape == (1,)


def test_a_request_with_more_rows_than_ever_fit_is_too_large() -> None:
    with cellrt.Engine(workers=1, max_queue_rows=20) as engine:
        engine.register(model("a", Gate()))
        with pytest.raises(cellrt.RequestTooLargeError, match="21 rows at once; the engine takes 20"):
            engine.submit("a", torch.zeros(21, 1))
        with pytest.raises(cellrt.RequestTooLargeError):
            engine.submit("a", torch.zeros(21, 1), wait=True)


def test_who_waits_for_places_gets_them_when_rows_come_back() -> None:
    gate = Gate()
    with cellrt.Engine(workers=1, max_queue_rows=10) as engine:
        engine.register(model("a", gate))
        first = engine.submit("a", torch.full((8, 1), HOLD))
        threading.Timer(0.05, gate.set).start()
        second = engine.submit("a", torch.zeros(8, 1), wait=True)
        assert first.done() or first.result(WAIT_S)
        second.result(WAIT_S)
        assert sum(1 for _ in engine.map("a", [torch.zeros(7, 1)] * 20)) == 20


def test_what_was_counted_and_never_came_is_forgotten() -> None:
    places = Places("the engine", QueueLimit(2, 10))
    places.take(Size(1, 9))
    assert not places.has_room(Size(1, 2)) and places.has_room(Size(1, 1))
    places.heal(Size(0, 0))
    assert (places.num_unfinished, places.num_rows) == (0, 0) and places.has_room(Size(2, 10))
