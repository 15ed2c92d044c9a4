"""Where the row numbers of several tensors lie in one buffer of int32, and how the tensors' rows are split in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

TILE_BYTES = 4096
"""Bytes a program moves: two accesses of 16 bytes for each of its 128 threads."""
MOST_TILE_ROWS = 128

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What a number of so many bytes is moved as: rows are copied bit by bit, and fewer kernels are compiled."""

Ranges: TypeAlias = Sequence[tuple[int, ...]] | Tensor
"""For each tensor a count and positions in the buffer: known to the host, or in a tensor that the kernel reads."""


def ranges_on_host(ranges: Ranges) -> Sequence[tuple[int, ...]]:
    """The ranges as Python integers; waits for the device if they are there."""
    return [tuple(row) for row in ranges.tolist()] if isinstance(ranges, Tensor) else ranges


def check_ranges(ranges: Ranges, width: int, num_tensors: int, buffer: Tensor) -> None:
    """Checks types, shapes and devices of a buffer and the ranges in it; raises ValueError."""
    if buffer.dtype != torch.int32 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(f"the buffer must be contiguous int32 of one dimension, got {buffer.dtype} {buffer.shape}")
    if len(ranges) != num_tensors:
        raise ValueError(f"{num_tensors} tensors need {num_tensors} ranges, got {len(ranges)}")
    if isinstance(ranges, Tensor):
        is_right = ranges.dtype == torch.int32 and ranges.device == buffer.device
        if not is_right or ranges.shape != (num_tensors, width) or ranges.stride(1) != 1:
            raise ValueError(
                f"ranges in a tensor must be int32 [{num_tensors}, {width}] beside the buffer on {buffer.device}, "
                f"its rows contiguous, got {ranges.dtype} {tuple(ranges.shape)} on {ranges.device}"
            )
        return
    for count, *starts in ranges:
        if len(starts) != width - 1:
            raise ValueError(f"a range is a count and {width - 1} positions, got {len(starts)} positions")
        if count < 0 or max(starts) + count > len(buffer):
            raise ValueError(f"{count} rows from {starts} are outside of the buffer of {len(buffer)}")


def check_pairs(arenas: Sequence[Tensor], others: Sequence[Tensor], other_name: str, buffer: Tensor) -> None:
    """Checks that each arena and the tensor it exchanges rows with fit together; raises ValueError."""
    if not arenas or len(arenas) != len(others):
        raise ValueError(f"as many arenas as {other_name} are needed, got {len(arenas)} and {len(others)}")
    for arena, other in zip(arenas, others, strict=True):
        if arena.dtype != other.dtype or arena.shape[1:] != other.shape[1:]:
            raise ValueError(
                f"rows of {arena.dtype} {tuple(arena.shape[1:])} cannot be exchanged with {other_name} of "
                f"{other.dtype} {tuple(other.shape[1:])}"
            )
        if arena.element_size() not in BITS:
            raise ValueError(f"rows of {arena.dtype} cannot be moved: its numbers have {arena.element_size()} bytes")
        if not arena.is_contiguous() or not other.is_contiguous():
            raise ValueError(f"arenas and {other_name} must be contiguous")
        if arena.device != buffer.device or other.device != buffer.device:
            raise ValueError(f"arena, {other_name} and buffer are on {arena.device}, {other.device}, {buffer.device}")


def check_counts(ranges: Ranges, tensors: Sequence[Tensor], name: str) -> None:
    """Checks that each tensor has the rows its range counts, where the host knows them; raises ValueError."""
    if not isinstance(ranges, Tensor):
        for (count, *_), tensor in zip(ranges, tensors, strict=True):
            if count > len(tensor):
                raise ValueError(f"{count} rows do not fit in {name} of {len(tensor)}")


def shielded(values: Iterable[int]) -> tuple[int, ...]:
    """Integers that a launch never compiles a kernel for: each times 32, plus 2 (a kernel shifts them back).

    Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16, and cannot be told not to
    inside a tuple. Counts and positions change with every task.
    """
    return tuple(32 * value + 2 for value in values)


def tile_of(arena: Tensor) -> tuple[int, int, int]:
    """Of an arena: numbers in a row, rows in a tile, and columns in a tile (both powers of two)."""
    size = arena[:1].numel()
    numbers = TILE_BYTES // arena.element_size()
    columns = min(1 << max(0, size - 1).bit_length(), numbers)
    return size, min(numbers // columns, MOST_TILE_ROWS), columns


def num_tiles(num_rows: int, tile: tuple[int, int, int]) -> int:
    """How many tiles cover so many rows."""
    size, rows, columns = tile
    return -(-num_rows // rows) * -(-size // columns)
