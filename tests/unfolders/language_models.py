"""A small random Llama as a served model, for tests, and its answers in a plain loop."""

from __future__ import annotations

import torch

from cellrt.cells.language_models import LayeredModel, language_model, layered_language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.definition.cell import Cell

VOCABULARY, END = 50, 39
SIZES = LlamaSizes(vocabulary=VOCABULARY, hidden=24, inner=44, layers=2, heads=4, kv_heads=2)


def small_llama() -> Llama:
    """Random weights, large enough for texts that vary."""
    torch.manual_seed(3)
    model = Llama(SIZES).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.5 if weight.dim() > 1 else 1.0)
    return model


def small_cell(page_size: int = 4, max_batch_rows: int = 64, max_batch: int = 8) -> Cell:
    """The model as a cell."""
    limits = {"max_batch_rows": max_batch_rows, "max_batch": max_batch}
    return language_model(small_llama(), END, page_size=page_size, **limits)


def small_layers(page_size: int = 4, max_batch_rows: int = 64, max_batch: int = 8) -> LayeredModel:
    """The model as one cell a layer."""
    limits = {"max_batch_rows": max_batch_rows, "max_batch": max_batch}
    return layered_language_model(small_llama(), END, page_size=page_size, **limits)


def draw_prompt(seed: int, length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def until_end(tokens: list[int]) -> list[int]:
    """Those up to the end token, and it."""
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens
