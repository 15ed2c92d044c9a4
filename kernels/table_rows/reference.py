"""Rows of a table in plain torch."""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows


def table_rows(numbers: ArenaRows, end: int) -> Tensor:
    """Compute the operation in plain torch; arguments are not checked, and no number is copied to the host."""
    found = numbers.values.index_select(0, numbers.rows.clamp(min=0, max=len(numbers.values) - 1))
    return found.clamp_(-1, end).remainder_(end + 1)
