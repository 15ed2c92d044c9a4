"""The outputs that a decoder makes of its logits: each row's best token, the logits, and a token's log-probability."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_numbers, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import TYPES
from cellrt.kernels.projection import TOKEN_TYPES
from cellrt.kernels.score_tokens import reference

__all__ = ["score_tokens"]


def score_tokens(
    logits: Tensor,
    token: ArenaRows,
    stop: ArenaRows | None = None,
    end_token: int = -1,
    copies: ArenaRows | None = None,
    logprob: ArenaRows | None = None,
) -> None:
    """Write each row of logits to ``copies``, and the log-probability of its token to ``logprob``.

    With ``stop`` the token is the best one, of equal ones the lowest: it is written to ``token``, and whether it is
    ``end_token`` to ``stop``. Without, ``token`` has the tokens already.

    ``logits`` is contiguous float32, bfloat16 or float16 ``[rows, tokens]``, a row for each that there may be, in
    order. The others name rows of arenas, all with the same span, or none: ``token`` int32 or int64, ``stop`` bool and
    ``logprob`` float32 ``[capacity]``, ``copies`` ``[capacity, tokens]`` of the type of ``logits``. Negative rows are
    not written; the others must be inside their arenas, which the kernel cannot check. Raise ValueError.
    """
    if logits.ndim != 2 or logits.dtype not in TYPES or not logits.is_contiguous() or len(logits) < token.most_rows:
        raise ValueError(
            f"logits must be contiguous, a row for each of {token.most_rows}, got {logits.dtype} {tuple(logits.shape)}"
        )
    check_numbers("token", token, TOKEN_TYPES, token, logits.device)
    if stop is not None:
        check_numbers("stop", stop, (torch.bool,), token, logits.device)
    if logprob is not None:
        check_numbers("logprob", logprob, (torch.float32,), token, logits.device)
    check_rows("copies", copies, token, logits.shape[1], logits)
    if uses_triton(logits):
        from cellrt.kernels.score_tokens import triton

        triton.score_tokens(logits, token, stop, end_token, copies, logprob)
    else:
        reference.score_tokens(logits, token, stop, end_token, copies, logprob)
