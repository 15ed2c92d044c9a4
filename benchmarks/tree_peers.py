"""The usual servers of a binary TreeLSTM (BatchMaker 2.7.5): batches of whole trees.

Every peer is a server: ``submit(tree)`` gives a future of the root's hidden state ``[hidden]``.

===================== ==============================================================================
one at a time         naive recursion in torch, a node at a time
level-batched         TensorFlow Fold's way: a batch's nodes of one level and type at once, in torch
level-batched, folded the same, with the states of all words' leaves computed beforehand
DGL                   the same by ``dgl``'s topological propagation (skipped where it is not installed)
DyNet                 on-the-fly batching of single operations (skipped where ``dynet38`` is not installed)
===================== ==============================================================================

The level-batched servers use threads; the others have a process for each core, since they hold Python's lock or keep
one graph a process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.packed import PackedLinear
from benchmarks.server import BatchServer, Runner
from benchmarks.trees import Numbers, Tree

Leaves = Callable[[Tensor], tuple[Tensor, Tensor]]
"""h and c ``[leaves, hidden]`` of words ``[leaves]``."""


class Weights(NamedTuple):
    """A binary TreeLSTM (Tai et al. 2015, section 3.2, with words at the leaves alone).

    ``embedding [words, size]``; ``leaf [3 * hidden, size]`` with the gates input, output and candidate;
    ``inner [5 * hidden, 2 * hidden]``, which reads the left and the right h, with the gates input, output, left
    forget, right forget and candidate; a bias of each.
    """

    embedding: Tensor
    leaf: Tensor
    leaf_bias: Tensor
    inner: Tensor
    inner_bias: Tensor

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        return self.inner.shape[1] // 2


def random_weights(num_words: int, size: int, hidden: int) -> Weights:
    """Return weights drawn like those of ``nn.Linear``, with torch's own generator."""
    scale = hidden**-0.5

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-scale, scale)

    embedding = torch.randn(num_words, size)
    return Weights(embedding, draw(3 * hidden, size), draw(3 * hidden), draw(5 * hidden, 2 * hidden), draw(5 * hidden))


def make_peer(name: str, weights: Weights, **options: Any) -> BatchServer:
    """Return the server of that name; ``options`` go to ``BatchServer``. Raise KeyError for another name."""
    make_runner, max_batch, processes = PEERS[name]
    return BatchServer(partial(make_runner, weights), **{"max_batch": max_batch, "processes": processes, **options})


def is_installed(name: str) -> bool:
    """Return whether the package of this peer is there."""
    package = PACKAGES.get(name)
    return package is None or importlib.util.find_spec(package) is not None


# The cells, on any number of rows.


def leaf_cell(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leaves with inputs ``x [rows, size]``: h and c ``[rows, hidden]``."""
    return leaf_gates(linear(x, weights.leaf, weights.leaf_bias))


def leaf_gates(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c of leaves from their sums ``[rows, 3 * hidden]``."""
    hidden = sums.shape[1] // 3
    gates = torch.sigmoid(sums[:, : 2 * hidden])
    c = gates[:, :hidden] * torch.tanh(sums[:, 2 * hidden :])
    return gates[:, hidden:] * torch.tanh(c), c


def inner_cell(weights: Weights, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return inner nodes with their children's ``h`` and ``c`` side by side ``[rows, 2 * hidden]``."""
    return inner_gates(linear(h, weights.inner, weights.inner_bias), c)


def inner_gates(sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c of inner nodes from their sums ``[rows, 5 * hidden]`` and their children's c ``[rows, 2 *
    hidden]``.
    """
    hidden = sums.shape[1] // 5
    i, o, left, right = torch.sigmoid(sums[:, : 4 * hidden]).chunk(4, dim=1)
    c = i * torch.tanh(sums[:, 4 * hidden :]) + left * c[:, :hidden] + right * c[:, hidden:]
    return o * torch.tanh(c), c


# The peers.


def recursion(weights: Weights, threads: int) -> Runner:
    """Naive recursion: a node at a time."""

    def root(tree: Tree) -> Tensor:
        words = iter(tree.tokens.tolist())
        num_leaves = len(tree.tokens)
        inner = iter(range(num_leaves - 1))
        rank = {node: next(inner) for node in range(len(tree.levels)) if tree.levels[node]}

        def value(node: int) -> tuple[Tensor, Tensor]:
            if node not in rank:
                return leaf_cell(weights, weights.embedding[next(words)][None])
            left, right = (value(child) for child in tree.children[rank[node]].tolist())
            return inner_cell(weights, torch.cat([left[0], right[0]], 1), torch.cat([left[1], right[1]], 1))

        return value(len(tree.levels) - 1)[0][0]

    return lambda trees: ((k, root(tree)) for k, tree in enumerate(trees))


class Levels(NamedTuple):
    """The nodes of a batch of trees by level, leaves first.

    ``sizes`` has the number of nodes of each level; ``children [inner * 2]`` the place of each inner node's left and
    right child in this order, ``roots [trees]`` that of the roots; ``tokens [leaves]`` are the words.
    """

    sizes: list[int]
    children: Tensor
    roots: Tensor
    tokens: Tensor


def by_level(trees: Sequence[Tree]) -> Levels:
    """Sort the nodes of all trees by level."""
    levels = np.concatenate([tree.levels for tree in trees])
    ends = np.cumsum([len(tree.levels) for tree in trees])
    starts = ends - [len(tree.levels) for tree in trees]
    order = np.argsort(levels, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    children = np.full((len(order), 2), -1, np.int64)
    children[levels > 0] = np.concatenate([tree.children + start for tree, start in zip(trees, starts, strict=True)])
    tokens = np.concatenate([tree.tokens for tree in trees])
    sorted_children = place[children[order[len(tokens) :]]].ravel()
    return Levels(
        np.bincount(levels).tolist(),
        torch.from_numpy(sorted_children),
        torch.from_numpy(place[ends - 1]),
        torch.from_numpy(tokens),
    )


def level_batched(weights: Weights, threads: int) -> Runner:
    """Return all nodes of one level and type of the whole batch at once."""
    return _by_level(weights, lambda tokens: leaf_cell(weights, weights.embedding[tokens]))


def level_batched_folded(weights: Weights, threads: int) -> Runner:
    """Return the same, with the state of each word's leaf computed once and looked up."""
    h, c = leaf_cell(weights, weights.embedding)
    return _by_level(weights, lambda tokens: (h[tokens], c[tokens]))


def _by_level(weights: Weights, leaves: Leaves) -> Runner:
    inner = partial(inner_cell, weights)
    return lambda trees: enumerate(root_states(weights.hidden, by_level(trees), leaves, inner).unbind())


def packed_levels(weights: Weights, fold: bool) -> Runner:
    """Return ``level_batched``, or folded, with packed weights."""
    inner, hidden = PackedLinear(weights.inner, weights.inner_bias), weights.hidden
    if fold:
        h, c = leaf_cell(weights, weights.embedding)
        leaves: Leaves = lambda tokens: (h[tokens], c[tokens])  # noqa: E731
    else:
        leaf = PackedLinear(weights.leaf, weights.leaf_bias)
        leaves = lambda tokens: leaf_gates(leaf(weights.embedding[tokens]))  # noqa: E731

    def cell(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return inner_gates(inner(h), c)

    return lambda trees: enumerate(root_states(hidden, by_level(trees), leaves, cell).unbind())


def root_states(
    hidden: int, levels: Levels, leaves: Leaves, inner: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the roots' h ``[trees, hidden]``, on the device of ``levels``.

    ``leaves`` gives the states of words, ``inner`` those of nodes, as ``inner_cell``.
    """
    h, c = torch.empty(2, sum(levels.sizes), hidden, device=levels.roots.device).unbind()
    start = levels.sizes[0]
    h[:start], c[:start] = leaves(levels.tokens)
    at = 0
    for size in levels.sizes[1:]:
        children = levels.children[at : at + 2 * size]
        below = (state.index_select(0, children).view(size, 2 * hidden) for state in (h, c))
        h[start : start + size], c[start : start + size] = inner(*below)
        start, at = start + size, at + 2 * size
    return h[levels.roots]


def dgl_topological(weights: Weights, threads: int) -> Runner:
    """DGL: one graph of the whole batch, propagated in topological order."""
    dgl = importlib.import_module("dgl")
    hidden = weights.hidden

    def send(edges: Any) -> dict[str, Tensor]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def reduce(nodes: Any) -> dict[str, Tensor]:
        below = (nodes.mailbox[name].reshape(-1, 2 * hidden) for name in ("h", "c"))
        h, c = inner_cell(weights, *below)
        return {"h": h, "c": c}

    def run(trees: Sequence[Tree]) -> Iterable[tuple[int, Tensor]]:
        ends = np.cumsum([len(tree.levels) for tree in trees])
        starts = ends - [len(tree.levels) for tree in trees]
        levels = np.concatenate([tree.levels for tree in trees])
        children = np.concatenate([tree.children + start for tree, start in zip(trees, starts, strict=True)])
        inner = np.flatnonzero(levels)
        edges = torch.from_numpy(children.ravel()), torch.from_numpy(inner.repeat(2))
        graph = dgl.graph(edges, num_nodes=len(levels))
        leaves = torch.from_numpy(np.flatnonzero(levels == 0))
        tokens = torch.from_numpy(np.concatenate([tree.tokens for tree in trees]))
        h, c = torch.zeros(2, len(levels), hidden).unbind()
        h[leaves], c[leaves] = leaf_cell(weights, weights.embedding[tokens])
        graph.ndata["h"], graph.ndata["c"] = h, c
        graph.prop_nodes(dgl.topological_nodes_generator(graph)[1:], send, reduce)
        return enumerate(graph.ndata["h"][torch.from_numpy(ends - 1)].unbind())

    return run


class DyNet:
    """DyNet: a graph of single operations for each tree, batched by DyNet as it finds equal ones."""

    def __init__(self, weights: Weights, threads: int) -> None:
        importlib.import_module("dynet_config").set(mem=1024, autobatch=1)  # must come before the next line
        self._dynet, self._hidden = importlib.import_module("dynet"), weights.hidden
        self._model = self._dynet.ParameterCollection()
        """Kept here because its parameters do not keep it alive."""
        self._embedding = self._model.lookup_parameters_from_numpy(weights.embedding.numpy())
        parameters = [self._model.parameters_from_numpy(value.numpy()) for value in weights[1:]]
        self._leaf_weight, self._leaf_bias, self._inner_weight, self._inner_bias = parameters

    def __call__(self, trees: Sequence[Tree]) -> Iterable[tuple[int, Tensor]]:
        """Run a batch: builds all graphs, then computes them together."""
        self._dynet.renew_cg()
        roots = [self._root(tree) for tree in trees]
        self._dynet.forward(roots)
        return enumerate([torch.from_numpy(value.npvalue().astype(np.float32)) for value in roots])

    def _root(self, tree: Tree) -> Any:
        states: list[tuple[Any, Any]] = []
        words, children = iter(tree.tokens.tolist()), iter(tree.children.tolist())
        for level in tree.levels.tolist():
            if level:
                left, right = next(children)
                states.append(self._inner(states[left], states[right]))
            else:
                states.append(self._leaf(next(words)))
        return states[-1][0]

    def _leaf(self, token: int) -> tuple[Any, Any]:
        dynet = self._dynet
        sums = dynet.affine_transform([self._leaf_bias, self._leaf_weight, dynet.lookup(self._embedding, token)])
        gates = dynet.logistic(self._part(sums, 0, 2))
        c = dynet.cmult(self._part(gates, 0), dynet.tanh(self._part(sums, 2)))
        return dynet.cmult(self._part(gates, 1), dynet.tanh(c)), c

    def _inner(self, left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        dynet = self._dynet
        sums = dynet.affine_transform([self._inner_bias, self._inner_weight, dynet.concatenate([left[0], right[0]])])
        gates = dynet.logistic(self._part(sums, 0, 4))
        begun = dynet.cmult(self._part(gates, 0), dynet.tanh(self._part(sums, 4)))
        kept = dynet.cmult(self._part(gates, 2), left[1]) + dynet.cmult(self._part(gates, 3), right[1])
        c = begun + kept
        return dynet.cmult(self._part(gates, 1), dynet.tanh(c)), c

    def _part(self, sums: Any, gate: int, count: int = 1) -> Any:
        return self._dynet.pick_range(sums, gate * self._hidden, (gate + count) * self._hidden)


PEERS: dict[str, tuple[Callable[[Weights, int], Runner], int, bool]] = {
    "one at a time": (recursion, 1, True),
    "level-batched": (level_batched, 64, False),
    "level-batched, folded": (level_batched_folded, 64, False),
    "DGL": (dgl_topological, 64, True),
    "DyNet": (DyNet, 64, True),
}
"""The peers by name: their runner, the most trees of a batch, and whether each worker has a process of its own.

The paper found batches of 64 best for Fold and DyNet.
"""

PACKAGES = {"DGL": "dgl", "DyNet": "dynet"}


def ideal_batch(weights: Weights, tokens: Numbers) -> Callable[[], None]:
    """Return the bare cells on complete trees with the words ``tokens [trees, leaves]``: a function that runs them
    once.

    Siblings lie side by side, so nothing is gathered but the words' vectors, or decided (section 2.7.5).
    """
    x = weights.embedding[torch.from_numpy(tokens).flatten()]

    def once() -> None:
        h, c = leaf_cell(weights, x)
        while len(h) > len(tokens):
            h, c = inner_cell(weights, h.view(-1, 2 * weights.hidden), c.view(-1, 2 * weights.hidden))

    return once
