"""Trees through the public API: child sums, left and right, their pictures and their subgraphs."""

from __future__ import annotations

import random
import sys
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cellrt
from cellrt.core.templates.program import OP_NODE, OP_RESULT
from cellrt.core.templates.program_operations import operations
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from tests.api.models import SIZE, Numbering, child_sum, embedded, leaf, model, pair, recurrent, serve, sum_rows


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
def test_every_node_of_a_tree_is_written_out_after_its_children(size: int, seed: int) -> None:
    parents = random_parents(size, seed)
    bottom, inner = leaf(), child_sum()

    def function(graph, xs):
        tree = graph.tree(parents, leaf=bottom, inner=inner, leaf_inputs={"x": xs}, inner_inputs={"x": xs[0]})
        return {"root": tree.h, "nodes": tree.nodes.h}

    num_leaves = size - len(set(parents) - {-1})
    binding = Numbering()
    recorded = model(function).record(binding, torch.ones(num_leaves, SIZE))  # type: ignore[arg-type]
    nodes = [made for made in operations(recorded.program, binding.ports) if made.op == OP_NODE]
    assert len(nodes) == size and nodes[-1].value in recorded_values(recorded.program, binding)
    read: set[int] = set()
    for node in nodes[num_leaves:]:
        children = node.inputs[list(inner.inputs).index("h")].listed
        assert children and all(nodes[0].value <= child < node.value for child in children)
        assert read.isdisjoint(children)
        read.update(children)
    assert read == {node.value for node in nodes[:-1]}
    assert [node.inputs[0].first for node in nodes[:num_leaves]] == list(range(num_leaves))


def recorded_values(program: bytes, binding: Numbering) -> set[int]:
    """The values that are results."""
    return {made.first for made in operations(program, binding.ports) if made.op == OP_RESULT}


class Summed(nn.Module):
    """A node of a tree: two outputs from all children's, its own row and, at leaves, no child's."""

    def forward(self, x: torch.Tensor, h: RaggedRows, c: RaggedRows) -> dict[str, torch.Tensor]:
        total = torch.tanh(x + sum_rows(h))
        return {"h": total, "c": 0.5 * sum_rows(c) + total}


SUMMED = cell(Summed(), {"x": (SIZE,), "h": ragged(SIZE), "c": ragged(SIZE)})
LEAF, PAIR, SUM = leaf(), pair(), child_sum()
HALF = cell(lambda h: {"half": h / 2}, {"h": (SIZE,)}, name="half")


def by_hand(parents: list[int], leaf: Cell, inner: Cell, leaf_xs: list[Any], inner_xs: list[Any]) -> list[Any]:
    """The nodes of a tree, called one by one in the order in which a tree has them."""
    children = [[k for k, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    made: dict[int, Any] = {}
    leaves = [node for node, its in enumerate(children) if not its]
    inners = [node for node, its in enumerate(children) if its]
    ragged_inputs = [name for name, spec in inner.inputs.items() if spec.ragged]
    for place, node in enumerate(leaves):
        made[node] = leaf(x=leaf_xs[place], **{name: [] for name, spec in leaf.inputs.items() if spec.ragged})
    waiting, missing = list(leaves), [len(its) for its in children]
    while waiting:
        parent = parents[waiting.pop(0)]
        if parent < 0:
            continue
        missing[parent] -= 1
        if not missing[parent]:
            read = [made[child] for child in children[parent]]
            given = {name: [getattr(each, name) for each in read] for name in ragged_inputs}
            if not ragged_inputs:
                given = {"h_left": read[0].h, "h_right": read[1].h}
            elif "x" in inner.inputs:
                given["x"] = inner_xs[inners.index(parent)]
            made[parent] = inner(**given)
            waiting.append(parent)
    return [made[node] for node in range(len(parents))]


@given(size=st.integers(1, 25), seed=st.integers(0, 1000))
def test_a_tree_is_the_graph_that_its_nodes_are_one_by_one(size: int, seed: int) -> None:
    """Program and results, whatever the nodes are given: rows of the request, outputs of others, one for all."""
    torch.manual_seed(seed)
    cells = [(LEAF, SUM), (SUMMED, SUMMED), (LEAF, PAIR)][seed % 3]
    parents = random_binary(size, seed) if cells[1] is PAIR else random_parents(size, seed)
    num_leaves = len(parents) - len(set(parents) - {-1})
    leaf_xs, inner_xs = torch.randn(num_leaves, SIZE), torch.randn(len(parents) - num_leaves, SIZE)

    def function(graph: Graph, is_by_hand: bool) -> object:
        of_leaves: Any = list(leaf_xs) if seed % 2 else [LEAF(x=row).h for row in leaf_xs]
        of_inner: Any = list(inner_xs) if seed % 5 else [graph.constant(torch.ones(SIZE))] * len(inner_xs)
        if is_by_hand:
            nodes = by_hand(parents, *cells, of_leaves, of_inner)
            root = nodes[parents.index(-1)]
            return {"root": root.h, "nodes": [node.h for node in nodes]}
        if seed % 5 == 0 and of_inner:
            of_inner = of_inner[0]
        given = {"x": of_inner} if "x" in cells[1].inputs else {}
        tree = graph.tree(parents, leaf=cells[0], inner=cells[1], leaf_inputs={"x": of_leaves}, inner_inputs=given)
        return {"root": tree.h, "nodes": tree.nodes.h}

    results, expected = (run_one_by_one(model(function), is_by_hand) for is_by_hand in (False, True))
    assert results.keys() == expected.keys() and all(torch.equal(results[name], expected[name]) for name in expected)
    binding = Numbering()
    one, other = (model(function).record(binding, is_by_hand) for is_by_hand in (False, True))  # type: ignore[arg-type]
    if seed % 2 == 0 and (cells[1] is PAIR or seed % 5 == 0):  # then the request's rows are the same tensors, too
        assert list(operations(one.program, binding.ports)) == list(operations(other.program, binding.ports))


def random_binary(num_leaves: int, seed: int) -> list[int]:
    """A tree of so many leaves whose other nodes have two children, numbered at random."""
    source = random.Random(seed)
    numbers = source.sample(range(2 * num_leaves - 1), 2 * num_leaves - 1)
    parents, free = [-1] * len(numbers), [numbers[0]]
    for k in range(1, len(numbers), 2):
        parent = free.pop(source.randrange(len(free)))
        parents[numbers[k]] = parents[numbers[k + 1]] = parent
        free += numbers[k : k + 2]
    return parents


def test_a_client_makes_as_many_calls_for_a_large_tree_or_dag_as_for_a_small_one(engine: Engine) -> None:
    def of_parents(graph: Graph, parents: np.ndarray) -> object:
        xs = np.ones(((len(parents) + 1) // 2, SIZE), np.float32)
        tree = graph.tree(parents, leaf=LEAF, inner=PAIR, leaf_inputs={"x": xs})
        return {"root": tree.h, "nodes": tree.nodes.h, "after": graph.chain(HALF, h=tree.nodes.h).half}

    def of_sources(graph: Graph, sources: np.ndarray) -> object:
        xs = np.ones((len(sources) + 1, SIZE), np.float32)
        offsets = np.array([0, *range(len(sources) + 1)], np.int32)
        return {"h": graph.dag(SUM, offsets, sources, {"x": xs}).h}

    engine.register(model(of_parents, np.array([2, 2, -1], np.int32), "tree"), warm_up=False)
    engine.register(model(of_sources, np.array([0], np.int32), "dag"), warm_up=False)
    source = random.Random(0)
    for name, make in (
        ("tree", lambda size: np.array(random_binary((size + 1) // 2, size), np.int32)),
        ("dag", lambda size: np.array([source.randrange(k) for k in range(1, size)], np.int32)),
    ):
        for size in (9, 401):  # what is done for the first of a kind alone
            engine.submit(name, make(size)).result(60)
        small, large = (num_calls(engine, name, make(size)) for size in (11, 301))
        assert large <= small + 10, name


def num_calls(engine: Engine, name: str, request: object) -> int:
    """How many functions, in Python and C, a client calls to hand in a request whose graph is new."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        future = engine.submit(name, request)
    finally:
        sys.setprofile(None)
    future.result(60)
    return count


def test_outputs_of_every_node_are_as_a_list_of_them() -> None:
    """An input, a result beside that of the root, and whatever lists are for."""

    def function(graph: Graph, way: int) -> object:
        tree = graph.tree([3, 4, 4, -1, 3], leaf=LEAF, inner=PAIR, leaf_inputs={"x": torch.eye(3, SIZE)})
        listed: Any = tree.nodes.h if way else [*tree.nodes.h]
        first = {"root": tree.h, "every": listed, "again": listed} if way < 2 else {"every": listed, "root": tree.h}
        total = SUM(x=listed[3], h=listed).h
        more = listed + [total]  # noqa: RUF005
        return first | {
            "again": listed,
            "total": total,
            "half": graph.chain(HALF, h=listed, reverse=True).half,
            "few": graph.chain(HALF, h=listed[1:3]).half,
            "more": SUM(x=more[-1], h=[total] + listed).h,  # noqa: RUF005
            "count": SUM(x=listed[-1], h=more).h,
        }

    expected, *others = (run_one_by_one(model(function), way) for way in range(4))
    assert expected["every"].shape == expected["half"].shape == (5, SIZE)
    for other in others:
        assert other.keys() == expected.keys() and all(torch.equal(other[name], expected[name]) for name in other)
