"""Scatter in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cellrt.kernels.row_ranges import Ranges, ranges_on_host


def scatter_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, values: Sequence[Tensor]) -> None:
    """As the operation; arguments are not checked."""
    for arena, value, (count, positions_at, rows_at) in zip(arenas, values, ranges_on_host(ranges), strict=True):
        rows = buffer[rows_at : rows_at + count].long()
        kept = value[:count] if positions_at < 0 else value[buffer[positions_at : positions_at + count].long()]
        is_row = rows >= 0
        arena[rows[is_row]] = kept[is_row]
