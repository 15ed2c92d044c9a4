"""The rows of a loop's steps in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cellrt.kernels.loop_rows import LoopRows, LoopTask


def go_on(task: LoopTask, found: LoopRows, step: int, flags: Tensor, stops: Tensor) -> None:
    """Compute the operation in plain torch; arguments are not checked, and no number is copied to the host."""
    words, count, inputs = task.words, task.num_rows, task.num_inputs
    numbers = torch.arange(count, device=words.device)
    plan = words[task.plan_at :]
    outputs = plan[3 * inputs :][: 5 * task.num_outputs].view(-1, 5)
    active, lengths = found.is_active[step % 2] != 0, words[task.lengths_at :][:count]

    def lie(output: Tensor, at: int) -> Tensor:
        return output[0] + numbers * output[1] + at % output[3] * output[2]

    if step < 0:
        goes_on = lengths > 0
        if task.flags_at >= 0:
            goes_on &= ~flags[words[task.flags_at :][:count]]
        found.done.zero_()
    else:
        has_stopped = torch.zeros_like(active)
        if task.stop >= 0:
            has_stopped = active & stops.reshape(-1)[lie(outputs[task.stop], step)]
        done = torch.where(has_stopped, -step - 1, step + 1).to(torch.int32)
        found.done.copy_(torch.where(active, done, found.done))
        goes_on = active & ~has_stopped & (lengths > step + 1)
    found.is_active[(step + 1) % 2] = goes_on.to(torch.int32)
    for k in range(inputs):
        source, rows_at, first = plan[3 * k], plan[3 * k + 1], plan[3 * k + 2]
        if step < 0:
            given = words.index_select(0, (rows_at + numbers).clamp(min=0, max=len(words) - 1))
            found.rows[k] = torch.where(rows_at >= 0, given, first + numbers)
        else:
            output = outputs.index_select(0, source.reshape(1))[0]
            found.rows[k] = torch.where(goes_on, lie(output, step), found.rows[k])
    for k in range(task.num_outputs):
        written, left = found.rows[inputs + k], found.rows[inputs + task.num_outputs + k]
        written.copy_(torch.where(goes_on, lie(outputs[k], step + 1), -1))
        if step >= 0:
            left.copy_(torch.where(active, lie(outputs[k], step), left))
        elif inputs:
            carried = outputs[k, 4]
            given = found.rows[:inputs].index_select(0, carried.clamp(min=0).reshape(1))[0]
            left.copy_(torch.where(carried >= 0, given, lie(outputs[k], 0)))
        else:
            left.copy_(lie(outputs[k], 0))
