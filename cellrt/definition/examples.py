"""Inputs to try a cell with: rows of zeros, and random rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec

NUM_PAGES = 8
"""Of an example, at most: nodes beyond share them."""


def zero_inputs(specs: Iterable[RowSpec], rows: int, device: str = "cpu") -> list[CellInput]:
    """Zeros for each spec; a ragged input has two rows a node, a node with pages or spans one row."""
    inputs: list[CellInput] = []
    for spec in specs:
        if spec.has_nodes:
            inputs.append(_one_row_each(spec, rows, device))
            continue
        count = 2 * rows if spec.ragged else rows
        values = torch.zeros((count, *spec.shape), dtype=spec.dtype, device=device)
        inputs.append(RaggedRows(values, torch.arange(0, count + 1, 2, device=device)) if spec.ragged else values)
    return inputs


def random_inputs(specs: Iterable[RowSpec], rows: int, generator: torch.Generator) -> list[CellInput]:
    """Random normal numbers for each spec; integers and bools are zeros; a ragged input has one or two rows a node."""
    inputs: list[CellInput] = []
    for spec in specs:
        if spec.has_nodes:
            made = _one_row_each(spec, rows, "cpu")
            if isinstance(made, PagedRows) and spec.dtype.is_floating_point:
                drawn = torch.randn(made.pages.shape, generator=generator)
                made = made._replace(pages=drawn.to(spec.dtype))
            inputs.append(made)
            continue
        counts = [1 + row % 2 for row in range(rows)]
        shape = (sum(counts) if spec.ragged else rows, *spec.shape)
        values = torch.zeros(shape, dtype=spec.dtype)
        if spec.dtype.is_floating_point:
            values = torch.randn(shape, generator=generator).to(spec.dtype)
        inputs.append(RaggedRows(values, torch.tensor([0, *counts]).cumsum(0)) if spec.ragged else values)
    return inputs


def _one_row_each(spec: RowSpec, rows: int, device: str) -> PagedRows | Spans:
    """So many nodes of one row, the first of its chain."""
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    if spec.span:
        return Spans(offsets, zeros, zeros == 0)
    pages = torch.zeros((min(rows, NUM_PAGES), *spec.stored.shape), dtype=spec.dtype, device=device)
    tables = (offsets[:-1] % min(rows, NUM_PAGES))[:, None]
    return PagedRows(pages, tables, zeros + 1, offsets, offsets[:-1], zeros, zeros == 0, spec.page_dim)
