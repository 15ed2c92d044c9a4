"""A number may be Python's, NumPy's or a tensor's, wherever one is asked for; a bool is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cellrt
from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder
from cellrt.engine.sessions import SessionLimits
from cellrt.errors import CellrtError, DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.numbers import as_integer, as_real
from cellrt.unfolders import encoder_decoder, parent_tree
from tests.engine.helpers import WAIT_S, small_engine
from tests.process import models
from tests.process.helpers import start, steps
from tests.steps import WIDTH

INTEGERS = {"Python": int, "NumPy": np.int64, "small": np.uint8, "a tensor": torch.tensor}
X = steps(2)


@pytest.mark.parametrize("given", [5, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor([5])])
def test_integers(given):
    assert (as_integer(given), type(as_integer(given))) == (5, int)


@pytest.mark.parametrize("given", [5, np.int64(5), np.float32(5), torch.tensor(5.0), np.float16(5)])
def test_reals(given):
    assert (as_real(given), type(as_real(given))) == (5.0, float)


@pytest.mark.parametrize("given", [True, np.True_, torch.tensor(True), "5", None, b"5", [5], np.ones(2), torch.ones(2)])
def test_what_is_no_number(given):
    assert as_integer(given) is None and as_real(given) is None


@pytest.mark.parametrize("given", [5.0, np.float32(5), torch.tensor(5.0)])
def test_what_is_no_integer(given):
    assert as_integer(given) is None


@pytest.fixture(scope="module", params=[small_engine, start], ids=["here", "apart"])
def engine(request) -> Iterator[Any]:
    with request.param(max_queue=np.int64(64), max_nodes=np.int32(900), max_queue_rows=np.int64(9999)) as made:
        made.register(models.chain, warm_up=False, max_queue=np.int64(50), max_batch={"step": np.int64(4)})
        made.register(models.kept, warm_up=False, priorities={"step": np.int8(1)}, max_queue_rows=np.int64(999))
        yield made


DOORS: dict[str, Callable[[Any, Any, Any], object]] = {
    "submit": lambda engine, number, seconds: engine.submit("chain", X, priority=number, deadline=seconds).result(
        seconds
    ),
    "many": lambda engine, number, seconds: engine.submit_many("chain", [X], priority=number).results(seconds),
    "infer": lambda engine, number, seconds: asyncio.run(engine.infer("chain", X, priority=number, deadline=seconds)),
    "infer that waits": lambda engine, number, seconds: asyncio.run(
        engine.infer("chain", X, priority=number, deadline=seconds, wait=True)
    ),
    "map": lambda engine, number, seconds: list(engine.map("chain", [X], max_in_flight=number, deadline=seconds)),
    "stream": lambda engine, number, seconds: list(engine.stream("chain", X, max_unread=number, priority=number)),
    "session": lambda engine, number, seconds: engine.session("kept").submit(X, priority=number).result(seconds),
    "drain": lambda engine, number, seconds: engine.drain(seconds),
    "submit that waits": lambda engine, number, seconds: engine.submit(
        "chain", X, deadline=seconds, wait=True
    ).exception(seconds),
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("door", DOORS)
def test_by_any_door(engine, door, kind):
    DOORS[door](engine, INTEGERS[kind](3), np.float32(WAIT_S) if kind != "Python" else WAIT_S)


@pytest.mark.parametrize("door", ["submit", "many", "infer", "map", "stream", "session"])
def test_a_bool_is_refused(engine, door):
    with pytest.raises(RequestError, match="priority|max_in_flight|max_unread"):
        DOORS[door](engine, True, WAIT_S)


def test_options():
    limits = SessionLimits(max_sessions=np.int64(9), max_resident=np.int64(2), idle_timeout_s=np.float32(60))
    options = dict.fromkeys(("threads_per_worker", "queue_depth", "trace"), np.int64(1))
    with small_engine(np.int64(1), sessions=limits, page_bytes=np.int64(1 << 16), **options) as engine:
        engine.register(models.kept, warm_up=False)
        engine.session("kept").submit(X).result(WAIT_S)
        engine.close(np.float32(WAIT_S))


def test_cells_and_graphs():
    two = np.int64(WIDTH)
    options = {"max_batch": np.int64(4), "min_batch": np.int64(1), "priority": np.int64(1)}
    cell = cellrt.cell(lambda x, h: {"h": x + h}, {"x": two, "h": (two,)}, **options)
    assert cell.inputs["x"] == cell.inputs["h"] == cellrt.rows(two) == cellrt.rows(WIDTH)
    model = Unfolder("loop", lambda graph, x: {"h": graph.loop(cell, max_steps=np.int64(3), x=x).h}, X[0])
    assert len(run_one_by_one(model, X[0])["h"]) == 3


def translator() -> Unfolder:
    token = cellrt.token
    encoder = cellrt.cell(EmbeddingGRUCell(9, 4, 6), {"token": token, "h": (6,)})
    decoder = cellrt.cell(EmbeddingGRUDecoder(9, 4, 6, 2), {"token": token, "h": (6,)})
    return encoder_decoder("model", encoder=encoder, decoder=decoder, start=0, max_steps=np.int64(7))


def test_limits_of_requests():
    request = {"source": [1, 2, 3], "max_steps": np.int64(2)}
    (made,) = run_one_by_one(translator(), request).values()
    assert 1 <= len(made) <= 2
    with pytest.raises(RequestError, match="max_steps"):
        run_one_by_one(translator(), request | {"max_steps": True})


TREES = [
    lambda parents: Unfolder("tree", lambda graph, _: {"h": graph.tree(parents, leaf=LEAF, inner=SUM).h}, None),
    lambda parents: Unfolder("dag", lambda graph, _: {"h": graph.dag(SUM, [0, 0, 1], parents).h}, None),
]
SUM = cellrt.cell(lambda h: {"h": torch.zeros(len(h.offsets) - 1, 2)}, {"h": cellrt.ragged(2)}, name="sum")
LEAF = cellrt.cell(lambda x: {"h": x}, {"x": (2,)}, name="leaf", carry={})


@pytest.mark.parametrize("parents", [[True, False], [0, True], np.array([True, False]), torch.tensor([True, False])])
def test_bools_are_no_parents(parents):
    for model in TREES:
        with pytest.raises(RequestError, match="expected .* as integers"):
            run_one_by_one(model(parents), None)
    ready = parent_tree("ready", leaf=SUM)
    with pytest.raises(RequestError, match="expected parents as integers"):
        run_one_by_one(ready, {"parents": parents, "inputs": {}})


def test_views_that_are_still_to_be_conjugated_are_read(engine):
    drawn = torch.randn(3, WIDTH, dtype=torch.complex64).conj()
    wanted = engine.submit("chain", drawn.imag.clone()).result(WAIT_S)["every"]
    for request in (drawn.imag, list(drawn.imag), [list(row) for row in drawn.imag]):
        torch.testing.assert_close(engine.submit("chain", request).result(WAIT_S)["every"], wanted)
    with pytest.raises(CellrtError, match="complex64"):
        engine.submit("chain", drawn)


def test_errors_name_what_came():
    with pytest.raises(DefinitionError, match="max_queue: expected a positive integer, got True"):
        small_engine(max_queue=True)
    with pytest.raises(DefinitionError, match="workers"):
        small_engine(np.int64(0))
