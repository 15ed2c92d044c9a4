"""An LSTM, a TreeLSTM and a Llama in one engine at once: each result is that of its request alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cellrt import unfolders
from cellrt.cells import BinaryTreeLSTMCell, EmbeddingTreeLSTMLeaf
from cellrt.definition.define import cell
from cellrt.definition.spec import token
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders.completion import complete
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.unfolders.language_models import draw_prompt, small_cell

HIDDEN, WORDS = 16, 3
TREES = ["(0 (0 a) (0 b))", "(0 (0 (0 c) (0 a)) (0 (0 b) (0 (0 a) (0 c))))", "(0 a)"]


def make_models():
    torch.manual_seed(0)
    leaf = cell(EmbeddingTreeLSTMLeaf(WORDS, 8, HIDDEN), {"token": token}, name="leaf")
    state = {name: (HIDDEN,) for name in ("h_left", "c_left", "h_right", "c_right")}
    inner = cell(BinaryTreeLSTMCell(None, HIDDEN), state, name="inner")
    return {
        "lstm": unfolders.chain("lstm", nn.LSTM(8, HIDDEN)),
        "tree": unfolders.penn_tree("tree", leaf=leaf, inner=inner, vocabulary={"a": 0, "b": 1, "c": 2}, unknown=0),
        "lm": complete("lm", small_cell(page_size=2, max_batch_rows=16)),
    }


def requests_of(count):
    """The three in turns."""
    generator = torch.Generator().manual_seed(1)
    for k in range(count):
        yield "lstm", torch.randn(1 + 7 * k % 30, 8, generator=generator)
        yield "tree", TREES[k % len(TREES)]
        yield "lm", {"prompt": draw_prompt(k, 1 + 5 * k % 40), "max_tokens": 1 + 3 * k % 17}


@pytest.mark.parametrize("workers", [1, 2])
def test_recurrent_networks_trees_and_transformers_share_an_engine(workers):
    models, requests = make_models(), list(requests_of(12))
    engine = small_engine(workers, page_bytes=1, trace=True, debug=True)
    try:
        for model in models.values():
            engine.register(model, warm_up=False)
        futures = [engine.submit(name, request) for name, request in requests]
        for (name, request), future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(models[name], request))
        tasks = engine.timeline().tasks
    finally:
        close_and_check(engine)
    for name in ("leaf", "inner", "language model"):
        assert any(len(set(task.requests)) > 1 for task in tasks if task.cell == name)
