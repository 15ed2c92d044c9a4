"""Two rows into one in Triton: a program has a tile of rows and numbers, and multiplies one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of, tanh
from cellrt.kernels.projection import Projection, choose_tile
from cellrt.kernels.projection_tiles import logits_tile

if TYPE_CHECKING:
    from cellrt.kernels.combine_rows import Combination

MOST_ROWS, MOST_NUMBERS = 32, 64
"""The largest tile: a row is hardly wider than a state, so small tiles fill a device."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_rows", "p_out_rows", "p_span"])
def combine_kernel(
    p_a,
    p_b,
    B_STRIDE: tl.constexpr,
    p_rows,
    p_span,
    num_rows,
    p_weight_a,
    p_weight_b,
    p_bias,
    p_out,
    OUT_STRIDE: tl.constexpr,
    p_out_rows,
    p_in_order,
    SIZE: tl.constexpr,
    A_SIZE: tl.constexpr,
    B_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile, written where it belongs."""
    _, num_rows = span_of(p_span, num_rows)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_numbers = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    b_is_row = o_rows < num_rows
    b_index = tl.load(p_rows + o_rows, mask=b_is_row, other=-1).to(tl.int64)
    b_order = tl.where(b_is_row, o_rows, -1).to(tl.int64)
    b_sums = logits_tile(
        p_b, B_STRIDE, b_index, p_weight_b, p_bias, o_numbers, SIZE, B_SIZE, p_bias is not None, DEPTH, PRECISION
    )
    b_sums += logits_tile(p_a, A_SIZE, b_order, p_weight_a, p_bias, o_numbers, SIZE, A_SIZE, False, DEPTH, PRECISION)
    b_made = tanh(b_sums).to(p_out.dtype.element_ty)
    b_is_number = (o_numbers < SIZE)[None, :]
    b_to = tl.load(p_out_rows + o_rows, mask=b_is_row, other=-1).to(tl.int64)
    b_mask = ((b_index >= 0) & (b_to >= 0))[:, None] & b_is_number
    tl.store(p_out + b_to[:, None] * OUT_STRIDE + o_numbers[None, :], b_made, mask=b_mask)
    if p_in_order is not None:
        p_block = p_in_order + o_rows.to(tl.int64)[:, None] * SIZE + o_numbers[None, :]
        tl.store(p_block, b_made, mask=(b_index >= 0)[:, None] & b_is_number)


def combine_rows(a: Tensor, b: ArenaRows, combination: Combination, out: ArenaRows, in_order: Tensor | None) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    weight_a, weight_b, bias, precision = combination
    num_rows, (size, b_size) = b.most_rows, weight_b.shape
    if num_rows == 0:
        return
    tile = choose_tile(min(num_rows, MOST_ROWS), Projection(weight_b, bias, None, precision))
    combine_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(size, MOST_NUMBERS))](
        a,
        b.values,
        b.values.stride(0),
        b.rows,
        b.span,
        num_rows,
        weight_a,
        weight_b,
        bias,
        out.values,
        out.values.stride(0),
        out.rows,
        in_order,
        SIZE=size,
        A_SIZE=a.shape[1],
        B_SIZE=b_size,
        PRECISION=precision if weight_b.dtype == torch.float32 else "ieee",
        ROWS=tile.rows,
        NUMBERS=MOST_NUMBERS,
        DEPTH=tile.depth,
        num_warps=4,
        num_stages=tile.stages,
    )
