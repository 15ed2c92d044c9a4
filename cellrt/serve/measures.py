"""What a front end counts itself, for ``/metrics``; one object a process, added up over the front ends of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Measures:
    """Counters of one front end. With several front ends their files (``PROMETHEUS_MULTIPROC_DIR``) are added up."""

    def __init__(self, *, is_shared: bool) -> None:
        registry = CollectorRegistry()
        self.http_requests = Counter(
            "cellrt_http_requests", "Requests that were answered.", ["handler", "code"], registry=registry
        )
        self.http_seconds = Histogram(
            "cellrt_http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ["handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_result = Histogram(
            "cellrt_time_to_first_result_seconds",
            "From a streamed request to its first step.",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.rejections = Counter(
            "cellrt_rejections", "Requests that were refused because there were too many.", ["model"], registry=registry
        )
        self.streams = Gauge(
            "cellrt_streams_open", "Streams that are open.", registry=registry, multiprocess_mode="livesum"
        )
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        """Of those that have been: to look them up by their labels takes longer than to count."""
        self.registry = CollectorRegistry() if is_shared else registry
        if is_shared:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]

    def count_answer(self, handler: str, status: int, seconds: float) -> None:
        """Counts an answer, which took so long."""
        found = self._answers.get((handler, status))
        if found is None:
            found = self.http_requests.labels(handler, str(status)), self.http_seconds.labels(handler)
            self._answers[handler, status] = found
        found[0].inc()
        found[1].observe(seconds)
