"""The fused LSTM step in Triton: gather, both products, the pointwise half and the scatter in one launch.

A program has a tile of rows and of units. It gathers its rows of x and h by index while it multiplies; the weights
are interleaved (``gate_weights.py``), so its sums are all four gates of its units, and it writes their h and c to
their arena rows.
"""

import torch
import triton
import triton.language as tl

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import (
    bias_block,
    gate,
    multiply,
    multiply_parts,
    row_pointers,
    span_of,
    split_four,
    store_rows,
    tanh,
)
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.tiles import Tile


@triton.jit
def update(b_i, b_f, b_g, b_o, b_c):
    """Return the new h and c from the four sums and the old c."""
    b_c = tl.sigmoid(b_f) * b_c + tl.sigmoid(b_i) * tanh(b_g)
    return tl.sigmoid(b_o) * tanh(b_c), b_c


# Where a task's rows lie changes from task to task, and a kernel is compiled once.
ROWS = ("p_x_rows", "p_gates_rows", "p_h_rows", "p_c_rows", "p_h_out_rows", "p_c_out_rows")
SPANS = ("p_state_span", "p_span")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROWS + SPANS)
def lstm_step_kernel(
    p_x,
    p_x_rows,
    X_STRIDE: tl.constexpr,
    p_gates,
    p_gates_rows,
    GATES_STRIDE: tl.constexpr,
    p_h,
    p_h_rows,
    H_STRIDE: tl.constexpr,
    p_c,
    p_c_rows,
    C_STRIDE: tl.constexpr,
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
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    HAS_GATES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program's tile of the step: see ``lstm_step`` in the package for what the arguments mean."""
    first, num_rows = span_of(p_span, num_rows)
    first_state, _ = span_of(p_state_span, num_rows)
    if tl.program_id(0) * BLOCK_ROWS >= num_rows:
        return
    p_x_rows, p_gates_rows, p_h_out_rows, p_c_out_rows = (
        p_x_rows + first, p_gates_rows + first, p_h_out_rows + first, p_c_out_rows + first
    )  # fmt: skip
    p_h_rows, p_c_rows = p_h_rows + first_state, p_c_rows + first_state
    o_rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_is_row = o_rows < num_rows
    o_columns = tl.program_id(1) * 4 * BLOCK_UNITS + tl.arange(0, 4 * BLOCK_UNITS)
    b_sums = bias_block(p_bias, o_columns, BLOCK_ROWS)
    p_left = row_pointers(p_h, p_h_rows, o_rows, b_is_row, H_STRIDE)
    if INPUT > 0:
        b_sums = multiply_parts(
            b_sums, row_pointers(p_x, p_x_rows, o_rows, b_is_row, X_STRIDE), p_left, p_weight_ih, p_weight_hh,
            o_columns, INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, BLOCK_DEPTH, PRECISION,
        )  # fmt: skip
    else:
        b_sums = multiply(b_sums, p_left, p_weight_hh, o_columns, HIDDEN, PADDED_HIDDEN, BLOCK_DEPTH, PRECISION)

    o_units = tl.program_id(1) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    b_is_unit = o_units < HIDDEN
    b_mask = b_is_row[:, None] & b_is_unit[None, :]
    b_i, b_f, b_g, b_o = split_four(b_sums, BLOCK_ROWS, BLOCK_UNITS)
    if HAS_GATES:
        p_row = row_pointers(p_gates, p_gates_rows, o_rows, b_is_row, GATES_STRIDE)
        b_i += gate(p_row, o_units, b_mask, 0, HIDDEN)
        b_f += gate(p_row, o_units, b_mask, 1, HIDDEN)
        b_g += gate(p_row, o_units, b_mask, 2, HIDDEN)
        b_o += gate(p_row, o_units, b_mask, 3, HIDDEN)
    b_c = gate(row_pointers(p_c, p_c_rows, o_rows, b_is_row, C_STRIDE), o_units, b_mask, 0, HIDDEN)
    b_h, b_c = update(b_i, b_f, b_g, b_o, b_c)
    store_rows(p_h_out, p_h_out_rows, o_rows, b_is_row, H_OUT_STRIDE, o_units, b_is_unit, b_h)
    store_rows(p_c_out, p_c_out_rows, o_rows, b_is_row, C_OUT_STRIDE, o_units, b_is_unit, b_c)


def lstm_step(
    weights: PackedWeights,
    *,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
    precision: Precision,
    tile: Tile,
) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    num_rows, hidden = h.most_rows, weights.hidden_size
    weight_ih = weights.weight_hh if weights.weight_ih is None else weights.weight_ih
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(hidden, tile.units))
    lstm_step_kernel[grid](
        *(x or h).arguments(),
        *(gates or h).arguments(),
        *h.arguments(),
        *c.arguments(),
        weight_ih,
        weights.weight_hh,
        weights.bias,
        *h_out.arguments(),
        *c_out.arguments(),
        h.span,
        h_out.span,
        num_rows,
        INPUT=0 if x is None else weights.input_size,
        HIDDEN=hidden,
        PADDED_INPUT=weight_ih.shape[1],
        PADDED_HIDDEN=weights.weight_hh.shape[1],
        HAS_GATES=gates is not None,
        PRECISION=precision if weights.weight_hh.dtype == torch.float32 else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_UNITS=tile.units,
        BLOCK_DEPTH=tile.depth,
        **tile.options(),
    )
