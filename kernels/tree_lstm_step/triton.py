"""The fused binary TreeLSTM step in Triton. As in the LSTM's, a program has a tile of rows and of units.

Gates i, f_left, f_right and o are one section of interleaved columns, g is another.
"""

import torch
import triton
import triton.language as tl

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import (
    bias_block,
    gate,
    multiply_states,
    row_pointers,
    span_of,
    split_four,
    store_rows,
    tanh,
)
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.tiles import Tile

INPUTS = ("p_x_rows", "p_h_left_rows", "p_h_right_rows", "p_c_left_rows", "p_c_right_rows")
OUTPUTS = ("p_h_out_rows", "p_c_out_rows")
SPANS = ("p_state_span", "p_span")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=INPUTS + OUTPUTS + SPANS)
def tree_lstm_step_kernel(
    p_x,
    p_x_rows,
    X_STRIDE: tl.constexpr,
    p_h_left,
    p_h_left_rows,
    H_LEFT_STRIDE: tl.constexpr,
    p_h_right,
    p_h_right_rows,
    H_RIGHT_STRIDE: tl.constexpr,
    p_c_left,
    p_c_left_rows,
    C_LEFT_STRIDE: tl.constexpr,
    p_c_right,
    p_c_right_rows,
    C_RIGHT_STRIDE: tl.constexpr,
    p_weight_ih,
    p_weight_hh,
    p_bias,
    p_h_out,
    p_h_out_rows,
    H_OUT_STRIDE: tl.constexpr,
    p_c_out,
    p_c_out_rows,
    C_OUT_STRIDE: tl.constexpr,
    p_state_span,
    p_span,
    num_rows,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program's tile of the step: see ``tree_lstm_step`` in the package for what the arguments mean."""
    first, num_rows = span_of(p_span, num_rows)
    first_state, _ = span_of(p_state_span, num_rows)
    if tl.program_id(0) * BLOCK_ROWS >= num_rows:
        return
    p_x_rows, p_h_out_rows, p_c_out_rows = p_x_rows + first, p_h_out_rows + first, p_c_out_rows + first
    p_h_left_rows, p_c_left_rows = p_h_left_rows + first_state, p_c_left_rows + first_state
    p_h_right_rows, p_c_right_rows = p_h_right_rows + first_state, p_c_right_rows + first_state
    o_rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_is_row = o_rows < num_rows
    o_units = tl.program_id(1) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    o_four = tl.program_id(1) * 4 * BLOCK_UNITS + tl.arange(0, 4 * BLOCK_UNITS)
    o_g = 4 * UNITS + o_units
    b_four = bias_block(p_bias, o_four, BLOCK_ROWS)
    b_g = bias_block(p_bias, o_g, BLOCK_ROWS)
    p_left = row_pointers(p_h_left, p_h_left_rows, o_rows, b_is_row, H_LEFT_STRIDE)
    p_right = row_pointers(p_h_right, p_h_right_rows, o_rows, b_is_row, H_RIGHT_STRIDE)
    p_inputs = p_left
    if INPUT > 0:
        p_inputs = row_pointers(p_x, p_x_rows, o_rows, b_is_row, X_STRIDE)
    b_four, b_g = multiply_states(
        b_four, b_g, p_inputs, p_left, p_right, p_weight_ih, p_weight_hh, o_four, o_g,
        INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, BLOCK_DEPTH, PRECISION,
    )  # fmt: skip

    b_is_unit = o_units < HIDDEN
    b_mask = b_is_row[:, None] & b_is_unit[None, :]
    b_i, b_f_left, b_f_right, b_o = split_four(b_four, BLOCK_ROWS, BLOCK_UNITS)
    p_row = row_pointers(p_c_left, p_c_left_rows, o_rows, b_is_row, C_LEFT_STRIDE)
    b_c = tl.sigmoid(b_f_left) * gate(p_row, o_units, b_mask, 0, HIDDEN)
    p_row = row_pointers(p_c_right, p_c_right_rows, o_rows, b_is_row, C_RIGHT_STRIDE)
    b_c += tl.sigmoid(b_f_right) * gate(p_row, o_units, b_mask, 0, HIDDEN)
    b_c += tl.sigmoid(b_i) * tanh(b_g)
    b_h = tl.sigmoid(b_o) * tanh(b_c)
    store_rows(p_h_out, p_h_out_rows, o_rows, b_is_row, H_OUT_STRIDE, o_units, b_is_unit, b_h)
    store_rows(p_c_out, p_c_out_rows, o_rows, b_is_row, C_OUT_STRIDE, o_units, b_is_unit, b_c)


def tree_lstm_step(
    weights: PackedWeights,
    *,
    h_left: ArenaRows,
    h_right: ArenaRows,
    c_left: ArenaRows,
    c_right: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    x: ArenaRows | None = None,
    precision: Precision,
    tile: Tile,
) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    num_rows, hidden = h_left.most_rows, weights.hidden_size
    weight_ih = weights.weight_hh if weights.weight_ih is None else weights.weight_ih
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(hidden, tile.units))
    tree_lstm_step_kernel[grid](
        *(x or h_left).arguments(),
        *h_left.arguments(),
        *h_right.arguments(),
        *c_left.arguments(),
        *c_right.arguments(),
        weight_ih,
        weights.weight_hh,
        weights.bias,
        *h_out.arguments(),
        *c_out.arguments(),
        h_left.span,
        h_out.span,
        num_rows,
        INPUT=0 if x is None else weights.input_size,
        HIDDEN=hidden,
        UNITS=weights.padded_units,
        PADDED_INPUT=weight_ih.shape[1],
        PADDED_HIDDEN=weights.weight_hh.shape[1] // 2,
        PRECISION=precision if weights.weight_hh.dtype == torch.float32 else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_UNITS=tile.units,
        BLOCK_DEPTH=tile.depth,
        **tile.options(),
    )
