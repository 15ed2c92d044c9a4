"""Gather in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cellrt.kernels.row_ranges import Ranges, ranges_on_host


def gather_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, outs: Sequence[Tensor]) -> None:
    """As the operation; arguments are not checked."""
    for arena, out, (count, start) in zip(arenas, outs, ranges_on_host(ranges), strict=True):
        rows = buffer[start : start + count].long()
        is_row = rows >= 0
        out[:count][is_row] = arena[rows[is_row]]
