"""The parts that the step kernels share inside Triton: the product with gathered rows, and taking gates apart.

In kernels, names start with p_ for pointers, b_ for blocks of values, o_ for offsets; sizes are upper case.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(b_x):
    """Return the hyperbolic tangent, to about 1e-7 absolute; exact at both ends."""
    return 1.0 - 2.0 / (tl.exp(2.0 * b_x) + 1.0)


@triton.jit
def span_of(p_span, num_rows):
    """Return the first of a step's rows and their number: from the device if it knows, else the first ``num_rows``."""
    first = 0
    if p_span is not None:
        first = tl.load(p_span).to(tl.int32)
        num_rows = tl.load(p_span + 1).to(tl.int32)
    return first, num_rows


@triton.jit
def row_pointers(p_values, p_rows, o_rows, b_is_row, stride):
    """Return pointers to the start of the arena rows that ``p_rows[o_rows]`` name; arena row 0 behind the last row."""
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
def part_block(
    block,
    p_x,
    p_h,
    p_right,
    p_weight_ih,
    p_weight_hh,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a block of the gathered rows, of x, then h and, with two states, those at ``p_right``; and of weights the
    pointer to its columns of the first row, and the step between rows.
    """
    NUM_X: tl.constexpr = (INPUT + BLOCK - 1) // BLOCK
    NUM_H: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    o_depth = tl.arange(0, BLOCK)
    is_x = block < NUM_X
    start = tl.where(is_x, block, block - NUM_X) * BLOCK
    p_rows = tl.where(is_x, p_x, p_h)
    p_weight = tl.where(is_x, p_weight_ih, p_weight_hh)
    if STATES == 2:
        is_right = block >= NUM_X + NUM_H
        start -= tl.where(is_right, NUM_H * BLOCK, 0)
        p_rows = tl.where(is_right, p_right, p_rows)
        p_weight += tl.where(is_right, PADDED_HIDDEN, 0)
    p_block = p_rows[:, None] + (start + o_depth)[None, :]
    if INPUT % BLOCK == 0 and HIDDEN % BLOCK == 0:
        b_rows = tl.load(p_block)
    else:
        b_rows = tl.load(p_block, mask=o_depth[None, :] < tl.where(is_x, INPUT, HIDDEN) - start, other=0.0)
    return b_rows, p_weight + start, tl.where(is_x, PADDED_INPUT, STATES * PADDED_HIDDEN)


@triton.jit
def multiply_parts(
    b_sums,
    p_x,
    p_h,
    p_weight_ih,
    p_weight_hh,
    o_columns,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``multiply`` of the rows at ``p_x``, and then of those at ``p_h``, in one loop: nothing runs dry between them."""
    o_depth = tl.arange(0, BLOCK)
    for block in range((INPUT + BLOCK - 1) // BLOCK + (HIDDEN + BLOCK - 1) // BLOCK):
        b_a, p_weight, step = part_block(
            block, p_x, p_h, p_h, p_weight_ih, p_weight_hh, INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, 1, BLOCK
        )
        p_b = p_weight + o_columns[None, :] * step + o_depth[:, None]
        b_sums = tl.dot(b_a, tl.load(p_b), b_sums, input_precision=PRECISION)
    return b_sums


@triton.jit
def multiply_states(
    b_sums,
    b_last,
    p_x,
    p_left,
    p_right,
    p_weight_ih,
    p_weight_hh,
    o_columns,
    o_last,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``multiply_parts`` with two states, for two sections of columns at once: the gathered rows are read once."""
    o_depth = tl.arange(0, BLOCK)
    for block in range((INPUT + BLOCK - 1) // BLOCK + 2 * ((HIDDEN + BLOCK - 1) // BLOCK)):
        b_a, p_weight, step = part_block(
            block, p_x, p_left, p_right, p_weight_ih, p_weight_hh, INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, 2, BLOCK
        )
        p_b = p_weight + o_columns[None, :] * step + o_depth[:, None]
        b_sums = tl.dot(b_a, tl.load(p_b), b_sums, input_precision=PRECISION)
        p_d = p_weight + o_last[None, :] * step + o_depth[:, None]
        b_last = tl.dot(b_a, tl.load(p_d), b_last, input_precision=PRECISION)
    return b_sums, b_last


@triton.jit
def multiply_apart(
    b_sums,
    b_of_x,
    b_of_h,
    p_x,
    p_h,
    p_weight_ih,
    p_weight_hh,
    o_columns,
    o_last,
    INPUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_INPUT: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``multiply_parts`` for two sections of columns; the second's sums over x and over h are kept apart.

    Each block is multiplied for both, for one of them by zeros that are not read: a tensor core that waits for memory
    has the time, and what other sums it adds to does not depend on the block.
    """
    o_depth = tl.arange(0, BLOCK)
    for block in range((INPUT + BLOCK - 1) // BLOCK + (HIDDEN + BLOCK - 1) // BLOCK):
        b_a, p_weight, step = part_block(
            block, p_x, p_h, p_h, p_weight_ih, p_weight_hh, INPUT, HIDDEN, PADDED_INPUT, PADDED_HIDDEN, 1, BLOCK
        )
        p_b = p_weight + o_columns[None, :] * step + o_depth[:, None]
        b_sums = tl.dot(b_a, tl.load(p_b), b_sums, input_precision=PRECISION)
        p_d = p_weight + o_last[None, :] * step + o_depth[:, None]
        b_is_x = tl.full((BLOCK, o_last.shape[0]), 0, tl.int1) | (block < (INPUT + BLOCK - 1) // BLOCK)
        b_of_x = tl.dot(b_a, tl.load(p_d, mask=b_is_x, other=0.0), b_of_x, input_precision=PRECISION)
        b_of_h = tl.dot(b_a, tl.load(p_d, mask=~b_is_x, other=0.0), b_of_h, input_precision=PRECISION)
    return b_sums, b_of_x, b_of_h


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
    """Return the bias of ``o_columns`` in each of ROWS rows: where sums start."""
    b_bias = tl.load(p_bias + o_columns)
    return tl.zeros((ROWS, o_columns.shape[0]), dtype=tl.float32) + b_bias[None, :]


@triton.jit
def split_two(b_sums, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Return the two gates of interleaved columns, ``[ROWS, UNITS]`` each."""
    b_gates = tl.permute(tl.reshape(b_sums, (ROWS, UNITS // 8, 2, 8)), (0, 1, 3, 2))
    b_0, b_1 = tl.split(b_gates)
    return tl.reshape(b_0, (ROWS, UNITS)), tl.reshape(b_1, (ROWS, UNITS))


@triton.jit
def split_four(b_sums, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Return the four gates of interleaved columns, ``[ROWS, UNITS]`` each."""
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
    """Return gate INDEX of the gate rows at ``p_gates`` (gates one after the other, HIDDEN units each), in float32."""
    p_block = p_gates[:, None] + INDEX * HIDDEN + o_units[None, :]
    return tl.load(p_block, mask=b_mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p_out, p_rows, o_rows, b_is_row, stride, o_units, b_is_unit, b_values):
    """Write units ``o_units`` of ``b_values`` to the arena rows ``p_rows[o_rows]`` that are not negative."""
    b_rows = tl.load(p_rows + o_rows, mask=b_is_row, other=-1)
    p_block = p_out + b_rows.to(tl.int64)[:, None] * stride + o_units[None, :]
    tl.store(p_block, b_values.to(p_out.dtype.element_ty), mask=(b_rows >= 0)[:, None] & b_is_unit[None, :])
