"""Two rows into one: tanh of their products with a weight each, such as a decoder's state and what it read.

    out = tanh(W_a a + W_b b + bias)        Luong et al. (2015), equation 5

``a`` are rows in order, ``b`` rows of an arena.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.combine_rows import reference
from cellrt.kernels.gate_weights import Precision
from cellrt.kernels.projection import Projection, check_weights

__all__ = ["Combination", "combine_rows"]


class Combination(NamedTuple):
    """``weight_a`` is ``[size, a]``, ``weight_b`` ``[size, b]``, ``bias`` ``[size]`` or None; contiguous, of one dtype,
    float32, bfloat16 or float16. ``precision`` is how float32 is multiplied; sums are float32."""

    weight_a: Tensor
    weight_b: Tensor
    bias: Tensor | None = None
    precision: Precision = "tf32"


def combine_rows(
    a: Tensor, b: ArenaRows, combination: Combination, out: ArenaRows, in_order: Tensor | None = None
) -> None:
    """Write row k, of row k of ``a`` ``[rows, a]`` and row k of ``b``, to that of ``out``, and to ``in_order[k]``.

    ``out`` has the span of ``b``, which must begin at 0, or none has one; its negative rows are not written. Nothing is
    written for rows of ``b`` with a negative index. Other indices must be inside their arenas, which the kernel cannot
    check. Raise ValueError.
    """
    weight_a, weight_b, bias, precision = combination
    check_weights(b, Projection(weight_b, bias, None, precision))
    size = len(weight_b)
    for name, tensor, shape in (
        ("weight_a", weight_a, (size, a.shape[-1])),
        ("a", a, (b.most_rows, a.shape[-1])),
        *([] if in_order is None else [("in_order", in_order, (b.most_rows, size))]),
    ):
        if tensor.shape != shape or tensor.dtype != weight_b.dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {weight_b.dtype} {shape}, got {tensor.dtype} {tensor.shape}")
    check_rows("out", out, b, size, weight_b)
    if uses_triton(weight_b):
        from cellrt.kernels.combine_rows import triton

        triton.combine_rows(a, b, combination, out, in_order)
    else:
        reference.combine_rows(a, b, combination, out, in_order)
