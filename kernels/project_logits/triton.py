"""Logits in Triton: a program has a tile of rows and tokens, as the first stage of projection and argmax has it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of
from cellrt.kernels.projection import Projection, choose_tile
from cellrt.kernels.projection_tiles import logits_tile

MOST_ROWS = 64
"""The most rows of a tile: with more, a thread has no registers left for where its logits go."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_rows", "p_span"])
def logits_kernel(
    p_arena,
    arena_stride,
    p_rows,
    p_span,
    num_rows,
    p_weight,
    p_bias,
    p_logits,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile, written where it belongs."""
    first, num_rows = span_of(p_span, num_rows)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    b_index = tl.load(p_rows + first + o_rows, mask=o_rows < num_rows, other=-1).to(tl.int64)
    b_logits = logits_tile(
        p_arena,
        arena_stride,
        b_index,
        p_weight,
        p_bias,
        o_tokens,
        VOCABULARY,
        HIDDEN,
        p_bias is not None,
        DEPTH,
        PRECISION,
    )
    p_block = p_logits + o_rows.to(tl.int64)[:, None] * VOCABULARY + o_tokens[None, :]
    b_mask = (b_index >= 0)[:, None] & (o_tokens < VOCABULARY)[None, :]
    tl.store(p_block, b_logits.to(p_logits.dtype.element_ty), mask=b_mask)


def project_logits(h: ArenaRows, projection: Projection, logits: Tensor) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    num_rows, (vocabulary, hidden) = h.most_rows, projection.weight.shape
    if num_rows == 0:
        return
    tile = choose_tile(min(num_rows, MOST_ROWS), projection)
    logits_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(vocabulary, tile.tokens))](
        h.values,
        h.values.stride(0),
        h.rows,
        h.span,
        num_rows,
        projection.weight,
        projection.bias,
        logits,
        VOCABULARY=vocabulary,
        HIDDEN=hidden,
        PRECISION=projection.precision if h.values.dtype == torch.float32 else "ieee",
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
