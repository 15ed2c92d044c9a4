"""The engine's counts for ``/metrics``, in Prometheus' format; units are in the names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cellrt.engine.occupancy import UNITS
from cellrt.engine.statistics import EAGER, NUM_SIZES, TIME_BOUNDS_S

PARTS = {
    "queueing": "From a request's arrival to the launch of its first task.",
    "computation": "From the launch of a request's first task to its answer.",
}


class EngineMetrics(Collector):
    """The metrics of one result of ``Engine.statistics``; None if there is no engine now."""

    def __init__(self, counts: Mapping[str, Any] | None, models: Sequence[Mapping[str, Any]]) -> None:
        self._counts, self._models = counts, models

    def collect(self) -> Iterator[Metric]:
        """Yield all families of metrics."""
        yield GaugeMetricFamily("cellrt_up", "Whether the engine's process is there.", int(self._counts is not None))
        if self._counts is None:
            return
        yield from _of_models(self._counts["models"])
        yield from _of_cells(self._counts["cells"])
        yield from _of_rows(self._counts["rows"])
        yield from _of_the_rest(self._counts)
        versions = GaugeMetricFamily("cellrt_model_version", "How often a model was registered.", labels=["model"])
        for entry in self._models:
            versions.add_metric([entry["name"]], entry["version"] if entry["is_loaded"] else 0)
        yield versions


def _of_models(models: Mapping[str, Any]) -> Iterator[Metric]:
    ended = CounterMetricFamily("cellrt_requests", "Requests that ended, by how.", labels=["model", "outcome"])
    missed = CounterMetricFamily("cellrt_deadline_misses", "Requests whose deadline passed.", labels=["model"])
    live = GaugeMetricFamily("cellrt_live_requests", "Requests that have not ended.", labels=["model"])
    for name, counts in models.items():
        ended.add_metric([name, "done"], counts["done"])
        for error, count in counts["errors"].items():
            ended.add_metric([name, error], count)
        missed.add_metric([name], counts["errors"].get("DeadlineError", 0))
        live.add_metric([name], counts["unfinished"])
    yield from (ended, missed, live)
    for part, what in PARTS.items():
        family = HistogramMetricFamily(f"cellrt_request_{part}_seconds", what, labels=["model"])
        for name, counts in models.items():
            histogram = counts["histograms"][part]
            bounds = [str(bound) for bound in TIME_BOUNDS_S]
            family.add_metric([name], _cumulative(bounds, histogram["counts"]), histogram["sum_s"])
        yield family


def _of_cells(cells: Mapping[str, Any]) -> Iterator[Metric]:
    for name, key, what in (
        ("cellrt_tasks", "tasks", "Tasks that were run."),
        ("cellrt_nodes", "nodes", "Nodes that were computed; of a chain or loop: steps."),
        ("cellrt_tasks_retried", "retried", "Tasks that failed and were tried again in halves."),
    ):
        counter = CounterMetricFamily(name, what, labels=["cell"])
        for cell, counts in cells.items():
            counter.add_metric([cell], counts[key])
        yield counter
    compiled = GaugeMetricFamily("cellrt_cell_compiled", "Whether a compiled form runs it on a CPU.", labels=["cell"])
    ready = GaugeMetricFamily("cellrt_nodes_ready", "Nodes that could run now.", labels=["cell"])
    sizes = HistogramMetricFamily("cellrt_task_rows", "Rows of a task at its first step.", labels=["cell"])
    bounds = [str(float(1 << power)) for power in range(NUM_SIZES - 1)]
    for cell, counts in cells.items():
        compiled.add_metric([cell], not counts["form"].startswith(EAGER))
        ready.add_metric([cell], counts["ready"])
        sizes.add_metric([cell], _cumulative(bounds, counts["batch_sizes"]), counts["rows"])
    yield from (compiled, ready, sizes)


def _of_rows(places: Mapping[str, Any]) -> Iterator[Metric]:
    for unit in UNITS:
        size = GaugeMetricFamily(f"cellrt_arena_{unit}", f"{unit.capitalize()} of arenas.", labels=["place"])
        used = GaugeMetricFamily(f"cellrt_arena_used_{unit}", f"{unit.capitalize()} in use.", labels=["place"])
        for place, counts in places.items():
            size.add_metric([place], counts[unit])
            used.add_metric([place], counts[f"used_{unit}"])
        yield from (size, used)


def _of_the_rest(counts: Mapping[str, Any]) -> Iterator[Metric]:
    busy = CounterMetricFamily("cellrt_worker_busy_seconds", "Time spent in tasks.", labels=["worker"])
    for location, worker in counts["workers"].items():
        busy.add_metric([str(location)], worker["busy_s"])
    yield busy
    yield GaugeMetricFamily(
        "cellrt_unfinished_rows", "Rows of requests that have not ended.", counts["unfinished_rows"]
    )
    sessions = counts["sessions"]
    yield GaugeMetricFamily("cellrt_sessions_open", "Sessions that are open.", sessions["open"])
    yield GaugeMetricFamily("cellrt_sessions_resident", "Idle sessions with state at a worker.", sessions["resident"])
    yield CounterMetricFamily("cellrt_session_evictions", "Moves of a state to host memory.", sessions["evictions"])
    yield CounterMetricFamily(
        "cellrt_sessions_closed_for_memory",
        "Sessions that were closed because the states in host memory took all that they may.",
        sessions["closed_for_memory"],
    )
    sizes = GaugeMetricFamily(
        "cellrt_session_bytes",
        "States of sessions without a running request: in arenas, and saved in host memory beside them.",
        labels=["place"],
    )
    for place, size in sessions["bytes"].items():
        sizes.add_metric([place], size)
    yield sizes
    yield GaugeMetricFamily(
        "cellrt_session_saved_bytes_limit", "What saved states may take.", sessions["max_saved_bytes"]
    )
    yield GaugeMetricFamily("cellrt_clients", "Connections to the engine's process.", counts["clients"])


def _cumulative(bounds: Sequence[str], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return the cumulative buckets up to each bound and to infinity."""
    total, buckets = 0, []
    for bound, count in zip([*bounds, "+Inf"], counts):
        total += count
        buckets.append((bound, float(total)))
    return buckets
