"""The model that the HTTP benchmark serves everywhere: an LSTM over tokens, and the class of its last state.

A module of its own, since the engine's process and the front ends import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.http_classifier import HIDDEN, Classifier
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders import from_torch

MAX_BATCH = 256


def classify() -> Unfolder:
    """Return the model ``classify``: a request is its tokens, its result their class."""
    model = Classifier()
    layers = from_torch(model.lstm, embedding=model.embedding, max_batch=MAX_BATCH)
    head = cell(model, {"h": (HIDDEN,)}, name="head", max_batch=MAX_BATCH)

    @unfold("classify", example=[1, 2, 3], key=len)
    def unfolded(graph: Graph, tokens: Sequence[int]) -> dict[str, object]:
        return {"class": head(h=layers(graph, tokens).states("h")[0]).output}

    return unfolded


class Step(nn.Module):
    """A step of the same LSTM as a user writes it in plain torch: a token and the state before, the state after."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.embedding, self.step = model.embedding, nn.LSTMCell(HIDDEN, HIDDEN)
        of_layer = {name.removesuffix("_l0"): value for name, value in model.lstm.state_dict().items()}
        self.step.load_state_dict(of_layer)
        self.eval().requires_grad_(False)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """``token`` int64 ``[rows]``, ``h`` and ``c`` float32 ``[rows, 256]`` -> the next two."""
        h, c = self.step(self.embedding(token), (h, c))
        return {"h": h, "c": c}


def classify_own() -> Unfolder:
    """Return the same, of a user's own cell: the server's compiler makes its form."""
    model = Classifier()
    inputs = {"token": rows(dtype=torch.int64), "h": (HIDDEN,), "c": (HIDDEN,)}
    step = cell(Step(model), inputs, name="step", max_batch=MAX_BATCH)
    head = cell(model, {"h": (HIDDEN,)}, name="head", max_batch=MAX_BATCH)

    @unfold("classify", example=[1, 2, 3], key=len)
    def unfolded(graph: Graph, tokens: Sequence[int]) -> dict[str, object]:
        return {"class": head(h=graph.chain(step, token=tokens).last.h).output}

    return unfolded
