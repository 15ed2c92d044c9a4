"""Sampling: a random token for each row of logits, with temperature, top-k and top-p.

The token is where the cumulative distribution passes a uniform number, which is a hash of the row's ``seed`` and
``step`` (the mixing function of SplitMix64; Steele, Lea and Flood 2014). So it depends on the row's logits, seed and
step alone. Logits are read where they are, by several programs a row; probabilities are summed as whole numbers, in
multiples of 2**-40 of the largest, whose sums do not depend on the order. For top-k and top-p the least logit that is
kept is found four bits at a time, in eight passes each over the logits, which stay in the L2 cache. Rows of at most
2,048 logits take one launch for all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_numbers, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import TYPES
from cellrt.kernels.projection import TOKEN_TYPES
from cellrt.kernels.sample import reference

__all__ = ["MOST_TOKENS", "Sampling", "sample"]

MOST_TOKENS = 1 << 20
"""The most tokens: with more, sums would not fit in 64 bits."""


class Sampling(NamedTuple):
    """The parameters of sampling.

    Attributes:
        end_token: ends a sequence.
        temperature: logits are divided by it; above 0.
        top_k: only this many of the most likely tokens, and those as likely as the last of them; 0: all.
        top_p: of the tokens that ``top_k`` leaves, only the most likely ones that together reach this probability, and
            those as likely as the last of them; 1: all.
    """

    end_token: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sample(
    logits: ArenaRows | Tensor,
    seed: ArenaRows,
    step: ArenaRows,
    sampling: Sampling,
    token: ArenaRows,
    stop: ArenaRows,
    next_step: ArenaRows | None = None,
) -> None:
    """Write a random token of each row to ``token``, and whether it is the end token to ``stop``.

    ``logits`` names rows of an arena ``[capacity, tokens]`` of float32, bfloat16 or float16, or is a contiguous tensor
    with a row for each that there may be, in order. The others name numbers of arenas ``[capacity]``: ``seed`` and
    ``step`` int64, ``token`` int32 or int64, ``stop`` bool; ``next_step`` int64, which is given ``step + 1``. All have
    the same span, or none. Negative rows of ``token``, ``stop`` and ``next_step`` are not written; the others must be
    inside their arenas, which the kernel cannot check. Between kernel and reference a token may differ where the
    uniform number is within rounding of the bound of two. Raise ValueError.
    """
    values = logits if isinstance(logits, Tensor) else logits.values
    if values.ndim != 2 or values.dtype not in TYPES or not 0 < values.shape[1] <= MOST_TOKENS:
        raise ValueError(f"logits must be rows of 1 to {MOST_TOKENS} numbers, got {values.dtype} {tuple(values.shape)}")
    if not isinstance(logits, Tensor):
        check_rows("logits", logits, logits, values.shape[1], values)
    elif len(logits) < seed.most_rows or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous, a row for each of {seed.most_rows}, got {tuple(logits.shape)}")
    like = seed if isinstance(logits, Tensor) else logits
    for name, arena, dtypes in (
        *(("seed", seed, (torch.int64,)), ("step", step, (torch.int64,))),
        *(("token", token, TOKEN_TYPES), ("stop", stop, (torch.bool,))),
        *([] if next_step is None else [("next_step", next_step, (torch.int64,))]),
    ):
        check_numbers(name, arena, dtypes, like, values.device)
    if uses_triton(values):
        from cellrt.kernels.sample import triton

        triton.sample(logits, seed, step, sampling, token, stop, next_step)
    else:
        reference.sample(logits, seed, step, sampling, token, stop, next_step)
