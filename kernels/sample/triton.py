"""Sampling in Triton: a program has a part of a row's logits, and each pass over them is a launch.

A row that is one part is drawn in a launch of its own, in which the least logit that is kept is settled bit by bit. Of
several parts, *most* finds each part's largest logit. A *narrowing* for top-k, and one for top-p, then finds the least
logit that is kept. Logits are compared as integers that rise with them, of 32 bits; four bits of the least are settled
at a pass: programs count (for top-p: weigh) what reaches each of 16 integers, and each program of the next pass adds up
the counts of its row and takes the largest of the 16 that is reached by enough. At last each part is weighed, and one
program a row draws: first the part, then the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of
from cellrt.kernels.projection_tiles import store_token
from cellrt.kernels.sample.pieces import load_part, order, target_of, weigh

if TYPE_CHECKING:
    from cellrt.kernels.sample import Sampling

PART = 2048
PASSES = 8
BITS = tl.constexpr(4)
DIGITS = tl.constexpr(1 << 4)
ROWS = ["p_rows", "p_span", "p_seed_rows", "p_step_rows", "p_token_rows", "p_stop_rows", "p_next_rows"]


@triton.jit
def largest_of(p_most, row, parts, PARTS: tl.constexpr):
    """Return a row's largest scaled logit."""
    o_parts = tl.arange(0, PARTS)
    return tl.max(tl.load(p_most + row * parts + o_parts, mask=o_parts < parts, other=float("-inf")), axis=0)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def most_kernel(
    p_logits, STRIDE: tl.constexpr, p_rows, p_span, temperature, p_most, TOKENS: tl.constexpr, PART: tl.constexpr
):
    """Write the largest logit of a part of a row."""
    row, part = tl.program_id(0), tl.program_id(1)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    b_scaled = load_part(p_logits, STRIDE, p_rows, first, row, part, temperature, TOKENS, PART)
    tl.store(p_most + row * tl.num_programs(1) + part, tl.max(b_scaled, axis=0))


@triton.jit
def settle(p_sums, p_least, p_needed, row, parts, settled, needed, IS_MASS: tl.constexpr, PARTS: tl.constexpr):
    """Return the least kept integer as far as it is known after the pass before: ``settled`` passes are over.

    For masses, ``needed`` is a share of what all weigh, which the first pass has found.
    """
    o_parts, o_digits = tl.arange(0, PARTS), tl.arange(0, DIGITS)
    p_block = p_sums + (row * parts + o_parts[:, None]) * DIGITS + o_digits[None, :]
    b_reach = tl.sum(tl.load(p_block, mask=(o_parts < parts)[:, None], other=0), axis=0)
    enough = needed
    if IS_MASS:
        enough = tl.load(p_needed + row, mask=settled > 1, other=0.0)
        enough = tl.where(settled > 1, enough, needed * tl.max(b_reach, axis=0).to(tl.float64))
        tl.store(p_needed + row, enough, mask=settled == 1)
    digit = tl.sum((b_reach.to(tl.float64) >= enough).to(tl.int64), axis=0) - 1
    least = tl.maximum(digit, 0) << (32 - BITS * settled)
    if settled > 1:
        least += tl.load(p_least + row)
    return least


@triton.jit(do_not_specialize=["num_rows", "settled"], do_not_specialize_on_alignment=ROWS)
def narrow_kernel(
    p_logits,
    STRIDE: tl.constexpr,
    p_rows,
    p_span,
    num_rows,
    temperature,
    p_most,
    p_kept,
    p_sums,
    p_least,
    p_needed,
    settled,
    needed,
    IS_MASS: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Pass ``settled``: counts or weighs what of a part reaches each of the next 16 integers.

    ``p_sums`` ``[2, rows, parts, 16]`` and ``p_least`` ``[2, rows]`` are used in turns.
    """
    row, part, parts, most_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.num_programs(0)
    first, num_rows = span_of(p_span, num_rows)
    if row >= num_rows:
        return
    here, before = settled % 2, (settled + 1) % 2
    least = row.to(tl.int64) * 0
    if settled > 0:
        p_last = p_sums + before * most_rows * parts * DIGITS
        least = settle(p_last, p_least + before * most_rows, p_needed, row, parts, settled, needed, IS_MASS, PARTS)
        tl.store(p_least + here * most_rows + row, least)
    b_scaled = load_part(p_logits, STRIDE, p_rows, first, row, part, temperature, TOKENS, PART)
    b_order, b_is_token = order(b_scaled), part * PART + tl.arange(0, PART) < TOKENS
    if IS_MASS:
        b_weights = weigh(b_scaled, largest_of(p_most, row, parts, PARTS))
        if p_kept is not None:
            b_weights = tl.where(b_order >= tl.load(p_kept + row), b_weights, 0)
    else:
        b_weights = tl.full((PART,), 1, tl.int64)
    b_weights = tl.where(b_is_token, b_weights, 0)
    p_sums += ((here * most_rows + row) * parts + part) * DIGITS
    for digit in range(DIGITS):
        bound = least + ((row.to(tl.int64) * 0 + digit) << (32 - BITS * (settled + 1)))
        tl.store(p_sums + digit, tl.sum(tl.where(b_order >= bound, b_weights, 0), axis=0))


@triton.jit(do_not_specialize=["num_rows", "settled", "parts"], do_not_specialize_on_alignment=["p_span", "p_least"])
def settle_kernel(
    p_span,
    num_rows,
    p_kept,
    p_sums,
    p_least,
    p_needed,
    settled,
    parts,
    needed,
    IS_MASS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write a row's least kept integer, behind the last pass."""
    row = tl.program_id(0)
    _, num_rows = span_of(p_span, num_rows)
    if row < num_rows:
        tl.store(p_kept + row, settle(p_sums, p_least, p_needed, row, parts, settled, needed, IS_MASS, PARTS))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def weigh_kernel(
    p_logits,
    STRIDE: tl.constexpr,
    p_rows,
    p_span,
    temperature,
    p_most,
    p_kept,
    p_masses,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the weight of what is kept of a part of a row."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    b_scaled = load_part(p_logits, STRIDE, p_rows, first, row, part, temperature, TOKENS, PART)
    b_weights = weigh(b_scaled, largest_of(p_most, row, parts, PARTS))
    if p_kept is not None:
        b_weights = tl.where(order(b_scaled) >= tl.load(p_kept + row), b_weights, 0)
    tl.store(p_masses + row * parts + part, tl.sum(b_weights, axis=0))


@triton.jit(do_not_specialize=["parts", "end_token"], do_not_specialize_on_alignment=ROWS)
def draw_kernel(
    p_logits,
    STRIDE: tl.constexpr,
    p_rows,
    p_span,
    temperature,
    p_most,
    p_kept,
    p_masses,
    p_seeds,
    p_seed_rows,
    p_steps,
    p_step_rows,
    p_tokens,
    p_token_rows,
    p_stops,
    p_stop_rows,
    p_nexts,
    p_next_rows,
    parts,
    end_token,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Draw the token of one row."""
    row = tl.program_id(0)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    o_parts = tl.arange(0, PARTS)
    b_masses = tl.load(p_masses + row * parts + o_parts, mask=o_parts < parts, other=0)
    target = target_of(
        p_seeds, p_seed_rows, p_steps, p_step_rows, p_nexts, p_next_rows, first + row, tl.sum(b_masses, axis=0)
    )
    b_is_before = tl.cumsum(b_masses, axis=0).to(tl.float64) <= target
    part = tl.minimum(tl.sum(b_is_before.to(tl.int32), axis=0), parts - 1)
    before = tl.sum(tl.where(o_parts < part, b_masses, 0), axis=0)
    b_scaled = load_part(p_logits, STRIDE, p_rows, first, row, part, temperature, TOKENS, PART)
    b_weights = weigh(b_scaled, largest_of(p_most, row, parts, PARTS))
    if p_kept is not None:
        b_weights = tl.where(order(b_scaled) >= tl.load(p_kept + row), b_weights, 0)
    b_is_before = (before + tl.cumsum(b_weights, axis=0)).to(tl.float64) <= target
    token = tl.minimum(part * PART + tl.sum(b_is_before.to(tl.int32), axis=0), TOKENS - 1)
    store_token(p_tokens, p_token_rows, p_stops, p_stop_rows, first + row, token, end_token)


@triton.jit
def least_kept(b_order, b_weights, enough):
    """Return the largest integer that is reached by enough of what the numbers count or weigh."""
    least = tl.sum(b_weights, axis=0) * 0
    for bit in range(32):
        bound = least + ((least * 0 + 1) << (31 - bit))
        is_reached = tl.sum(tl.where(b_order >= bound, b_weights, 0), axis=0).to(tl.float64) >= enough
        least = tl.where(is_reached, bound, least)
    return least


@triton.jit(do_not_specialize=["end_token"], do_not_specialize_on_alignment=ROWS)
def draw_alone_kernel(
    p_logits,
    STRIDE: tl.constexpr,
    p_rows,
    p_span,
    temperature,
    top_k,
    top_p,
    p_seeds,
    p_seed_rows,
    p_steps,
    p_step_rows,
    p_tokens,
    p_token_rows,
    p_stops,
    p_stop_rows,
    p_nexts,
    p_next_rows,
    end_token,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
):
    """Draw the token of a row that is one part, in one program."""
    row = tl.program_id(0)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    b_scaled = load_part(p_logits, STRIDE, p_rows, first, row, 0, temperature, TOKENS, PART)
    b_order, b_is_token = order(b_scaled), tl.arange(0, PART) < TOKENS
    b_weights = tl.where(b_is_token, weigh(b_scaled, tl.max(b_scaled, axis=0)), 0)
    if HAS_TOP_K:
        least = least_kept(b_order, b_is_token.to(tl.int64), top_k)
        b_weights = tl.where(b_order >= least, b_weights, 0)
    if HAS_TOP_P:
        enough = top_p * tl.sum(b_weights, axis=0).to(tl.float64)
        b_weights = tl.where(b_order >= least_kept(b_order, b_weights, enough), b_weights, 0)
    target = target_of(
        p_seeds, p_seed_rows, p_steps, p_step_rows, p_nexts, p_next_rows, first + row, tl.sum(b_weights, axis=0)
    )
    b_is_before = tl.cumsum(b_weights, axis=0).to(tl.float64) <= target
    token = tl.minimum(tl.sum(b_is_before.to(tl.int32), axis=0), TOKENS - 1)
    store_token(p_tokens, p_token_rows, p_stops, p_stop_rows, first + row, token, end_token)


def sample(
    logits: ArenaRows | Tensor,
    seed: ArenaRows,
    step: ArenaRows,
    sampling: Sampling,
    token: ArenaRows,
    stop: ArenaRows,
    next_step: ArenaRows | None = None,
) -> None:
    """Launch all passes; arguments are as in the operation, and are not checked."""
    values, rows = (logits, None) if isinstance(logits, Tensor) else logits[:2]
    num_rows, tokens = seed.most_rows, values.shape[1]
    if num_rows == 0:
        return
    part = min(PART, max(16, triton.next_power_of_2(tokens)))
    parts = triton.cdiv(tokens, part)
    given = (values, values.stride(0), rows, seed.span)
    drawn: list[Tensor | None] = [tensor for arena in (seed, step, token, stop) for tensor in arena[:2]]
    drawn += [None, None] if next_step is None else next_step[:2]
    sizes = {"TOKENS": tokens, "PART": part}
    has_top_k, has_top_p = 0 < sampling.top_k < tokens, sampling.top_p < 1
    if parts == 1:
        draw_alone_kernel[(num_rows,)](
            *(*given, sampling.temperature, float(sampling.top_k), sampling.top_p, *drawn, sampling.end_token),
            HAS_TOP_K=has_top_k,
            HAS_TOP_P=has_top_p,
            num_warps=8 if part > 1024 else 4,
            **sizes,
        )
        return
    most = torch.empty(num_rows, parts, dtype=torch.float32, device=values.device)
    most_kernel[(num_rows, parts)](*given, sampling.temperature, most, **sizes)
    sizes["PARTS"] = triton.next_power_of_2(parts)
    kept: Tensor | None = None
    for needed, is_mass, is_wanted in ((float(sampling.top_k), False, has_top_k), (sampling.top_p, True, has_top_p)):
        if is_wanted:
            kept = _narrow(given, num_rows, parts, sampling.temperature, most, kept, needed, is_mass, sizes)
    masses = torch.empty(num_rows, parts, dtype=torch.int64, device=values.device)
    weigh_kernel[(num_rows, parts)](*given, sampling.temperature, most, kept, masses, **sizes)
    draw_kernel[(num_rows,)](
        *(*given, sampling.temperature, most, kept, masses, *drawn, parts, sampling.end_token), **sizes
    )


def _narrow(
    given: tuple[object, ...],
    num_rows: int,
    parts: int,
    temperature: float,
    most: Tensor,
    kept: Tensor | None,
    needed: float,
    is_mass: bool,
    sizes: dict[str, int],
) -> Tensor:
    """Return the least integer that is kept of each row: ``needed`` logits reach it, or (of a mass) that share of
    them.
    """
    sums = torch.empty(2, num_rows, parts, 1 << 4, dtype=torch.int64, device=most.device)
    least = torch.empty(2, num_rows, dtype=torch.int64, device=most.device)
    enough = torch.empty(num_rows, dtype=torch.float64, device=most.device)
    for settled in range(PASSES):
        narrow_kernel[(num_rows, parts)](
            *given, num_rows, temperature, most, kept, sums, least, enough, settled, needed, IS_MASS=is_mass, **sizes
        )
    found = torch.empty(num_rows, dtype=torch.int64, device=most.device)
    last = (PASSES - 1) % 2
    settle_kernel[(num_rows,)](
        *(given[3], num_rows, found, sums[last], least[last], enough, PASSES, parts, needed),
        IS_MASS=is_mass,
        PARTS=sizes["PARTS"],
    )
    return found
