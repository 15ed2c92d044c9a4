"""Gather in Triton: the grid is tiles x tensors, and each program copies one tile of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.row_ranges import BITS, Ranges, num_tiles, shielded, tile_of


@triton.jit(
    do_not_specialize=["range_stride"],
    do_not_specialize_on_alignment=["p_buffer", "p_ranges"],
)
def gather_rows_kernel(
    p_arenas,
    p_buffer,
    counts,
    starts,
    p_ranges,
    range_stride,
    p_outs,
    TILES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """``TILES`` are as ``tile_of`` gives them; the ranges are in ``p_ranges`` if there is a table."""
    for k in tl.static_range(len(TILES)):
        if tl.program_id(1) == k:
            SIZE: tl.constexpr = TILES[k][0]
            ROWS: tl.constexpr = TILES[k][1]
            COLUMNS: tl.constexpr = TILES[k][2]
            ACROSS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
            if HAS_TABLE:
                count = tl.load(p_ranges + k * range_stride)
                start = tl.load(p_ranges + k * range_stride + 1)
            else:
                count = counts[k] >> 5
                start = starts[k] >> 5
            o_rows = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
            o_columns = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
            b_index = tl.load(p_buffer + start + o_rows, mask=o_rows < count, other=-1).to(tl.int64)
            b_mask = (b_index >= 0)[:, None] & (o_columns < SIZE)[None, :]
            b_values = tl.load(p_arenas[k] + b_index[:, None] * SIZE + o_columns[None, :], mask=b_mask)
            tl.store(p_outs[k] + o_rows.to(tl.int64)[:, None] * SIZE + o_columns[None, :], b_values, mask=b_mask)


def gather_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, outs: Sequence[Tensor]) -> None:
    """Launches the kernel; arguments are as in the operation, and are not checked."""
    tiles = tuple(tile_of(arena) for arena in arenas)
    num_programs = max(num_tiles(len(out), tile) for out, tile in zip(outs, tiles, strict=True))
    if num_programs == 0:
        return
    table = ranges if isinstance(ranges, Tensor) else None
    listed = () if isinstance(ranges, Tensor) else ranges
    gather_rows_kernel[(num_programs, len(tiles))](
        tuple(arena.view(BITS[arena.element_size()]) for arena in arenas),
        buffer,
        shielded(count for count, _ in listed),
        shielded(start for _, start in listed),
        table,
        None if table is None else table.stride(0),
        tuple(out.view(BITS[out.element_size()]) for out in outs),
        TILES=tiles,
        HAS_TABLE=table is not None,
    )
