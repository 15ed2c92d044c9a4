"""Logits in plain torch."""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host
from cellrt.kernels.projection import Projection, plain_logits


def project_logits(h: ArenaRows, projection: Projection, logits: Tensor) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    h = on_host(h, h)
    is_row = h.rows >= 0
    logits[: len(is_row)][is_row] = plain_logits(h.values[h.rows[is_row].long()], projection).to(logits.dtype)
