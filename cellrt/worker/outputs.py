"""Checks of a cell's outputs before they are used: an author's tensors may be of any kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cellrt.definition.cell import Cell
from cellrt.errors import CellError


def plain_outputs(cell: Cell, outputs: Sequence[torch.Tensor], rows: int, device: torch.device) -> list[torch.Tensor]:
    """Return the outputs as plain dense tensors ``[rows, *shape]`` on a device, without gradients.

    Raise CellError if they have other shapes or dtypes than declared, or lie elsewhere.
    """
    for value, spec in zip(outputs, cell.outputs.values()):
        if type(value) is not torch.Tensor or value.dtype != spec.dtype or value.shape != (rows, *spec.shape):
            break
        if value.layout is not torch.strided or value.device != device or value.requires_grad:
            break
    else:
        return list(outputs)
    cell.check_outputs(outputs, rows)
    return [_plain(cell, name, value, device) for name, value in zip(cell.outputs, outputs)]


def _plain(cell: Cell, name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value.layout is not torch.strided or value.device != device:
        raise CellError(
            f"cell {cell.name!r}, output {name!r}: expected a dense tensor on {device}, "
            f"got one with layout {value.layout} on {value.device}"
        )
    if type(value) is torch.Tensor:
        return value.detach() if value.requires_grad else value
    # A subclass may do anything at any operation: whatever it does, it does here.
    return torch.zeros(value.shape, dtype=value.dtype, device=device).copy_(value.detach())
