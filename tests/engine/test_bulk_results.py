"""``submit_many(...).results()``: all results at once are what each future has, and errors are those of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cellrt
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, make_cells
from tests.engine.test_mixed_lengths import EXAMPLE, MODELS

PLAIN, _, _ = make_cells()
LARGE = 5000
"""Floats of a row: a result of so many bytes lies by itself."""


def refuse(x):
    if bool((x < 0).any()):
        raise ValueError("below zero")
    return {"y": x}


REFUSING = cellrt.cell(refuse, {"x": (1,)})
WIDE = cellrt.cell(lambda x: {"y": x + 1, "flag": x[:, 0] > 0}, {"x": (LARGE,)}, name="wide")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=examples(10), deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12), taken=st.data())
def test_they_are_what_each_future_has(model, lengths, taken):
    engine = small_engine(2)
    engine.register(model, warm_up=False)
    requests = [(torch.randn(length, WIDTH), limit) for length, limit in lengths]
    futures = engine.submit_many(model.name, requests)
    before = taken.draw(st.sets(st.integers(0, len(requests) - 1)), "asked for before")
    alone = {place: futures[place].result(WAIT_S) for place in before}
    results = futures.results(WAIT_S)
    for place, (request, result) in enumerate(zip(requests, results)):
        assert_same(result, run_one_by_one(model, request))
        assert futures[place].result() is result
        assert place not in alone or alone[place] is result
    close_and_check(engine)


def test_large_rows_and_those_of_other_dtypes_are_the_same():
    def wide(graph, x):
        node = WIDE(x=x)
        return {"y": node.y, "flag": node.flag}

    model = Unfolder("wide", wide, torch.zeros(LARGE))
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    requests = [torch.randn(LARGE) for _ in range(5)]
    for request, result in zip(requests, engine.submit_many("wide", requests).results(WAIT_S)):
        assert_same(result, run_one_by_one(model, request))
    close_and_check(engine)


def test_an_error_is_raised_and_leaves_the_others_their_results():
    model = Unfolder("refusing", lambda graph, x: {"y": REFUSING(x=x).y}, torch.zeros(1))
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    futures = engine.submit_many("refusing", [torch.tensor([float(k - 2 * (k == 3) * k)]) for k in range(1, 6)])
    with pytest.raises(cellrt.CellError, match="below zero"):
        futures.results(WAIT_S)
    assert [float(futures[k].result(WAIT_S)["y"]) for k in (0, 1, 3, 4)] == [1, 2, 4, 5]
    close_and_check(engine)


def test_a_cancelled_one_is_raised_as_cancelled():
    engine = small_engine(1)
    engine.register(MODELS[0], warm_up=False)
    futures = engine.submit_many("tagged", [EXAMPLE] * 4)
    if futures[3].cancel():
        with pytest.raises(cellrt.CancelledError):
            futures.results(WAIT_S)
    close_and_check(engine)


def test_who_waits_too_long_hears_so():
    engine = small_engine(1)
    engine.register(MODELS[0], warm_up=False)
    with engine._manager.turns.held(), pytest.raises(TimeoutError):  # nobody else gets a turn
        engine.submit_many("tagged", [EXAMPLE] * 3).results(0.01)
    close_and_check(engine)


def test_no_requests_have_no_results():
    engine = small_engine(1)
    engine.register(MODELS[0], warm_up=False)
    assert engine.submit_many("tagged", []).results() == []
    close_and_check(engine)


def test_requests_of_different_graphs_whose_results_lie_alike_are_answered_together():
    def fan(graph, count):
        nodes = [WIDE(x=torch.full((LARGE,), float(k))) for k in range(count)]
        return {"y": nodes[-1].y, "flag": nodes[0].flag}

    model = Unfolder("fan", fan, 1)
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    plans = [engine._submission.model("fan").plans([count])[0].plan for count in (1, 2, 3)]
    assert len({id(plan.template.template) for plan in plans}) == 3
    assert len({id(plan.answered_with) for plan in plans}) == 1
    counts = [1, 2, 3, 2, 1]
    for count, result in zip(counts, engine.submit_many("fan", counts).results(WAIT_S)):
        assert_same(result, run_one_by_one(model, count))
    close_and_check(engine)


def stacked_by_hand(results):
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


@pytest.mark.parametrize("rows", [1, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("is_taken", [False, True], ids=["first", "after the others"])
def test_stacked_results_are_those_of_all_requests_in_their_order(rows, count, is_taken):
    cell = cellrt.cell(lambda x: {"y": x + 1, "flag": x[:, 0] > 0}, {"x": (rows,)}, name=f"wide {rows}")
    model = Unfolder("wide", lambda graph, x: {"y": cell(x=x).y, "flag": cell(x=x).flag}, torch.zeros(rows))
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    requests = [torch.randn(rows) for _ in range(count)]
    futures = engine.submit_many("wide", requests)
    if is_taken:
        futures[0].result(WAIT_S)
    stacked = futures.stacked(WAIT_S)
    assert_same(stacked, {"y": torch.stack(requests) + 1, "flag": torch.stack(requests)[:, 0] > 0})
    stacked["y"].zero_()
    assert_same(stacked_by_hand(futures.results(WAIT_S)), {"y": torch.stack(requests) + 1, "flag": stacked["flag"]})
    close_and_check(engine)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=examples(10), deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6))
def test_results_that_differ_in_shape_are_not_stacked(model, lengths):
    engine = small_engine(2)
    engine.register(model, warm_up=False)
    requests = [(torch.randn(length, WIDTH), limit) for length, limit in lengths]
    expected = [run_one_by_one(model, request) for request in requests]
    futures = engine.submit_many(model.name, requests)
    if len({tuple(tensor.shape for tensor in result.values()) for result in expected}) == 1:
        assert_same(futures.stacked(WAIT_S), stacked_by_hand(expected))
    else:
        with pytest.raises(cellrt.RequestError, match="stacked: the results of requests 0 and"):
            futures.stacked(WAIT_S)
    close_and_check(engine)


def test_stacked_results_raise_what_the_requests_raised_and_none_are_no_tensors():
    model = Unfolder("refusing", lambda graph, x: {"y": REFUSING(x=x).y}, torch.zeros(1))
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    with pytest.raises(cellrt.CellError, match="below zero"):
        engine.submit_many("refusing", [torch.ones(1), -torch.ones(1)]).stacked(WAIT_S)
    assert engine.submit_many("refusing", []).stacked(WAIT_S) == {}
    close_and_check(engine)
