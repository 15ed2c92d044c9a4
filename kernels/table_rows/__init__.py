"""Finds the rows of a table that numbers name, such as tokens in an embedding; the last row for any other number."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_numbers
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.table_rows import reference


def table_rows(numbers: ArenaRows, end: int) -> Tensor:
    """Return each number, or ``end`` where it is not from 0 to ``end``: int64, one for each of ``numbers.rows``.

    ``numbers`` are rows of an arena of int64 ``[capacity]``, which must be inside it: a kernel cannot check that. With
    a span, what is returned for rows outside it is anything. Raise ValueError for other types.
    """
    check_numbers("numbers", numbers, (torch.int64,), numbers, numbers.values.device)
    if uses_triton(numbers.values):
        from cellrt.kernels.table_rows import triton

        return triton.table_rows(numbers, end)
    return reference.table_rows(numbers, end)
