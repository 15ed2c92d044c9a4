"""Requests that differ in their lengths alone are admitted and answered together, each with its own results."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, make_cells

PLAIN, WITH_STEPS, LOOP = make_cells()


def tagged(graph: Graph, request):
    """Every step of a chain and of one above it that runs backwards, and the last of both."""
    x, _ = request
    below = graph.chain(PLAIN, x=x)
    above = graph.chain(PLAIN, x=below.h, reverse=True)
    return {"below": below.h, "above": above.h, "last": above.last.h}


def decoded(graph: Graph, request):
    """A loop that may take as many steps as its request says: every step, and the last."""
    x, limit = request
    loop = graph.loop(LOOP, max_steps=limit, until="stop", n=3, x=x[0], at=1, h=graph.chain(PLAIN, x=x).last.h)
    return {"h": loop.h, "n": loop.last.n}


EXAMPLE = torch.zeros(3, WIDTH), 9
MODELS = [
    Unfolder("tagged", tagged, EXAMPLE),
    Unfolder("decoded", decoded, EXAMPLE),
    Unfolder("known", tagged, EXAMPLE, key=lambda request: len(request[0])),
]
REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}, {'known' if model.key else 'unfolded'}")
@settings(max_examples=examples(15), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12), in_bulk=st.booleans()
)
def test_each_result_is_that_of_its_request_alone(model, lengths, in_bulk):
    engine = small_engine(2)
    engine.register(model, warm_up=False)
    requests = [(torch.randn(length, WIDTH), limit) for length, limit in lengths]
    if in_bulk:
        futures = engine.submit_many(model.name, requests)
    else:
        futures = [engine.submit(model.name, request) for request in requests]
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
def test_those_that_python_admits_are_admitted_in_one_call(model):
    engine = small_engine(1, trace=True)  # by the door each would be admitted by itself
    engine.register(model, warm_up=False)
    draw, turns, counts = random.Random(0), engine._manager.turns, []
    admit_many = engine._processor.admit_many
    engine._processor.admit_many = lambda template, sequences, *rest: (
        counts.append(len(sequences)) or admit_many(template, sequences, *rest)
    )
    lengths = draw.sample(range(2, 30), 20)
    requests = [(torch.randn(length, WIDTH), 30 + length) for length in lengths]
    with turns.held():
        futures = [engine.submit(model.name, request) for request in requests]
    turns.wake()
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert counts == [20]
    close_and_check(engine)
