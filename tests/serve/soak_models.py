"""Models for long soaks: one whose requests kill a worker that is replaced, one with pages, and one that waits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders import complete
from tests.serve.models import COUNT
from tests.steps import WIDTH
from tests.unfolders.language_models import small_cell

KILL = 104.0
"""A row that starts with it kills the worker that has it; another takes its place."""


def mortal() -> Unfolder:
    """A chain of which a row may kill its worker: by the executor, as no cell can."""
    from cellrt.worker.cpu.cpu_executor import Executor

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


GATE = "CELLRT_TEST_GATE"
"""The environment has the path of a file there: until it exists, ``gated`` waits, at most so long."""
GATE_S = 120.0
LAST = 100_000
"""Where ``COUNT`` stops."""
MOST_STEPS = 64


def _wait(n: Tensor) -> dict[str, Tensor]:
    if n.device.type != "meta" and (n > LAST - MOST_STEPS).any():
        end_s = time.monotonic() + GATE_S
        while not Path(os.environ[GATE]).exists() and time.monotonic() < end_s:
            time.sleep(0.02)
    return {"n": n.clone()}


_WAIT = cell(_wait, {"n": rows(dtype=torch.int64)}, name="wait")


@unfold("gated", example=3)
def gated(graph: Graph, first: int) -> dict[str, object]:
    """Counts from a number up to ``LAST + 1``, once the gate is open."""
    start = _WAIT(n=graph.constant(first) if first == 3 else first).n
    return {"n": graph.loop(COUNT, n=start, max_steps=MOST_STEPS, until="stop").n}


def text() -> Unfolder:
    """A small language model whose sessions keep what was read, in pages."""
    return complete("text", small_cell(), max_tokens=24, keep=True)
