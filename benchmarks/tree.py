"""Binary TreeLSTM over trees (BatchMaker 2.7.5): cellrt beside what else batches trees, in one run.

Every server gets the same trees of words and answers with the root's hidden state; the embedding has the hidden size.
Parts: ``identical`` (complete trees of 16 leaves against the bare cells), ``treebank`` (the trees of ``--treebank``, of
the file that ``CELLRT_TREEBANK`` names, or of ``data/trees/train.txt``; without any, trees are drawn that are about as
long and as deep as the Stanford Sentiment Treebank's). "Folded" servers look the states of leaves up in a table that
was computed beforehand; bare loops have no server around them. The full run takes about half an hour on two cores.

DGL and DyNet are measured where they are installed: ``pip install --no-deps dgl==1.1.3 dynet38==2.2`` and
``pip install scipy requests tqdm psutil``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks.bare_loop import BareLoop, Batches, fastest
from benchmarks.compare import (
    FULL,
    NUM_CHECKED,
    QUICK,
    MakeCell,
    Makers,
    Plan,
    Server,
    answers,
    closed,
    compare,
    draw,
    is_ours,
    loops_per_second,
    progress,
)
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.server import InOrder
from benchmarks.tree_peers import (
    PEERS,
    Weights,
    ideal_batch,
    is_installed,
    make_peer,
    packed_levels,
    random_weights,
    recursion,
)
from benchmarks.trees import Tree, complete_trees, treebank_trees
from cellrt.cells.tree_lstm import BinaryTreeLSTMCell, EmbeddingTreeLSTMLeaf
from examples.models.treebank import TRAIN, how_to_get

PARTS = ("identical", "treebank")
IDENTICAL_WORDS = 10_000
IDEAL_BATCH = 64
IDENTICAL_CONCURRENCY = 512
IDENTICAL_SERVERS = ("cellrt", "level-batched", "DGL", "DyNet")
BARE_LOOP = "level-batched, packed, bare loop"
FOLDED_BARE_LOOP = "level-batched, folded, packed, bare loop"
BARE_BATCH, NUM_TRIED = 128, 256
"""Most trees of a bare loop's batch, and how many it is tried with."""
QUICK_SERVERS = ("cellrt", "cellrt, folded", "level-batched", "DGL", "DyNet", BARE_LOOP, FOLDED_BARE_LOOP)
ALL_SERVERS = ("cellrt", "cellrt, folded", *PEERS, BARE_LOOP, FOLDED_BARE_LOOP)


class Cellrt:
    """cellrt behind the peers' interface.

    Args:
        weights: of both cells.
        fold: the leaves are looked up in a table of their states.
        max_batch: most rows of a task, of either cell.
        make_cell: makes the cells, as ``cellrt.cell`` does.
        options: for the engine.
    """

    def __init__(
        self,
        weights: Weights,
        fold: bool,
        *,
        max_batch: int = 512,
        make_cell: MakeCell = cellrt.cell,
        **options: Any,
    ) -> None:
        state = (weights.hidden,)
        children = {"h_left": state, "c_left": state, "h_right": state, "c_right": state}
        token = {"token": cellrt.rows(dtype=torch.int64)}
        leaf = make_cell(leaf_module(weights, fold), token, name="leaf", max_batch=max_batch)
        inner = make_cell(inner_module(weights), children, name="inner", max_batch=max_batch)
        example = complete_trees(1, len(weights.embedding), seed=0)[0]

        @cellrt.unfold("tree", example=example)
        def model(graph: cellrt.Graph, tree: Tree) -> dict[str, object]:
            return {"h": graph.tree(tree.parents, leaf=leaf, inner=inner, leaf_inputs={"token": tree.tokens}).h}

        self.engine = cellrt.Engine(max_queue=1 << 20, **options)
        self.engine.register(model)

    def submit(self, tree: Tree) -> Future[Any]:
        """Submit one tree; the future's result has the root's hidden state as "h"."""
        return self.engine.submit("tree", tree)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def leaf_module(weights: Weights, fold: bool) -> EmbeddingTreeLSTMLeaf:
    """Return the leaf cell with these weights."""
    num_words, size = weights.embedding.shape
    leaf = EmbeddingTreeLSTMLeaf(num_words, size, weights.hidden, fold=fold)
    with torch.no_grad():
        leaf.embedding.weight.copy_(weights.embedding)
        leaf.weight_ih.copy_(weights.leaf)
        leaf.bias.copy_(weights.leaf_bias)
    return leaf.eval()


def inner_module(weights: Weights) -> BinaryTreeLSTMCell:
    """Return the inner cell with these weights: its gates are input, output, candidate, left and right forget."""

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        i, o, left, right, u = rows.chunk(5)
        return torch.cat([i, o, u, left, right])

    inner = BinaryTreeLSTMCell(None, weights.hidden)
    with torch.no_grad():
        inner.weight_hh.copy_(reorder(weights.inner))
        inner.bias.copy_(reorder(weights.inner_bias))
    return inner.eval()


def bare_loop(weights: Weights, fold: bool, threads: int) -> BareLoop:
    """Return the level-batched peer with packed weights and without a server."""
    return BareLoop(Batches(packed_levels(weights, fold), InOrder(), BARE_BATCH), threads)


def servers(weights: Weights, trees: Sequence[Tree], names: Sequence[str]) -> Makers:
    """Return makers of the servers by name, but for peers whose package is absent, which are printed."""
    ours: dict[str, Callable[[], Server]] = {
        "cellrt": lambda: Cellrt(weights, fold=False),
        "cellrt, folded": lambda: Cellrt(weights, fold=True),
        BARE_LOOP: lambda: fastest(partial(bare_loop, weights, False), trees[:NUM_TRIED]),
        FOLDED_BARE_LOOP: lambda: fastest(partial(bare_loop, weights, True), trees[:NUM_TRIED]),
    }
    for name in names:
        if not is_installed(name):
            print(f"{name} is left out: it is not installed (benchmarks/tree.py says how)")
    return {name: ours.get(name) or partial(make_peer, name, weights) for name in names if is_installed(name)}


def check(weights: Weights, trees: Sequence[Tree], name: str, roots: Sequence[Any]) -> None:
    """Raise AssertionError where a server's roots are not those of plain recursion."""
    with torch.inference_mode():
        expected = dict(recursion(weights, 1)(trees[:NUM_CHECKED]))
    for k, answer in enumerate(roots):
        h = answer["h"] if isinstance(answer, dict) else answer
        torch.testing.assert_close(h, expected[k], rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def our_ideal_batch(weights: Weights, tokens: np.ndarray) -> Callable[[], None]:
    """Return ``ideal_batch`` with cellrt's cells: left children in the first half of the rows, right ones in the
    other.
    """
    leaf, inner = leaf_module(weights, fold=False), inner_module(weights)
    flat = torch.from_numpy(tokens).flatten()

    def once() -> None:
        h, c = leaf(flat)
        while len(h) > len(tokens):
            half = len(h) // 2
            h, c = inner(h[:half], c[:half], h[half:], c[half:])

    return once


def identical(recorder: Recorder, hidden: int, plan: Plan) -> None:
    """Throughput on complete trees of 16 leaves, against the bare cells of torch and of cellrt at full batch."""
    weights = random_weights(IDENTICAL_WORDS, hidden, hidden)
    trees = complete_trees(2048, IDENTICAL_WORDS, seed=1)
    tokens = np.stack([tree.tokens for tree in trees[:IDEAL_BATCH]])
    ideals = {"torch's": ideal_batch(weights, tokens), "our": our_ideal_batch(weights, tokens)}
    case = f"H={hidden}, 16 leaves"
    made: dict[str, Server] = {}
    rates: dict[str, list[float]] = {}
    rounds = max(3, plan.rounds)
    makers = servers(weights, trees, IDENTICAL_SERVERS)
    with progress(case, rounds * (len(makers) + len(ideals))) as advance:
        try:
            for name, make in makers.items():
                made[name] = make()
                check(weights, trees, name, answers(made[name], trees[:NUM_CHECKED]))
                rates[name] = [closed(made[name], trees, 128, 128).throughput]
            for _ in range(rounds):
                for name, server in made.items():
                    advance(name)
                    count = plan.sample_size(rates[name][-1], IDENTICAL_CONCURRENCY)
                    rates[name].append(closed(server, trees, count, IDENTICAL_CONCURRENCY).throughput)
                for name, once in ideals.items():
                    advance(f"{name} cells alone")
                    rate = IDEAL_BATCH * loops_per_second(once, plan.sample_s)
                    rates.setdefault(f"{name} cells alone", [0.0]).append(rate)
        finally:
            for server in made.values():
                server.close()
    _record_ratios(recorder, case, {name: samples[1:] for name, samples in rates.items()}, tuple(made))


def _record_ratios(recorder: Recorder, case: str, rates: dict[str, list[float]], names: Sequence[str]) -> None:
    """Medians of the rounds, and of the ratios to the better ideal of the same round and to torch's."""
    for name, samples in rates.items():
        recorder.add(case, f"{name} throughput", statistics.median(samples), "requests/s")
    torchs = rates["torch's cells alone"]
    best = [max(pair) for pair in zip(torchs, rates["our cells alone"], strict=True)]
    for name in names:
        for title, ideal in (("ideal", best), ("ideal of torch's cells", torchs)):
            ratio = statistics.median(mine / other for mine, other in zip(rates[name], ideal, strict=True))
            recorder.add(case, f"{name} / {title}", ratio, "ratio")


def run(recorder: Recorder, options: Options) -> None:
    """Run the benchmark: identical trees against the ideal, then real trees closed and open loop."""
    torch.manual_seed(0)
    plan = QUICK if options.quick else FULL
    points = []
    for hidden in options.hidden_sizes:
        if options.has("identical"):
            identical(recorder, hidden, plan)
        if not options.has("treebank"):
            continue
        title, trees, num_words = treebank_trees(options.treebank)
        if options.treebank is None:
            print(f"{how_to_get(TRAIN)}\nHere, trees are drawn that are about as long and as deep.")
        case = f"H={hidden}, {title}"
        weights = random_weights(num_words, hidden, hidden)
        made = servers(weights, trees, QUICK_SERVERS if options.quick else ALL_SERVERS)
        comparison = compare(recorder, case, made, trees, plan, partial(check, weights, trees))
        points += comparison.points
        _record_lead(recorder, case, comparison.peaks)
    if options.plot is not None:
        draw(points, options.plot)


def _record_lead(recorder: Recorder, case: str, peaks: dict[str, float]) -> None:
    """cellrt's peak against each peer's."""
    for name, peak in peaks.items():
        if not is_ours(name):
            recorder.add(case, f"cellrt / {name}", peaks["cellrt"] / peak, "ratio")
