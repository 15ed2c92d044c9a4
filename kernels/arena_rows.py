"""Rows of an arena named by index: how the step kernels take their inputs and outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INDEX_TYPES = (torch.int32, torch.int64)


class ArenaRows(NamedTuple):
    """Row ``rows[k]`` of ``values``, for each k.

    ``values`` is ``[arena rows, size]``, its rows contiguous (the step between rows is free, a multiple of 16 bytes is
    fastest). ``rows`` is int32 or int64 ``[num_rows]``, contiguous, on the device of ``values``. As an input, each must
    be inside the arena: a kernel cannot check it. As an output, a negative row is not written, and no row may be
    named twice.
    """

    values: Tensor
    rows: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """What a kernel takes: values, rows and the step between the arena's rows."""
        return self.values, self.rows, self.values.stride(0)

    def gather(self) -> Tensor:
        """The rows in order, ``[num_rows, size]``, in float32."""
        return self.values[self.rows.long()].float()

    def scatter(self, result: Tensor) -> None:
        """Write ``result`` ``[num_rows, size]``, rounded to the arena's type, to the rows that are not negative."""
        is_kept = self.rows >= 0
        self.values[self.rows[is_kept].long()] = result[is_kept].to(self.values.dtype)


def check_rows(name: str, arena: ArenaRows | None, num_rows: int, size: int, like: Tensor) -> None:
    """Check shape, type, device and layout of ``arena`` (None passes); raises ValueError.

    ``like`` is a tensor of the type and on the device that it must have.
    """
    if arena is None:
        return
    values, rows = arena
    if values.ndim != 2 or values.shape[1] != size or (size > 1 and values.stride(1) != 1):
        raise ValueError(f"{name} must be rows of {size} contiguous numbers, got {tuple(values.shape)}")
    if values.dtype != like.dtype or values.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} as the weights are, got {values.dtype} on {values.device}"
        )
    if rows.dtype not in INDEX_TYPES or rows.device != like.device or not rows.is_contiguous():
        raise ValueError(f"the rows of {name} must be contiguous int32 or int64 on {like.device}")
    if rows.shape != (num_rows,):
        raise ValueError(f"{name} must name {num_rows} rows, got {tuple(rows.shape)}")
