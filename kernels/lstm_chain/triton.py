"""Several LSTM steps in one launch, in Triton: two forms.

*Rows*: a program owns a block of rows and computes all of their units, step by step; it needs nobody else, so the
only barrier is its own. Weights come from the L2 cache at every step.

*Persistent* (Diamos et al. 2016): a program owns a slice of units and keeps its weights on chip over all steps. At
each step it needs every unit's h, so the programs of a group meet at a barrier in global memory (``barrier.py``); all
of them must be on the device at once (a cooperative launch, no more programs than processors). As soon as its h is
written a program arrives there; what it writes for others than its group, and reads from others, is on its way while it
waits.

Both keep h in two buffers in turns, and c, in the arena's type: a chain gives what its steps give one at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.choose import is_interpreted
from cellrt.kernels.gate_tiles import bias_block, gate, multiply, row_pointers, split_four, store_rows
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.lstm_chain.barrier import MAX_WAIT_S, arrive, wait_for
from cellrt.kernels.lstm_chain.plan import ChainPlan
from cellrt.kernels.lstm_chain.scratch import ChainScratch
from cellrt.kernels.lstm_step.triton import update

COUNTS = ("limit_ns", "num_steps")
ROWS = ("p_sizes", "p_gates_rows", "p_h_rows", "p_c_rows", "p_h_out_rows", "p_c_out_rows")


@triton.jit
def keep_start(
    p_h,
    p_h_rows,
    H_STRIDE: tl.constexpr,
    p_c,
    p_c_rows,
    C_STRIDE: tl.constexpr,
    p_h_kept,
    p_c_kept,
    o_rows,
    b_is_row,
    o_units,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Copy the given units of the rows' first h and c to where the steps read them."""
    b_mask = b_is_row[:, None] & (o_units < HIDDEN)[None, :]
    o_block = o_rows[:, None] * PADDED + o_units[None, :]
    p_block = row_pointers(p_h, p_h_rows, o_rows, b_is_row, H_STRIDE)[:, None] + o_units[None, :]
    tl.store(p_h_kept + o_block, tl.load(p_block, mask=b_mask, other=0.0), mask=b_mask)
    p_block = row_pointers(p_c, p_c_rows, o_rows, b_is_row, C_STRIDE)[:, None] + o_units[None, :]
    tl.store(p_c_kept + o_block, tl.load(p_block, mask=b_mask, other=0.0), mask=b_mask)


@triton.jit
def load_inputs(
    p_gates,
    p_gates_rows,
    GATES_STRIDE: tl.constexpr,
    p_c_kept,
    o_rows,
    o_positions,
    b_is_active,
    o_units,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return the inputs of a step for its rows' units beside h: four gates, and c."""
    b_mask = b_is_active[:, None] & (o_units < HIDDEN)[None, :]
    p_row = row_pointers(p_gates, p_gates_rows, o_positions, b_is_active, GATES_STRIDE)
    b_c = tl.load(p_c_kept + o_rows[:, None] * PADDED + o_units[None, :], mask=b_mask, other=0.0).to(tl.float32)
    return (
        gate(p_row, o_units, b_mask, 0, HIDDEN),
        gate(p_row, o_units, b_mask, 1, HIDDEN),
        gate(p_row, o_units, b_mask, 2, HIDDEN),
        gate(p_row, o_units, b_mask, 3, HIDDEN),
        b_c,
    )


@triton.jit
def add_up(b_sums, b_i, b_f, b_g, b_o, b_c, BLOCK_ROWS: tl.constexpr, BLOCK_UNITS: tl.constexpr):
    """Return the new h and c from the sums over h, the gates and the old c."""
    s_i, s_f, s_g, s_o = split_four(b_sums, BLOCK_ROWS, BLOCK_UNITS)
    return update(s_i + b_i, s_f + b_f, s_g + b_g, s_o + b_o, b_c)


@triton.jit
def keep(p_kept, o_rows, o_units, b_is_active, b_values, HIDDEN: tl.constexpr, PADDED: tl.constexpr):
    """Write units of rows to where the next step reads them."""
    b_mask = b_is_active[:, None] & (o_units < HIDDEN)[None, :]
    p_block = p_kept + o_rows[:, None] * PADDED + o_units[None, :]
    tl.store(p_block, b_values.to(p_kept.dtype.element_ty), mask=b_mask)


@triton.jit(do_not_specialize=COUNTS[1:], do_not_specialize_on_alignment=ROWS)
def lstm_chain_rows_kernel(
    p_sizes,
    p_gates,
    p_gates_rows,
    GATES_STRIDE: tl.constexpr,
    p_h,
    p_h_rows,
    H_STRIDE: tl.constexpr,
    p_c,
    p_c_rows,
    C_STRIDE: tl.constexpr,
    p_weight,
    p_bias,
    p_h_out,
    p_h_out_rows,
    H_OUT_STRIDE: tl.constexpr,
    p_c_out,
    p_c_out_rows,
    C_OUT_STRIDE: tl.constexpr,
    p_h_kept,
    p_c_kept,
    buffer_stride,
    num_steps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """All units of a block of rows over all steps: see the package for what the arguments mean."""
    first = tl.program_id(0) * BLOCK_ROWS
    o_rows = first + tl.arange(0, BLOCK_ROWS)
    size = tl.load(p_sizes).to(tl.int32)
    if first >= size:
        return
    for unit in range(0, HIDDEN, BLOCK_UNITS):
        o_units = unit + tl.arange(0, BLOCK_UNITS)
        keep_start(
            p_h, p_h_rows, H_STRIDE, p_c, p_c_rows, C_STRIDE,
            p_h_kept, p_c_kept, o_rows, o_rows < size, o_units, HIDDEN, PADDED,
        )  # fmt: skip
    tl.debug_barrier()  # everywhere here: a block's writes are seen by its own threads behind it
    position = 0
    step = 0
    while (step < num_steps) & (first < size):
        p_h_last = p_h_kept + (step % 2) * buffer_stride
        p_h_next = p_h_kept + ((step + 1) % 2) * buffer_stride
        for unit in range(0, HIDDEN, BLOCK_UNITS):
            o_columns = 4 * unit + tl.arange(0, 4 * BLOCK_UNITS)
            b_sums = bias_block(p_bias, o_columns, BLOCK_ROWS)
            b_sums = multiply(
                b_sums, p_h_last + o_rows * PADDED, p_weight, o_columns, HIDDEN, PADDED, BLOCK_DEPTH, PRECISION
            )
            o_units = unit + tl.arange(0, BLOCK_UNITS)
            o_positions, b_is_active, b_is_unit = position + o_rows, o_rows < size, o_units < HIDDEN
            b_i, b_f, b_g, b_o, b_c = load_inputs(
                p_gates, p_gates_rows, GATES_STRIDE, p_c_kept, o_rows, o_positions, b_is_active, o_units,
                HIDDEN, PADDED,
            )  # fmt: skip
            b_h, b_c = add_up(b_sums, b_i, b_f, b_g, b_o, b_c, BLOCK_ROWS, BLOCK_UNITS)
            keep(p_h_next, o_rows, o_units, b_is_active, b_h, HIDDEN, PADDED)
            keep(p_c_kept, o_rows, o_units, b_is_active, b_c, HIDDEN, PADDED)
            store_rows(p_h_out, p_h_out_rows, o_positions, b_is_active, H_OUT_STRIDE, o_units, b_is_unit, b_h)
            store_rows(p_c_out, p_c_out_rows, o_positions, b_is_active, C_OUT_STRIDE, o_units, b_is_unit, b_c)
        tl.debug_barrier()
        position += size
        step += 1
        size = tl.load(p_sizes + step, mask=step < num_steps, other=0).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ROWS)
def lstm_chain_persistent_kernel(
    p_sizes,
    p_gates,
    p_gates_rows,
    GATES_STRIDE: tl.constexpr,
    p_h,
    p_h_rows,
    H_STRIDE: tl.constexpr,
    p_c,
    p_c_rows,
    C_STRIDE: tl.constexpr,
    p_weight,
    p_bias,
    p_h_out,
    p_h_out_rows,
    H_OUT_STRIDE: tl.constexpr,
    p_c_out,
    p_c_out_rows,
    C_OUT_STRIDE: tl.constexpr,
    p_h_kept,
    p_c_kept,
    buffer_stride,
    p_arrivals,
    p_error,
    limit_ns,
    num_steps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Compute a slice of units over all steps, for the blocks of rows of one group.

    There are ``num_programs(0)`` slices and ``num_programs(1)`` groups. The package explains the arguments.
    """
    slices = tl.num_programs(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    size = tl.load(p_sizes).to(tl.int32)
    if group * BLOCK_ROWS >= size:
        return
    p_arrivals += group
    o_units = tl.program_id(0) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    o_columns = tl.program_id(0) * 4 * BLOCK_UNITS + tl.arange(0, 4 * BLOCK_UNITS)
    o_depth = tl.arange(0, BLOCK_DEPTH)
    b_weights = ()
    for depth in tl.static_range(0, HIDDEN, BLOCK_DEPTH):
        p_block = p_weight + o_columns[None, :] * PADDED + depth + o_depth[:, None]
        b_weights = b_weights + (tl.load(p_block),)  # type: ignore[assignment]  # noqa: RUF005
    for first in range(group * BLOCK_ROWS, size, groups * BLOCK_ROWS):
        o_rows = first + tl.arange(0, BLOCK_ROWS)
        keep_start(
            p_h, p_h_rows, H_STRIDE, p_c, p_c_rows, C_STRIDE,
            p_h_kept, p_c_kept, o_rows, o_rows < size, o_units, HIDDEN, PADDED,
        )  # fmt: skip
    arrive(p_arrivals, IS_INTERPRETED)
    o_first = group * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_is_unit = o_units < HIDDEN
    n_i, n_f, n_g, n_o, n_c = load_inputs(
        p_gates, p_gates_rows, GATES_STRIDE, p_c_kept, o_first, o_first, o_first < size, o_units, HIDDEN, PADDED
    )
    is_alive = wait_for(p_arrivals, p_error, slices, limit_ns, IS_INTERPRETED)
    position = 0
    step = 0
    while (step < num_steps) & (group * BLOCK_ROWS < size) & is_alive:  # no other group waits for this one
        p_h_last = p_h_kept + (step % 2) * buffer_stride
        p_h_next = p_h_kept + ((step + 1) % 2) * buffer_stride
        for first in range(group * BLOCK_ROWS, size, groups * BLOCK_ROWS):
            o_rows = first + tl.arange(0, BLOCK_ROWS)
            o_positions, b_is_active = position + o_rows, o_rows < size
            b_sums = bias_block(p_bias, o_columns, BLOCK_ROWS)
            p_left = p_h_last + o_rows[:, None] * PADDED + o_depth[None, :]
            b_states = ()  # all on their way before the first is needed
            for depth in tl.static_range(0, HIDDEN, BLOCK_DEPTH):
                b_mask = (depth + o_depth < HIDDEN)[None, :]
                # Others wrote it: not from this processor's own cache, which does not see that.
                b_state = tl.load(p_left + depth, mask=b_mask, other=0.0, cache_modifier=".cg")
                b_states = b_states + (b_state,)  # type: ignore[assignment]  # noqa: RUF005
            if first > group * BLOCK_ROWS:
                n_i, n_f, n_g, n_o, n_c = load_inputs(
                    p_gates, p_gates_rows, GATES_STRIDE, p_c_kept, o_rows, o_positions, b_is_active, o_units,
                    HIDDEN, PADDED,
                )  # fmt: skip
            for block in tl.static_range(len(b_states)):
                b_sums = tl.dot(b_states[block], b_weights[block], b_sums, input_precision=PRECISION)
            b_h, b_c = add_up(b_sums, n_i, n_f, n_g, n_o, n_c, BLOCK_ROWS, BLOCK_UNITS)
            keep(p_h_next, o_rows, o_units, b_is_active, b_h, HIDDEN, PADDED)
            if first + groups * BLOCK_ROWS >= size:
                arrive(p_arrivals, IS_INTERPRETED)
            keep(p_c_kept, o_rows, o_units, b_is_active, b_c, HIDDEN, PADDED)
            store_rows(p_h_out, p_h_out_rows, o_positions, b_is_active, H_OUT_STRIDE, o_units, b_is_unit, b_h)
            store_rows(p_c_out, p_c_out_rows, o_positions, b_is_active, C_OUT_STRIDE, o_units, b_is_unit, b_c)
        position += size
        step += 1
        # What the next step needs and no other program wrote: on its way while the others arrive. Of c, another thread
        # of this one may have written it.
        tl.debug_barrier()
        size = tl.load(p_sizes + step, mask=step < num_steps, other=0).to(tl.int32)
        n_i, n_f, n_g, n_o, n_c = load_inputs(
            p_gates, p_gates_rows, GATES_STRIDE, p_c_kept, o_first, position + o_first, o_first < size, o_units,
            HIDDEN, PADDED,
        )  # fmt: skip
        is_alive = wait_for(p_arrivals, p_error, slices * (step + 1), limit_ns, IS_INTERPRETED)


def lstm_chain(
    weights: PackedWeights,
    batch_sizes: Tensor,
    *,
    gates: ArenaRows,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    scratch: ChainScratch,
    precision: Precision,
    plan: ChainPlan,
) -> None:
    """Launch the kernel of ``plan``; arguments are as in the operation, and are not checked."""
    num_rows, tile = len(h.rows), plan.tile
    arguments = [batch_sizes, *gates.arguments(), *h.arguments(), *c.arguments(), weights.weight_hh, weights.bias]
    arguments += [*h_out.arguments(), *c_out.arguments(), scratch.h, scratch.c, scratch.h.stride(0)]
    constants = {
        "HIDDEN": weights.hidden_size,
        "PADDED": weights.weight_hh.shape[1],
        "PRECISION": precision if weights.weight_hh.dtype == torch.float32 else "ieee",
        "BLOCK_ROWS": tile.rows,
        "BLOCK_UNITS": tile.units,
        "BLOCK_DEPTH": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    # Left alone the assembler spills a few bytes here to use fewer registers, of which there are enough; but in
    # tf32x3, with the limit, the compiler splits all weights in registers before the first step.
    if constants["PRECISION"] != "tf32x3":
        constants["maxnreg"] = 255
    if plan.groups == 0:
        lstm_chain_rows_kernel[(triton.cdiv(num_rows, tile.rows),)](*arguments, len(batch_sizes), **constants)
        return
    scratch.arrivals.zero_()
    grid = (triton.cdiv(weights.hidden_size, tile.units), plan.groups)
    lstm_chain_persistent_kernel[grid](
        *arguments,
        scratch.arrivals,
        scratch.error,
        int(MAX_WAIT_S * 1e9),
        len(batch_sizes),
        **constants,
        IS_INTERPRETED=is_interpreted(),
        launch_cooperative_grid=True,
    )
