"""Models that misbehave on demand: what a row holds decides whether its cell raises, hangs, or has its worker die."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.worker import CpuWorker

WIDTH = 2
RAISE, WRONG_SHAPE, NOT_FINITE, DIE = 101.0, 102.0, 103.0, 104.0
"""A row that starts with one of these makes its cell do so."""


class DyingError(Exception):
    """Raised on rows that start with DIE: see ``let_rows_kill``."""


def let_rows_kill(monkeypatch: pytest.MonkeyPatch, *, forever: bool) -> None:
    """From now on a CPU worker dies of a row that starts with DIE, as of a fault of its own: no cell can kill one.

    ``forever``: none takes its place, as if its memory were gone.
    """
    if forever:
        monkeypatch.setattr(CpuWorker, "is_replaceable", False)
    execute = Executor.execute

    def execute_or_die(self, type_id, buffer):
        failures = execute(self, type_id, buffer)
        if any(isinstance(failure.error.__cause__, DyingError) for failure in failures):
            raise SystemExit("the worker's own fault")
        return failures

    monkeypatch.setattr(Executor, "execute", execute_or_die)


class Sum(NamedTuple):
    h: Tensor


class Step(NamedTuple):
    h: Tensor
    n: Tensor
    stop: Tensor


def misbehave(x: Tensor, h: Tensor) -> Tensor:
    """``x + h / 2``, unless a row of ``x`` says otherwise."""
    out = x + 0.5 * h
    if x.device.type == "meta":
        return out
    marks = x[:, 0]
    if (marks == DIE).any():
        raise DyingError
    if (marks == RAISE).any():
        raise ValueError("a row this cell cannot take")
    if (marks == WRONG_SHAPE).any():
        return out[:, :1]
    return torch.where((marks == NOT_FINITE)[:, None], torch.nan, out)


def add(x: Tensor, h: Tensor) -> Sum:
    return Sum(misbehave(x, h))


class AddWithSteps(torch.nn.Module):
    """The same with a form for several steps."""

    def forward(self, x: Tensor, h: Tensor) -> Sum:
        return Sum(misbehave(x, h))

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor) -> Sum:
        taken, states = 0, []
        for size in batch_sizes:
            h = misbehave(x[taken : taken + size], h[:size])
            states.append(h)
            taken += size
        return Sum(torch.cat(states))


def count(h: Tensor, n: Tensor, at: Tensor, x: Tensor) -> Step:
    """A loop's step: behaves until step ``at``, then takes ``x`` in."""
    n = n + 1
    now = torch.where((n == at)[:, None], x, torch.ones_like(x))
    return Step(misbehave(now, h), n, n >= 6)


NUMBER = rows(dtype=torch.int64)


def make_cells(max_batch: int = 64) -> tuple[Cell, Cell, Cell]:
    """(plain step, step with a steps-first form, loop step)."""
    row = (WIDTH,)
    return (
        cell(add, {"x": row, "h": row}, max_batch=max_batch, finite=["h"]),
        cell(AddWithSteps(), {"x": row, "h": row}, max_batch=max_batch, finite=["h"]),
        cell(count, {"h": row, "n": NUMBER, "at": NUMBER, "x": row}, max_batch=max_batch, finite=["h"]),
    )


def chain_model(name: str, made: Cell) -> Unfolder:
    """Requests are ``[steps, 2]``; results: every step's and the last state."""

    def unfold(graph: Graph, request: Tensor) -> dict[str, object]:
        chain = graph.chain(made, x=request)
        return {"every": chain.h, "last": chain.last.h}

    return Unfolder(name, unfold, torch.zeros(2, WIDTH))


def loop_model(name: str, made: Cell) -> Unfolder:
    """Requests are (x ``[2]``, step that takes it); six steps; the last state goes through one more step."""

    def unfold(graph: Graph, request: tuple[Tensor, int]) -> dict[str, object]:
        loop = graph.loop(made, max_steps=9, until="stop", x=request[0], at=request[1])
        return {"every": loop.h, "last": loop.last.h, "n": loop.last.n}

    return Unfolder(name, unfold, (torch.zeros(WIDTH), 1))


class Gate:
    """A model with a cell that waits: ``entered`` is set when a worker is inside, which leaves once ``open`` is set."""

    def __init__(self, wait_s: float) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._wait_s = wait_s
        made = cell(Door(self), {"x": (WIDTH,)}, name="gate", max_batch=1)
        self.unfolder = Unfolder("gate", lambda graph, request: made(x=request), torch.zeros(WIDTH))

    def hold(self) -> None:
        """Called by the worker."""
        self.entered.set()
        self.open.wait(self._wait_s)


class Door:
    """The gate's cell: adds 1, after waiting if a row has a 1 (trials of the cell have none). Copies share the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __deepcopy__(self, memo: dict[int, object]) -> Door:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and (x == 1).any():
            self._gate.hold()
        return x + 1
