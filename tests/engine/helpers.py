"""What the engine's tests share: small engines, comparison, and the check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import torch

from cellrt.core.checks.validate import broken_rules
from cellrt.core.state.moves import FREE
from cellrt.engine.engine import Engine
from cellrt.engine.future import RequestFuture
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests import limits

WAIT_S = 30.0
"""Time limit of every wait: long enough for a busy machine, short enough to see what hangs."""

SMALL = replace(limits.SMALL, max_sessions=1024)


def small_engine(workers: int | Sequence[str] = 1, *, kind: type[Engine] = Engine, **options: Any) -> Engine:
    """An engine with small tables, so that a test makes many of them."""
    options.setdefault("limits", SMALL)
    options.setdefault("arena_bytes", 1 << 16)
    options.setdefault("freeze", False)  # it collects garbage, through all that every test has imported
    return kind(workers, **options)


def watch_suspensions(engine: Engine) -> list[bool]:
    """A list that gets, of each time that the engine looks for a request to suspend, whether there was one."""
    told: list[bool] = []
    suspend = engine._processor.suspend

    def watched(worker: int) -> bool:
        told.append(suspend(worker))
        return told[-1]

    engine._processor.suspend = watched  # type: ignore[method-assign]
    return told


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same names, shapes and dtypes; floats within the rounding that another batch size may cause."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_streamed(engine: Engine, model: Unfolder, name: str, ends: Sequence[int]) -> None:
    """A result's steps come as the reference makes them, of requests that are numbers, and none behind their stop."""
    for end in ends:
        with engine.stream(model.name, end) as stream:
            seen = [update[name] for update in stream if name in update]
        assert_same({name: torch.stack(seen)}, {name: run_one_by_one(model, end)[name]})


def error_of(future: RequestFuture) -> BaseException | None:
    """How a request ended: its error, CancelledError included, or None."""
    assert wait([future], WAIT_S).done, "the request has not ended"
    return future.error()


def close_and_check(engine: Engine) -> None:
    """Closes the engine; then no request is live, every rule holds and so every row is back."""
    engine.close(WAIT_S)
    tables = engine._processor.tables
    assert not engine._manager.turns._thread.is_alive()
    assert broken_rules(tables) == []
    assert (tables.requests["state"] == FREE).all()
    assert not tables.tasks["in_use"].any()
    assert engine.statistics()["unfinished"] == 0
