"""The models of the clients' benchmark: chains of a cell that does nothing, found by import path in every process."""

from __future__ import annotations

import torch

import cellrt

SHORT, LONG = 24, 512
"""Steps of a request: of the open loop, and where the time of a task is measured."""


def nothing(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """Hand its state on."""
    return {"h": h}


CELL = cellrt.cell(nothing, {"x": cellrt.rows(dtype=torch.int64), "h": (1,)})
SHORT_REQUEST, LONG_REQUEST = list(range(SHORT)), list(range(LONG))


@cellrt.unfold("chain", example=SHORT_REQUEST, key=len)
def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
    """Return one node an item; the last state is the result."""
    return {"h": graph.chain(CELL, x=request).last.h}
