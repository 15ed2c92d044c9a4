"""Finds on the device which rows of arenas a loop's rows read and write at each step; only the device knows the stops.

A loop's task takes several steps of many rows, by a kernel that reads and writes rows of arenas (``ArenaRows``). A row
that has stopped must read the same rows as at its last step, and write none. So between two steps one launch reads the
stop flags, counts the steps, and writes the row numbers of the next step.

Where an output of a row lies at a step is a rule: ``first + row * by_row + (step % period) * by_step``. Carried state
takes turns in two sets of rows (``period`` 2); an output wanted of every step has a row for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cellrt.kernels.choose import uses_triton
from cellrt.kernels.loop_rows import reference

INPUT, OUTPUT = 3, 5
"""Numbers of an input and of an output in the words: see ``LoopTask``."""
NONE = -1


class LoopTask(NamedTuple):
    """The places of a task's numbers in its words, int64 on the device; ``words`` may begin anywhere.

    Attributes:
        words: the task's words.
        num_rows: the number of the task's rows, with those that never run.
        num_inputs, num_outputs: that are carried; whose rows are to be found.
        plan_at: first word of three for each input: the output that it is carried from; the first word of its rows
            before the first step, or NONE; then they are this number and those behind it. Behind these five for each
            output: ``first``, ``by_row``, ``by_step``, ``period``, and the input that is carried from it, or NONE.
        lengths_at: first word of how many steps each row takes at most; 0: none.
        flags_at: first word of the numbers of the rows' flags, or NONE: a row does not run whose flag is set.
        stop: the output that says stop, or NONE.
    """

    words: Tensor
    num_rows: int
    num_inputs: int
    num_outputs: int
    plan_at: int
    lengths_at: int
    flags_at: int
    stop: int


class LoopRows(NamedTuple):
    """The state of a task's rows; made by ``begin``, and updated by ``go_on``.

    Attributes:
        rows: int64 ``[inputs + 2 * outputs, num_rows]``: of each input the rows that the next step reads, of each
            output those that it writes, negative if none; then of each output where the last step left it. Of a row
            that did not run that is where the input lies that is carried from it.
        done: int32 ``[num_rows]``: steps that each row took, negative if it stopped.
        is_active: int32 ``[2, num_rows]``: whether a row takes the next step, in turns.
    """

    rows: Tensor
    done: Tensor
    is_active: Tensor


def begin(task: LoopTask, flags: Tensor, stops: Tensor) -> LoopRows:
    """Return the rows of the first step. ``flags`` and ``stops`` are as in ``go_on``; the latter are not read."""
    device = task.words.device
    found = LoopRows(
        torch.empty(task.num_inputs + 2 * task.num_outputs, task.num_rows, dtype=torch.int64, device=device),
        torch.empty(task.num_rows, dtype=torch.int32, device=device),
        torch.empty(2, task.num_rows, dtype=torch.int32, device=device),
    )
    go_on(task, found, -1, flags, stops)
    return found


def go_on(task: LoopTask, found: LoopRows, step: int, flags: Tensor, stops: Tensor) -> None:
    """Bring ``found`` from ``step``, which has run, to the next.

    ``flags`` are bool ``[n]``. ``stops`` bool ``[arena rows]`` is the arena of the output that says stop; without one,
    any. Nothing waits. Raise ValueError for other types.
    """
    if flags.dtype != torch.bool or stops.dtype != torch.bool or task.words.dtype != torch.int64:
        raise ValueError(f"flags and stops must be bool, words int64: {flags.dtype}, {stops.dtype}, {task.words.dtype}")
    if uses_triton(task.words):
        from cellrt.kernels.loop_rows import triton

        triton.go_on(task, found, step, flags, stops)
    else:
        reference.go_on(task, found, step, flags, stops)
