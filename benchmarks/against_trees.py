"""The processor time of a tree of a treebank, client and engine together: ``python benchmarks/against_trees.py``.

Trees of cells that do nothing go through an engine of one worker, each once: handed in by itself, all taken together
behind. Most have a shape of their own, so each costs what a graph costs that was not seen before. It asks for nothing
but what every version since 2a12ad4 has, and prints microseconds as JSON: of the client's thread, and of all others.
With a checkout, ``python benchmarks/against_trees.py CHECKOUT [ROUNDS]``, it does so in turns with that, and prints
medians. ``CELLRT_TREEBANK`` names a file of trees in Penn brackets; without it they are drawn (``trees.py``).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

COUNT, SAMPLES, ROUNDS = 2_000, 5, 6
CASES = ("a tree of a treebank, client", "a tree of a treebank, engine")


def leaf_of(token: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a leaf."""
    return {"h": token}


def inner_of(h_left: torch.Tensor, h_right: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of an inner node."""
    return {"h": h_left}


def measure() -> list[float]:
    """Return microseconds of processor time a tree, of the client and of the engine, medians of some samples, of the
    cellrt that is imported.
    """
    import cellrt
    from benchmarks.trees import treebank_trees

    row = cellrt.rows(dtype=torch.int64)
    leaf = cellrt.cell(leaf_of, {"token": row}, max_batch=64)
    inner = cellrt.cell(inner_of, {"h_left": row, "h_right": row}, max_batch=64)
    file = os.environ.get("CELLRT_TREEBANK")
    _, trees, _ = treebank_trees(Path(file) if file else None, (1 + SAMPLES) * COUNT)

    def function(graph: cellrt.Graph, tree: Any) -> dict[str, object]:
        return {"h": graph.tree(tree.parents, leaf=leaf, inner=inner, leaf_inputs={"token": tree.tokens}).h}

    def sample(engine: cellrt.Engine, number: int) -> tuple[float, float]:
        asked = trees[number * len(trees) // (1 + SAMPLES) : (number + 1) * len(trees) // (1 + SAMPLES)]
        whole, client = time.process_time(), time.thread_time()
        for future in [engine.submit("tree", tree) for tree in asked]:
            future.result()
        whole, client = time.process_time() - whole, time.thread_time() - client
        return 1e6 * client / len(asked), 1e6 * (whole - client) / len(asked)

    with cellrt.Engine(1, max_queue=1 << 20) as engine:
        engine.register(cellrt.Unfolder("tree", function, trees[0]))
        sample(engine, 0)
        gc.collect()
        gc.freeze()
        samples = [sample(engine, 1 + number) for number in range(SAMPLES)]
    return [statistics.median(column) for column in zip(*samples)]


def main(other: Path, rounds: int) -> None:
    """Measure another checkout and this one in turns, and print medians and the ratio of this one's to the other's."""
    from benchmarks.against import run_file

    own = Path(__file__).resolve().parents[1]
    for checkout in (own, other):
        run_file(checkout, "against_trees.py")  # compiles what is not
    pairs: list[tuple[list[float], list[float]]] = []
    for number in range(rounds):
        order = (own, other) if number % 2 else (other, own)
        made = {checkout: run_file(checkout, "against_trees.py") for checkout in order}
        pairs.append((made[other], made[own]))
    for pick, case in ((lambda both: both[0], CASES[0]), (lambda both: both[1], CASES[1]), (sum, "both")):
        theirs, ours = (statistics.median(pick(values) for values in column) for column in zip(*pairs))
        share = statistics.median(pick(here) / pick(there) for there, here in pairs)
        print(f"{case}: {theirs:.1f} us there, {ours:.1f} here; here / there {share:.3f}, of {rounds} rounds")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
    else:
        print(json.dumps(measure()))
