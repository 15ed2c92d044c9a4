"""A recurrent step, and the chain of it, for whoever serves from another process: it has no weights, and does as its
rows say."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import unfold

WIDTH = 2
RAISE, HOLD, HOLD_LONG = 101.0, 102.0, 104.0
"""A row that starts with one of these makes its cell raise, or take so long:"""
HOLDS_S = {HOLD: 0.02, HOLD_LONG: 0.2}


def step(x: Tensor, h: Tensor) -> dict[str, Tensor]:
    """``x + h / 2``, unless a row of ``x`` says otherwise."""
    if x.device.type != "meta":
        if (x[:, 0] == RAISE).any():
            raise ValueError("a row this cell cannot take")
        for mark, seconds in HOLDS_S.items():
            if (x[:, 0] == mark).any():
                time.sleep(seconds)
    return {"h": x + 0.5 * h}


STEP = cell(step, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8)
HALF = cell(lambda x: {"y": x + 1}, {"x": rows(3, dtype=torch.bfloat16)}, name="half")


@unfold("chain", example=torch.zeros(2, WIDTH))
def chain(graph: Graph, x: Tensor) -> dict[str, object]:
    made = graph.chain(STEP, x=x)
    return {"every": made.h, "last": made.last.h}
