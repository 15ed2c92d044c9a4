"""Models as newcomers write them: tokens and vocabularies, parts that may be left out, weights without a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import cellrt
from cellrt.cells import EmbeddingGRUCell

VOCABULARY = 10
torch.manual_seed(7)
READ = cellrt.cell(EmbeddingGRUCell(VOCABULARY, 4, 4), {"token": cellrt.token, "h": (4,)}, name="read")


class LookUp(nn.Module):
    """A plain torch module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 3)

    def forward(self, token: Tensor) -> dict[str, Tensor]:
        return {"y": self.table(token)}


LOOK_UP = cellrt.cell(LookUp(), {"token": cellrt.token}, name="look_up")
TWICE = cellrt.cell(lambda x: {"token": 2 * x}, {"x": cellrt.token}, name="twice")


@cellrt.unfold("words", example=[1, 2])
def words(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
    return {"h": graph.chain(READ, token=request).last.h}


@cellrt.unfold("rows", example=torch.zeros(2, dtype=torch.int64))
def rows(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    return {"y": graph.chain(LOOK_UP, token=request).y}


@cellrt.unfold("doubled", example=[1])
def doubled(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
    """A token that no request gives: nobody can say which input is wrong."""
    return {"y": [LOOK_UP(token=TWICE(x=value).token).y for value in request]}


COUNT = cellrt.cell(lambda n: {"n": n + 1}, {"n": cellrt.token}, name="count")


@cellrt.unfold("said", example={"first": 0, "max_steps": 1})
def said(graph: cellrt.Graph, request: Mapping[str, Any]) -> dict[str, object]:
    """Takes a number of steps, or takes three."""
    return {"n": graph.loop(COUNT, n=request["first"], max_steps=request.get("max_steps", 3)).n}


@dataclass
class Steps:
    first: int
    steps: int = 2


@cellrt.unfold("stepped", example=Steps(0, 1))
def stepped(graph: cellrt.Graph, request: Steps) -> dict[str, object]:
    return {"n": graph.loop(COUNT, n=request.first, max_steps=request.steps).n}


JOIN = cellrt.cell(lambda left, right: {"y": left + right}, {"left": (3,), "right": (3,)}, name="join")


@cellrt.unfold("terms", example={"nodes": [["leaf", 3], ["leaf", 4], ["join", 0, 1]]})
def terms(graph: cellrt.Graph, request: Mapping[str, Any]) -> dict[str, object]:
    """Nodes in order, whose parts may be shared."""
    made: list[Any] = []
    for kind, *parts in request["nodes"]:
        made.append(LOOK_UP(token=parts[0]).y if kind == "leaf" else JOIN(left=made[parts[0]], right=made[parts[1]]).y)
    return {"all": made, "last": made[-1]}


@cellrt.unfold("many", example=1)
def many(graph: cellrt.Graph, how_many: int) -> dict[str, object]:
    return {"n": [COUNT(n=place).n for place in range(how_many)]}


@cellrt.unfold("a/b", example=1)
def slashed(graph: cellrt.Graph, n: int) -> dict[str, object]:
    return {"n": COUNT(n=n).n}


def unseeded() -> cellrt.Unfolder:
    """Other weights in each process."""
    generator = torch.Generator()
    generator.seed()
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.rand(2, 2, generator=generator))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.inner(x)}

    layer = cellrt.cell(Layer(), {"x": (2,)}, name="layer")

    @cellrt.unfold("unseeded", example=torch.zeros(1, 2))
    def made(graph: cellrt.Graph, x: Tensor) -> dict[str, object]:
        return {"y": graph.chain(layer, x=x).y}

    return made
