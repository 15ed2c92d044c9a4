"""Scatter: copies rows of several tensors that a cell returned to rows of arenas, named by index, in one launch.

Not every row that a cell returns is kept (of a run, only the last steps), so what goes where is said by positions in
the tensor and rows of the arena, both in the task's buffer of int32. A task's output records are a table of such
ranges; the kernel can read them from the device itself, so that it may be part of a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cellrt.kernels.choose import uses_triton
from cellrt.kernels.row_ranges import Ranges, check_counts, check_pairs, check_ranges
from cellrt.kernels.scatter_rows import reference


def scatter_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, values: Sequence[Tensor]) -> None:
    """Copies ``values[k][buffer[positions + i]]`` to ``arenas[k][buffer[rows + i]]``, ``i < count``, for each ``k``.

    ``arenas[k]`` is ``[capacity, *row]`` and ``values[k]`` ``[n, *row]``, both contiguous and of the same dtype (of
    1, 2, 4 or 8 bytes). ``buffer`` is int32 ``[n]``; ``ranges[k]`` is ``(count, positions, rows)``; with positions of
    -1 the values are taken in order. As a list, ranges are checked here; as an int32 tensor ``[tensors, 3]`` on the
    device (its first stride is free) they are read there and must be right. No count may be above
    ``len(values[k])``.

    A negative row is skipped. No row may be named twice; rows and positions must be inside their tensors, which the
    kernel cannot check. Rows that are not named stay as they are. Raises ValueError.
    """
    check_pairs(arenas, values, "values", buffer)
    check_ranges(ranges, 3, len(arenas), buffer)
    check_counts(ranges, values, "values")
    if uses_triton(buffer):
        from cellrt.kernels.scatter_rows import triton

        triton.scatter_rows(arenas, buffer, ranges, values)
    else:
        reference.scatter_rows(arenas, buffer, ranges, values)
