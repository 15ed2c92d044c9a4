"""Scatter in Triton: the grid is tiles x tensors, and each program copies one tile of one tensor."""

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
def scatter_rows_kernel(
    p_arenas,
    p_buffer,
    counts,
    positions_starts,
    rows_starts,
    p_ranges,
    range_stride,
    p_values,
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
                positions_at = tl.load(p_ranges + k * range_stride + 1)
                rows_at = tl.load(p_ranges + k * range_stride + 2)
            else:
                count = counts[k] >> 5
                positions_at = positions_starts[k] >> 5
                rows_at = rows_starts[k] >> 5
            o_items = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
            o_columns = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
            b_is_item = o_items < count
            b_rows = tl.load(p_buffer + rows_at + o_items, mask=b_is_item, other=-1).to(tl.int64)
            b_listed = tl.load(p_buffer + positions_at + o_items, mask=b_is_item & (positions_at >= 0), other=0)
            b_positions = tl.where(positions_at >= 0, b_listed, o_items).to(tl.int64)
            b_mask = (b_rows >= 0)[:, None] & (o_columns < SIZE)[None, :]
            b_values = tl.load(p_values[k] + b_positions[:, None] * SIZE + o_columns[None, :], mask=b_mask)
            tl.store(p_arenas[k] + b_rows[:, None] * SIZE + o_columns[None, :], b_values, mask=b_mask)


def scatter_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, values: Sequence[Tensor]) -> None:
    """Launches the kernel; arguments are as in the operation, and are not checked."""
    table = ranges if isinstance(ranges, Tensor) else None
    listed = () if isinstance(ranges, Tensor) else ranges
    tiles = tuple(tile_of(arena) for arena in arenas)
    # The table's counts are on the device: as many programs as there are values (an upper limit) are launched.
    counts = [count for count, _, _ in listed] if table is None else [len(value) for value in values]
    num_programs = max(num_tiles(count, tile) for count, tile in zip(counts, tiles, strict=True))
    if num_programs == 0:
        return
    scatter_rows_kernel[(num_programs, len(tiles))](
        tuple(arena.view(BITS[arena.element_size()]) for arena in arenas),
        buffer,
        shielded(count for count, _, _ in listed),
        shielded(positions for _, positions, _ in listed),
        shielded(rows for _, _, rows in listed),
        table,
        None if table is None else table.stride(0),
        tuple(value.view(BITS[value.element_size()]) for value in values),
        TILES=tiles,
        HAS_TABLE=table is not None,
    )
