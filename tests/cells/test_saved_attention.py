"""Cells with pages and spans as files: what is loaded says what was saved."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import cellrt
from cellrt.cells import StackSizes, TransformerStack, encoder_decoder_cells, sentence_encoder
from cellrt.cells.cached_attention import cached_attention, key_values, span_attention
from cellrt.cells.language_models import language_model
from cellrt.cells.transformer_stack import EncoderDecoder
from cellrt.errors import DefinitionError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders import complete, embed, transduce
from tests.engine.helpers import WAIT_S
from tests.unfolders.language_models import VOCABULARY, draw_prompt, small_cell, small_llama

SIZES = StackSizes(vocabulary=VOCABULARY, positions=64, hidden=24, inner=40, layers=2, heads=4)
PROMPTS = [draw_prompt(seed, length) for seed, length in enumerate((9, 1, 30, 2))]


def saved(cell, folder):
    """The cell, as another process would load it."""
    cell.save(folder)
    loaded = cellrt.load_cell(folder)
    assert loaded.identity == cell.identity and str(loaded) == str(cell)
    assert loaded.max_batch_rows == cell.max_batch_rows
    return loaded


def assert_answers(model, expected, requests, compile="off"):
    with cellrt.Engine(workers=1, page_bytes=1 << 20, compile=compile) as engine:
        engine.register(model)
        futures = [engine.submit(model.name, request) for request in requests]
        for request, future in zip(requests, futures):
            for name, value in run_one_by_one(expected, request).items():
                torch.testing.assert_close(future.result(WAIT_S)[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compile", ["off", pytest.param("wait", marks=[pytest.mark.slow, pytest.mark.timeout(500)])])
def test_a_loaded_language_model_says_what_the_saved_one_says(tmp_path, compile):
    cell = small_cell(4, 16)
    requests = [{"prompt": prompt, "max_tokens": 8} for prompt in PROMPTS]
    assert_answers(complete("lm", saved(cell, tmp_path)), complete("lm", cell), requests, compile)


def test_a_loaded_encoder_embeds_as_the_saved_one(tmp_path):
    torch.manual_seed(1)
    cell = sentence_encoder(TransformerStack(SIZES))
    assert_answers(embed("embed", saved(cell, tmp_path)), embed("embed", cell), PROMPTS)


def test_loaded_encoder_decoders_answer_as_the_saved_ones(tmp_path):
    torch.manual_seed(2)
    cells = encoder_decoder_cells(
        TransformerStack(SIZES), TransformerStack(SIZES, is_decoder=True), nn.Linear(24, VOCABULARY), end_token=0
    )
    loaded = EncoderDecoder(*(saved(cell, tmp_path / str(number)) for number, cell in enumerate(cells)))
    of_these, of_those = (transduce("lm", each, start=1, max_steps=9) for each in (loaded, cells))
    assert_answers(of_these, of_those, PROMPTS)


class Own(nn.Module):
    """Reads a window of its own text, and all of the task's rows of its node."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, kv, span):
        query, key, value = self.qkv(x).view(x.shape[0], 3, 2, 4).unbind(1)
        read = cached_attention(query, key, value, kv, window=3)
        return (read + span_attention(read, key, value, span, causal=True)).flatten(1)


def test_a_cell_of_ones_own_is_saved_with_all_that_was_said_of_it(tmp_path):
    torch.manual_seed(3)
    inputs = {"x": (8,), "kv": key_values(2, 4, page_size=3), "span": cellrt.span()}
    cell = cellrt.cell(Own(), inputs, max_batch=5, max_batch_rows=11, priority=3)
    loaded = saved(cell, tmp_path)
    assert (loaded.max_batch, loaded.max_batch_rows, loaded.inputs) == (5, 11, cell.inputs)

    def answer(used):
        def unfold(graph, x):
            return {"y": graph.chain(used, x=x, kv=graph.pages(used)).output}

        model = cellrt.Unfolder("own", unfold, torch.zeros(2, 8), (used,))
        return run_one_by_one(model, torch.linspace(-1, 1, 56).view(7, 8))["y"]

    torch.testing.assert_close(answer(loaded), answer(cell))


class Looking(nn.Module):
    def forward(self, x, kv):
        kv.append(x)
        return x + kv.pages[0, 0]


def test_a_cell_that_looks_at_pages_itself_is_not_saved(tmp_path):
    cell = cellrt.cell(Looking(), {"x": (3,), "kv": cellrt.grows(3)}, name="looking")
    with pytest.raises(DefinitionError, match="'looking' cannot be exported: it reads or writes pages otherwise"):
        cell.save(tmp_path)
    sampling = language_model(small_llama(), 0, sampling=True)
    with pytest.raises(DefinitionError, match="cannot be exported: it reads or writes pages otherwise"):
        sampling.save(tmp_path)


@pytest.mark.parametrize(
    "change", [{"page_size": 0.5}, {"page_dim": 9}, {"appends": 1}, {"span": "some"}, {"pages": 3}]
)
def test_what_is_said_of_pages_is_checked(tmp_path, change):
    small_cell().save(tmp_path)
    description = json.loads((tmp_path / "cell.json").read_text())
    description["inputs"]["kv"].update(change)
    del description["digest"]
    from cellrt.definition.file import _digest_of

    description["digest"] = _digest_of(description)
    (tmp_path / "cell.json").write_text(json.dumps(description))
    with pytest.raises(DefinitionError, match="no cell that can be loaded"):
        cellrt.load_cell(tmp_path)
