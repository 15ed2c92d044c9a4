"""The time of one step of a cell, measured at registration.

The scheduler chooses runs by it, and the most rows of a task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.modes import torch_threads, workers_modes
from cellrt.worker.build_forms import build_forms
from cellrt.worker.choose_form import choose_form, choose_runs, fastest
from cellrt.worker.device.device import Device

ROWS = (1, 8, 64, 512)
MORE_ON_CPU = (32, 128, 256)
"""Further numbers of rows on a CPU, where a larger step may take longer a row, once its temporaries leave the nearest
cache.
"""
LONG_S = 0.05
"""The seconds of a step after which no larger one is measured."""
TURN_S = 1e-4
"""The approximate cost of a task besides its step: forming it, copying its rows, telling its clients."""
CLEARLY, NEARLY = 1.25, 1.1
AGAIN = 2


def measure_steps(cell: Cell, form: CompiledForm | None, device: Device | None, num_threads: int) -> dict[int, float]:
    """Return the seconds of one step of a cell by number of rows, on a device (None: the CPU, with this many torch
    threads).

    On the CPU they are those of its form, if it has one. A cell that refuses zeros is left for the scheduler to
    measure.
    """
    if device is not None:
        return _measure_on(device, cell)
    times: dict[int, float] = {}
    with torch_threads(num_threads):
        for rows in _sizes(cell, *MORE_ON_CPU):
            times[rows] = _time_on_cpu(cell, form, rows)
            if times[rows] > LONG_S:
                break
        for _ in range(AGAIN if rows_that_pay(times) else 0):  # something else may have had the processor
            times = {rows: min(seconds, _time_on_cpu(cell, form, rows)) for rows, seconds in times.items()}
    return times


def rows_that_pay(step_s: Mapping[int, float]) -> int | None:
    """Return the fewest rows of a task at about the least time for each; None if it is the most that were measured.

    ``step_s``: the seconds of its steps by rows. The fewest are best, as a run keeps the rows of all its steps, which a
    step
    alone does not show.
    """
    if min(step_s.values(), default=0.0) <= 0:
        return None
    each_s = {rows: (seconds + TURN_S) / rows for rows, seconds in step_s.items()}
    least_s = min(each_s.values())
    if each_s[max(each_s)] <= CLEARLY * least_s:
        return None
    return min(rows for rows, seconds in each_s.items() if seconds <= NEARLY * least_s)


def _sizes(cell: Cell, *more: int) -> list[int]:
    fitting = [rows for rows in sorted((*ROWS, *more)) if rows <= cell.max_batch]
    return [rows for rows in fitting if not cell.batch_sizes or rows in cell.batch_sizes]


@workers_modes()
@torch.inference_mode()
def _time_on_cpu(cell: Cell, form: CompiledForm | None, rows: int) -> float:
    samples = []
    try:
        inputs = cell.example_inputs(rows)
        by_name = {} if form is None else dict(zip(cell.inputs, inputs))
        for _ in range(3):
            start = time.perf_counter()
            if form is None or form.run(rows, by_name) is None:
                cell.run_step(*inputs)
            samples.append(time.perf_counter() - start)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a cell may refuse zeros, and this many rows may be more than there is memory
        return 0.0
    return min(samples)


@torch.inference_mode()
def _measure_on(device: Device, cell: Cell) -> dict[int, float]:
    """Return the seconds of a step by rows on a device, by its own clock.

    Recurring work is captured, and then its launches take no time. The cell is placed and, if asked for, compiled
    there;
    its kernels are loaded and tuned.
    """
    times: dict[int, float] = {}
    with device.beside() as wait:  # a kernel of Triton's goes to the device that the thread is on
        placed = device.placements.of(cell)
        if device.torch_device.type == "cpu":
            return times
        build_forms(placed)
        choose_form(placed, _sizes(cell), device.elapsed)
        choose_runs(placed, device.elapsed, wait)
        for rows in _sizes(cell):
            try:
                times[rows] = fastest(placed.example_step(rows), device.elapsed)
            except KeyboardInterrupt:
                raise
            except BaseException:  # a cell may refuse zeros
                return times
            if times[rows] > LONG_S:
                break
    return times
