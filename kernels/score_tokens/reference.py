"""Scores of tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host


def score_tokens(
    logits: Tensor,
    token: ArenaRows,
    stop: ArenaRows | None,
    end_token: int,
    copies: ArenaRows | None,
    logprob: ArenaRows | None,
) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    token = on_host(token, token)
    logits = logits[: len(token.rows)]
    if stop is None:
        chosen = token.values[token.rows.long().clamp(min=0)].long().clamp(0, logits.shape[1] - 1)
    else:
        chosen = logits.argmax(1)
        token.scatter(chosen)
        on_host(stop, stop).scatter(chosen == end_token)
    if copies is not None:
        on_host(copies, copies).scatter(logits)
    if logprob is not None:
        wide = logits.float()
        on_host(logprob, logprob).scatter(wide.gather(1, chosen[:, None])[:, 0] - torch.logsumexp(wide, 1))
