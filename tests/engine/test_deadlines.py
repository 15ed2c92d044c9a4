"""Requests that cannot be done in time are refused when they come, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import cellrt
from cellrt import DeadlineError, Engine, Graph
from cellrt.engine.waiting import TRIED_EVERY

STEP_S = 0.01
"""Of which a quarter counts as the cell's own time, and half of that as certain."""
LONG = 1000
"""Steps; 1.25 s or more are certain."""
FAR_TOO_SHORT_S = 0.5
calls: list[int] = []


def slow(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """Takes its time, and hands its state on."""
    calls.append(len(x))
    time.sleep(STEP_S)
    return {"h": h + x}


CARRIES = cellrt.cell(slow, {"x": (1,), "h": (1,)}, name="slow")
CARRIES_NOTHING = cellrt.cell(lambda x: {"y": slow(x, x)["h"]}, {"x": (1,)}, name="rows")


def chain(graph: Graph, steps: int) -> dict[str, object]:
    """So many steps, one after the other."""
    return {"h": graph.chain(CARRIES, keep=True, x=torch.ones(steps, 1)).last.h}


def rows(graph: Graph, steps: int) -> dict[str, object]:
    """So many rows of one task."""
    return {"y": graph.chain(CARRIES_NOTHING, x=torch.ones(steps, 1)).last.y}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(1) as made:
        made.register(cellrt.Unfolder("chain", chain, 2))
        made.register(cellrt.Unfolder("rows", rows, 2))
        made.submit("chain", 4).result(10)
        calls.clear()
        yield made
        made.drain()
        made.check()


def test_what_cannot_be_done_in_time_is_refused_when_it_comes(engine: Engine) -> None:
    begin_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"cannot be done within 0\.5 s: a chain of 1000 steps of slow takes"):
        engine.submit("chain", LONG, deadline=FAR_TOO_SHORT_S).result(10)
    assert time.monotonic() - begin_s < FAR_TOO_SHORT_S
    assert calls == []


def test_what_can_be_done_in_time_runs(engine: Engine) -> None:
    assert engine.submit("chain", 3, deadline=60).result(10)["h"].item() == 3
    assert len(calls) == 3


def test_steps_that_carry_nothing_are_not_one_after_the_other(engine: Engine) -> None:
    assert engine.submit("rows", LONG, deadline=60).result(10)["y"].item() == 2
    assert engine.submit("rows", LONG, deadline=FAR_TOO_SHORT_S).result(10)["y"].item() == 2


def test_one_of_many_that_cannot_be_done_is_tried(engine: Engine) -> None:
    messages = [str(engine.submit("chain", LONG, deadline=FAR_TOO_SHORT_S).exception(10)) for _ in range(TRIED_EVERY)]
    assert [message.split(":")[1].strip()[:6] for message in messages] == ["cannot"] * (TRIED_EVERY - 1) + ["not do"]
    assert calls


def test_a_session_goes_on_after_a_request_that_was_refused(engine: Engine) -> None:
    session = engine.session("chain")
    assert session.submit(2).result(10)["h"].item() == 2
    with pytest.raises(DeadlineError, match="cannot be done"):
        session.submit(LONG, deadline=FAR_TOO_SHORT_S).result(10)
    assert session.submit(1).result(10)["h"].item() == 3
