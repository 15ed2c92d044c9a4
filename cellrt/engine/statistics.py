"""Counts that an engine keeps while it runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cellrt.worker.cell_type import CellType

WINDOW = 4096


@dataclass
class Statistics:
    """Written by the manager; ``snapshot`` may be read from any thread (it may lag by a turn of the loop)."""

    num_done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    tasks: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    latencies_ns: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def count_task(self, type_id: int, rows: int, positions: int) -> None:
        """Counts a launched task of ``rows`` rows and ``positions`` cell invocations."""
        self.tasks[type_id] += 1
        self.rows[type_id] += rows
        self.steps[type_id] += positions

    def count_end(self, error: Exception | None, latency_ns: int) -> None:
        """Counts a request that ended."""
        if error is None:
            self.num_done += 1
            self.latencies_ns.append(latency_ns)
        else:
            self.errors[type(error).__name__] += 1

    def snapshot(self, types: Sequence[CellType]) -> dict[str, Any]:
        """Requests by end, what each cell did, and latencies. Cells of one name are told apart by their identity."""
        names = Counter(made.cell.name for made in types)
        cells = {
            made.cell.name if names[made.cell.name] == 1 else f"{made.cell.name} {made.cell.identity[:8]}": {
                "tasks": self.tasks[made.id],
                "mean_batch": self.rows[made.id] / max(1, self.tasks[made.id]),
                "nodes": self.steps[made.id],
                "retried": made.retries.count,
            }
            for made in types
        }
        return {
            "done": self.num_done,
            "errors": dict(self.errors),
            "cells": cells,
            "latency_s": self._latency_percentiles_s(),
        }

    def _latency_percentiles_s(self) -> dict[str, float]:
        """p50, p90 and p99 of the last finished requests, in seconds; empty before the first."""
        latencies = np.array(self.latencies_ns, np.float64) / 1e9
        if not latencies.size:
            return {}
        return {f"p{q}": float(np.percentile(latencies, q)) for q in (50, 90, 99)}
