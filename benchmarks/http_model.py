"""The model that the HTTP benchmark serves everywhere: an LSTM over tokens, and the class of its last state.

A module of its own, since the engine's process and the front ends import it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.http_classifier import HIDDEN, Classifier
from cellrt.definition.define import cell
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders import from_torch

MAX_BATCH = 256


def classify() -> Unfolder:
    """The model ``classify``: a request is its tokens, its result their class."""
    model = Classifier()
    layers = from_torch(model.lstm, embedding=model.embedding, max_batch=MAX_BATCH)
    head = cell(model, {"h": (HIDDEN,)}, name="head", max_batch=MAX_BATCH)

    @unfold("classify", example=[1, 2, 3], key=len)
    def unfolded(graph: Graph, tokens: Sequence[int]) -> dict[str, object]:
        return {"class": head(h=layers(graph, tokens).states("h")[0]).output}

    return unfolded
