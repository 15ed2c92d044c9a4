"""Rows of a table in Triton: a thread has a number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "end"], do_not_specialize_on_alignment=["p_rows", "p_span"])
def table_rows_kernel(p_numbers, p_rows, p_span, p_out, num_rows, end, BLOCK: tl.constexpr):
    """Compute the operation; ``table_rows`` in the package explains the arguments."""
    first, count = span_of(p_span, num_rows)
    o_rows = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_is_row = o_rows < first + count
    b_at = tl.load(p_rows + o_rows, mask=b_is_row, other=0)
    b_numbers = tl.load(p_numbers + b_at, mask=b_is_row, other=0)
    tl.store(p_out + o_rows, tl.where((b_numbers < 0) | (b_numbers > end), end, b_numbers), mask=b_is_row)


def table_rows(numbers: ArenaRows, end: int) -> Tensor:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    made = torch.empty(len(numbers.rows), dtype=torch.int64, device=numbers.values.device)
    if numbers.most_rows:
        grid = (triton.cdiv(numbers.most_rows, BLOCK),)
        arguments = numbers.values, numbers.rows, numbers.span, made, numbers.most_rows, end
        table_rows_kernel[grid](*arguments, BLOCK=BLOCK, num_warps=BLOCK // 32)
    return made
