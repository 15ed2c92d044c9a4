"""Measures the cells of a model on this device, one step with 1, 2, 4, ... rows, and what the engine does beside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.examples import random_inputs
from cellrt.definition.modes import torch_threads, workers_modes
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.profile import CellProfile, HostCosts, Profile, best_batch

MOST_TOGETHER = 64
TIMEOUT_S = 600.0
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
    with Engine(1, freeze=False, compile="off") as engine:
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
        progress("the engine's host")
        host = host_costs(engine, model, seconds_each)
    return Profile("cpu", cells, host)


def host_costs(engine: Engine, model: Unfolder, seconds: float) -> HostCosts:
    """What the engine's host costs, from how the example is served: alone, and many together in fewer tasks each."""
    alone_s, alone_tasks, took_s = _served(engine, model, 1, seconds)  # first: who was many lately waits for company
    together = max(4, min(MOST_TOGETHER, int(seconds / took_s)))
    shared_s, shared_tasks, _ = _served(engine, model, together, seconds)
    most_s = alone_s / max(1.0, alone_tasks)
    saved = alone_tasks - shared_tasks
    task_s = min(most_s, max(0.0, alone_s - shared_s) / saved) if saved > 0 else most_s
    return HostCosts(max(0.0, alone_s - alone_tasks * task_s), task_s)


def _served(engine: Engine, model: Unfolder, together: int, seconds: float) -> tuple[float, float, float]:
    """Of one request of so many that are submitted at a time: seconds in which no worker ran its tasks, its tasks, and
    all its seconds; of a round that was disturbed little: waking a thread takes long beside other work."""
    samples: list[tuple[float, float, float]] = []
    end_s = time.perf_counter() + seconds
    while len(samples) < 4 or time.perf_counter() < end_s:
        busy_s, tasks = _ran(engine)
        begin_s = time.perf_counter()
        for future in [engine.submit(model.name, model.example) for _ in range(together)]:
            future.result(TIMEOUT_S)
        took_s = time.perf_counter() - begin_s
        later_s, later = _ran(engine)
        samples.append((max(0.0, took_s - (later_s - busy_s)), later - tasks, took_s))
    host_s, ran, all_s = sorted(samples[1:])[len(samples) // 10]  # the first warms up
    return host_s / together, ran / together, all_s / together


def _ran(engine: Engine) -> tuple[float, int]:
    """The seconds that workers ran tasks so far, and these tasks."""
    counts = engine.statistics()
    return (
        sum(worker["busy_s"] for worker in counts["workers"].values()),
        sum(cell["tasks"] for cell in counts["cells"].values()),
    )


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
                cell.run_step(*inputs)
            except Exception as error:
                raise CellError(f"{cell.name!r} raised with {rows} rows: {type(error).__name__}: {error}") from error
        samples.append(time.perf_counter() - begin_s)
    samples.sort()
    return samples[len(samples) // 2]
