"""The fused GRU step in Triton. As in the LSTM's, a program has a tile of rows and of units.

Gates r and z are one section of interleaved columns; n is another, because its two halves meet only behind r. Where a
tensor core has the time, both halves go through one loop; where float32 is multiplied in full or as three products, the
multiplications count, and each half has a loop of its own.
"""

import torch
import triton
import triton.language as tl

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import (
    bias_block,
    gate,
    multiply_apart,
    multiply_two,
    row_pointers,
    span_of,
    split_two,
    store_rows,
    tanh,
)
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.tiles import Tile

ROWS = ("p_x_rows", "p_gates_rows", "p_h_rows", "p_h_out_rows")
SPANS = ("p_state_span", "p_span")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROWS + SPANS)
def gru_step_kernel(
    p_x,
    p_x_rows,
    X_STRIDE: tl.constexpr,
    p_gates,
    p_gates_rows,
    GATES_STRIDE: tl.constexpr,
    p_h,
    p_h_rows,
    H_STRIDE: tl.constexpr,
    p_weight_ih,
    p_weight_hh,
    p_bias,
    p_h_out,
    p_h_out_rows,
    H_OUT_STRIDE: tl.constexpr,
    p_state_span,
    p_span,
    num_rows,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_CORES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program's tile of the step: see ``gru_step`` in the package for what the arguments mean."""
    first, num_rows = span_of(p_span, num_rows)
    first_state, _ = span_of(p_state_span, num_rows)
    if tl.program_id(0) * BLOCK_ROWS >= num_rows:
        return
    p_x_rows, p_gates_rows, p_h_out_rows = p_x_rows + first, p_gates_rows + first, p_h_out_rows + first
    p_h_rows += first_state
    o_rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_is_row = o_rows < num_rows
    o_units = tl.program_id(1) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    o_rz = tl.program_id(1) * 2 * BLOCK_UNITS + tl.arange(0, 2 * BLOCK_UNITS)
    o_n = 2 * UNITS + o_units
    b_rz = bias_block(p_bias, o_rz, BLOCK_ROWS)
    b_input_n = bias_block(p_bias, o_n, BLOCK_ROWS)
    b_hidden_n = bias_block(p_bias, o_n + UNITS, BLOCK_ROWS)
    p_left = row_pointers(p_h, p_h_rows, o_rows, b_is_row, H_STRIDE)
    if INPUT > 0:
        p_inputs = row_pointers(p_x, p_x_rows, o_rows, b_is_row, X_STRIDE)
        if HAS_CORES:
            b_rz, b_input_n, b_hidden_n = multiply_apart(
                b_rz, b_input_n, b_hidden_n, p_inputs, p_left, p_weight_ih, p_weight_hh, o_rz, o_n,
                INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, BLOCK_DEPTH, PRECISION,
            )  # fmt: skip
        else:
            b_rz, b_input_n = multiply_two(
                b_rz, b_input_n, p_inputs, p_weight_ih, o_rz, o_n, INPUT, PADDED_INPUT, BLOCK_DEPTH, PRECISION
            )
    if INPUT == 0 or not HAS_CORES:
        b_rz, b_hidden_n = multiply_two(
            b_rz, b_hidden_n, p_left, p_weight_hh, o_rz, o_n, HIDDEN, PADDED_HIDDEN, BLOCK_DEPTH, PRECISION
        )

    b_is_unit = o_units < HIDDEN
    b_mask = b_is_row[:, None] & b_is_unit[None, :]
    b_r, b_z = split_two(b_rz, BLOCK_ROWS, BLOCK_UNITS)
    if HAS_GATES:
        p_row = row_pointers(p_gates, p_gates_rows, o_rows, b_is_row, GATES_STRIDE)
        b_r += gate(p_row, o_units, b_mask, 0, HIDDEN)
        b_z += gate(p_row, o_units, b_mask, 1, HIDDEN)
        b_input_n += gate(p_row, o_units, b_mask, 2, HIDDEN)
    b_z = tl.sigmoid(b_z)
    b_n = tanh(b_input_n + tl.sigmoid(b_r) * b_hidden_n)
    b_h = (1.0 - b_z) * b_n + b_z * gate(p_left, o_units, b_mask, 0, HIDDEN)
    store_rows(p_h_out, p_h_out_rows, o_rows, b_is_row, H_OUT_STRIDE, o_units, b_is_unit, b_h)


def gru_step(
    weights: PackedWeights,
    *,
    h: ArenaRows,
    h_out: ArenaRows,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
    precision: Precision,
    tile: Tile,
) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    num_rows, hidden = h.most_rows, weights.hidden_size
    weight_ih = weights.weight_hh if weights.weight_ih is None else weights.weight_ih
    has_cores = weights.weight_hh.dtype != torch.float32 or precision == "tf32"
    # Of gates alone, only the tile of 64 rows spills where it is left alone: the next one does where it is not.
    is_limited = (tile.rows == 64 if x is None else None) if has_cores else True
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(hidden, tile.units))
    gru_step_kernel[grid](
        *(x or h).arguments(),
        *(gates or h).arguments(),
        *h.arguments(),
        weight_ih,
        weights.weight_hh,
        weights.bias,
        *h_out.arguments(),
        h.span,
        h_out.span,
        num_rows,
        INPUT=0 if x is None else weights.input_size,
        HIDDEN=hidden,
        UNITS=weights.padded_units,
        PADDED_INPUT=weight_ih.shape[1],
        PADDED_HIDDEN=weights.weight_hh.shape[1],
        HAS_GATES=gates is not None,
        HAS_CORES=has_cores,
        PRECISION=precision if weights.weight_hh.dtype == torch.float32 else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_UNITS=tile.units,
        BLOCK_DEPTH=tile.depth,
        **tile.options(is_limited),
    )
