"""Models for the doors: one for each form that a request may have; their cells have no weights, or a seed's."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor

from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.errors import RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from tests.steps import HALF, STEP, WIDTH
from tests.steps import chain as chain


def count_up(n: Tensor) -> dict[str, Tensor]:
    if n.device.type != "meta":
        time.sleep(3e-4)
    return {"n": n + 1, "stop": n >= 100_000}


COUNT = cell(count_up, {"n": rows(dtype=torch.int64)})
NEXT = cell(lambda letter: {"code": letter + 1}, {"letter": rows(dtype=torch.int64)}, name="next")
ADD = cell(lambda a, b: {"sum": a + b}, {"a": rows(dtype=torch.int64), "b": rows(dtype=torch.int64)}, name="add")


@unfold("kept", example=torch.zeros(2, WIDTH))
def kept(graph: Graph, x: Tensor) -> dict[str, object]:
    return {"h": graph.chain(STEP, keep=True, x=x).h}


@unfold("count", example=3)
def count(graph: Graph, first: int) -> dict[str, object]:
    """Counts for a while: a stream that one leaves."""
    return {"n": graph.loop(COUNT, n=graph.constant(first) if first == 3 else first, max_steps=20_000, until="stop").n}


@unfold("limited", example={"first": 4, "max_steps": 2})
def limited(graph: Graph, request: dict[str, int]) -> dict[str, object]:
    """Counts as far as it is told."""
    most = request.get("max_steps", 5)
    return {"n": graph.loop(COUNT, n=request["first"], max_steps=most, until="stop").n}


@unfold("letters", example="ab")
def letters(graph: Graph, text: str) -> dict[str, object]:
    if not text:
        raise RequestError("letters: an empty text")
    return {"codes": graph.chain(NEXT, letter=[ord(letter) for letter in text]).code}


@unfold("two", example={"x": torch.zeros(2, WIDTH), "y": torch.zeros(2, WIDTH), "scale": 2})
def two(graph: Graph, request: dict[str, object]) -> dict[str, object]:
    x, y = request["x"], request["y"]
    return {"h": graph.chain(STEP, x=(x + y) * request["scale"]).h}


@unfold("half", example=torch.zeros(3, dtype=torch.bfloat16))
def half(graph: Graph, x: Tensor) -> dict[str, object]:
    return {"y": HALF(x=x).y}


@unfold("tree", example=((1, 2), 3))
def tree(graph: Graph, request: object) -> dict[str, object]:
    """The sum of a tree's leaves."""

    def built(node: object) -> object:
        if not isinstance(node, tuple):
            return node
        left, right = map(built, node)
        return ADD(a=left, b=right).sum

    return {"sum": built(request)}


class Pair(NamedTuple):
    words: list[int]
    bias: int


@unfold("pair", example=Pair([1, 2], 3))
def pair(graph: Graph, request: Pair) -> dict[str, object]:
    return {"sums": graph.chain(ADD, a=request.words, b=[request.bias] * len(request.words)).sum}


def _network() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_node("a", value=1)
    graph.add_node("b", value=2)
    graph.add_edge("a", "b")
    return graph


@unfold("network", example=_network())
def network(graph: Graph, request: nx.DiGraph) -> dict[str, object]:
    """The sum of the values of a path's nodes."""
    total: object = 0
    for node in nx.topological_sort(request):
        total = ADD(a=total, b=request.nodes[node]["value"]).sum
    return {"sum": total}


class Scale(torch.nn.Module):
    """``x`` times a weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x * self.weight}


def scaled() -> Unfolder:
    """A model whose weight is read from the file that the environment names, as often as it is loaded.

    The word ``random`` in it: each process draws another.
    """
    text = Path(os.environ["CELLRT_TEST_WEIGHT"]).read_text()
    weight = random.SystemRandom().random() if text == "random" else float(text)
    scale = cell(Scale(weight), {"x": (WIDTH,)}, name="scale")

    @unfold("scaled", example=torch.zeros(2, WIDTH))
    def made(graph: Graph, x: Tensor) -> dict[str, object]:
        return {"y": graph.chain(scale, x=x).y}

    return made


class WeighedSum(torch.nn.Module):
    """``h`` and ``x`` times a weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        return {"h": h + x * self.weight}


def summed() -> Unfolder:
    """As ``scaled``, with state."""
    weight = float(Path(os.environ["CELLRT_TEST_WEIGHT"]).read_text())
    add = cell(WeighedSum(weight), {"x": (1,), "h": (1,)}, name="weighed_sum")

    @unfold("summed", example=torch.zeros(2, 1))
    def made(graph: Graph, x: Tensor) -> dict[str, object]:
        return {"h": graph.chain(add, keep=True, x=x).h}

    return made


DIE = 103.0
"""A row that starts with it kills the worker of an engine that serves ``deadly``."""


def deadly() -> Unfolder:
    """A model in whose process a worker may die, for good: no cell can kill one."""
    from cellrt.worker.cpu.cpu_executor import Executor
    from cellrt.worker.cpu.worker import CpuWorker

    def poison(x: Tensor) -> dict[str, Tensor]:
        if x.device.type != "meta" and (x[:, 0] == DIE).any():
            raise SystemError("die")
        return {"y": x}

    execute = Executor.execute

    def execute_or_die(self: Executor, type_id: int, buffer: object) -> object:
        failures = execute(self, type_id, buffer)  # type: ignore[arg-type]
        if any("die" in str(failure.error) for failure in failures):
            raise SystemExit("the worker's own fault")
        return failures

    CpuWorker.is_replaceable, Executor.execute = False, execute_or_die  # type: ignore[method-assign, assignment]
    cell_ = cell(poison, {"x": (WIDTH,)}, name="poison")

    @unfold("deadly", example=torch.zeros(2, WIDTH))
    def made(graph: Graph, x: Tensor) -> dict[str, object]:
        return {"y": graph.chain(cell_, x=x).y}

    return made
