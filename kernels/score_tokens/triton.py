"""Scores of tokens in Triton: a program has a row, and goes over its logits once for the best and once for the sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of
from cellrt.kernels.projection_tiles import ordered, store_token, token_of

PART = 2048
NUM_WARPS = 8
ROWS = ["p_span", "p_token_rows", "p_stop_rows", "p_copy_rows", "p_logprob_rows"]


@triton.jit(do_not_specialize=["end_token"], do_not_specialize_on_alignment=ROWS)
def score_kernel(
    p_logits,
    p_span,
    p_tokens,
    p_token_rows,
    p_stops,
    p_stop_rows,
    p_copies,
    p_copy_rows,
    copy_stride,
    p_logprobs,
    p_logprob_rows,
    end_token,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute the operation; ``score_tokens`` in the package explains the arguments."""
    row = tl.program_id(0)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    p_row, o_part = p_logits + row.to(tl.int64) * TOKENS, tl.arange(0, PART)
    copy_at = tl.full((), -1, tl.int64)
    if p_copies is not None:
        copy_at = tl.load(p_copy_rows + first + row).to(tl.int64)
    best = tl.full((), -(2**63), tl.int64)
    for start in range(0, TOKENS, PART):
        o_tokens = start + o_part
        b_logits = tl.load(p_row + o_tokens, mask=o_tokens < TOKENS, other=0.0)
        if p_copies is not None:
            tl.store(p_copies + copy_at * copy_stride + o_tokens, b_logits, mask=(o_tokens < TOKENS) & (copy_at >= 0))
        b_order = tl.where(o_tokens < TOKENS, ordered(b_logits.to(tl.float32)), -0x80000000)
        b_best = (b_order.to(tl.int64) << 32) | (0x7FFFFFFF - o_tokens).to(tl.int64)
        best = tl.maximum(best, tl.max(b_best, axis=0))
    token = token_of(best)
    largest = tl.load(p_row + token).to(tl.float32)
    if p_stops is not None:
        store_token(p_tokens, p_token_rows, p_stops, p_stop_rows, first + row, token, end_token)
    else:
        given = tl.load(p_tokens + tl.maximum(tl.load(p_token_rows + first + row), 0)).to(tl.int64)
        token = tl.minimum(tl.maximum(given, 0), TOKENS - 1)
    if p_logprobs is not None:
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, TOKENS, PART):
            o_tokens = start + o_part
            b_logits = tl.load(p_row + o_tokens, mask=o_tokens < TOKENS, other=float("-inf")).to(tl.float32)
            total += tl.sum(tl.exp(b_logits - largest), axis=0)
        at = tl.load(p_logprob_rows + first + row)
        logprob = tl.load(p_row + token).to(tl.float32) - largest - tl.log(total)
        tl.store(p_logprobs + at, logprob, mask=at >= 0)


def score_tokens(
    logits: Tensor,
    token: ArenaRows,
    stop: ArenaRows | None,
    end_token: int,
    copies: ArenaRows | None,
    logprob: ArenaRows | None,
) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    if token.most_rows == 0:
        return
    part = min(PART, triton.next_power_of_2(logits.shape[1]))
    score_kernel[(token.most_rows,)](
        logits,
        token.span,
        *token[:2],
        *((None, None) if stop is None else stop[:2]),
        *((None, None, 0) if copies is None else copies.arguments()),
        *((None, None) if logprob is None else logprob[:2]),
        end_token,
        TOKENS=logits.shape[1],
        PART=part,
        num_warps=NUM_WARPS,
    )
