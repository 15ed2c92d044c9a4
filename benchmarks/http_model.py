"""The model that the HTTP benchmark serves everywhere: an LSTM over tokens, and the class of its last state.

A module of its own, since the engine's process, front ends and peers all import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cellrt.definition.define import cell
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders import from_torch

VOCABULARY, HIDDEN, CLASSES = 1000, 256, 16
MAX_BATCH = 256


class Classifier(nn.Module):
    """Tokens int64 ``[batch, steps]``, padded, and lengths ``[batch]`` -> classes ``[batch]``, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.eval().requires_grad_(False)

    @torch.inference_mode()
    def classes(self, requests: Sequence[Sequence[int]]) -> list[int]:
        """The class of each request, as one padded batch that is packed, which is the faster of torch's ways."""
        lengths = torch.tensor([len(tokens) for tokens in requests])
        padded = nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in requests], batch_first=True)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(padded), lengths, batch_first=True, enforce_sorted=False
        )
        _, (h, _) = self.lstm(packed)
        found: list[int] = self.forward(h[-1]).tolist()
        return found

    def forward(self, h: Tensor) -> Tensor:
        """The class of a state ``[rows, 256]``."""
        logits: Tensor = self.head(h)
        return logits.argmax(dim=-1)


def classify() -> Unfolder:
    """The model ``classify``: a request is its tokens, its result their class."""
    model = Classifier()
    layers = from_torch(model.lstm, embedding=model.embedding, max_batch=MAX_BATCH)
    head = cell(model, {"h": (HIDDEN,)}, name="head", max_batch=MAX_BATCH)

    @unfold("classify", example=[1, 2, 3])
    def unfolded(graph: Graph, tokens: Sequence[int]) -> dict[str, object]:
        return {"class": head(h=layers(graph, tokens).states("h")[0]).output}

    return unfolded
