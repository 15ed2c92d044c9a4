"""The history of a run: its tasks, the requests they served, statistics of both, and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cellrt.view.chrome_trace import save_chrome_trace
from cellrt.view.paper import NEEDS_MATPLOTLIB, PICTURES, known_suffix
from cellrt.view.timeline_spans import RequestSpan, TaskSpan, first_starts

CHROME_TRACE = ".json"
NUM_DRAWN = 40
"""Requests in a picture, unless its caller asks for another number."""
MANY = 3
"""Requests of a moment that a task must hold to count as one in which they met."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, repr=False)
class Timeline:
    """Tasks and requests of one run, or of a part of it, in any order."""

    tasks: list[TaskSpan]
    requests: list[RequestSpan]

    def __repr__(self) -> str:
        return f"Timeline({len(self.tasks)} tasks, {len(self.requests)} requests)"

    def window(self, first: int, count: int) -> Timeline:
        """Return the part with at most ``count`` requests, by arrival from number ``first`` on, and the tasks that
        touch them.

        The tasks are kept whole: their rows count those of requests outside the window too.

        Raises:
            ValueError: ``first`` is negative or ``count`` is not positive.
        """
        if first < 0 or count < 1:
            raise ValueError(f"a window needs first >= 0 and count >= 1, not first={first} and count={count}")
        requests = self._by_arrival()[first : first + count]
        kept = {span.request for span in requests}
        return Timeline([task for task in self.tasks if not kept.isdisjoint(task.requests)], requests)

    def last(self, count: int = NUM_DRAWN) -> Timeline:
        """Return the window of the ``count`` requests that arrived last."""
        return self.window(max(0, len(self.requests) - count), count)

    def of(self, request: int) -> Timeline:
        """Return one request, by its number, with the tasks that it was in: whole, as in ``window``."""
        tasks = [task for task in self.tasks if request in task.requests]
        return Timeline(tasks, [span for span in self.requests if span.request == request])

    def busiest(self, count: int = NUM_DRAWN) -> Timeline:
        """Return the window of the ``count`` successive requests that met each other most.

        Most tasks there hold three of them or more; where that is equal, they needed the fewest tasks. Takes time in
        proportion to the requests of all tasks, whatever ``count`` is.
        """
        if not 0 < count < len(self.requests):
            return self.window(0, count)
        ordered, tasks_of = self._by_arrival(), self._tasks_of_requests()
        met: Counter[int] = Counter()  # task -> how many requests of the moment it holds
        num_shared = num_saved = best_first = 0
        most = (-1, -1)
        for entering, span in enumerate(ordered):
            for task in tasks_of.get(span.request, ()):
                met[task] += 1
                num_shared += met[task] == MANY
                num_saved += met[task] > 1
            if entering >= count:
                for task in tasks_of.get(ordered[entering - count].request, ()):
                    num_shared -= met[task] == MANY
                    num_saved -= met[task] > 1
                    met[task] -= 1
            if entering >= count - 1 and (num_shared, num_saved) > most:
                most, best_first = (num_shared, num_saved), entering - count + 1
        return self.window(best_first, count)

    def summary(self) -> dict[str, float]:
        """Return figures of the run. Times are seconds, ``mean_rows`` and ``mean_steps`` plain means over the tasks.

        Per request: ``latency`` is arrival to finish, ``queueing`` arrival to the start of the first task,
        ``computation`` that start to finish; each with ``_p50_s``, ``_p90_s`` and ``_p99_s`` (linear interpolation).
        Requests that no task served count in throughput and latency only. ``mean_rows_over_time`` weights
        each task's rows by how long it ran. Throughput counts from the first arrival to the last finish.

        Raises:
            ValueError: there are no requests, no tasks, none that belong together, or no time passes.
        """
        self._require_requests("summarise")
        if not self.tasks:
            raise ValueError("cannot summarise a timeline without tasks")
        starts = first_starts(self.tasks)
        served = [span for span in self.requests if span.request in starts]
        if not served:
            raise ValueError("cannot summarise a timeline whose tasks serve none of its requests")
        elapsed_s = max(r.finish_s for r in self.requests) - min(r.arrival_s for r in self.requests)
        if elapsed_s <= 0:
            raise ValueError("cannot summarise a timeline in which no time passes")
        rows = np.array([task.rows for task in self.tasks], dtype=np.float64)
        mean_rows = float(rows.mean())
        durations_s = np.array([task.end_s - task.start_s for task in self.tasks])
        return {
            "requests": float(len(self.requests)),
            "tasks": float(len(self.tasks)),
            "throughput_per_s": len(self.requests) / elapsed_s,
            **_percentiles("latency", [r.finish_s - r.arrival_s for r in self.requests]),
            **_percentiles("queueing", [starts[r.request] - r.arrival_s for r in served]),
            **_percentiles("computation", [r.finish_s - starts[r.request] for r in served]),
            "mean_rows": mean_rows,
            "mean_rows_over_time": float(np.average(rows, weights=durations_s)) if durations_s.any() else mean_rows,
            "mean_steps": float(np.mean([task.steps for task in self.tasks])),
        }

    def save(self, path: str | Path, *, count: int | None = None, caption: str = "") -> None:
        """Write a picture (``.svg``, ``.png``) of the busiest moment, or the whole run for a trace viewer (``.json``).

        A picture shows ``count`` requests, 40 by default, those of ``busiest``; for another moment, save a ``window``
        or the ``last``. Above is one strip a worker: a column for each task, as high as its rows, the number written
        over it where there is room (rows times steps where tasks differ in steps). Below is one row a request: a light
        bar from arrival to finish, and a box for every task it took part in. Colours are cell types, hatches are
        workers. In an SVG, the groups ``task-<worker>``, ``life-<request>``, ``boxes-<request>-<worker>`` and
        ``label-<request>`` hold the shapes. Drawing takes about 10 ms a request.

        A ``.json`` file is in Chrome's trace event format, for Perfetto or ``chrome://tracing``. It has a row for each
        worker, and every request (or those of the busiest ``count``) with the time it waited for its first task.

        Args:
            path: the file; its suffix says what is written.
            count: the most requests that are shown.
            caption: what a picture says below its time axis, besides the number of requests and tasks.

        Raises:
            ValueError: there are no requests, ``count`` is not positive, or the suffix is none of these.
            ImportError: a picture, and matplotlib is not installed.
        """
        suffix = known_suffix(path, (*PICTURES, CHROME_TRACE))
        self._require_requests("draw")
        if count is None:
            count = len(self.requests) if suffix == CHROME_TRACE else NUM_DRAWN
        shown = self.busiest(count) if count < len(self.requests) else self
        if suffix == CHROME_TRACE:
            save_chrome_trace(shown.tasks, shown.requests, Path(path))
            return
        try:
            from cellrt.view.timeline_drawing import save_drawing
        except ImportError as error:
            raise ImportError(NEEDS_MATPLOTLIB) from error
        save_drawing(shown.tasks, shown.requests, Path(path), caption)

    def _by_arrival(self) -> list[RequestSpan]:
        return sorted(self.requests, key=lambda span: (span.arrival_s, span.request))

    def _require_requests(self, verb: str) -> None:
        if not self.requests:
            raise ValueError(f"cannot {verb} a timeline without requests")

    def _tasks_of_requests(self) -> dict[int, set[int]]:
        """Request to the places of its tasks in ``tasks``."""
        tasks_of: dict[int, set[int]] = {}
        for place, task in enumerate(self.tasks):
            for request in task.requests:
                tasks_of.setdefault(request, set()).add(place)
        return tasks_of


def _percentiles(name: str, values_s: Sequence[float]) -> dict[str, float]:
    found = np.percentile(np.array(values_s, dtype=np.float64), PERCENTILES)
    return {f"{name}_p{percent}_s": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
