"""Inputs to try a cell with: rows of zeros, and random rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cellrt.definition.spec import CellInput, RaggedRows, RowSpec


def zero_inputs(specs: Iterable[RowSpec], rows: int, device: str = "cpu") -> list[CellInput]:
    """Zeros for each spec; a ragged input has two rows a node."""
    inputs: list[CellInput] = []
    for spec in specs:
        count = 2 * rows if spec.ragged else rows
        values = torch.zeros((count, *spec.shape), dtype=spec.dtype, device=device)
        inputs.append(RaggedRows(values, torch.arange(0, count + 1, 2, device=device)) if spec.ragged else values)
    return inputs


def random_inputs(specs: Iterable[RowSpec], rows: int, generator: torch.Generator) -> list[CellInput]:
    """Random normal numbers for each spec; integers and bools are zeros; a ragged input has one or two rows a node."""
    inputs: list[CellInput] = []
    for spec in specs:
        counts = [1 + row % 2 for row in range(rows)]
        shape = (sum(counts) if spec.ragged else rows, *spec.shape)
        values = torch.zeros(shape, dtype=spec.dtype)
        if spec.dtype.is_floating_point:
            values = torch.randn(shape, generator=generator).to(spec.dtype)
        inputs.append(RaggedRows(values, torch.tensor([0, *counts]).cumsum(0)) if spec.ragged else values)
    return inputs
