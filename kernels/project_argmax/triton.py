"""Projection and argmax in Triton.

The rows are the fastest dimension of the grid: programs that read the same weights run side by side, so each tile of
weights comes from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of
from cellrt.kernels.projection import Projection, choose_tile
from cellrt.kernels.projection_tiles import best_of_row_kernel, best_of_tile, logits_tile


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_rows", "p_span"])
def best_of_part_kernel(
    p_arena,
    arena_stride,
    p_rows,
    p_span,
    num_rows,
    p_weight,
    p_bias,
    p_best,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Run the first stage: a program takes the best of a part of the vocabulary for each of its rows."""
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
    b_best = best_of_tile(b_logits, o_tokens, VOCABULARY)
    tl.store(p_best + o_rows * tl.num_programs(1) + tl.program_id(1), b_best, mask=b_index >= 0)


def project_argmax(h: ArenaRows, projection: Projection, token: ArenaRows, stop: ArenaRows) -> None:
    """Launch both stages; arguments are as in the operation, and are not checked."""
    num_rows, (vocabulary, hidden) = h.most_rows, projection.weight.shape
    if num_rows == 0:
        return
    tile = choose_tile(num_rows, projection)
    num_parts = triton.cdiv(vocabulary, tile.tokens)
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=h.values.device)
    best_of_part_kernel[(triton.cdiv(num_rows, tile.rows), num_parts)](
        h.values,
        h.values.stride(0),
        h.rows,
        h.span,
        num_rows,
        projection.weight,
        projection.bias,
        best,
        VOCABULARY=vocabulary,
        HIDDEN=hidden,
        PRECISION=projection.precision if h.values.dtype == torch.float32 else "ieee",
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    stop_token = -1 if projection.stop_token is None else projection.stop_token
    parts = triton.next_power_of_2(num_parts)
    best_of_row_kernel[(num_rows,)](
        h.rows, h.span, best, token.values, token.rows, stop.values, stop.rows, num_parts, stop_token, PARTS=parts
    )
