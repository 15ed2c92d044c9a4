"""What the step kernels share inside Triton: the product with gathered rows, and taking gates apart.

In kernels, names start with p_ for pointers, b_ for blocks of values, o_ for offsets; sizes are upper case.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(b_x):
    """The hyperbolic tangent, to about 1e-7 absolute; exact at both ends."""
    return 1.0 - 2.0 / (tl.exp(2.0 * b_x) + 1.0)


@triton.jit
def row_pointers(p_values, p_rows, o_rows, b_is_row, stride):
    """Pointers to the start of the arena rows that ``p_rows[o_rows]`` name; arena row 0 behind the last row."""
    b_rows = tl.load(p_rows + o_rows, mask=b_is_row, other=0)
    return p_values + b_rows.to(tl.int64) * stride


@triton.jit
def multiply(
    b_sums,
    p_left,
    p_weight,
    o_columns,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``b_sums`` plus the rows at ``p_left`` times the rows ``o_columns`` of the weight ``[columns, PADDED]``."""
    o_depth = tl.arange(0, BLOCK)
    p_a = p_left[:, None] + o_depth[None, :]
    p_b = p_weight + o_columns[None, :] * PADDED + o_depth[:, None]
    for start in range(0, DEPTH, BLOCK):
        if DEPTH % BLOCK == 0:
            b_a = tl.load(p_a)
        else:
            b_a = tl.load(p_a, mask=o_depth[None, :] < DEPTH - start, other=0.0)
        b_sums = tl.dot(b_a, tl.load(p_b), b_sums, input_precision=PRECISION)
        p_a += BLOCK
        p_b += BLOCK
    return b_sums


@triton.jit
def multiply_two(
    b_sums,
    b_last,
    p_left,
    p_weight,
    o_columns,
    o_last,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``multiply`` for two sections of columns at once: the gathered rows are read once."""
    o_depth = tl.arange(0, BLOCK)
    p_a = p_left[:, None] + o_depth[None, :]
    p_b = p_weight + o_columns[None, :] * PADDED + o_depth[:, None]
    p_d = p_weight + o_last[None, :] * PADDED + o_depth[:, None]
    for start in range(0, DEPTH, BLOCK):
        if DEPTH % BLOCK == 0:
            b_a = tl.load(p_a)
        else:
            b_a = tl.load(p_a, mask=o_depth[None, :] < DEPTH - start, other=0.0)
        b_sums = tl.dot(b_a, tl.load(p_b), b_sums, input_precision=PRECISION)
        b_last = tl.dot(b_a, tl.load(p_d), b_last, input_precision=PRECISION)
        p_a += BLOCK
        p_b += BLOCK
        p_d += BLOCK
    return b_sums, b_last


@triton.jit
def bias_block(p_bias, o_columns, ROWS: tl.constexpr):
    """The bias of ``o_columns`` in each of ROWS rows: where sums start."""
    b_bias = tl.load(p_bias + o_columns)
    return tl.zeros((ROWS, o_columns.shape[0]), dtype=tl.float32) + b_bias[None, :]


@triton.jit
def split_two(b_sums, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """The two gates of interleaved columns, ``[ROWS, UNITS]`` each."""
    b_gates = tl.permute(tl.reshape(b_sums, (ROWS, UNITS // 8, 2, 8)), (0, 1, 3, 2))
    b_0, b_1 = tl.split(b_gates)
    return tl.reshape(b_0, (ROWS, UNITS)), tl.reshape(b_1, (ROWS, UNITS))


@triton.jit
def split_four(b_sums, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """The four gates of interleaved columns, ``[ROWS, UNITS]`` each."""
    b_gates = tl.permute(tl.reshape(b_sums, (ROWS, UNITS // 8, 2, 2, 8)), (0, 1, 4, 2, 3))
    b_even, b_odd = tl.split(b_gates)
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return (
        tl.reshape(b_0, (ROWS, UNITS)),
        tl.reshape(b_1, (ROWS, UNITS)),
        tl.reshape(b_2, (ROWS, UNITS)),
        tl.reshape(b_3, (ROWS, UNITS)),
    )


@triton.jit
def gate(p_gates, o_units, b_mask, INDEX: tl.constexpr, HIDDEN: tl.constexpr):
    """Gate INDEX of the gate rows at ``p_gates`` (gates one after the other, HIDDEN units each), in float32."""
    p_block = p_gates[:, None] + INDEX * HIDDEN + o_units[None, :]
    return tl.load(p_block, mask=b_mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p_out, p_rows, o_rows, b_is_row, stride, o_units, b_is_unit, b_values):
    """Write units ``o_units`` of ``b_values`` to the arena rows ``p_rows[o_rows]`` that are not negative."""
    b_rows = tl.load(p_rows + o_rows, mask=b_is_row, other=-1)
    p_block = p_out + b_rows.to(tl.int64)[:, None] * stride + o_units[None, :]
    tl.store(p_block, b_values.to(p_out.dtype.element_ty), mask=(b_rows >= 0)[:, None] & b_is_unit[None, :])
