"""The models of the workers' benchmark, found by import path in every process: two eager cells and a compiled one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import cellrt
from benchmarks.own_cell_decoder import GO, Decoder
from benchmarks.own_models import TOKENS
from cellrt import cells

SMALL, HIDDEN, SPAN = 64, 256, 8
LONG, SHORT = 96, 24


class Small(nn.Module):
    """A step of a few small operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SMALL, SMALL)

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step."""
        return {"h": torch.tanh(self.linear(x) + h)}


torch.manual_seed(0)
SMALL_CELL = cellrt.cell(Small(), {"x": (SMALL,), "h": (SMALL,)}, name="small")
DECODER_CELL = cellrt.cell(
    Decoder(nn.Embedding(TOKENS, HIDDEN), HIDDEN),
    {"token": cellrt.token, "left": cellrt.token, "h": (2, HIDDEN), "memory": cellrt.ragged(HIDDEN)},
    name="decoder",
)
COMPILED_CELL = cellrt.cell(cells.LSTMCell(SMALL, SMALL), {"x": (SMALL,), "h": (SMALL,), "c": (SMALL,)}, name="lstm")
INPUTS, MEMORY = torch.randn(LONG, SMALL), torch.randn(SPAN, HIDDEN)


@cellrt.unfold("small", example=INPUTS, key=len)
def small(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    """Return a chain of an eager cell of a few operations; the last state is the result."""
    return {"h": graph.chain(SMALL_CELL, x=request).last.h}


@cellrt.unfold("decoder", example=MEMORY)
def decoder(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    """Return a loop of an eager cell with two GRU cells, attention and an output layer; the last token is the
    result.
    """
    loop = graph.loop(
        DECODER_CELL,
        until="stop",
        max_steps=SHORT,
        token=GO,
        left=SHORT,
        h=torch.zeros(2, HIDDEN),
        memory=list(request),
    )
    return {"token": loop.last.token, "h": loop.last.h}


@cellrt.unfold("compiled", example=INPUTS, key=len)
def compiled(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    """Return a chain of an LSTM cell, which runs in its compiled form; the last state is the result."""
    return {"h": graph.chain(COMPILED_CELL, x=request).last.h}


class Served(NamedTuple):
    """A model, what is asked of it, and how many steps that takes."""

    model: cellrt.Unfolder
    request: Tensor
    steps: int

    @property
    def path(self) -> str:
        """The import path of the model."""
        return f"{__name__}:{self.model.name}"


SERVED = (Served(small, INPUTS, LONG), Served(decoder, MEMORY, SHORT), Served(compiled, INPUTS, LONG))
