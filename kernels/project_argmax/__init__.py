"""Projection to a vocabulary and argmax in one: the next token of a greedy decoder (BatchMaker section 2.7.4).

The logits are never written: a program computes those of a tile of rows and tokens and keeps each row's best token; a
second, small kernel takes the best of each row's parts. For 512 rows and 50,000 tokens that saves writing and reading
0.1 GB.
"""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.project_argmax import reference
from cellrt.kernels.projection import Projection, check_projection

__all__ = ["Projection", "project_argmax"]


def project_argmax(h: ArenaRows, projection: Projection, tokens: Tensor, stops: Tensor) -> None:
    """Writes the most likely token of each row to ``tokens``, and whether it is the stop token to ``stops``.

    ``h`` names rows of an arena ``[capacity, hidden]`` of the weight's dtype (float32, bfloat16 or float16); its rows
    may be a part of a task's buffer of int32. ``tokens`` is int32 or int64 ``[rows]``, ``stops`` bool ``[rows]``.

    The lowest of equally likely tokens is taken; a NaN counts as most likely. Products of float32 are as
    ``projection.precision`` says, sums float32. Logits that differ by less than their rounding may change places
    between kernel and reference, and between batches so different in size that their tiles differ.

    Rows of a negative index, and those behind the span of ``h``, are left as they are in ``tokens`` and ``stops``. Other indices must be inside the arena,
    which the kernel cannot check. Raises ValueError.
    """
    check_projection(h, projection, tokens, stops)
    if uses_triton(projection.weight):
        from cellrt.kernels.project_argmax import triton

        triton.project_argmax(h, projection, tokens, stops)
    else:
        rows = on_host(h, h)
        reference.project_argmax(rows, projection, tokens[: len(rows.rows)], stops[: len(rows.rows)])
