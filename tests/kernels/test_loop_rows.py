"""The rows of a loop's steps, against a loop in Python, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cellrt.kernels.loop_rows import INPUT, NONE, OUTPUT, LoopRows, LoopTask, begin, go_on
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches

STEPS, FIRST = 5, 100
OUTPUTS = [[FIRST, 1, 1000, 2, 1], [FIRST + 2000, STEPS, 1, STEPS, 0], [NONE, 0, 0, 1, NONE], [3000, 1, 500, 2, NONE]]
"""Carried in turns; carried, and a row for each step; not wanted; what says stop."""
STOP = 3
Advance = Callable[[LoopTask, LoopRows, int, Tensor, Tensor], None]


def lie(output: list[int], row: int, step: int) -> int:
    first, by_row, by_step, period, _ = output
    return first + row * by_row + step % period * by_step


def task_of(count: int, device: str, shift: int, with_flags: bool, stop: int) -> tuple[LoopTask, list[int], list[int]]:
    """Two inputs, one of which has rows of its own at first; lengths of 0 to STEPS; every third flag is set."""
    lengths, flags = [(2 * row) % (STEPS + 1) for row in range(count)], [row % 7 for row in range(count)]
    plan = [1, NONE, 7000, 0, INPUT * 2 + OUTPUT * len(OUTPUTS), 0]
    for output in OUTPUTS:
        plan += output
    rows = [50 + 3 * row for row in range(count)]
    words = torch.tensor([*[NONE] * shift, *plan, *rows, *lengths, *flags], device=device)[shift:]
    at = len(plan) + count
    return LoopTask(words, count, 2, len(OUTPUTS), 0, at, at + count if with_flags else NONE, stop), lengths, flags


def expected(task: LoopTask, lengths: list[int], flags: list[int], is_set: list[bool], stops: list[bool]) -> list[list]:
    """What is known behind each step: rows read, written and left, steps done."""
    count = task.num_rows
    active = [length > 0 for length in lengths]
    if task.flags_at >= 0:
        active = [is_active and not is_set[flag] for is_active, flag in zip(active, flags)]
    reads = [[7000 + row for row in range(count)], [50 + 3 * row for row in range(count)]]
    left = [[lie(output, row, 0) for row in range(count)] for output in OUTPUTS]
    left[0], left[1] = list(reads[1]), list(reads[0])
    done, history = [0] * count, []
    for step in range(-1, STEPS):
        for row in range(count):
            if step < 0 or not active[row]:
                continue
            for k, output in enumerate(OUTPUTS):
                left[k][row] = lie(output, row, step)
            stopped = task.stop >= 0 and stops[lie(OUTPUTS[STOP], row, step)]
            done[row] = -step - 1 if stopped else step + 1
            active[row] = not stopped and lengths[row] > step + 1
            if active[row]:
                reads[0][row], reads[1][row] = lie(OUTPUTS[1], row, step), lie(OUTPUTS[0], row, step)
        writes = [[lie(output, row, step + 1) if active[row] else NONE for row in range(count)] for output in OUTPUTS]
        history.append(([list(rows) for rows in (*reads, *writes, *left)], list(done)))
    return history


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(("with_flags", "stop"), [(False, STOP), (True, STOP), (True, NONE)])
@pytest.mark.parametrize("count", [1, 37, 300])
def test_rows_are_those_of_a_loop_in_python(
    device: str, count: int, with_flags: bool, stop: int, is_reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_reference:
        monkeypatch.setattr("cellrt.kernels.loop_rows.uses_triton", lambda words: False)
    generator = torch.Generator().manual_seed(count)
    flags, stops = torch.arange(7) % 3 == 2, torch.rand(5000, generator=generator) < 0.2
    task, lengths, numbers = task_of(count, device, count % 3, with_flags, stop)
    history = expected(task, lengths, numbers, flags.tolist(), stops.tolist())
    found, seen = None, []
    for step in range(-1, STEPS):
        if found is None:
            found = begin(task, flags.to(device), stops.to(device))
        else:
            go_on(task, found, step, flags.to(device), stops.to(device))
        seen.append((found.rows.tolist(), found.done.tolist()))
    assert seen == history


def test_a_loop_that_carries_nothing_has_rows_too(device: str) -> None:
    words = torch.tensor([10, 1, 0, 1, NONE, 2, 1], device=device)
    flags = torch.zeros(1, dtype=torch.bool, device=device)
    task = LoopTask(words, 2, 0, 1, 0, 5, NONE, NONE)
    found = begin(task, flags, flags)
    go_on(task, found, 0, flags, flags)
    assert found.rows.tolist() == [[10, NONE], [10, 11]] and found.done.tolist() == [1, 1]


def test_other_types_are_refused(device: str) -> None:
    task, _, _ = task_of(2, device, 0, False, NONE)
    numbers = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="flags and stops must be bool"):
        begin(task, numbers, numbers)


@needs_compiler
def test_it_compiles_everywhere_and_spills_nothing() -> None:
    from cellrt.kernels.loop_rows import triton

    task, _, _ = task_of(16, "cpu", 0, True, STOP)
    flags = torch.zeros(8, dtype=torch.bool)
    found = LoopRows(torch.empty(10, 16, dtype=torch.int64), *torch.empty(3, 16, dtype=torch.int32).split([1, 2]))
    with recorded_launches() as launches:
        triton.go_on(task, found, 0, flags, flags)
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0
