"""Several LSTM steps in one launch, in Triton: two forms.

*Rows*: a program owns a block of rows and computes all of their units, step by step; it needs nobody else, so the
only barrier is its own. Weights come from the L2 cache at every step.

*Persistent* (Diamos et al. 2016): a program owns a slice of units and keeps its weights on chip over all steps. At
each step it needs every unit's h, so the programs of a group meet at a barrier in global memory; all of them must be
on the device at once (a cooperative launch, no more programs than processors). A program that waits in vain gives
up after a bounded number of looks and says so in the error flag; then it ends by a trap, so that the host has an error
of the device instead of outputs that are not there (in the interpreter, which has no traps, it just ends).

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
from cellrt.kernels.lstm_chain.plan import ChainPlan
from cellrt.kernels.lstm_chain.scratch import ChainScratch
from cellrt.kernels.lstm_step.triton import update

# Each look takes about a microsecond, a step a few: a wait that ends at all ends long before.
MAX_LOOKS = 1 << 20
COUNTS = ("num_rows", "num_steps")
ROWS = ("p_sizes", "p_gates_rows", "p_h_rows", "p_c_rows", "p_h_out_rows", "p_c_out_rows")


@triton.jit
def keep_start(
    p_h,
    p_h_rows,
    h_stride,
    p_c,
    p_c_rows,
    c_stride,
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
    p_block = row_pointers(p_h, p_h_rows, o_rows, b_is_row, h_stride)[:, None] + o_units[None, :]
    tl.store(p_h_kept + o_block, tl.load(p_block, mask=b_mask, other=0.0), mask=b_mask)
    p_block = row_pointers(p_c, p_c_rows, o_rows, b_is_row, c_stride)[:, None] + o_units[None, :]
    tl.store(p_c_kept + o_block, tl.load(p_block, mask=b_mask, other=0.0), mask=b_mask)


@triton.jit
def finish_step(
    b_sums,
    p_gates,
    p_gates_rows,
    gates_stride,
    p_h_out,
    p_h_out_rows,
    h_out_stride,
    p_c_out,
    p_c_out_rows,
    c_out_stride,
    p_h_next,
    p_c_kept,
    o_rows,
    o_positions,
    b_is_active,
    o_units,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """From the sums over h to h and c, kept for the next step and written to the arena rows of their positions."""
    b_is_unit = o_units < HIDDEN
    b_mask = b_is_active[:, None] & b_is_unit[None, :]
    p_row = row_pointers(p_gates, p_gates_rows, o_positions, b_is_active, gates_stride)
    b_i, b_f, b_g, b_o = split_four(b_sums, BLOCK_ROWS, BLOCK_UNITS)
    b_i += gate(p_row, o_units, b_mask, 0, HIDDEN)
    b_f += gate(p_row, o_units, b_mask, 1, HIDDEN)
    b_g += gate(p_row, o_units, b_mask, 2, HIDDEN)
    b_o += gate(p_row, o_units, b_mask, 3, HIDDEN)
    o_block = o_rows[:, None] * PADDED + o_units[None, :]
    b_c = tl.load(p_c_kept + o_block, mask=b_mask, other=0.0).to(tl.float32)
    b_h, b_c = update(b_i, b_f, b_g, b_o, b_c)
    tl.store(p_h_next + o_block, b_h.to(p_h_next.dtype.element_ty), mask=b_mask)
    tl.store(p_c_kept + o_block, b_c.to(p_c_kept.dtype.element_ty), mask=b_mask)
    store_rows(p_h_out, p_h_out_rows, o_positions, b_is_active, h_out_stride, o_units, b_is_unit, b_h)
    store_rows(p_c_out, p_c_out_rows, o_positions, b_is_active, c_out_stride, o_units, b_is_unit, b_c)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ROWS)
def lstm_chain_rows_kernel(
    p_sizes,
    p_gates,
    p_gates_rows,
    gates_stride,
    p_h,
    p_h_rows,
    h_stride,
    p_c,
    p_c_rows,
    c_stride,
    p_weight,
    p_bias,
    p_h_out,
    p_h_out_rows,
    h_out_stride,
    p_c_out,
    p_c_out_rows,
    c_out_stride,
    p_h_kept,
    p_c_kept,
    buffer_stride,
    num_rows,
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
    for unit in range(0, HIDDEN, BLOCK_UNITS):
        o_units = unit + tl.arange(0, BLOCK_UNITS)
        keep_start(
            p_h, p_h_rows, h_stride, p_c, p_c_rows, c_stride,
            p_h_kept, p_c_kept, o_rows, o_rows < num_rows, o_units, HIDDEN, PADDED,
        )  # fmt: skip
    tl.debug_barrier()  # everywhere here: a block's writes are seen by its own threads behind it
    position = 0
    for step in range(num_steps):
        size = tl.load(p_sizes + step).to(tl.int32)
        if first < size:
            p_h_last = p_h_kept + (step % 2) * buffer_stride
            p_h_next = p_h_kept + ((step + 1) % 2) * buffer_stride
            for unit in range(0, HIDDEN, BLOCK_UNITS):
                o_columns = 4 * unit + tl.arange(0, 4 * BLOCK_UNITS)
                b_sums = bias_block(p_bias, o_columns, BLOCK_ROWS)
                b_sums = multiply(
                    b_sums, p_h_last + o_rows * PADDED, p_weight, o_columns, HIDDEN, PADDED, BLOCK_DEPTH, PRECISION
                )
                finish_step(
                    b_sums, p_gates, p_gates_rows, gates_stride, p_h_out, p_h_out_rows, h_out_stride,
                    p_c_out, p_c_out_rows, c_out_stride, p_h_next, p_c_kept, o_rows, position + o_rows,
                    o_rows < size, unit + tl.arange(0, BLOCK_UNITS), HIDDEN, PADDED, BLOCK_ROWS, BLOCK_UNITS,
                )  # fmt: skip
            tl.debug_barrier()
        position += size


@triton.jit
def meet(p_arrivals, p_error, target, MAX_LOOKS: tl.constexpr, TRAPS: tl.constexpr):
    """Wait until ``target`` arrivals were counted; False, or a trap, if that did not come within MAX_LOOKS looks.

    The arrival releases what this program's threads wrote before it (they meet first), and the last look acquires
    what others wrote before theirs.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") + 1
    looks = 0
    while (arrived < target) & (looks < MAX_LOOKS):
        arrived = tl.load(p_arrivals, volatile=True)
        looks += 1
    arrived = tl.atomic_add(p_arrivals, 0, sem="acq_rel", scope="gpu")
    if arrived < target:
        tl.store(p_error, 1)
        if TRAPS:
            tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [arrived], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return arrived >= target


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ROWS)
def lstm_chain_persistent_kernel(
    p_sizes,
    p_gates,
    p_gates_rows,
    gates_stride,
    p_h,
    p_h_rows,
    h_stride,
    p_c,
    p_c_rows,
    c_stride,
    p_weight,
    p_bias,
    p_h_out,
    p_h_out_rows,
    h_out_stride,
    p_c_out,
    p_c_out_rows,
    c_out_stride,
    p_h_kept,
    p_c_kept,
    buffer_stride,
    p_arrivals,
    p_error,
    num_rows,
    num_steps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_LOOKS: tl.constexpr,
    TRAPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """A slice of units over all steps, for every so-manyth block of rows: one of ``num_programs(0)`` slices, one of
    ``num_programs(1)`` groups. See the package for what the arguments mean."""
    slices = tl.num_programs(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    p_arrivals += group
    o_units = tl.program_id(0) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    o_columns = tl.program_id(0) * 4 * BLOCK_UNITS + tl.arange(0, 4 * BLOCK_UNITS)
    o_depth = tl.arange(0, BLOCK_DEPTH)
    b_weights = ()
    for depth in tl.static_range(0, HIDDEN, BLOCK_DEPTH):
        p_block = p_weight + o_columns[None, :] * PADDED + depth + o_depth[:, None]
        b_weights = b_weights + (tl.load(p_block),)  # type: ignore[assignment]  # noqa: RUF005
    for first in range(group * BLOCK_ROWS, num_rows, groups * BLOCK_ROWS):
        o_rows = first + tl.arange(0, BLOCK_ROWS)
        keep_start(
            p_h, p_h_rows, h_stride, p_c, p_c_rows, c_stride,
            p_h_kept, p_c_kept, o_rows, o_rows < num_rows, o_units, HIDDEN, PADDED,
        )  # fmt: skip
    is_alive = meet(p_arrivals, p_error, slices, MAX_LOOKS, TRAPS)
    position = 0
    step = 0
    while (step < num_steps) & is_alive:
        size = tl.load(p_sizes + step).to(tl.int32)
        p_h_last = p_h_kept + (step % 2) * buffer_stride
        p_h_next = p_h_kept + ((step + 1) % 2) * buffer_stride
        for first in range(group * BLOCK_ROWS, size, groups * BLOCK_ROWS):
            o_rows = first + tl.arange(0, BLOCK_ROWS)
            b_sums = bias_block(p_bias, o_columns, BLOCK_ROWS)
            p_left = p_h_last + o_rows[:, None] * PADDED + o_depth[None, :]
            b_states = ()  # all on their way before the first is needed
            for depth in tl.static_range(0, HIDDEN, BLOCK_DEPTH):
                b_mask = (depth + o_depth < HIDDEN)[None, :]
                # Others wrote it: not from this processor's own cache, which does not see that.
                b_state = tl.load(p_left + depth, mask=b_mask, other=0.0, cache_modifier=".cg")
                b_states = b_states + (b_state,)  # type: ignore[assignment]  # noqa: RUF005
            for block in tl.static_range(len(b_states)):
                b_sums = tl.dot(b_states[block], b_weights[block], b_sums, input_precision=PRECISION)
            finish_step(
                b_sums, p_gates, p_gates_rows, gates_stride, p_h_out, p_h_out_rows, h_out_stride,
                p_c_out, p_c_out_rows, c_out_stride, p_h_next, p_c_kept, o_rows, position + o_rows,
                o_rows < size, o_units, HIDDEN, PADDED, BLOCK_ROWS, BLOCK_UNITS,
            )  # fmt: skip
        position += size
        step += 1
        is_alive = meet(p_arrivals, p_error, slices * (step + 1), MAX_LOOKS, TRAPS)


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
    max_looks: int = MAX_LOOKS,
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
        lstm_chain_rows_kernel[(triton.cdiv(num_rows, tile.rows),)](*arguments, num_rows, len(batch_sizes), **constants)
        return
    scratch.arrivals.zero_()
    grid = (triton.cdiv(weights.hidden_size, tile.units), plan.groups)
    lstm_chain_persistent_kernel[grid](
        *arguments,
        scratch.arrivals,
        scratch.error,
        num_rows,
        len(batch_sizes),
        **constants,
        MAX_LOOKS=max_looks,
        TRAPS=not is_interpreted(),
        launch_cooperative_grid=True,
    )
