"""Projection to a vocabulary: the logits of rows of an arena, in order, for what draws from them."""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.project_logits import reference
from cellrt.kernels.projection import Projection, check_weights

__all__ = ["Projection", "project_logits"]


def project_logits(h: ArenaRows, projection: Projection, logits: Tensor) -> None:
    """Write the logits of row k of ``h`` to ``logits[k]``, rounded to the weight's dtype.

    ``h`` names rows of an arena ``[capacity, hidden]`` (see ``project_argmax``); ``logits`` is contiguous ``[rows,
    vocabulary]`` of the weight's dtype, as many rows as ``h`` may have. Of rows of ``h`` with a negative index, and
    behind the last, nothing is written. Other indices must be inside the arena, which the kernel cannot check. The
    projection's stop token does not matter. Raise ValueError.
    """
    check_weights(h, projection)
    expected, weight = (h.most_rows, len(projection.weight)), projection.weight
    if logits.shape != expected or logits.dtype != weight.dtype or not logits.is_contiguous():
        raise ValueError(
            f"logits must be contiguous {weight.dtype} {expected}, got {logits.dtype} {tuple(logits.shape)}"
        )
    if uses_triton(weight):
        from cellrt.kernels.project_logits import triton

        triton.project_logits(h, projection, logits)
    else:
        reference.project_logits(h, projection, logits)
