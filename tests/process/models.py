"""Models that an engine's process and its clients import each for themselves: their cells have no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, grows, ragged, rows
from cellrt.graph.graph import Graph
from cellrt.graph.loops import LoopBody
from cellrt.graph.symbols import State
from cellrt.graph.unfolder import Unfolder, unfold
from tests.engine.paged_models import SumSoFar
from tests.steps import HALF, STEP, WIDTH
from tests.steps import chain as chain


def count(h: Tensor, n: Tensor) -> dict[str, Tensor]:
    return {"h": h * 2, "n": n + 1, "stop": n >= 4}


COUNT = cell(count, {"h": (WIDTH,), "n": rows(dtype=torch.int64)})
TOTAL = cell(SumSoFar(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=3)}, name="total")


@unfold("loop", example=torch.zeros(WIDTH))
def loop(graph: Graph, x: Tensor) -> dict[str, object]:
    made = graph.loop(COUNT, h=x, max_steps=9, until="stop")
    return {"h": made.h, "n": made.n, "total": made.last.n}


@unfold("layers", example=torch.zeros(WIDTH))
def layers(graph: Graph, x: Tensor) -> dict[str, object]:
    """A loop of two cells, and one over a list of them."""

    def step(body: LoopBody, state: State) -> dict[str, object]:
        counted = COUNT(h=state.h, n=state.n)
        return {"h": STEP(x=counted.h, h=state.h).h, "n": counted.n, "stop": counted.stop}

    made = graph.loop(step, max_steps=9, until="stop", h=x, n=0)
    return {"h": made.h, "n": made.last.n, "twice": graph.loop([COUNT, COUNT], h=made.last.h).last.h}


@unfold("kept", example=torch.zeros(2, WIDTH))
def kept(graph: Graph, x: Tensor) -> dict[str, object]:
    return {"last": graph.chain(STEP, keep=True, x=x).last.h}


@unfold("grown", example=torch.zeros(2, WIDTH))
def grown(graph: Graph, x: Tensor) -> dict[str, object]:
    total = graph.pages(TOTAL, keep=True)
    return {"x": graph.chain(TOTAL, x=x, total=total).x, "made": graph.loop(TOTAL, x=x, total=total, max_steps=3).x}


def added(h: RaggedRows) -> dict[str, Tensor]:
    counts = h.offsets.diff()
    of_row = torch.repeat_interleave(torch.arange(counts.shape[0]), counts, output_size=h.values.shape[0])
    return {"h": torch.ones(counts.shape[0], WIDTH).index_add(0, of_row, h.values)}


ADDED = cell(added, {"h": ragged(WIDTH)})


@unfold("shapes", example={"parents": [2, 2, -1], "x": torch.zeros(2, WIDTH)})
def shapes(graph: Graph, request: dict[str, Any]) -> dict[str, object]:
    """A tree, a dag, and a node that reads both."""
    tree = graph.tree(request["parents"], leaf=STEP, inner=ADDED, leaf_inputs={"x": request["x"]})
    dag = graph.dag(ADDED, [0, 0, 1, 3], [0, 1, 0])
    return {"root": tree.h, "nodes": tree.nodes.h, "dag": dag.h, "both": ADDED(h=[tree.h, dag.h[1]]).h}


@unfold("half", example=torch.zeros(3, dtype=torch.bfloat16))
def half(graph: Graph, x: Tensor) -> dict[str, object]:
    return {"y": HALF(x=x).y, "twice": [HALF(x=x).y, HALF(x=graph.constant(torch.ones(3, dtype=torch.bfloat16))).y]}


@dataclass
class Packet:
    """A request of its client's own kind."""

    x: Any


SEEN: list[Callable[[Any], object]] = []
"""Told of each request that ``anything`` unfolds."""


def rows_in(request: Any) -> Any:
    """The rows of a request, however they are wrapped."""
    while isinstance(request, Packet | dict | tuple):
        request = request.x if isinstance(request, Packet) else request["x" if isinstance(request, dict) else 0]
    return request


@unfold("anything", example=torch.zeros(2, WIDTH))
def anything(graph: Graph, request: Any) -> dict[str, object]:
    for tell in SEEN:
        tell(request)
    return {"every": graph.chain(STEP, keep=True, x=rows_in(request)).h}


known = Unfolder("known", anything.function, anything.example, key=lambda request: len(rows_in(request)))
"""As ``anything``, with a key."""


def other_chain() -> Unfolder:
    """Another model of the name ``chain``, as if of new weights."""

    def unfold_other(graph: Graph, x: Tensor) -> dict[str, object]:
        made = graph.chain(STEP, x=x)
        return {"only": made.last.h}

    return Unfolder("chain", unfold_other, torch.zeros(2, WIDTH))


# But this one, which no two processes draw alike.
RANDOM = cell(torch.nn.Linear(WIDTH, WIDTH), {"input": (WIDTH,)}, name="random")
drawn = Unfolder("drawn", lambda graph, x: {"y": RANDOM(input=x)}, torch.zeros(WIDTH))
