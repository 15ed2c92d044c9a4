"""Projection to a vocabulary and argmax in one: the next token of a greedy decoder (BatchMaker section 2.7.4).

The logits are never written: a program computes those of a tile of rows and tokens and keeps each row's best token; a
second, small kernel takes the best of each row's parts. For 512 rows and 50,000 tokens that saves writing and reading
0.1 GB.
"""

from __future__ import annotations

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.project_argmax import reference
from cellrt.kernels.projection import Projection, check_projection

__all__ = ["Projection", "project_argmax"]


def project_argmax(h: ArenaRows, projection: Projection, token: ArenaRows, stop: ArenaRows) -> None:
    """Write the most likely token of each row to ``token``, and whether it is the stop token to ``stop``.

    ``h`` names rows of an arena ``[capacity, hidden]`` of the weight's dtype (float32, bfloat16 or float16); its rows
    may be a part of a task's buffer of int32. ``token`` names numbers of an arena of int32 or int64 ``[capacity]``,
    ``stop`` of bool; all have the same span, or none. Negative rows of ``token`` and ``stop`` are not written.

    The lowest of equally likely tokens is taken; a NaN counts as most likely. Products of float32 are as
    ``projection.precision`` says, sums float32. Logits that differ by less than their rounding may change places
    between kernel and reference, and between batches so different in size that their tiles differ.

    Of rows of ``h`` with a negative index nothing is written. Other indices must be inside the arena, which the kernel
    cannot check. Raise ValueError.
    """
    check_projection(h, projection, token, stop)
    if uses_triton(projection.weight):
        from cellrt.kernels.project_argmax import triton

        triton.project_argmax(h, projection, token, stop)
    else:
        reference.project_argmax(h, projection, token, stop)
