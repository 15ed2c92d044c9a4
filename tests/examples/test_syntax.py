"""Naming functions by their syntax: sharing changes nothing, and what is served is what the equations say."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import cellrt
from models.syntax import VERBS, SharedTree, VerbModel, make_verbs, read_functions, share, train

SOURCE = '''
class Shelf:
    def get_book(self, name):
        """Looks for it."""
        if name in self.books:
            return self.books[name]
        return self.books.get(name, None)

    async def setAll(self, books):
        self.books, self.num_books = books, len(books)

    def other(self): pass
'''


@pytest.fixture
def trees() -> list[SharedTree]:
    sources = ["x", "x = x + x", "def f(a, a2): return a.b(a.b(1), a.b(1), True)", textwrap.dedent(SOURCE)]
    return [share(ast.parse(source)) for source in sources]


@pytest.fixture
def model(trees: list[SharedTree]) -> VerbModel:
    torch.manual_seed(0)
    labels = sorted({label for tree in trees for label in tree.labels})
    return VerbModel(labels[::2], size=8).eval()  # half of the labels are unknown


def logits(model: VerbModel, tree: SharedTree) -> np.ndarray:
    """Equations 2 to 8 of the paper, from the root down, every part as often as it occurs, in float64."""
    weights: Mapping[str, np.ndarray] = {name: value.double().numpy() for name, value in model.state_dict().items()}
    tokens = model.tokens(tree)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def state(node: int) -> tuple[np.ndarray, np.ndarray]:
        below = [state(child) for child in tree.children[node]]
        x = weights["node.embedding.weight"][tokens[node]]
        x_i, x_o, x_u, x_f = np.split(weights["node.weight_ih"] @ x + weights["node.bias"], 4)
        h_i, h_o, h_u, _ = np.split(weights["node.weight_hh"] @ sum((h for h, _ in below), np.zeros(8)), 4)
        forget = weights["node.weight_hh"][24:]
        kept = sum((sigmoid(x_f + forget @ h) * c for h, c in below), np.zeros(8))
        c = sigmoid(x_i + h_i) * np.tanh(x_u + h_u) + kept
        return sigmoid(x_o + h_o) * np.tanh(c), c

    return weights["output.weight"] @ state(len(tokens) - 1)[0] + weights["output.bias"]


def test_equal_parts_are_one_node() -> None:
    tree = share(ast.parse("x = x + x"))
    assert tree.labels == ["Name x", "Add", "BinOp", "Assign", "Module"]
    assert tree.children == [(), (), (0, 0, 1), (0, 2), (3,)]
    assert tree.num_nodes_as_tree == 7


def test_functions_are_found_by_their_verbs_which_their_syntax_does_not_tell(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(SOURCE)
    (tmp_path / "wrong.py").write_text("def get(:")
    functions = list(read_functions([tmp_path / "wrong.py", tmp_path / "shelf.py"]))
    assert [(one.name, one.module, VERBS[one.verb]) for one in functions] == [
        ("get_book", "shelf", "get"),
        ("setAll", "shelf", "set"),
    ]
    assert not any("get_book" in label for label in functions[0].tree.labels)


def test_levels_give_what_the_equations_say(model: VerbModel, trees: list[SharedTree]) -> None:
    with torch.no_grad():
        np.testing.assert_allclose(model(trees), [logits(model, tree) for tree in trees], atol=1e-6)


def test_served_graphs_are_as_the_equations_say(model: VerbModel, trees: list[SharedTree]) -> None:
    with cellrt.Engine() as engine:
        engine.register(make_verbs(model))
        futures = engine.submit_many("verbs", [model.as_networkx(tree) for tree in trees])
        for tree, future in zip(trees, futures, strict=True):
            np.testing.assert_allclose(future.result(timeout=60)["output"][0], logits(model, tree), atol=1e-6)


def test_training_learns_what_tells_the_verb(tmp_path: Path) -> None:
    lines = [f"def get_{k}(self): return self.a{k % 5}\ndef set_{k}(self, v): self.a{k % 7} = v" for k in range(60)]
    (tmp_path / "module.py").write_text("\n".join(lines))
    functions = list(read_functions([tmp_path / "module.py"]))
    *_, model = train(functions[:80], epochs=5)
    with torch.no_grad():
        verbs = model([one.tree for one in functions[80:]]).argmax(1)
    assert verbs.tolist() == [one.verb for one in functions[80:]]
