"""Models of trees: what an engine answers equals plain recursion over the same tree, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cellrt
from cellrt import unfolders
from cellrt.cells import (
    BinaryTreeLSTMCell,
    ChildSumTreeLSTMCell,
    EmbeddingChildSumTreeLSTMCell,
    EmbeddingTreeLSTMLeaf,
    LSTMCell,
    NaryTreeLSTMCell,
    TreeLSTMLeaf,
)
from cellrt.definition.spec import RaggedRows
from cellrt.errors import DefinitionError, RequestError, RequestTooLargeError
from cellrt.unfolders.trees import _flatten
from tests.effort import examples
from tests.engine.helpers import small_engine

HIDDEN = 8
STATE, CHILDREN, TOKEN = (HIDDEN,), cellrt.ragged(HIDDEN), cellrt.rows(dtype=torch.int64)
MOST = 1000
"""Nodes of a tree."""
WORDS = {"a": 1, "lovely": 2, "film": 3}
SENTENCE = "".join(
    f"{k}\t{word}\t_\t_\t_\t_\t{head}\t_\t_\t_\n"
    for k, (word, head) in enumerate([("a", 3), ("lovely", 3), ("film", 0), ("indeed", 3), ("!", 4)], 1)
)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 3)

    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"scores": self.linear(h)}


class Again(nn.Module):
    """Reads and writes ``h``, so that its chains would carry it."""

    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"h": 2 * h}


def make_cells() -> SimpleNamespace:
    torch.manual_seed(0)
    pair = dict.fromkeys(["h_left", "c_left", "h_right", "c_right"], STATE)
    three = dict.fromkeys([f"{name}_{k}" for name in "hc" for k in range(3)], STATE)
    below = {"h": CHILDREN, "c": CHILDREN}
    return SimpleNamespace(
        leaf=cellrt.cell(TreeLSTMLeaf(4, HIDDEN), {"x": (4,)}),
        word=cellrt.cell(EmbeddingTreeLSTMLeaf(5, 4, HIDDEN), {"token": TOKEN}),
        binary=cellrt.cell(BinaryTreeLSTMCell(None, HIDDEN), pair),
        binary_x=cellrt.cell(BinaryTreeLSTMCell(2, HIDDEN), {"x": (2,), **pair}),
        ternary=cellrt.cell(NaryTreeLSTMCell(3, None, HIDDEN), three),
        child_sum=cellrt.cell(ChildSumTreeLSTMCell(4, HIDDEN), {"x": (4,), **below}),
        word_sum=cellrt.cell(EmbeddingChildSumTreeLSTMCell(5, 4, HIDDEN), {"token": TOKEN, **below}),
        classifier=cellrt.cell(Classifier(), {"h": STATE}),
        recurrent=cellrt.cell(LSTMCell(4, HIDDEN), {"x": (4,), "h": STATE, "c": STATE}),
        again=cellrt.cell(Again(), {"h": STATE}),
    )


@pytest.fixture(scope="module")
def cells() -> SimpleNamespace:
    return make_cells()


@pytest.fixture(scope="module")
def engine(cells) -> Iterator[cellrt.Engine]:
    with cellrt.Engine(freeze=False) as made:  # a tree of 5,000 levels is among the requests
        every = {"output": cells.classifier, "every_node": True}
        words = {"vocabulary": WORDS, "unknown": 4}
        for model in (
            unfolders.tree("tree", leaf=cells.leaf, inner=cells.binary),
            unfolders.tree("words", leaf=cells.word, inner=cells.binary, **every),
            unfolders.tree("stateful", leaf=cells.recurrent, inner=cells.binary, output=cells.again, every_node=True),
            unfolders.tree("ternary", leaf=cells.leaf, inner=cells.ternary, every_node=True),
            unfolders.parent_tree("parents", leaf=cells.child_sum, output=cells.classifier),
            unfolders.parent_tree("parents_every", leaf=cells.child_sum, every_node=True),
            unfolders.parent_tree("two_cells", leaf=cells.word, inner=cells.binary_x),
            unfolders.parent_tree("two_cells_every", leaf=cells.word, inner=cells.binary_x, every_node=True),
            unfolders.penn_tree("penn", leaf=cells.word, inner=cells.binary, output=cells.classifier, **words),
            unfolders.penn_tree("penn_unary", leaf=cells.word, inner=cells.binary, collapse_unary=True, **words),
            unfolders.conllu_tree("conllu", cell=cells.word_sum, **words, **every),
        ):
            made.register(model, warm_up=False)
        yield made


def ask(engine: cellrt.Engine, model: str, request: Any) -> dict[str, Tensor]:
    return engine.submit(model, request).result(timeout=60)


def run(cell, **inputs: Any) -> Any:
    """One row through the cell's module."""
    given = {
        name: value if isinstance(value, RaggedRows) else torch.as_tensor(value)[None] for name, value in inputs.items()
    }
    return cell.module(**given)


def ragged(rows: list[Tensor]) -> RaggedRows:
    return RaggedRows(torch.cat(rows) if rows else torch.zeros(0, HIDDEN), torch.tensor([0, len(rows)]))


def fold_nested(tree: Any, leaf, inner, names, name: str, nodes: list) -> Any:
    """The state of nested tuples by recursion; states of all nodes, as they begin, in ``nodes``."""
    place = len(nodes)
    nodes.append(None)
    if not isinstance(tree, tuple):
        state = run(leaf, **{name: tree})
    else:
        below = [fold_nested(child, leaf, inner, names, name, nodes) for child in tree]
        given = {f"{part}_{side}": getattr(child, part)[0] for side, child in zip(names, below) for part in "hc"}
        state = run(inner, **given)
    nodes[place] = state
    return state


def fold_parents(parents: list[int], node: int, cell, inputs: dict[str, Any], nodes: dict) -> Any:
    """The state of a child-sum node by recursion."""
    below = [
        fold_parents(parents, child, cell, inputs, nodes) for child, parent in enumerate(parents) if parent == node
    ]
    given = {name: rows[node] for name, rows in inputs.items()}
    nodes[node] = run(cell, **given, h=ragged([child.h for child in below]), c=ragged([child.c for child in below]))
    return nodes[node]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.detach().reshape(actual.shape), rtol=1e-4, atol=1e-5)


def scores_of(cells, nodes) -> Tensor:
    return torch.cat([cells.classifier.module(node.h)["scores"] for node in nodes])


def vectors(count: int) -> list[Tensor]:
    return list(torch.randn(count, 4))


def parents_of(size: int, seed: int) -> list[int]:
    """A random tree whose nodes are numbered at random."""
    source = np.random.default_rng(seed)
    numbers = source.permutation(size).tolist()
    parents = [-1] * size
    for k in range(1, size):
        parents[numbers[k]] = numbers[int(source.integers(k))]
    return parents


def test_nested_tuples(engine, cells):
    a, b, c, d = vectors(4)
    for request in (a, (a, b), ((a, b), c), ((a, (b, c)), (d, a))):
        expected = fold_nested(request, cells.leaf, cells.binary, ("left", "right"), "x", [])
        result = ask(engine, "tree", request)
        assert_same(result["h"], expected.h)
        assert_same(result["c"], expected.c)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_leaves_may_be_numbers_of_any_dtype(dtype):
    leaf = cellrt.cell(lambda x: {"h": x.float()}, {"x": cellrt.rows(dtype=dtype)}, name="leaf")
    inner = cellrt.cell(lambda h_left, h_right: {"h": 2 * h_left + h_right}, {"h_left": (), "h_right": ()})
    with small_engine(1) as engine:
        engine.register(unfolders.tree("numbers", leaf=leaf, inner=inner), warm_up=False)
        assert ask(engine, "numbers", ((1, 0), 3))["h"] == 7
        if dtype.is_floating_point:
            assert ask(engine, "numbers", ((1, 0.5), 3))["h"] == 8


def test_leaves_may_be_arrays(engine):
    a, b = vectors(2)
    assert_same(ask(engine, "tree", (a.numpy(), b.numpy()))["h"], ask(engine, "tree", (a, b))["h"])


@settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(st.integers(0, 4), lambda below: st.tuples(below, below), max_leaves=25))
def test_every_node_of_random_trees(engine, cells, request_):
    nodes: list = []
    fold_nested(request_, cells.word, cells.binary, ("left", "right"), "token", nodes)
    assert_same(ask(engine, "words", request_)["scores"], scores_of(cells, nodes))


def test_three_children_in_order(engine, cells):
    a, b, c = vectors(3)
    nodes: list = []
    fold_nested((a, (c, b, a), b), cells.leaf, cells.ternary, (0, 1, 2), "x", nodes)
    assert_same(ask(engine, "ternary", (a, (c, b, a), b))["h"], torch.cat([node.h for node in nodes]))


@pytest.mark.parametrize("size", [1, 2, 3, 30])
def test_parents_with_one_cell_for_every_node(engine, cells, size):
    parents, x = parents_of(size, size), torch.randn(size, 4)
    nodes: dict = {}
    root = fold_parents(parents, parents.index(-1), cells.child_sum, {"x": x}, nodes)
    assert_same(ask(engine, "parents", {"parents": parents, "inputs": {"x": x}})["scores"], scores_of(cells, [root]))
    every = ask(engine, "parents_every", {"parents": np.array(parents), "inputs": {"x": x.numpy()}})
    assert_same(every["c"], torch.cat([nodes[node].c for node in range(size)]))


def test_parents_with_two_cells(engine, cells):
    parents, x = [3, 4, 4, -1, 3], torch.randn(2, 2)
    request = {"parents": parents, "leaf_inputs": {"token": [1, 2, 3]}, "inner_inputs": {"x": x}}
    leaves = [run(cells.word, token=token) for token in (1, 2, 3)]

    def pair(row: Tensor, left, right):
        states = {"h_left": left.h[0], "c_left": left.c[0], "h_right": right.h[0], "c_right": right.c[0]}
        return run(cells.binary_x, x=row, **states)

    inner = pair(x[1], leaves[1], leaves[2])
    root = pair(x[0], leaves[0], inner)
    assert_same(ask(engine, "two_cells", request)["h"], root.h)
    expected = torch.cat([state.h for state in (*leaves, root, inner)])
    assert_same(ask(engine, "two_cells_every", request)["h"], expected)


def test_leaf_and_output_cells_with_state_of_their_own_start_anew_at_every_node(engine, cells):
    a, b = vectors(2)
    zeros = torch.zeros(HIDDEN)
    left, right = (run(cells.recurrent, x=x, h=zeros, c=zeros) for x in (a, b))
    root = run(cells.binary, h_left=left.h[0], c_left=left.c[0], h_right=right.h[0], c_right=right.c[0])
    assert_same(ask(engine, "stateful", (a, b))["h"], torch.cat([2 * state.h for state in (root, left, right)]))


def test_penn_brackets(engine, cells):
    root = fold_nested((1, (2, 4)), cells.word, cells.binary, ("left", "right"), "token", [])
    result = ask(engine, "penn", "(3 (2 a) (4 (3 lovely) (2 movie)))")
    assert_same(result["scores"], scores_of(cells, [root]))
    assert_same(ask(engine, "penn_unary", "( (S (NP (DT a)) (VP (VP (JJ lovely) (NN movie)))) )")["h"], root.h)


def test_a_sentence_of_conllu(engine, cells):
    nodes: dict = {}
    fold_parents([2, 2, -1, 2, 3], 2, cells.word_sum, {"token": torch.tensor([1, 2, 3, 4, 4])}, nodes)
    assert_same(ask(engine, "conllu", SENTENCE)["scores"], scores_of(cells, [nodes[k] for k in range(5)]))


def test_five_thousand_levels(engine):
    depth = 5_000
    nested: Any = 1
    for _ in range(depth):
        nested = (nested, 2)
    assert ask(engine, "words", nested)["scores"].shape == (2 * depth + 1, 3)
    brackets = "(0 " * depth + "(1 a)" + " (1 lovely))" * depth
    assert engine.graph("penn", brackets).num_nodes == 2 * depth + 2
    chain = {"parents": list(range(-1, depth - 1)), "inputs": {"x": torch.randn(depth, 4)}}
    assert engine.graph("parents", chain).num_nodes == depth + 1
    assert engine.graph("parents_every", chain).num_nodes == depth


@pytest.mark.parametrize(
    ("model", "request_", "message"),
    [
        ("tree", ((), torch.zeros(4)), "node 1: expected at least one child, found an empty tuple"),
        (
            "tree",
            (torch.zeros(4), torch.zeros(3)),
            r"leaf 1: expected a row of shape \[4\] as the others, found float32",
        ),
        ("tree", (torch.zeros(4), "b"), r"leaf 1: expected a row of shape \[4\], found str"),
        ("tree", (torch.zeros(4),), "node 0 has 1 children, cell 'BinaryTreeLSTMCell' reads 2"),
        ("words", (1, 2, 3), "node 0 has 3 children, cell 'BinaryTreeLSTMCell' reads 2"),
        ("words", (1, 2.5), "leaf 1"),
        ("parents", [0, -1], "expected a dict with parents and .'inputs'., got list"),
        ("parents", {"parents": [-1], "leaf_inputs": {}}, "got .'leaf_inputs', 'parents'."),
        ("parents", {"parents": [], "inputs": {}}, "expected parents as integers"),
        ("parents", {"parents": [0.5], "inputs": {}}, "expected parents as integers"),
        ("parents", {"parents": [-1, 2], "inputs": {}}, "expected parents from -1 to 1, found -1 to 2"),
        ("parents", {"parents": [-1], "inputs": [1]}, "expected inputs as a dict, got list"),
        ("parents", {"parents": [-1, 0], "inputs": {"x": torch.zeros(3, 4)}}, "input 'x': expected 2 rows"),
        ("parents", {"parents": [-1, 0]}, "input 'x': missing"),
        ("parents", {"parents": [1, 0, -1], "inputs": {"x": torch.zeros(3, 4)}}, "cycle"),
        ("parents_every", {"parents": [1, 0, -1], "inputs": {"x": torch.zeros(3, 4)}}, "cycle"),
        ("parents_every", {"parents": [-1, -1], "inputs": {"x": torch.zeros(2, 4)}}, "two roots: nodes 0 and 1"),
        ("parents_every", {"parents": [-1], "inputs": {"y": torch.zeros(1, 4)}}, "input 'y': unknown"),
        ("two_cells_every", {"parents": [-1], "leaf_inputs": {"token": [1, 2]}}, "one for each leaf of parents, got 2"),
        ("penn", "(3 (2 a)", r"character 8: expected '\)', found the end of the text"),
        ("penn", "(3 (2 a) (2 a) (2 a))", "node 0 has 3 children, cell 'BinaryTreeLSTMCell' reads 2"),
        ("conllu", "1\ta\n", "line 1: expected 10 columns"),
        ("conllu", SENTENCE.replace("a\t_\t_\t_\t_\t3", "a\t_\t_\t_\t_\t1"), "cycle"),
    ],
)
def test_a_wrong_request_is_named(engine, model, request_, message):
    with pytest.raises(RequestError, match=message):
        ask(engine, model, request_)


def test_a_wrong_definition_is_named(cells):
    words = {"vocabulary": WORDS, "unknown": 4}
    with pytest.raises(DefinitionError, match="input 'h' of cell 'Classifier' reads 'h', float32"):
        other = cellrt.cell(TreeLSTMLeaf(4, 3), {"x": (4,)})
        unfolders.tree("m", leaf=other, inner=cells.binary, output=cells.classifier)
    with pytest.raises(DefinitionError, match="input 'h_left' of cell 'BinaryTreeLSTMCell' reads 'h'"):
        unfolders.tree("m", leaf=cellrt.cell(nn.Linear(4, 4), {"x": (4,)}), inner=cells.binary)
    with pytest.raises(DefinitionError, match="no output in common"):
        unfolders.parent_tree("m", leaf=cells.classifier, inner=cells.again)
    with pytest.raises(DefinitionError, match="inner nodes have no inputs besides their children"):
        unfolders.tree("m", leaf=cells.leaf, inner=cells.binary_x)
    with pytest.raises(DefinitionError, match=r"expected an input of int64\[\] for tokens, input 'x'"):
        unfolders.penn_tree("m", leaf=cells.leaf, inner=cells.binary, **words)
    with pytest.raises(DefinitionError, match="expected a leaf cell with one input"):
        unfolders.tree("m", leaf=cells.binary, inner=cells.binary)
    with pytest.raises(DefinitionError, match="no ragged input"):
        unfolders.conllu_tree("m", cell=cells.word, **words)
    with pytest.raises(DefinitionError, match="expected a cell, got TreeLSTMLeaf"):
        unfolders.tree("m", leaf=TreeLSTMLeaf(4, HIDDEN), inner=cells.binary)


LEAVES = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=2),
)


def walk(item: Any, parent: int, parents: list[int], leaves: list[Any]) -> tuple[list[int], list[Any]]:
    """Parents and leaves by plain recursion."""
    node = len(parents)
    parents.append(parent)
    if isinstance(item, tuple):
        for child in item:
            walk(child, node, parents, leaves)
    else:
        leaves.append(item)
    return parents, leaves


@given(st.recursive(LEAVES, lambda inside: st.lists(inside, min_size=1, max_size=4).map(tuple), max_leaves=20))
def test_nested_tuples_are_read_in_the_order_in_which_nodes_begin(request_):
    parents, leaves = _flatten(request_, MOST)
    assert (parents.tolist(), list(leaves)) == walk(request_, -1, [], [])


@given(
    st.lists(LEAVES, min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=3), max_size=6),
    st.integers(0, 2),
)
def test_a_part_that_is_shared_is_nodes_of_its_own_each_time(leaves, inner, room):
    parts: list[Any] = list(leaves)
    for children in inner:
        parts.append(tuple([parts[-1 - child % len(parts)] for child in children]))
    expected = walk(parts[-1], -1, [], [])
    parents, found = _flatten(parts[-1], len(expected[0]) + room)
    assert (parents.tolist(), list(found)) == expected


@pytest.mark.parametrize("leaf", [7, torch.zeros(4)])
def test_more_nodes_than_are_allowed_are_refused_before_they_are_counted(leaf):
    """Sixty tuples, 2**60 leaves."""
    shared: Any = leaf
    for _ in range(60):
        shared = (shared, shared)
    with pytest.raises(RequestTooLargeError, match="more than 1000 nodes"):
        _flatten(shared, MOST)
    just_right = ((leaf,) * (MOST - 2),)
    assert _flatten(just_right, MOST)[0].size == MOST
    with pytest.raises(RequestTooLargeError):
        _flatten((*just_right, leaf), MOST)


def test_a_request_of_shared_trees_is_too_large(cells):
    shared: Any = torch.zeros(4)
    for _ in range(60):
        shared = (shared, shared)
    with small_engine(1, arena_bytes=1 << 20, max_nodes=100) as engine:
        engine.register(unfolders.tree("m", leaf=cells.leaf, inner=cells.binary), warm_up=False)
        with pytest.raises(RequestTooLargeError, match=r"model 'm': the tree has more than 100 nodes.*max_nodes"):
            engine.submit("m", shared)


def test_a_tree_deeper_than_the_stack_is_read():
    request_ = 0
    for leaf in range(1, 20_000):
        request_ = (request_, leaf)
    parents, leaves = _flatten(request_, 1 << 16)
    assert len(parents) == 39_999
    assert list(leaves) == list(range(20_000))
