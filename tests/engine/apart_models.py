"""Cells that a worker's process finds by import."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn

import cellrt
from cellrt import RaggedRows, cells

WIDTH, STEPS = 8, 5
DEADLY, WRONG = 1e6, 2e6


class Step(nn.Module):
    """A step that fails on a row which begins with WRONG, and kills its process on one with DEADLY."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        """One step."""
        if bool((x[:, 0] == DEADLY).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        if bool((x[:, 0] == WRONG).any()):
            raise ValueError("a wrong row")
        return {"h": torch.tanh(self.linear(x) + h)}


def decode(token: Tensor, left: Tensor, h: Tensor, memory: RaggedRows) -> dict[str, Tensor]:
    """A step of a loop over a memory, a plain function."""
    mean = torch.segment_reduce(memory.values, "mean", offsets=memory.offsets)
    h = torch.tanh(h + mean + token[:, None])
    return {"h": h, "token": (h.sum(1) * 10).long() % 7, "left": left - 1, "stop": left <= 1}


torch.manual_seed(0)
STEP = cellrt.cell(Step(), {"x": (WIDTH,), "h": (WIDTH,)}, name="step")
LSTM = cellrt.cell(cells.LSTMCell(WIDTH, WIDTH), {"x": (WIDTH,), "h": (WIDTH,), "c": (WIDTH,)}, name="lstm")
DECODE = cellrt.cell(
    decode, {"token": cellrt.token, "left": cellrt.token, "h": (WIDTH,), "memory": cellrt.ragged(WIDTH)}, name="decode"
)
EXAMPLE = torch.ones(STEPS, WIDTH)


@cellrt.unfold("model", example=EXAMPLE)
def model(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    """An eager chain and a compiled one side by side, then an eager loop over both."""
    eager, compiled = graph.chain(STEP, x=request), graph.chain(LSTM, x=request)
    loop = graph.loop(
        DECODE,
        until="stop",
        max_steps=9,
        token=1,
        left=len(request),
        h=eager.last.h,
        memory=[eager.last.h, compiled.last.h],
    )
    return {"tokens": loop.token, "h": loop.last.h, "c": compiled.last.c}


@cellrt.unfold("chain", example=EXAMPLE)
def chain(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
    """The eager chain alone."""
    return {"h": graph.chain(STEP, x=request).last.h}
