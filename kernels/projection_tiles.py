"""Pieces of the projecting kernels: a tile of logits, and the best token of a tile and of a row.

Scores are compared as integers: the bits of a float, turned so that they rise with it. A NaN is above all (as in
torch.argmax) and what is outside of the vocabulary below all. Of equal scores the lowest token wins, at every stage,
so the result does not depend on how the vocabulary is split.
"""

import triton
import triton.language as tl

from cellrt.kernels.gate_tiles import span_of


@triton.jit
def logits_tile(
    p_arena,
    arena_stride,
    b_index,
    p_weight,
    p_bias,
    o_tokens,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return logits of the arena rows ``b_index`` (row 0 for negative ones) and ``o_tokens`` (the last for those
    behind).
    """
    b_known = tl.minimum(o_tokens, VOCABULARY - 1).to(tl.int64)
    o_depth = tl.arange(0, DEPTH)
    p_h = p_arena + tl.maximum(b_index, 0)[:, None] * arena_stride + o_depth[None, :]
    p_w = p_weight + b_known[None, :] * HIDDEN + o_depth[:, None]
    b_logits = tl.zeros((b_index.shape[0], o_tokens.shape[0]), dtype=tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            b_h = tl.load(p_h)
            b_w = tl.load(p_w)
        else:
            b_h = tl.load(p_h, mask=o_depth[None, :] < HIDDEN - start, other=0.0)
            b_w = tl.load(p_w, mask=o_depth[:, None] < HIDDEN - start, other=0.0)
        b_logits = tl.dot(b_h, b_w, b_logits, input_precision=PRECISION)
        p_h += DEPTH
        p_w += DEPTH
    if HAS_BIAS:
        b_logits += tl.load(p_bias + b_known).to(tl.float32)[None, :]
    return b_logits


@triton.jit
def ordered(b_scores):
    """Return integers in the order of the scores."""
    b_bits = tl.where(b_scores == 0.0, 0.0, b_scores).to(tl.int32, bitcast=True)
    b_bits = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    return tl.where(b_scores != b_scores, 0x7FFFFFFF, b_bits)


@triton.jit
def best_of_tile(b_scores, o_tokens, VOCABULARY: tl.constexpr):
    """Return for each row the best score and its token in one integer, larger for a better score and a lower token."""
    b_order = tl.where((o_tokens < VOCABULARY)[None, :], ordered(b_scores), -0x80000000)
    b_most = tl.max(b_order, axis=1)
    b_token = tl.min(tl.where(b_order == b_most[:, None], o_tokens[None, :], 0x7FFFFFFF), axis=1)
    return (b_most.to(tl.int64) << 32) | (0x7FFFFFFF - b_token).to(tl.int64)


@triton.jit
def token_of(best):
    """Return the token in what ``best_of_tile`` returns."""
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)


@triton.jit
def store_token(p_tokens, p_token_rows, p_stops, p_stop_rows, row, token, stop_token):
    """Write one row's token and whether it is the stop token, to the arena rows named; not to negative ones."""
    at = tl.load(p_token_rows + row)
    tl.store(p_tokens + at, token.to(p_tokens.dtype.element_ty), mask=at >= 0)
    at = tl.load(p_stop_rows + row)
    tl.store(p_stops + at, token == stop_token, mask=at >= 0)


@triton.jit(
    do_not_specialize=["num_parts", "stop_token"],
    do_not_specialize_on_alignment=["p_rows", "p_span", "p_token_rows", "p_stop_rows"],
)
def best_of_row_kernel(
    p_rows,
    p_span,
    p_best,
    p_tokens,
    p_token_rows,
    p_stops,
    p_stop_rows,
    num_parts,
    stop_token,
    PARTS: tl.constexpr,
):
    """Run the second stage: a program takes the best of the parts of one row, unless the row's index is negative."""
    row = tl.program_id(0)
    first, num_rows = span_of(p_span, row + 1)
    if row >= num_rows:
        return
    if tl.load(p_rows + first + row) >= 0:
        o_parts = tl.arange(0, PARTS)
        b_best = tl.load(p_best + row * num_parts + o_parts, mask=o_parts < num_parts, other=-(2**63))
        token = token_of(tl.max(b_best, axis=0))
        store_token(p_tokens, p_token_rows, p_stops, p_stop_rows, first + row, token, stop_token)
