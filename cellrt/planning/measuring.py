"""Measures the cells of a model on this device: one step with 1, 2, 4, ... rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.examples import random_inputs
from cellrt.definition.modes import workers_modes
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.profile import CellProfile, Profile, best_batch
from cellrt.worker.torch_state import torch_threads

Progress = Callable[[str], None]
"""Called with what is measured next."""


def sizes_of(cell: Cell) -> Iterator[int]:
    """The numbers of rows that are measured."""
    rows = 1
    while rows < cell.max_batch:
        if not cell.batch_sizes or rows in cell.batch_sizes:
            yield rows
        rows *= 2
    yield cell.max_batch


def measure(model: Unfolder, bound_s: float | None, progress: Progress, *, seconds_each: float = 0.2) -> Profile:
    """The profile of a model's cells on this machine's CPU, one thread. Raises DefinitionError if it does not unfold.

    Args:
        model: of which cells.
        bound_s: a step may not take longer; see ``best_batch``.
        progress: hears what is measured.
        seconds_each: time for each number of rows.
    """
    with Engine(1, freeze=False) as engine:
        engine.register(model, warm_up=False)
        types = list(engine._registry.types.values())
        cells = {}
        with torch_threads(1):
            for made in types:
                rows = tuple(sizes_of(made.cell))
                step_s = []
                for count in rows:
                    progress(f"{made.cell.name}, {count} rows")
                    step_s.append(step_seconds(made.cell, made.form, count, seconds_each))
                best = best_batch(rows, tuple(step_s), bound_s)
                cells[made.cell.identity] = CellProfile(made.cell.name, rows, tuple(step_s), best)
    return Profile("cpu", cells)


@workers_modes()
@torch.inference_mode()
def step_seconds(cell: Cell, form: CompiledForm | None, rows: int, seconds: float) -> float:
    """The median of one step's time with random rows, in its compiled form if it has one. Raises CellError."""
    inputs = random_inputs(cell.inputs.values(), rows, torch.Generator().manual_seed(0))
    by_name = {} if form is None else dict(zip(cell.inputs, inputs))
    samples: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        if form is None or form.run(rows, by_name) is None:
            try:
                cell.run(*inputs)
            except Exception as error:
                raise CellError(f"{cell.name!r} raised with {rows} rows: {type(error).__name__}: {error}") from error
        samples.append(time.perf_counter() - begin_s)
    samples.sort()
    return samples[len(samples) // 2]
