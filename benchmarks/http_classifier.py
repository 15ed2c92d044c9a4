"""The model of the HTTP benchmark in plain torch, for servers whose Python has torch and nothing of cellrt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

VOCABULARY, HIDDEN, CLASSES = 1000, 256, 16


class Classifier(nn.Module):
    """Tokens int64 ``[batch, steps]``, padded, and lengths ``[batch]`` -> classes ``[batch]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.eval().requires_grad_(False)

    @torch.inference_mode()
    def classes(self, requests: Sequence[Sequence[int]]) -> list[int]:
        """Return the class of each request, as one padded batch that is packed, which is the faster of torch's ways."""
        lengths = torch.tensor([len(tokens) for tokens in requests])
        padded = nn.utils.rnn.pad_sequence([torch.as_tensor(tokens) for tokens in requests], batch_first=True)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(padded), lengths, batch_first=True, enforce_sorted=False
        )
        _, (h, _) = self.lstm(packed)
        found: list[int] = self.forward(h[-1]).tolist()
        return found

    def forward(self, h: Tensor) -> Tensor:
        """Return the class of a state ``[rows, 256]``."""
        logits: Tensor = self.head(h)
        return logits.argmax(dim=-1)
