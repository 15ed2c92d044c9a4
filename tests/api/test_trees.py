"""Trees through the public API: child sums, left and right, their pictures and their subgraphs."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cellrt
from cellrt.engine.engine import Engine
from cellrt.graph.tree_program import tree_program
from tests.api.models import SIZE, child_sum, embedded, leaf, model, pair, recurrent, serve


def random_parents(size: int, seed: int) -> list[int]:
    """A tree of ``size`` nodes, numbered at random."""
    numbers = list(range(size))
    source = random.Random(seed)
    source.shuffle(numbers)
    parents = [-1] * size
    for k in range(1, size):
        parents[numbers[k]] = numbers[source.randrange(k)]
    return parents


def binary_parents(num_leaves: int) -> list[int]:
    """A complete binary tree: leaves first, then level by level, the root last."""
    parents: list[int] = []
    level, first = num_leaves, 0
    while level > 1:
        parents += [first + level + k // 2 for k in range(level)]
        first, level = first + level, level // 2
    return [*parents, -1]


def test_leaves_are_one_subgraph_and_the_nodes_above_them_another(engine: Engine) -> None:
    bottom, inner = leaf(), pair()

    def function(graph, xs):
        return graph.tree(binary_parents(16), leaf=bottom, inner=inner, leaf_inputs={"x": xs})

    engine.register(model(function, torch.ones(16, SIZE)), warm_up=False)
    graph = engine.graph("m", torch.ones(16, SIZE))
    assert (graph.num_nodes, graph.num_subgraphs) == (31, 2)
    drawn = graph.to_networkx()
    assert list(nx.get_node_attributes(drawn, "subgraph").values()) == [0] * 16 + [1] * 15


@pytest.mark.parametrize("seed", range(6))
def test_child_sums_of_random_trees(engine: Engine, seed: int) -> None:
    bottom, inner = leaf(), child_sum()

    def function(graph, request):
        parents, xs = request
        leaves = len(set(range(len(parents))) - set(parents))
        tree = graph.tree(
            parents, leaf=bottom, inner=inner, leaf_inputs={"x": xs[:leaves]}, inner_inputs={"x": xs[leaves:]}
        )
        return {"root": tree.h, "nodes": tree.nodes.h}

    requests = [(random_parents(size, seed), torch.randn(size, SIZE)) for size in (1, 2, 3, 20)]
    results = serve(engine, model(function, requests[0]), *requests)
    for (parents, xs), result in zip(requests, results):
        expected = evaluate(parents, xs, bottom, inner)
        torch.testing.assert_close(result["nodes"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["root"], expected[parents.index(-1)], rtol=1e-5, atol=1e-5)


def evaluate(parents, xs, bottom, inner) -> torch.Tensor:
    """Every node's value by plain recursion on the modules."""
    children = [[k for k, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    leaves = [node for node in range(len(parents)) if not children[node]]
    inners = [node for node in range(len(parents)) if children[node]]

    def value(node: int) -> torch.Tensor:
        if not children[node]:
            return bottom.module(xs[leaves.index(node)][None])["h"]
        total = torch.stack([value(child) for child in children[node]]).sum(dim=0)
        return torch.tanh(inner.module.linear(xs[len(leaves) + inners.index(node)][None]) + total)

    return torch.cat([value(node) for node in range(len(parents))])


def test_outputs_that_not_every_node_has_are_refused(engine: Engine) -> None:
    bottom, inner = leaf(), pair()

    def function(graph, xs):
        return {"c": graph.tree([2, 2, -1], leaf=bottom, inner=inner, leaf_inputs={"x": xs}).nodes.c}

    with pytest.raises(cellrt.DefinitionError, match=r"has outputs \['h'\], not 'c'"):
        engine.register(model(function, torch.ones(2, SIZE)))


def test_left_and_right_differ_and_one_cell_may_be_both(engine: Engine) -> None:
    bottom, inner, both = leaf(), pair(), child_sum()

    def function(graph, xs):
        tree = graph.tree([2, 2, -1], leaf=bottom, inner=inner, leaf_inputs={"x": xs})
        swapped = graph.tree([2, 2, -1], leaf=bottom, inner=inner, leaf_inputs={"x": xs.flip(0)})
        same = graph.tree([2, 2, -1], leaf=both, inner=both, leaf_inputs={"x": xs}, inner_inputs={"x": xs[0]})
        return {"tree": tree.h, "swapped": swapped.h, "same": same.h}

    (result,) = serve(engine, model(function, torch.randn(2, SIZE)))
    assert not torch.allclose(result["tree"], result["swapped"])


def test_leaves_may_be_outputs_of_a_chain(engine: Engine) -> None:
    token, bottom, inner = embedded(), leaf(), pair()

    def function(graph, tokens):
        chain = graph.chain(token, token=tokens)
        root = graph.tree(np.array([3, 3, 4, 4, -1]), leaf=bottom, inner=inner, leaf_inputs={"x": chain.h})
        one = graph.tree([-1], leaf=bottom, inner=inner, leaf_inputs={"x": root.h})
        return {"root": root.h, "one": one.h}

    serve(engine, model(function, [1, 2, 3]))


def test_leaves_may_mix_rows_and_outputs_of_any_node(engine: Engine) -> None:
    token, bottom, inner = embedded(), leaf(), pair()
    row = torch.full((SIZE,), 0.25)

    def function(graph, tokens):
        chain = graph.chain(token, token=tokens)
        picked = [row, chain.h[3], row.tolist(), chain.h[0], chain.last.h]
        mixed = graph.tree([5, 5, 6, 7, 7, 6, 8, 8, -1], leaf=bottom, inner=inner, leaf_inputs={"x": picked})
        rows = [bottom(x=x).h for x in picked]
        first, second = inner(h_left=rows[0], h_right=rows[1]), inner(h_left=rows[3], h_right=rows[4])
        third = inner(h_left=rows[2], h_right=first.h)
        return {"mixed": mixed.h, "by hand": inner(h_left=third.h, h_right=second.h).h}

    (result, _) = serve(engine, model(function, [1, 2, 3, 4]), [1, 2, 3, 4], [4, 3, 2, 1])
    torch.testing.assert_close(result["mixed"], result["by hand"])


def test_inner_nodes_may_mix_rows_and_outputs(engine: Engine) -> None:
    step, inner = recurrent(), child_sum()
    row = torch.full((SIZE,), 0.25)

    def function(graph, request):
        made = step(x=row).h
        tree = graph.tree([1, 2, -1], leaf=step, inner=inner, leaf_inputs={"x": row}, inner_inputs={"x": [row, made]})
        return {"h": tree.h, "by hand": inner(x=made, h=[inner(x=row, h=[step(x=row).h]).h]).h}

    (result,) = serve(engine, model(function))
    torch.testing.assert_close(result["h"], result["by hand"])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64])
def test_parents_may_be_integers_of_any_width(engine: Engine, dtype: type) -> None:
    bottom, inner = leaf(), pair()
    parents = np.array([2, 2, -1 if np.iinfo(dtype).min < 0 else 2], dtype)

    def function(graph, given):
        return graph.tree(given, leaf=bottom, inner=inner, leaf_inputs={"x": torch.ones(2, SIZE)})

    engine.register(model(function, [2, 2, -1]), warm_up=False)
    if np.iinfo(dtype).min < 0:
        torch.testing.assert_close(
            engine.submit("m", parents).result(30), engine.submit("m", parents.tolist()).result(30)
        )
    else:  # there is no root without -1
        with pytest.raises(cellrt.RequestError, match="no root"):
            engine.submit("m", parents)


def test_a_graph_as_networkx_and_as_a_picture(engine: Engine, tmp_path) -> None:
    token, step, inner = embedded(), recurrent(), child_sum()

    def function(graph, tokens):
        chain = graph.chain(token, token=tokens)
        side = step(x=chain.h[0], h=chain.h[0])
        total = inner(x=side.h, h=[chain.h[1], side.h, chain.h[1]])
        return {"h": total.h}

    engine.register(model(function, [1, 2, 3]), warm_up=False)
    graph = engine.graph("m", [4, 5, 6])
    expected: nx.DiGraph = nx.DiGraph()
    expected.add_nodes_from([("t0", {"cell": "Embedded"}), ("t1", {"cell": "Embedded"}), ("t2", {"cell": "Embedded"})])
    expected.add_nodes_from([("side", {"cell": "Recurrent"}), ("total", {"cell": "ChildSum"})])
    expected.add_edge("t0", "t1", input=["h"])
    expected.add_edge("t1", "t2", input=["h"])
    expected.add_edge("t0", "side", input=["x", "h"])
    expected.add_edge("side", "total", input=["x", "h"])
    expected.add_edge("t1", "total", input=["h", "h"])
    drawn = graph.to_networkx()
    assert nx.is_isomorphic(
        drawn,
        expected,
        node_match=lambda a, b: a["cell"] == b["cell"],
        edge_match=lambda a, b: a["input"] == b["input"],
    )
    made = [node for node, results in drawn.nodes(data="results") if results]
    assert [drawn.nodes[node]["cell"] for node in made] == ["ChildSum"] and drawn.nodes[made[0]]["results"] == ["h"]
    read = [(data["cell"], data["inputs"]) for _, data in drawn.nodes(data=True) if data["inputs"]]
    assert read == [("Embedded", ["token"])] * 3
    assert repr(graph) == f"CellGraph(5 nodes, {graph.num_subgraphs} subgraphs)"
    # Contracted to its subgraphs, it is acyclic, and each subgraph is of one cell.
    subgraph_of = nx.get_node_attributes(drawn, "subgraph")
    contracted = nx.DiGraph(
        (subgraph_of[a], subgraph_of[b]) for a, b in drawn.edges if subgraph_of[a] != subgraph_of[b]
    )
    assert nx.is_directed_acyclic_graph(contracted)
    assert graph.num_subgraphs == len(set(subgraph_of.values()))
    graph.save(tmp_path / "graph.svg")
    text = (tmp_path / "graph.svg").read_text()
    assert "<svg" in text and 'id="node-0"' in text


@given(size=st.integers(1, 40), seed=st.integers(0, 1000))
def test_tree_program_writes_every_node_after_its_children(size: int, seed: int) -> None:
    parents = np.array(random_parents(size, seed), np.int32)
    leaf_words, inner_words = np.array([[1, 100, 1]], np.int32), np.array([[3, 0, 0]], np.int32)
    words, firsts, problem = tree_program(parents, 0, 1, 1, 1, leaf_words, inner_words, np.empty(0, np.int32), 1000)
    assert problem == -1 and firsts[parents.tolist().index(-1)] == 1000 + size - 1
    assert sorted(firsts.tolist()) == list(range(1000, 1000 + size))
    at, value, leaves = 0, 1000, set()
    read: set[int] = set()
    while at < len(words):
        if words[at + 1] == 0:
            leaves.add(int(words[at + 3]))
            at += 4
        else:
            children = words[at + 4 : at + 4 + words[at + 3]].tolist()
            assert children and all(1000 <= child < value for child in children)
            assert read.isdisjoint(children)
            read.update(children)
            at += 4 + len(children)
        value += 1
    assert value == 1000 + size and read == set(range(1000, 1000 + size - 1))
    assert leaves == set(range(100, 100 + len(leaves)))
