"""A cell over trees as a user writes it: a gate decides between both children and something new."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cellrt
from benchmarks.compiled_peer import compiled_step, warmed
from benchmarks.own_models import HIDDEN, TOKENS, seeded
from benchmarks.server import Runner
from benchmarks.tree_peers import by_level
from benchmarks.trees import Tree, parse_like_trees


class Leaf(nn.Module):
    """A word's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN)

    def forward(self, token: Tensor) -> dict[str, Tensor]:
        """Return the state of each row."""
        return {"h": self.table(token)}


class Node(nn.Module):
    """A node from its two children."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Linear(2 * HIDDEN, 3 * HIDDEN)

    def forward(self, h_left: Tensor, h_right: Tensor) -> dict[str, Tensor]:
        """``[rows, hidden]`` each."""
        new, gates = self.sums(torch.cat([h_left, h_right], 1)).split([HIDDEN, 2 * HIDDEN], 1)
        first, second = torch.sigmoid(gates).chunk(2, 1)
        return {"h": torch.tanh(new) + first * h_left + second * h_right}


class TreeModel(nn.Module):
    """Words at the leaves, ``Node`` above."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.node = Leaf(), Node()


def compose() -> cellrt.Unfolder:
    """Return the model in cellrt."""
    model = seeded(TreeModel)
    leaf = cellrt.cell(model.leaf, {"token": cellrt.token}, name="leaf")
    node = cellrt.cell(model.node, {"h_left": (HIDDEN,), "h_right": (HIDDEN,)}, name="node")

    @cellrt.unfold("compose", example=draw_trees(1, seed=0)[0])
    def unfolder(graph: cellrt.Graph, tree: Tree) -> dict[str, object]:
        return {"h": graph.tree(tree.parents, leaf=leaf, inner=node, leaf_inputs={"token": tree.tokens}).h}

    return unfolder


def levels(compiled: bool, threads: int) -> Runner:
    """Return a runner that batches all nodes of one level of a batch of trees at once."""
    model = seeded(TreeModel)
    node: Any = model.node
    return warmed(by_levels(model, compiled_step(node)), draw_trees(64, seed=1)) if compiled else by_levels(model, node)


def by_levels(model: TreeModel, node: Callable[..., dict[str, Tensor]]) -> Runner:
    """Run batches with this node."""

    def run(trees: Sequence[Tree]) -> Iterable[tuple[int, Tensor]]:
        sorted_nodes = by_level(trees)
        h = torch.empty(sum(sorted_nodes.sizes), HIDDEN)
        start, at = sorted_nodes.sizes[0], 0
        h[:start] = model.leaf.table(sorted_nodes.tokens)
        for size in sorted_nodes.sizes[1:]:
            below = h[sorted_nodes.children[at : at + 2 * size]].view(size, 2, HIDDEN)
            h[start : start + size] = node(below[:, 0], below[:, 1])["h"]
            start, at = start + size, at + 2 * size
        return enumerate(h[sorted_nodes.roots].unbind())

    return run


def draw_trees(count: int, seed: int) -> list[Tree]:
    """Return random trees like a treebank's."""
    return parse_like_trees(count, TOKENS, seed)
