"""Projection and argmax in plain torch."""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.projection import Projection, plain_logits, put_tokens


def project_argmax(h: ArenaRows, projection: Projection, tokens: Tensor, stops: Tensor) -> None:
    """As the operation; arguments are not checked."""
    is_row = h.rows >= 0
    chosen = plain_logits(h.values[h.rows[is_row].long()], projection).argmax(dim=1)
    put_tokens(is_row, chosen, projection, tokens, stops)
