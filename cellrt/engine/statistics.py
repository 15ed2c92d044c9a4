"""Counts that an engine keeps while it runs."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import NUM_SIZE_CLASSES, Tables
from cellrt.definition.cell import Cell
from cellrt.worker.cell_type import CellType

WINDOW = 4096
TAKEN_TOGETHER = 256
TIME_BOUNDS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
"""The upper bounds of the histograms of times, in seconds; one more bucket has longer times."""
NUM_SIZES = NUM_SIZE_CLASSES
"""The number of buckets of the histograms of rows: up to 1, 2, 4, ... rows, and more."""
EAGER = "eager"
"""The first word of the form of a cell that runs as its module does."""


_TIME_BOUNDS_NS = np.array([round(1e9 * bound) for bound in TIME_BOUNDS_S])


def _window() -> deque[int]:
    return deque(maxlen=WINDOW)


class Histogram:
    """Counts of times by upper bounds, and their sum."""

    def __init__(self) -> None:
        self._counts, self._sum_ns = np.zeros(len(TIME_BOUNDS_S) + 1, np.int64), 0

    def count(self, values_ns: NDArray[np.int64]) -> None:
        """Count times, given in ns."""
        self._counts += np.bincount(np.searchsorted(_TIME_BOUNDS_NS, values_ns), minlength=self._counts.size)
        self._sum_ns += int(values_ns.sum())

    def snapshot(self) -> dict[str, Any]:
        """Return counts by bucket, one more than there are bounds, and their sum in seconds."""
        return {"counts": self._counts.tolist(), "sum_s": self._sum_ns / 1e9}


@dataclass
class Ends:
    """The ends of requests of one model, or of all. Times are of the last that were done."""

    num_done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latencies_ns: deque[int] = field(default_factory=_window)
    queueing_ns: deque[int] = field(default_factory=_window)
    queueing: Histogram = field(default_factory=Histogram)
    computation: Histogram = field(default_factory=Histogram)

    def take_in(self, latencies_ns: NDArray[np.int64], queueing_ns: NDArray[np.int64]) -> None:
        """Add the times of requests that are done."""
        self.latencies_ns.extend(latencies_ns.tolist())
        self.queueing_ns.extend(queueing_ns.tolist())
        self.queueing.count(queueing_ns)
        self.computation.count(latencies_ns - queueing_ns)

    def snapshot(self) -> dict[str, Any]:
        """Return counts, and p50, p90 and p99 of times in seconds (empty before the first).

        ``queueing_s`` is from arrival to the launch of the first task, ``computation_s`` from there to the reply
        (BatchMaker section 2.7); together they are ``latency_s``. ``histograms`` has them for all requests, by
        ``TIME_BOUNDS_S``.
        """
        latencies, queueing = (np.array(window) / 1e9 for window in (self.latencies_ns, self.queueing_ns))
        return {
            "done": self.num_done,
            "errors": dict(self.errors),
            "latency_s": _percentiles(latencies),
            "queueing_s": _percentiles(queueing),
            "computation_s": _percentiles(latencies - queueing),
            "histograms": {"queueing": self.queueing.snapshot(), "computation": self.computation.snapshot()},
        }


class _Done(NamedTuple):
    """Requests of a model that were done together.

    They have the times of arrival with the number of requests each, and the times when their first tasks were launched.
    """

    ends: Ends
    arrivals_ns: Sequence[tuple[int, int]] | NDArray[np.int64]
    started_ns: NDArray[np.int64]
    ended_ns: int | NDArray[np.int64]


@dataclass
class Statistics:
    """Counts of requests. They are written in turns; ``snapshot`` may be called from any thread (it may lag by a turn).

    Times of requests are taken in many at a time: one by one, that would be a good part of a tiny request's cost. Cells
    and workers are counted by the scheduler.

    Attributes:
        tables: the tables of the scheduler, for those counts.
    """

    tables: Tables
    every: Ends = field(default_factory=Ends)
    by_model: dict[str, Ends] = field(default_factory=dict)
    _new: deque[_Done] = field(default_factory=deque)
    """The requests whose times are not taken in yet."""
    _taking_in: threading.Lock = field(default_factory=threading.Lock)

    def count_done(
        self,
        model: str,
        arrivals_ns: Sequence[tuple[int, int]] | NDArray[np.int64],
        started_ns: NDArray[np.int64],
        ended_ns: int | NDArray[np.int64],
    ) -> None:
        """Count requests of a model that are done.

        ``arrivals_ns``: the times of arrival, in order, with the number of requests each; ``started_ns``: when each
        one's first task was launched; ``ended_ns``: when each ended, or all did.
        """
        ends = self._of_model(model)
        ends.num_done += started_ns.size
        self.every.num_done += started_ns.size
        self._new.append(_Done(ends, arrivals_ns, started_ns, ended_ns))
        if len(self._new) >= TAKEN_TOGETHER and self._taking_in.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._taking_in.release()

    def _take_in(self) -> None:
        """Add the times of new requests. Only one thread at a time."""
        new = [self._new.popleft() for _ in range(len(self._new))]
        if not new:
            return
        arrived = np.concatenate([np.asarray(one.arrivals_ns, np.int64).reshape(-1, 2) for one in new])
        arrivals_ns = np.repeat(arrived[:, 0], arrived[:, 1])
        counts = [one.started_ns.size for one in new]
        latencies_ns = (
            np.concatenate([np.broadcast_to(one.ended_ns, count) for one, count in zip(new, counts)]) - arrivals_ns
        )
        queueing_ns = np.maximum(0, np.concatenate([one.started_ns for one in new]) - arrivals_ns)
        self.every.take_in(latencies_ns, queueing_ns)
        models = {id(one.ends): one.ends for one in new}
        whose = np.repeat([id(one.ends) for one in new], counts) if len(models) > 1 else None
        for key, ends in models.items():
            its = slice(None) if whose is None else whose == key
            ends.take_in(latencies_ns[its], queueing_ns[its])

    def count_error(self, model: str, error: Exception) -> None:
        """Count a request of a model that ended with an error."""
        for ends in (self.every, self._of_model(model)):
            ends.errors[type(error).__name__] += 1

    def _of_model(self, model: str) -> Ends:
        ends = self.by_model.get(model)
        if ends is None:
            ends = self.by_model[model] = Ends()
        return ends

    def snapshot(
        self,
        types: Mapping[int, CellType],
        unfinished: Mapping[str, int],
        why_eager: Callable[[Cell], str],
        ready: Callable[[int], int],
        counts: Mapping[int, Mapping[str, int]],
    ) -> dict[str, Any]:
        """Return requests by end, in all and by model, and the counts of each cell.

        Cells of one name are distinguished by their identity. ``unfinished``: by model; ``why_eager``: returns why a
        cell has no form; ``ready``: returns the nodes of a type that could run now; ``counts``: of workers, by
        location.
        """
        with self._taking_in:
            self._take_in()
        cells = {
            name: {
                **self._of_cell(made),
                "ready": sum(ready(one.id) for one in made),
                "form": _form_of(made[-1], why_eager),
            }
            for name, made in _by_name(types).items()
        }
        models = {
            name: {"unfinished": unfinished.get(name, 0), **self.by_model.get(name, Ends()).snapshot()}
            for name in [*unfinished, *(name for name in list(self.by_model) if name not in unfinished)]
        }
        workers = {
            location: {"busy_s": busy_ns / 1e9, **counts.get(location, {})}
            for location, busy_ns in enumerate(self.tables.busy_ns.tolist())
            if busy_ns
        }
        return {**self.every.snapshot(), "models": models, "cells": cells, "workers": workers}

    def _of_cell(self, types: Sequence[CellType]) -> dict[str, Any]:
        """Return the counts of a cell: of the types that it has, one for each form."""
        ids = [made.id for made in types]
        tasks, rows, nodes = (int(self.tables.counts[name][ids].sum()) for name in ("tasks", "rows", "positions"))
        return {
            "tasks": tasks,
            "mean_batch": rows / max(1, tasks),
            "rows": rows,
            "batch_sizes": self.tables.num_tasks[ids].sum(0).tolist(),
            "nodes": nodes,
            "retried": sum(made.retries.count for made in types),
        }


def forms_told(types: Mapping[int, CellType], why_eager: Callable[[Cell], str]) -> str:
    """Return how many cells have a compiled form, then each form, or the reason for none, with its cells.

    The forms are as ``Statistics.snapshot`` has them, which says what the arguments are.
    """
    newest = {name: made[-1] for name, made in _by_name(types).items()}
    cells_of: dict[str, list[str]] = {}
    for name, made in newest.items():
        cells_of.setdefault(_form_of(made, why_eager), []).append(name)
    compiled = sum(made.form is not None for made in newest.values())
    each = [f"{', '.join(names)} {form}" for form, names in cells_of.items()]
    return "; ".join([f"{compiled} of {len(newest)} cells compiled", *each])


def _by_name(types: Mapping[int, CellType]) -> dict[str, list[CellType]]:
    """Return the types of each cell, the newest last; cells of one name are distinguished by their identity."""
    by_identity: dict[str, list[CellType]] = {}
    for made in types.values():
        by_identity.setdefault(made.cell.identity, []).append(made)
    names = Counter(made[0].cell.name for made in by_identity.values())
    return {
        made[0].cell.name if names[made[0].cell.name] == 1 else f"{made[0].cell.name} {identity[:8]}": made
        for identity, made in by_identity.items()
    }


def _form_of(made: CellType, why_eager: Callable[[Cell], str]) -> str:
    return f"{EAGER}: {why_eager(made.cell)}" if made.form is None else made.form.origin


def _percentiles(values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
