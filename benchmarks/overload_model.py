"""The models of the benchmark of overload, found by import path in every process: LSTMs over sentences, random weights.

``heavy`` is so large that its steps are the limit, and not the client; ``light`` is for tests.
"""

from __future__ import annotations

import torch

import cellrt
from cellrt.cells.lstm import LSTMCell

INPUT, MAX_BATCH = 64, 64
"""Numbers of a word, and rows of a task at most."""


def sentence_model(name: str, hidden: int) -> cellrt.Unfolder:
    """Make a model of a chain of LSTM steps; a request is a tensor ``[words, INPUT]``, the result the last ``h``."""
    state = {"h": (hidden,), "c": (hidden,)}
    step = cellrt.cell(LSTMCell(INPUT, hidden), {"x": (INPUT,), **state}, name=name, max_batch=MAX_BATCH)

    @cellrt.unfold(name, example=torch.zeros(2, INPUT), key=len)
    def model(graph: cellrt.Graph, words: torch.Tensor) -> dict[str, object]:
        return {"h": graph.chain(step, x=words).last.h}

    return model


def heavy() -> cellrt.Unfolder:
    """Return the model that is measured: a step of 64 rows multiplies 570 million times."""
    torch.manual_seed(0)
    return sentence_model("heavy", 1024)


def light() -> cellrt.Unfolder:
    """Return one that costs next to nothing."""
    torch.manual_seed(0)
    return sentence_model("light", 8)
