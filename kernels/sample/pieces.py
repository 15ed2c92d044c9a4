"""Pieces of the sampling kernels: a part of a row's logits, their order and what they weigh, a row's random number."""

import triton
import triton.language as tl

from cellrt.kernels.projection_tiles import ordered

ONE = tl.constexpr(2.0**40)


@triton.jit
def load_part(p_logits, STRIDE, p_rows, first, row, part, temperature, TOKENS: tl.constexpr, PART: tl.constexpr):
    """Return scaled logits of a part of a row, -inf behind the last; without ``p_rows`` the rows are in order."""
    o_tokens = part * PART + tl.arange(0, PART)
    at = row.to(tl.int64)
    if p_rows is not None:
        at = tl.load(p_rows + first + row).to(tl.int64)
    b_logits = tl.load(p_logits + at * STRIDE + o_tokens, mask=o_tokens < TOKENS, other=float("-inf"))
    return b_logits.to(tl.float32) / temperature


@triton.jit
def order(b_scaled):
    """Return integers from 0 to 2**32 - 1 that rise with the numbers."""
    return ordered(b_scaled).to(tl.int64) + 0x80000000


@triton.jit
def weigh(b_scaled, largest):
    """Return a token's weight beside the most likely one, in multiples of 2**-40; 0 if it is not a number."""
    b_weights = tl.exp(b_scaled - largest)
    b_weights = tl.where(b_weights <= 1.0, b_weights, 0.0)
    return (b_weights * ONE).to(tl.int64)


@triton.jit
def mix(b_bits):
    """Return the next number of SplitMix64."""
    b_bits = b_bits + 0x9E3779B97F4A7C15
    b_bits = (b_bits ^ (b_bits >> 30)) * 0xBF58476D1CE4E5B9
    b_bits = (b_bits ^ (b_bits >> 27)) * 0x94D049BB133111EB
    return b_bits ^ (b_bits >> 31)


@triton.jit
def uniform(b_seed, b_step):
    """Return a number of (0, 1) of 48 random bits."""
    b_bits = mix(mix(b_seed.to(tl.uint64)) + b_step.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return ((b_bits >> 16).to(tl.float64) + 0.5) * (1.0 / 281474976710656.0)


@triton.jit
def target_of(p_seeds, p_seed_rows, p_steps, p_step_rows, p_nexts, p_next_rows, place, mass):
    """Return where in ``mass`` a row's uniform number is; write the number of its next step."""
    at = place + tl.zeros((1,), dtype=tl.int32)
    b_seed = tl.load(p_seeds + tl.load(p_seed_rows + at))
    b_step = tl.load(p_steps + tl.load(p_step_rows + at))
    if p_nexts is not None:
        b_next = tl.load(p_next_rows + at)
        tl.store(p_nexts + b_next, b_step + 1, mask=b_next >= 0)
    return tl.max(uniform(b_seed, b_step), axis=0) * mass.to(tl.float64)
