"""Counts of a front end's own, for ``/metrics``; one object a process, added up over the front ends of a server."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class _Seconds(Histogram):
    """A histogram with a method for many observations at once, each at a tenth of the cost of a single one."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe each of the amounts."""
        for bucket, count in Tally(bisect_left(self._upper_bounds, amount) for amount in amounts).items():
            self._buckets[bucket].inc(count)
        self._sum.inc(sum(amounts))


class Measures:
    """Counters of one front end. With several front ends their files (``PROMETHEUS_MULTIPROC_DIR``) are added up."""

    def __init__(self, *, is_shared: bool) -> None:
        registry = CollectorRegistry()
        self.http_requests = Counter(
            "cellrt_http_requests",
            "Requests that were answered, each message of a websocket.",
            ["handler", "code"],
            registry=registry,
        )
        self.http_seconds = _Seconds(
            "cellrt_http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ["handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self.grpc_requests = Counter(
            "cellrt_grpc_requests",
            "Requests over gRPC that were answered, each one of a stream.",
            ["handler", "code"],
            registry=registry,
        )
        self.grpc_seconds = Histogram(
            "cellrt_grpc_request_duration_seconds",
            "From a request over gRPC to the end of its answer.",
            ["handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_result = Histogram(
            "cellrt_time_to_first_result_seconds",
            "From a streamed request to its first step, from a websocket's first message to its answer.",
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
        self.last_inference = Gauge(
            "cellrt_last_inference_timestamp_seconds",
            "When the last request of a model was taken or done, in seconds since 1970.",
            ["model"],
            registry=registry,
            multiprocess_mode="max",
        )
        self._last_of: dict[str, Gauge] = {}
        """Gauges by model, cached like ``_answers``."""
        self._answers: dict[tuple[str, int], tuple[Counter, _Seconds]] = {}
        """Metrics by handler and status, cached: a look-up by labels takes longer than counting."""
        self._taken: dict[str, None] = {}
        self._seconds: dict[tuple[str, int], list[float]] = {}
        """Counts of this round of the loop: models, and the seconds of answers by handler and status."""
        self.registry = CollectorRegistry() if is_shared else registry
        if is_shared:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]

    def note_inference(self, model: str) -> None:
        """Record that a request of a model was accepted or answered now; counted later, like ``count_answer``."""
        self._count_soon()
        self._taken[model] = None

    def count_answer(self, handler: str, status: int, seconds: float) -> None:
        """Count an answer, which took so long, at the end of this round of the loop, which may have many of them."""
        self._count_soon()
        self._seconds.setdefault((handler, status), []).append(seconds)

    def _count_soon(self) -> None:
        if not self._taken and not self._seconds:
            asyncio.get_running_loop().call_soon(self._count_round)

    def _count_round(self) -> None:
        taken, self._taken = self._taken, {}
        for model in taken:
            gauge = self._last_of.get(model)
            if gauge is None:
                gauge = self._last_of[model] = self.last_inference.labels(model)
            gauge.set(time.time())
        each, self._seconds = self._seconds, {}
        for (handler, status), seconds in each.items():
            self._count(handler, status, seconds)

    def last_inference_ms(self, model: str) -> int:
        """Return when ``note_inference`` was last called at any front end, in milliseconds since 1970; 0: never."""
        last_s = self.registry.get_sample_value("cellrt_last_inference_timestamp_seconds", {"model": model})
        return round(1e3 * (last_s or 0.0))

    def _count(self, handler: str, status: int, seconds: Sequence[float]) -> None:
        found = self._answers.get((handler, status))
        if found is None:
            found = self.http_requests.labels(handler, str(status)), self.http_seconds.labels(handler)
            self._answers[handler, status] = found
        found[0].inc(len(seconds))
        found[1].observe_all(seconds)

    def count_call(self, handler: str, code: str, seconds: float) -> None:
        """Count an answer over gRPC, by the name of its status."""
        self.grpc_requests.labels(handler, code).inc()
        self.grpc_seconds.labels(handler).observe(seconds)

    def first_result_of(self, model: str) -> Callable[[], None]:
        """Return a function to call with each result of a model's stream, which begins now: it observes the first one's
        time.
        """
        begin_s, is_first = time.perf_counter(), True

        def note() -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self.first_result.labels(model).observe(time.perf_counter() - begin_s)

        return note
