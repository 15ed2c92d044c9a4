"""Checks a model before it is served: its example, cells, graph, row independence, and memory cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.arena_sizes import AS_MEMORY_ALLOWS, ArenaBytes
from cellrt.engine.cell_compiler import OFF, CompileMode
from cellrt.engine.engine import Engine
from cellrt.errors import CellError, DefinitionError
from cellrt.graph.binding import Binding
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.capacity import Room, room_for
from cellrt.planning.elsewhere import cells_elsewhere, cells_of, changing
from cellrt.planning.measuring import step_seconds
from cellrt.process.source import ModelSource

TIMEOUT_S = 60.0
NOT_HERE = "compiled forms were not looked for (see --compile); cellrt serve makes them in the background"
Describe = Callable[[Unfolder, Binding, Sequence[RowSpec]], object]
"""Raises DefinitionError if it cannot describe a model, of an engine whose rows are of these specs by kind."""


@dataclass(frozen=True)
class CellReport:
    """One cell: what goes in and comes out of a row, what runs it, and what one row costs."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    max_batch: int
    form: str
    mixed_outputs: list[str]
    """Outputs in which rows influence each other, of a cell with ``row_wise=False``; other such cells are refused."""
    failure: str
    """The error that the cell raised for its largest batch, which is a fault; empty if it raised none."""


@dataclass(frozen=True)
class Report:
    """A model. ``nodes``: of its example; ``unfold_us``: what recording it takes; ``lone_ms``: serving it alone;
    ``room``: what it takes of an engine's memory."""

    model: str
    cells: list[CellReport]
    nodes: int
    results: dict[str, list[int]]
    unfold_us: float
    lone_ms: float
    room: Room
    changing: list[str]
    """Cells that differ between processes in weights or code, which is a fault."""
    unserved: str = ""
    """The reason why a server cannot describe the model's inputs and outputs, which is a fault; empty if it can."""

    @property
    def faults(self) -> list[str]:
        """The problems that make the model unfit to be served, as texts."""
        changing = [
            f"{name}: another process makes it with other weights or code, so no server can serve it, and no session "
            "outlives its process: load its weights from files, or draw them with a seed (torch.manual_seed)"
            for name in self.changing
        ]
        failing = [cell.failure for cell in self.cells if cell.failure]
        return failing + changing + [self.unserved] * bool(self.unserved)

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, and the faults."""
        return {**asdict(self), "faults": self.faults}


def _failure_of(cell: Cell) -> str:
    """Return the error that a cell raises for its largest batch of random rows; empty if it raises none."""
    try:
        step_seconds(cell, None, cell.max_batch, 0.0)
    except CellError as error:
        return str(error)
    return ""


def _form_of(said: str) -> str:
    """Return the kind of form that runs a cell, from its engine's description.

    The engine of this check compiles nothing; a server does.
    """
    return NOT_HERE if said.endswith(f": {OFF}") else said


def check(
    source: str,
    compile: CompileMode = "off",
    describe: Describe | None = None,
    arena_bytes: ArenaBytes = AS_MEMORY_ALLOWS,
) -> Report:
    """Register a model and serve its example, once cold and then warm; let another process make its cells too.

    ``source``: see ``process.source``; ``describe``: what a server would do with it; ``arena_bytes``: see the
    engine. Raise DefinitionError, and what registering and serving raise.
    """
    unfolder = ModelSource(source).load()
    rows, pages = arena_bytes
    made = Engine(1, freeze=False, compile=compile, arena_bytes=rows, page_bytes=pages)
    with made as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what it warns of is in the report
        engine.register(unfolder)
        results = engine.submit(unfolder.name, unfolder.example).result(TIMEOUT_S)
        model = engine._submission.model(unfolder.name)
        begin_s = time.perf_counter()
        plan = model.plans([unfolder.example])[0].plan
        unfold_s = time.perf_counter() - begin_s
        samples = []
        for _ in range(20):
            begin_s = time.perf_counter()
            engine.submit(unfolder.name, unfolder.example).result(TIMEOUT_S)
            samples.append(time.perf_counter() - begin_s)
        unserved = ""
        try:
            if describe is not None:
                describe(unfolder, model, engine._registry.kinds)
        except DefinitionError as error:
            unserved = str(error)
        room = room_for(engine, plan.template)
        forms = engine.statistics()["cells"]
        cells = [
            CellReport(
                made.cell.name,
                {name: str(spec) for name, spec in made.cell.inputs.items()},
                {name: str(spec) for name, spec in made.cell.outputs.items()},
                made.cell.max_batch,
                _form_of((forms.get(made.cell.name) or forms[f"{made.cell.name} {made.cell.identity[:8]}"])["form"]),
                made.cell.check_row_wise(),
                _failure_of(made.cell),
            )
            for made in engine._registry.types.values()
        ]
    shapes = {name: list(value.shape) for name, value in results.items()}
    return Report(
        unfolder.name,
        cells,
        plan.num_nodes,
        shapes,
        1e6 * unfold_s,
        1e3 * sorted(samples)[len(samples) // 2],
        room,
        changing(cells_of(unfolder), cells_elsewhere(source)),
        unserved,
    )
