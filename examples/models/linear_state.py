"""A language model with a linear recurrence (a gated sum of outer products), in plain torch.

Its state is one matrix a head, however long the text is: no keys and values grow. Here it has random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cellrt

VOCABULARY, LAYERS, HEADS, SIZE = 64, 2, 2, 8
HIDDEN = HEADS * SIZE
END = 0


class Layer(nn.Module):
    """A layer: rows ``x`` ``[rows, HIDDEN]`` and a state ``[rows, HEADS, SIZE, SIZE]`` -> the next of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.decay = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HEADS)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run one token of each row."""
        normed = self.norm(x)
        query, key, value = self.qkv(normed).view(-1, 3, HEADS, SIZE).unbind(1)
        keep = torch.sigmoid(self.decay(normed) + 4)[:, :, None, None]
        state = keep * state + key[:, :, :, None] * value[:, :, None, :]
        read = (query[:, :, :, None] * state).sum(2).flatten(1)
        x = x + self.out(F.normalize(read, dim=1))
        return x + self.mlp(self.mlp_norm(x)), state


class Step(nn.Module):
    """A step: ``token`` ``[rows]`` and ``state`` ``[rows, LAYERS, HEADS, SIZE, SIZE]`` -> the next of both, and
    ``stop``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, token: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the likeliest next token of each row."""
        x, states = self.embedding(token), []
        for layer, before in zip(self.layers, state.unbind(1)):
            x, after = layer(x, before)
            states.append(after)
        token = self.head(x).argmax(1)
        return {"token": token, "state": torch.stack(states, 1), "stop": token == END}


def make_model(max_tokens: int = 20) -> tuple[Step, cellrt.Unfolder]:
    """Return the module, and the served model "linear": a request is a prompt, tokens, at least one."""
    torch.manual_seed(0)  # yours come from a file
    module = Step()
    inputs = {"token": cellrt.token, "state": (LAYERS, HEADS, SIZE, SIZE)}
    # A prompt's tokens are given and a loop's are carried, so each has a cell, with the same weights.
    read = cellrt.cell(module, inputs, carry={"state": "state"}, name="read")
    write = cellrt.cell(module, inputs, name="write")

    @cellrt.unfold("linear", example=torch.tensor([1, 2]))
    def linear(graph: cellrt.Graph, prompt: Tensor) -> dict[str, object]:
        carried: dict[str, Any] = {"token": prompt[-1]}  # a state that is not given begins with zeros
        if len(prompt) > 1:
            carried["state"] = graph.chain(read, token=prompt[:-1]).last.state
        return {"token": graph.loop(write, until="stop", max_steps=max_tokens, **carried).token}

    return module, linear
