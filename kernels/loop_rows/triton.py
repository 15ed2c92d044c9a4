"""The rows of a loop's steps in Triton: a thread has a row. What a launch reads of an array, it does not write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from cellrt.kernels.loop_rows import LoopRows, LoopTask

BLOCK = 128
NUMBERS = ["step", "num_rows", "num_inputs", "num_outputs", "plan_at", "lengths_at", "flags_at", "stop"]
POINTERS = ["p_words", "p_rows", "p_done", "p_active", "p_flags", "p_stops"]


@triton.jit
def lie(p_output, o_rows, step):
    """Return where an output's rows lie at a step."""
    period = tl.load(p_output + 3)
    return tl.load(p_output) + o_rows * tl.load(p_output + 1) + (step % period) * tl.load(p_output + 2)


@triton.jit
def given_rows(p_words, p_input, o_rows, b_is_row):
    """Return where an input's rows lie before the first step."""
    rows_at, first = tl.load(p_input + 1), tl.load(p_input + 2)
    b_given = tl.load(p_words + rows_at + o_rows, mask=b_is_row & (rows_at >= 0), other=0)
    return tl.where(rows_at >= 0, b_given, first + o_rows)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def go_on_kernel(
    p_words,
    p_rows,
    p_done,
    p_active,
    p_flags,
    p_stops,
    step,
    num_rows,
    num_inputs,
    num_outputs,
    plan_at,
    lengths_at,
    flags_at,
    stop,
    BLOCK: tl.constexpr,
):
    """Compute the operation; ``go_on`` in the package explains the arguments."""
    o_rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    b_is_row = o_rows < num_rows
    p_plan = p_words + plan_at
    p_outputs = p_plan + 3 * num_inputs
    p_written = p_rows + num_inputs * num_rows
    p_left = p_written + num_outputs * num_rows
    is_first = step < 0
    b_lengths = tl.load(p_words + lengths_at + o_rows, mask=b_is_row, other=0)
    b_has_run = b_is_row & (tl.load(p_active + (step + 2) % 2 * num_rows + o_rows, mask=b_is_row, other=0) != 0)
    b_has_run = b_has_run & (step >= 0)
    b_flags = tl.load(p_words + flags_at + o_rows, mask=b_is_row & is_first & (flags_at >= 0), other=0)
    b_is_over = tl.load(p_flags + b_flags, mask=b_is_row & is_first & (flags_at >= 0), other=0) != 0
    b_at = o_rows * 0
    if stop >= 0:
        b_at = lie(p_outputs + 5 * stop, o_rows, tl.maximum(step, 0))
    b_has_stopped = tl.load(p_stops + b_at, mask=b_has_run & (stop >= 0), other=0) != 0
    b_goes_on = tl.where(is_first, b_is_row & ~b_is_over, b_has_run & ~b_has_stopped) & (b_lengths > step + 1)
    b_done = tl.where(is_first, 0, tl.where(b_has_stopped, -step - 1, step + 1))
    tl.store(p_done + o_rows, b_done, mask=b_is_row & (is_first | b_has_run))
    tl.store(p_active + (step + 1) % 2 * num_rows + o_rows, b_goes_on.to(tl.int32), mask=b_is_row)
    for k in range(num_inputs):
        p_input = p_plan + 3 * k
        if is_first:
            b_given = given_rows(p_words, p_input, o_rows, b_is_row)
            tl.store(p_rows + k * num_rows + o_rows, b_given, mask=b_is_row)
        else:
            b_made = lie(p_outputs + 5 * tl.load(p_input), o_rows, step)
            tl.store(p_rows + k * num_rows + o_rows, b_made, mask=b_goes_on)
    for k in range(num_outputs):
        p_output = p_outputs + 5 * k
        b_next = tl.where(b_goes_on, lie(p_output, o_rows, step + 1), -1)
        tl.store(p_written + k * num_rows + o_rows, b_next, mask=b_is_row)
        b_left = lie(p_output, o_rows, tl.maximum(step, 0))
        carried = tl.load(p_output + 4)
        if is_first & (carried >= 0):
            b_left = given_rows(p_words, p_plan + 3 * carried, o_rows, b_is_row)
        tl.store(p_left + k * num_rows + o_rows, b_left, mask=b_is_row & (is_first | b_has_run))


def go_on(task: LoopTask, found: LoopRows, step: int, flags: Tensor, stops: Tensor) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    go_on_kernel[(triton.cdiv(task.num_rows, BLOCK),)](
        task.words,
        found.rows,
        found.done,
        found.is_active,
        flags.view(torch.uint8),
        stops.view(torch.uint8),
        step,
        *task[1:],
        BLOCK=BLOCK,
        num_warps=BLOCK // 32,
    )
