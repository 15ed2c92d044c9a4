"""Models whose requests are hard to describe: classes that check or make their fields, tensors of what no row has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cellrt

ADD = cellrt.cell(lambda a, b: {"sum": a + b}, {"a": cellrt.token, "b": cellrt.token}, name="add")
SUM = cellrt.cell(
    lambda x, h: {"h": x + torch.stack([rows.sum() for rows in h.values.split(h.offsets.diff().tolist())])},
    {"x": (), "h": cellrt.ragged()},
    name="sum of sources",
)
FOUR = cellrt.cell(lambda x: {"y": 2 * x}, {"x": (4,)}, name="four")
TWICE = cellrt.cell(lambda x: {"y": 2 * x}, {"x": ()}, name="twice")


@dataclass
class Both:
    """As long as each other."""

    a: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        if len(self.a) != len(self.b):
            raise ValueError("a and b must be as long")


@cellrt.unfold("both", example=Both(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)))
def both(graph: cellrt.Graph, request: Both) -> dict[str, object]:
    return {"sum": graph.chain(ADD, a=request.a, b=request.b).sum}


@dataclass
class Counted:
    """Makes a field itself."""

    words: list[int]
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.words)


@cellrt.unfold("counted", example=Counted([1, 2]))
def counted(graph: cellrt.Graph, request: Counted) -> dict[str, object]:
    return {"sum": graph.chain(ADD, a=request.words, b=[request.count] * request.count).sum}


NET = {"offsets": np.array([0, 0, 0, 2]), "sources": np.array([0, 1]), "x": np.zeros(3, np.float32)}


@cellrt.unfold("net", example=NET)
def net(graph: cellrt.Graph, request: dict[str, Any]) -> dict[str, object]:
    """Three arrays, of which none can be longer by itself, nor all by one."""
    return {"h": graph.dag(SUM, request["offsets"], request["sources"], {"x": request["x"]}).h}


class Edges(NamedTuple):
    """Of a graph, inside a request."""

    offsets: np.ndarray
    sources: Tensor


@cellrt.unfold("nested net", example={"edges": Edges(NET["offsets"], torch.from_numpy(NET["sources"])), "x": NET["x"]})
def nested_net(graph: cellrt.Graph, request: dict[str, Any]) -> dict[str, object]:
    edges = request["edges"]
    return {"h": graph.dag(SUM, edges.offsets, edges.sources, {"x": request["x"]}).h}


@cellrt.unfold("picture", example={"picture": torch.zeros(90_000), "scale": torch.ones(2), "a": NET["offsets"]})
def picture(graph: cellrt.Graph, request: dict[str, Any]) -> dict[str, object]:
    """Of what has one size, beside what may be longer."""
    row = request["picture"].reshape(300, 300)[0, :4] * request["scale"].repeat(2)
    return {"y": graph.chain(FOUR, x=row.expand(3, 4)).y, "sum": graph.chain(ADD, a=request["a"], b=request["a"]).sum}


@dataclass
class Leaving:
    """Its class would end the process."""

    id: Tensor
    parameters: Tensor

    def __post_init__(self) -> None:
        if len(self.id) != len(self.parameters):
            raise SystemExit("goodbye")


@cellrt.unfold("leaving", example=Leaving(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)))
def leaving(graph: cellrt.Graph, request: Leaving) -> dict[str, object]:
    return {"sum": graph.chain(ADD, a=request.id, b=request.parameters).sum}


@cellrt.unfold("number", example=1.5)
def number(graph: cellrt.Graph, request: float) -> dict[str, object]:
    return {"y": TWICE(x=request).y}


@cellrt.unfold("two {words}", example=1.5)
def two_words(graph: cellrt.Graph, request: float) -> dict[str, object]:
    return {"y": TWICE(x=request).y}


def _ignoring(name: str, example: Any) -> cellrt.Unfolder:
    return cellrt.unfold(name, example=example)(lambda graph, request: {"sum": ADD(a=1, b=2).sum})


class Unlike:
    """Stands for a dataclass that cannot be made of its own fields."""

    def __new__(cls) -> Any:
        made = Both(torch.zeros(1), torch.zeros(1))
        made.b = torch.zeros(2)
        return made


unsigned = _ignoring("unsigned", torch.zeros(2, dtype=torch.uint16))
complex_ = _ignoring("complex", torch.zeros(2, dtype=torch.complex64))
texts = _ignoring("texts", {"words": np.array(["a", "bc"])})
unlike = _ignoring("unlike", Unlike())
