"""Projection and argmax in plain torch."""

from __future__ import annotations

from cellrt.kernels.arena_rows import ArenaRows, on_host
from cellrt.kernels.projection import Projection, plain_logits, put_tokens


def project_argmax(h: ArenaRows, projection: Projection, token: ArenaRows, stop: ArenaRows) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    h, token, stop = (on_host(arena, h) for arena in (h, token, stop))
    is_row = h.rows >= 0
    chosen = plain_logits(h.values[h.rows[is_row].long()], projection).argmax(dim=1)
    put_tokens(is_row, chosen, projection.stop_token, token, stop)
