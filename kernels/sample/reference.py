"""Sampling in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host

if TYPE_CHECKING:
    from cellrt.kernels.sample import Sampling

# The constants of SplitMix64 as signed numbers: int64 products and sums wrap around.
GOLDEN, FIRST, SECOND = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def sample(
    logits: ArenaRows | Tensor,
    seed: ArenaRows,
    step: ArenaRows,
    sampling: Sampling,
    token: ArenaRows,
    stop: ArenaRows,
    next_step: ArenaRows | None = None,
) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    if isinstance(logits, ArenaRows):
        logits = on_host(logits, seed).gather()
    seed, step, token, stop = (on_host(arena, seed) for arena in (seed, step, token, stop))
    steps = step.values[step.rows.long()]
    scaled = logits[: len(steps)].float() / sampling.temperature
    cumulative = torch.where(kept(scaled, sampling), scaled.softmax(1), 0).double().cumsum(1)
    target = uniform(seed.values[seed.rows.long()], steps)[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= target).sum(1).clamp(max=scaled.shape[1] - 1)
    written = [(token, chosen), (stop, chosen == sampling.end_token)]
    if next_step is not None:
        written.append((on_host(next_step, next_step), steps + 1))
    for made, values in written:
        made.values[made.rows[made.rows >= 0].long()] = values[made.rows >= 0].to(made.values.dtype)


def kept(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens ``[rows, tokens]`` may be drawn."""
    is_kept = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < sampling.top_k < scaled.shape[1]:
        is_kept = scaled >= scaled.topk(sampling.top_k).values[:, -1:]
    if sampling.top_p < 1:
        falling = scaled.masked_fill(~is_kept, -math.inf).sort(1, descending=True).values
        likely = falling.double().softmax(1)
        num_inside = (likely.cumsum(1) - likely < sampling.top_p).sum(1, keepdim=True)
        is_kept &= scaled >= falling.gather(1, (num_inside - 1).clamp(min=0))
    return is_kept


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """Return a number of (0, 1) for each pair of int64 ``seed`` and ``step``: float64, 48 random bits."""
    bits = _mix(_mix(seed) + step * GOLDEN)
    return (_shift(bits, 16).double() + 0.5) / 2**48


def _mix(bits: Tensor) -> Tensor:
    bits = bits + GOLDEN
    bits = (bits ^ _shift(bits, 30)) * FIRST
    bits = (bits ^ _shift(bits, 27)) * SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)
