"""Measures the cells of a model on this device, one step with 1, 2, 4, ... rows, and what the engine does beside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from cellrt.core.state.tables import HOST, LOCATION_SHIFT, NUM_PERMANENT
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.examples import random_inputs, random_nodes
from cellrt.definition.modes import torch_threads, workers_modes
from cellrt.definition.spec import CellInput
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.profile import CellProfile, HostCosts, Profile, best_batch
from cellrt.worker.arenas import copy_page

MOST_TOGETHER = 64
NODES_READING, ROWS_READ = 8, (512, 128, 32, 8)
"""The nodes, and the rows that each reads, to measure the cost of reading: the first numbers that the cell takes."""
PAGES_COPIED = 16
TIMEOUT_S = 600.0
Progress = Callable[[str], None]
"""Called with what is measured next."""


def sizes_of(cell: Cell) -> Iterator[int]:
    """Yield the numbers of rows that are measured."""
    rows = 1
    while rows < cell.max_batch:
        if not cell.batch_sizes or rows in cell.batch_sizes:
            yield rows
        rows *= 2
    yield cell.max_batch


def measure(model: Unfolder, bound_s: float | None, progress: Progress, *, seconds_each: float = 0.2) -> Profile:
    """Return the profile of a model's cells on this machine's CPU, one thread. Raise DefinitionError if it does not
    unfold.

    Args:
        model: the model whose cells are measured.
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
                read_s = 0.0
                if any(spec.page_size for spec in made.cell.inputs.values()):
                    progress(f"{made.cell.name}, rows of growing states")
                    read_s = reading_seconds(made.cell, made.form, seconds_each)
                cells[made.cell.identity] = CellProfile(made.cell.name, rows, tuple(step_s), best, read_s)
        progress("the engine's host")
        host = host_costs(engine, model, seconds_each)
    return Profile("cpu", cells, host)


def host_costs(engine: Engine, model: Unfolder, seconds: float) -> HostCosts:
    """Return the cost of the engine's host work, from serving the example alone and many at once in fewer tasks
    each.
    """
    alone_s, alone_tasks, took_s = _served(engine, model, 1, seconds)  # first: who was many lately waits for company
    together = max(4, min(MOST_TOGETHER, int(seconds / took_s)))
    shared_s, shared_tasks, _ = _served(engine, model, together, seconds)
    most_s = alone_s / max(1.0, alone_tasks)
    saved = alone_tasks - shared_tasks
    task_s = min(most_s, max(0.0, alone_s - shared_s) / saved) if saved > 0 else most_s
    return HostCosts(max(0.0, alone_s - alone_tasks * task_s), task_s, page_seconds(engine))


def page_seconds(engine: Engine) -> float:
    """Return the median time in which an idle engine copies a page, of its largest, from a worker to the host; 0: it
    has none.

    Where nothing runs and no session keeps anything, all pages are free: any may be written to.
    """
    kinds = [(spec.num_bytes, kind) for kind, spec in enumerate(engine._registry.kinds) if spec.page_size]
    if not kinds:
        return 0.0
    (_, kind), samples = max(kinds), list[float]()
    for row in range(NUM_PERMANENT, NUM_PERMANENT + PAGES_COPIED):
        begin_s = time.perf_counter()
        copy_page(engine._arenas, kind, 1 << LOCATION_SHIFT | row, HOST << LOCATION_SHIFT | row)
        samples.append(time.perf_counter() - begin_s)
    return sorted(samples)[len(samples) // 2]


def _served(engine: Engine, model: Unfolder, together: int, seconds: float) -> tuple[float, float, float]:
    """Return figures for one of several requests submitted together: host seconds, tasks, and total seconds.

    Host seconds are those in which no worker ran the request's tasks. The figures are of a round with little
    disturbance: other work on the machine delays the waking of threads.
    """
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
    """Return the seconds that workers ran tasks so far, and these tasks."""
    counts = engine.statistics()
    return (
        sum(worker["busy_s"] for worker in counts["workers"].values()),
        sum(cell["tasks"] for cell in counts["cells"].values()),
    )


@workers_modes()
@torch.inference_mode()
def reading_seconds(cell: Cell, form: CompiledForm | None, seconds: float) -> float:
    """Return how much longer a step takes for each row of growing state that one of its rows reads.

    Return 0 if the cell takes no state of that many rows, or if reading costs nothing measurable.
    """
    nodes, states = min(cell.max_batch, NODES_READING), sum(bool(spec.page_size) for spec in cell.inputs.values())

    def reading(before: int) -> float:
        inputs = random_nodes(cell.inputs.values(), nodes, 1, before, torch.Generator().manual_seed(0))
        return median_seconds(cell, form, nodes, inputs, seconds)

    for before in ROWS_READ:
        with suppress(CellError):  # it may know fewer positions
            return max(0.0, reading(before) - reading(0)) / (nodes * before * states)
    return 0.0


@workers_modes()
@torch.inference_mode()
def step_seconds(cell: Cell, form: CompiledForm | None, rows: int, seconds: float) -> float:
    """Return the median of one step's time with random rows, in its compiled form if it has one. Raise CellError."""
    inputs = random_inputs(cell.inputs.values(), rows, torch.Generator().manual_seed(0))
    return median_seconds(cell, form, rows, inputs, seconds)


def median_seconds(
    cell: Cell, form: CompiledForm | None, rows: int, inputs: Sequence[CellInput], seconds: float
) -> float:
    """Return the median of one step's time with these inputs, as a worker runs it. Raise CellError."""
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
