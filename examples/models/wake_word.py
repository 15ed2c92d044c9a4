"""A streaming model whose weights are in a file: is the word being said, frame by frame?

The file is named by the environment, as every process of a server makes the model anew: ``WAKE_WORD_WEIGHTS``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

import cellrt
from cellrt import unfolders

FEATURES, HIDDEN = 16, 32
WEIGHTS = "WAKE_WORD_WEIGHTS"


class WakeWord(nn.Module):
    """The trained network: frames ``[frames, FEATURES]`` -> the probability ``[frames, 1]`` of the word at each."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)
        self.head = nn.Sequential(nn.Linear(HIDDEN, 1), nn.Sigmoid())

    def forward(self, frames: Tensor) -> Tensor:
        """Return a whole recording."""
        heard, _ = self.gru(frames)
        found: Tensor = self.head(heard)
        return found


def make_model(path: str | Path) -> cellrt.Unfolder:
    """Return the model "wake_word" with the weights of a file that ``torch.save(module.state_dict(), path)`` wrote."""
    module = WakeWord()
    module.load_state_dict(torch.load(path, weights_only=True))
    head = cellrt.cell(module.head, inputs={"input": (HIDDEN,)}, name="head")
    return unfolders.chain("wake_word", module.gru, head=head, keep=True)


def served() -> cellrt.Unfolder:
    """Return the model of the file that the environment names: ``cellrt serve examples/models/wake_word.py:served``."""
    return make_model(os.environ[WEIGHTS])
