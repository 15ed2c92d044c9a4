"""Counts that an engine keeps while it runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cellrt.definition.cell import Cell
from cellrt.worker.cell_type import CellType

WINDOW = 4096


def _window() -> deque[int]:
    return deque(maxlen=WINDOW)


@dataclass
class Ends:
    """How requests ended: of one model, or of all. Times are of the last that were done."""

    num_done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latencies_ns: deque[int] = field(default_factory=_window)
    queueing_ns: deque[int] = field(default_factory=_window)

    def count(self, latencies_ns: Sequence[int], queueing_ns: Sequence[int]) -> None:
        """Counts requests that are done."""
        self.num_done += len(latencies_ns)
        self.latencies_ns.extend(latencies_ns)
        self.queueing_ns.extend(queueing_ns)

    def snapshot(self) -> dict[str, Any]:
        """Counts, and p50, p90 and p99 of times in seconds (empty before the first).

        ``queueing_s`` is from arrival to the launch of the first task, ``computation_s`` from there to the reply
        (BatchMaker section 2.7); together they are ``latency_s``.
        """
        latencies, queueing = np.array(list(self.latencies_ns)) / 1e9, np.array(list(self.queueing_ns)) / 1e9
        size = min(latencies.size, queueing.size)
        return {
            "done": self.num_done,
            "errors": dict(self.errors),
            "latency_s": _percentiles(latencies),
            "queueing_s": _percentiles(queueing),
            "computation_s": _percentiles(latencies[:size] - queueing[:size]),
        }


@dataclass
class Statistics:
    """Written in turns; ``snapshot`` may be read from any thread (it may lag by a turn)."""

    every: Ends = field(default_factory=Ends)
    by_model: dict[str, Ends] = field(default_factory=dict)
    tasks: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)

    def count_task(self, type_id: int, rows: int, positions: int) -> None:
        """Counts a complete task of ``rows`` rows, and ``positions`` nodes that it did (of a loop: steps)."""
        self.tasks[type_id] += 1
        self.rows[type_id] += rows
        self.steps[type_id] += positions

    def forget_type(self, type_id: int, heir: int | None) -> None:
        """Begins a type's counts anew, for another cell that gets its number; ``heir``: another type of the same cell,
        whose counts they are from now on."""
        for counts in (self.tasks, self.rows, self.steps):
            count = counts.pop(type_id, 0)
            if heir is not None:
                counts[heir] += count

    def count_done(self, model: str, arrivals_ns: Sequence[int], started_ns: Sequence[int], now_ns: int) -> None:
        """Counts requests of a model that are done now; ``started_ns`` is when each one's first task was launched."""
        latencies_ns = [now_ns - arrival_ns for arrival_ns in arrivals_ns]
        queueing_ns = [max(0, started - arrival) for started, arrival in zip(started_ns, arrivals_ns)]
        for ends in (self.every, self._of_model(model)):
            ends.count(latencies_ns, queueing_ns)

    def count_error(self, model: str, error: Exception) -> None:
        """Counts a request of a model that ended with an error."""
        for ends in (self.every, self._of_model(model)):
            ends.errors[type(error).__name__] += 1

    def _of_model(self, model: str) -> Ends:
        ends = self.by_model.get(model)
        if ends is None:
            ends = self.by_model[model] = Ends()
        return ends

    def snapshot(
        self, types: Mapping[int, CellType], unfinished: Mapping[str, int], why_eager: Callable[[Cell], str]
    ) -> dict[str, Any]:
        """Requests by end, in all and by model, and what each cell did.

        Cells of one name are told apart by their identity. ``unfinished``: by model; ``why_eager``: a cell has no form.
        """
        by_identity: dict[str, list[CellType]] = {}
        for made in types.values():
            by_identity.setdefault(made.cell.identity, []).append(made)
        names = Counter(made[0].cell.name for made in by_identity.values())
        cells = {
            made[0].cell.name if names[made[0].cell.name] == 1 else f"{made[0].cell.name} {identity[:8]}": {
                **self._of_cell(made),
                "form": f"eager: {why_eager(made[-1].cell)}" if made[-1].form is None else made[-1].form.origin,
            }
            for identity, made in by_identity.items()
        }
        models = {
            name: {"unfinished": unfinished.get(name, 0), **self.by_model.get(name, Ends()).snapshot()}
            for name in [*unfinished, *(name for name in list(self.by_model) if name not in unfinished)]
        }
        return {**self.every.snapshot(), "models": models, "cells": cells}

    def _of_cell(self, types: Sequence[CellType]) -> dict[str, Any]:
        """Counts of a cell: of the types that it has, one for each form."""
        tasks = sum(self.tasks[made.id] for made in types)
        return {
            "tasks": tasks,
            "mean_batch": sum(self.rows[made.id] for made in types) / max(1, tasks),
            "nodes": sum(self.steps[made.id] for made in types),
            "retried": sum(made.retries.count for made in types),
        }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
