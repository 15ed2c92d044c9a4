"""Two rows into one in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host

if TYPE_CHECKING:
    from cellrt.kernels.combine_rows import Combination


def combine_rows(a: Tensor, b: ArenaRows, combination: Combination, out: ArenaRows, in_order: Tensor | None) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    b, out = (on_host(arena, b) for arena in (b, out))
    is_row = b.rows >= 0
    given = a[: len(is_row)][is_row].float(), b.values[b.rows[is_row].long()].float()
    sums = given[0] @ combination.weight_a.float().T + given[1] @ combination.weight_b.float().T
    made = torch.tanh(sums if combination.bias is None else sums + combination.bias.float())
    ArenaRows(out.values, out.rows[is_row]).scatter(made)
    if in_order is not None:
        in_order[: len(is_row)][is_row] = made.to(in_order.dtype)
