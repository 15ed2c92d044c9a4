"""``graph.dag``: any acyclic graph in one piece is the graph that is written node by node."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cellrt
from cellrt.core.templates.program_operations import operations
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.known import KnownGraphs
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import unfold
from tests.api.models import SIZE, Numbering, child_sum, leaf, model, serve, sum_rows
from tests.api.test_keys import Keeping


def weighted(h: RaggedRows, c: RaggedRows, weight: RaggedRows, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A node of two outputs that reads them both of its sources, and a number for each source."""
    by_weight = RaggedRows(h.values * weight.values[:, None], h.offsets)
    total = torch.tanh(x + sum_rows(by_weight))
    return {"h": total, "c": 0.5 * sum_rows(c) + x}


SUM, LEAF = child_sum(), leaf()
WEIGHTED = cell(weighted, {"h": ragged(SIZE), "c": ragged(SIZE), "weight": ragged(), "x": (SIZE,)})
TOTAL = cell(lambda rows: {"sum": sum_rows(rows)}, {"rows": ragged(SIZE)}, name="total")


def random_dag(size: int, seed: int) -> tuple[list[int], list[int]]:
    """Offsets and sources; a source may be read twice, and by a node that others of it read."""
    source = random.Random(seed)
    read = [
        [source.randrange(node) for _ in range(source.choice((0, 1, 2, 5)))] if node else [] for node in range(size)
    ]
    return np.cumsum([0, *map(len, read)]).tolist(), [each for sources in read for each in sources]


def node_by_node(offsets: Sequence[int], sources: Sequence[int], xs: Any, weights: Any) -> list[Any]:
    """What ``graph.dag(WEIGHTED, ...)`` should be."""
    nodes: list[Any] = []
    for node in range(len(offsets) - 1):
        places = range(offsets[node], offsets[node + 1])
        read = [nodes[sources[place]] for place in places]
        given = [weights[place] for place in places]
        nodes.append(WEIGHTED(h=[each.h for each in read], c=[each.c for each in read], weight=given, x=xs[node]))
    return nodes


dags = given(size=st.integers(1, 25), seed=st.integers(0, 1000))


@dags
def test_a_dag_computes_what_its_nodes_do_one_by_one(size: int, seed: int) -> None:
    torch.manual_seed(seed)
    offsets, sources = random_dag(size, seed)
    xs, weights = torch.randn(size, SIZE), torch.randn(len(sources))

    def function(graph: Graph, by_hand: bool) -> object:
        if by_hand:
            nodes = node_by_node(offsets, sources, xs, weights)
            h, c = [node.h for node in nodes], [node.c for node in nodes]
            return {"h": h, "c": c, "read": TOTAL(rows=h).sum, "last": c[-1]}
        dag = graph.dag(WEIGHTED, offsets, sources, {"x": xs, "weight": weights})
        return {"h": dag.h, "c": dag.c, "read": TOTAL(rows=dag.h).sum, "last": dag.c[size - 1]}

    results, expected = (run_one_by_one(model(function), by_hand) for by_hand in (False, True))
    assert results["h"].shape == results["c"].shape == (size, SIZE)
    assert results.keys() == expected.keys() and all(torch.equal(results[name], expected[name]) for name in expected)


@dags
def test_a_dag_is_written_out_as_its_nodes_one_by_one(size: int, seed: int) -> None:
    """Whatever of the graph they read: outputs in any order, or one for all."""
    offsets, sources = random_dag(size, seed)

    def function(graph: Graph, by_hand: bool) -> object:
        xs = [LEAF(x=graph.constant(torch.ones(SIZE))).h for _ in range(size)]
        weights = [graph.constant(float(k)) for k in range(len(sources))]
        if seed % 3 == 0:
            xs, weights = [xs[0]] * size, weights[:1] * len(weights)
        random.Random(seed).shuffle(xs)
        random.Random(seed).shuffle(weights)
        if by_hand:
            return {"h": node_by_node(offsets, sources, xs, weights)[-1].h}
        one = seed % 6 == 0 and len(weights) > 0  # for all
        given: dict[str, Any] = {"x": xs[0], "weight": weights[0]} if one else {"x": xs, "weight": weights}
        return {"h": graph.dag(WEIGHTED, offsets, sources, given).h[size - 1]}

    binding = Numbering()
    one, other = (model(function).record(binding, by_hand) for by_hand in (False, True))  # type: ignore[arg-type]
    read, expected = (list(operations(made.program, binding.ports)) for made in (one, other))
    assert read == expected and one.externals == other.externals == []


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_serves_dags(engine: Engine, seed: int) -> None:
    def function(graph: Graph, request: tuple[Any, Any, torch.Tensor]) -> object:
        offsets, sources, xs = request
        dag = graph.dag(SUM, offsets, sources, {"x": xs})
        upper = graph.dag(SUM, offsets, sources, {"x": dag.h})
        return {"h": dag.h, "upper": upper.h, "first": upper.h[0], "all": TOTAL(rows=upper.h).sum}

    requests = [(*random_dag(size, seed), torch.randn(size, SIZE)) for size in (1, 2, 3, 20, 60)]
    serve(engine, model(function, requests[0]), *requests)


def test_numbers_of_nodes_may_be_lists_arrays_or_tensors_of_any_width(engine: Engine) -> None:
    offsets, sources = random_dag(12, seed=1)
    forms: list[Any] = [list, tuple, torch.tensor, lambda values: np.array(values, np.uint64)[::1]]
    forms += [lambda values, kind=kind: np.array(values, kind) for kind in (np.int8, np.uint16, np.int32, np.int64)]
    forms += [lambda values: np.frombuffer(np.array(values, np.int32).tobytes(), np.int32)]  # which is read-only
    xs = torch.randn(12, SIZE)

    def function(graph: Graph, form: int) -> object:
        return {"h": graph.dag(SUM, forms[form](offsets), forms[form](sources), {"x": xs}).h}

    first, *others = serve(engine, model(function, 0), *range(len(forms)))
    assert all(torch.allclose(first["h"], other["h"]) for other in others)


def test_nodes_that_read_nothing_need_no_sources_and_no_rows_of_them() -> None:
    def function(graph: Graph, xs: torch.Tensor) -> object:
        none: list[Any] = [[], (), torch.empty(0), np.empty(0), torch.empty(0, dtype=torch.int64)]
        dags = [graph.dag(WEIGHTED, [0, 0, 0], each, {"x": xs, "weight": each}) for each in none]
        return {str(number): dag.h for number, dag in enumerate(dags)}

    xs = torch.randn(2, SIZE)
    for result in run_one_by_one(model(function), xs).values():
        torch.testing.assert_close(result, torch.tanh(xs))


def test_carried_inputs_that_a_dag_is_not_given_are_zeros() -> None:
    def counted(h: torch.Tensor, sums: RaggedRows) -> dict[str, torch.Tensor]:
        return {"h": h + 1, "sums": h + 1 + sum_rows(sums)}

    counting = cell(counted, {"h": (1,), "sums": ragged(1)})

    def function(graph: Graph, request: object) -> object:
        return {"sums": graph.dag(counting, [0, 0, 1, 3], [0, 0, 1]).sums}

    assert run_one_by_one(model(function), None)["sums"].tolist() == [[1.0], [2.0], [4.0]]


@pytest.mark.parametrize("form", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_a_request_of_arrays_may_have_its_numbers_of_nodes_as_a_key(form: Any) -> None:
    unfolded: list[int] = []

    def key(request: dict[str, Any]) -> object:
        return tuple(tuple(int(each) for each in request[name]) for name in ("offsets", "sources"))

    @unfold("m", example=None, key=key)
    def function(graph: Graph, request: dict[str, Any]) -> object:
        unfolded.append(len(request["x"]))
        given = {"x": request["x"], "weight": request["weight"]}
        return {"h": graph.dag(WEIGHTED, request["offsets"], request["sources"], given).h}

    def request_of(size: int, value: float) -> dict[str, Any]:
        offsets, sources = random_dag(size, seed=size)
        numbers = {"offsets": form(np.array(offsets)), "sources": form(np.array(sources))}
        x = np.full((size, SIZE), value, np.float32)
        return numbers | {"x": x, "weight": np.full(len(sources), value, np.float32)}

    known, binding = KnownGraphs(function), Keeping()
    for times in range(8):
        for size in (5, 9):
            request = request_of(size, times + 0.5)
            (alike,) = known.record(binding, [request])  # type: ignore[arg-type]
            recorded = function.record(binding, request)  # type: ignore[arg-type]
            unfolded.clear()
            assert alike.recorded.program == recorded.program and alike.recorded.results == recorded.results
            for one, other in zip(alike.recorded.externals, recorded.externals, strict=True):
                assert one[0] == other[0] and np.array_equal(one[1], other[1])
    several = [request_of(5, 20.0), request_of(5, 21.0)]
    for _ in range(2):  # one of these is unfolded to see that the key tells what it should
        unfolded.clear()
        (alike,) = known.record(binding, several)  # type: ignore[arg-type]
    assert unfolded == [] and [rows.shape[0] for _, rows in alike.recorded.externals] == [26, 10]


def test_the_source_that_is_wrong_is_named_and_not_one_before_it() -> None:
    def function(graph: Graph, request: object) -> object:
        return {"h": graph.dag(SUM, [0, 0, 1, 3], [0, 1, 7], {"x": torch.ones(SIZE)}).h}

    with pytest.raises(cellrt.RequestError, match="node 7"):
        run_one_by_one(model(function), None)


def test_a_dag_counts_its_nodes_before_it_is_written(engine: Engine) -> None:
    def function(graph: Graph, size: int) -> object:
        return {"h": graph.dag(SUM, [0] * (size + 1), [], {"x": torch.ones(SIZE)}).h[size - 1]}

    engine.register(model(function, 1), warm_up=False)
    assert engine.submit("m", 1000).result(30)["h"].shape == (SIZE,)
    with pytest.raises(cellrt.RequestTooLargeError, match="the graph has 1001 nodes, at most 1000 are allowed"):
        engine.submit("m", 1001)
