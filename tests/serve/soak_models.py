"""Models for a long soak: one whose requests kill a worker that is replaced, and one with pages."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.definition.define import cell
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders import complete
from tests.steps import WIDTH
from tests.unfolders.language_models import small_cell

KILL = 104.0
"""A row that starts with it kills the worker that has it; another takes its place."""


def mortal() -> Unfolder:
    """A chain of which a row may kill its worker: by the executor, as no cell can."""
    from cellrt.worker.cpu.executor import Executor

    def step(x: Tensor, h: Tensor) -> dict[str, Tensor]:
        if x.device.type != "meta" and (x[:, 0] == KILL).any():
            raise SystemError("kill")
        return {"h": x + 0.5 * h}

    execute = Executor.execute

    def execute_or_die(self: Executor, type_id: int, buffer: object) -> object:
        failures = execute(self, type_id, buffer)  # type: ignore[arg-type]
        if any("kill" in str(failure.error) for failure in failures):
            raise SystemExit("the worker's own fault")
        return failures

    Executor.execute = execute_or_die  # type: ignore[method-assign, assignment]
    made_cell = cell(step, {"x": (WIDTH,), "h": (WIDTH,)}, name="mortal")

    @unfold("mortal", example=torch.zeros(2, WIDTH))
    def made(graph: Graph, x: Tensor) -> dict[str, object]:
        return {"h": graph.chain(made_cell, keep=True, x=x).h}

    return made


def text() -> Unfolder:
    """A small language model whose sessions keep what was read, in pages."""
    return complete("text", small_cell(), max_tokens=24, keep=True)
