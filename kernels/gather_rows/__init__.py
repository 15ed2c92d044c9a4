"""Gather: copies rows of several arenas, named by index, to where a cell reads them, in one launch.

A task has one input port or several, each with an arena of its own (h, c, a token, of different row widths and
types) and a list of row numbers in the task's buffer of int32. One launch serves them all: at these sizes (2 MB at
most for 512 rows of 1024 floats) a launch costs as much as the copy.

The positions of the lists differ from task to task. The kernel can read them from the device itself, so that it may be
part of a captured CUDA graph: a task's input records are such a table, see ``ranges``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gather_rows import reference
from cellrt.kernels.row_ranges import Ranges, check_counts, check_pairs, check_ranges


def gather_rows(arenas: Sequence[Tensor], buffer: Tensor, ranges: Ranges, outs: Sequence[Tensor]) -> None:
    """Copies ``arenas[k][buffer[start + i]]`` to ``outs[k][i]`` for each ``i < count`` of each ``k``.

    ``arenas[k]`` is ``[capacity, *row]`` and ``outs[k]`` ``[at least count, *row]``, both contiguous and of the same
    dtype (of 1, 2, 4 or 8 bytes). ``buffer`` is int32 ``[n]``; ``ranges[k]`` is ``(count, start)``. As a list,
    ranges are checked here; as an int32 tensor ``[tensors, 2]`` on the device (its first stride is free) they are
    read there and must be right, and the launch is as large as ``outs``.

    Rows of ``outs`` whose index is negative, and those from ``count`` on, are left as they are. Other
    indices must be inside the arena, which the kernel cannot check. Nothing is allocated. Raises ValueError.
    """
    check_pairs(arenas, outs, "outs", buffer)
    check_ranges(ranges, 2, len(arenas), buffer)
    check_counts(ranges, outs, "outs")
    if uses_triton(buffer):
        from cellrt.kernels.gather_rows import triton

        triton.gather_rows(arenas, buffer, ranges, outs)
    else:
        reference.gather_rows(arenas, buffer, ranges, outs)
