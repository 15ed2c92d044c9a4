"""The tree benchmark's peers give what plain recursion on the equations gives, and its trees are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.tree_peers import PACKAGES, PEERS, Weights, is_installed, make_peer, random_weights
from benchmarks.trees import Nested, complete_trees, number_nodes, parse, read_trees

WORDS, SIZE, HIDDEN = 30, 6, 8
TEXTS = (
    "(3 (2 It) (4 (4 (2 's) (4 (3 (2 a) (4 (3 lovely) (2 film))) (3 (2 with) (2 words)))) (2 .)))",
    "(2 One)",
    "(1 (1 (2 left) (2 (2 of) (2 the))) (2 (2 right) (2 side)))",
)


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(4)
    return random_weights(WORDS, SIZE, HIDDEN)


def number_of(word: str) -> int:
    return sum(word.encode()) % WORDS


def evaluate(nested: Nested, weights: Weights) -> tuple[Tensor, Tensor]:
    """h and c by the equations, gate after gate."""
    if isinstance(nested, str):
        sums = weights.leaf @ weights.embedding[number_of(nested)] + weights.leaf_bias
        i, o, u = sums.split(HIDDEN)
        c = i.sigmoid() * u.tanh()
    else:
        (left_h, left_c), (right_h, right_c) = (evaluate(part, weights) for part in nested)
        sums = weights.inner[:, :HIDDEN] @ left_h + weights.inner[:, HIDDEN:] @ right_h + weights.inner_bias
        i, o, left, right, u = sums.split(HIDDEN)
        c = i.sigmoid() * u.tanh() + left.sigmoid() * left_c + right.sigmoid() * right_c
    return o.sigmoid() * c.tanh(), c


@pytest.mark.parametrize("name", PEERS)
def test_peer_equals_the_equations(name: str, weights: Weights) -> None:
    if not is_installed(name):
        pytest.skip(f"needs the package {PACKAGES[name]} (benchmarks/tree.py says how to install it)")
    nested = [parse(text) for text in TEXTS]
    server = make_peer(name, weights, threads=1, max_batch=2, processes=False)
    try:
        futures = [server.submit(number_nodes(part, number_of)) for part in nested]
        results = [future.result(60) for future in futures]
    finally:
        server.close()
    expected = torch.stack([evaluate(part, weights)[0] for part in nested])
    torch.testing.assert_close(torch.stack(results), expected, rtol=1e-5, atol=1e-6)


def test_nodes_are_numbered_in_postorder() -> None:
    tree = number_nodes((("3", "4"), "5"), int)
    assert tree.tokens.tolist() == [3, 4, 5]
    assert tree.parents.tolist() == [2, 2, 4, 4, -1]
    assert tree.children.tolist() == [[0, 1], [2, 3]]
    assert tree.levels.tolist() == [0, 0, 1, 0, 2]


def test_complete_trees_are_complete() -> None:
    (tree,) = complete_trees(1, num_words=WORDS, seed=1)
    assert np.bincount(tree.levels).tolist() == [16, 8, 4, 2, 1]
    assert (tree.tokens < WORDS).all()


def test_trees_are_read_with_one_number_a_word(tmp_path: Path) -> None:
    path = tmp_path / "trees.txt"
    path.write_text("(1 (2 a) (3 b))\n\n(1 (2 b) (3 c))\n")
    trees, num_words = read_trees(path)
    assert num_words == 3
    assert [tree.tokens.tolist() for tree in trees] == [[0, 1], [1, 2]]
    assert len(read_trees(path, limit=1)[0]) == 1


@pytest.mark.parametrize("text", ["(1 (2 a) (2 b) (2 c))", "(1 (2 a)", "(1 a))", "", "(", "(1 a) (1 b)"])
def test_what_is_no_binary_tree_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="match|one tree|children"):
        parse(text)
