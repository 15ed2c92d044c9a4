"""OpenTelemetry's spans of requests, for clients that ask for them by a W3C ``traceparent`` that is sampled.

Spans are made after the answer, from the tasks that the engine remembers for ``/debug``; a request without them costs
nothing. Belongs to the front end's event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellrt.errors import CellrtError, DefinitionError
from cellrt.serve.backend import Backend
from cellrt.serve.inference import SEEN

log = logging.getLogger("cellrt")
EXPORTER = "OTEL_TRACES_EXPORTER"
DEFAULT_EXPORTER = "otlp_proto_http"
US, NS = 1e3, 1e9
"""Nanoseconds in a microsecond and in a second."""


def make_provider() -> TracerProvider:
    """Return the provider that OpenTelemetry's environment variables describe.

    Raise DefinitionError for a wrong exporter.
    """
    name = os.environ.get(EXPORTER, DEFAULT_EXPORTER)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise DefinitionError(f"{EXPORTER}: no exporter {name!r} is installed")
    default = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "cellrt"}
    provider = TracerProvider(resource=Resource.create(default))
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    return provider


class Traced:
    """ASGI middleware that writes spans.

    Args:
        app: answers.
        backend: its engine remembers the requests.
        provider: exports the spans.
        with_tasks: whether each task of a request is an event.
    """

    def __init__(self, app: ASGIApp, backend: Backend, provider: TracerProvider, *, with_tasks: bool) -> None:
        self._app, self._backend, self._with_tasks = app, backend, with_tasks
        self._tracer = provider.get_tracer("cellrt")
        self._propagator = TraceContextTextMapPropagator()
        self._writing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, in a span if its client asks for one."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "traceparent" not in headers:
            await self._app(scope, receive, send)
            return
        parent = self._propagator.extract(headers)
        if trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            await self._answer_in_span(parent, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_in_span(self, parent: Any, scope: Scope, receive: Receive, send: Send) -> None:
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = self._tracer.start_span("request", parent, trace.SpanKind.SERVER, attributes)

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(trace.Status(trace.StatusCode.ERROR))
            await send(message)

        seen: list[str] = []
        token = SEEN.set(seen)
        try:
            await self._app(scope, receive, note)
        finally:
            SEEN.reset(token)
            model = scope.get("path_params", {}).get("model")
            if model is not None:
                span.set_attribute("cellrt.model", model)
            span.end()
            for id in seen:
                task = asyncio.create_task(self._write_way(span, id), context=contextvars.Context())
                self._writing.add(task)
                task.add_done_callback(self._writing.discard)

    async def _write_way(self, span: trace.Span, id: str) -> None:
        """Write the spans of a request's queueing and computation, within its span."""
        try:
            told = msgspec.json.decode(await self._backend.call("timeline_events", request=id))
        except CellrtError as error:  # it was answered long ago, or the engine is gone
            log.debug("request %s has no spans: %s", id, error)
            return
        zero_ns = int(told["otherData"]["zero_s"] * NS) + time.time_ns() - time.perf_counter_ns()
        self._write_parts(trace.set_span_in_context(span), told["traceEvents"], zero_ns)

    def _write_parts(self, parent: Any, events: Sequence[dict[str, Any]], zero_ns: int) -> None:
        """Write spans of the queueing, and of the computation from the first task's begin to the last one's end."""
        tasks = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
        arrival_us = next(event["ts"] for event in events if event["ph"] == "b" and event["name"] != "queueing")
        if not tasks:
            return

        def at(us: float) -> int:
            return zero_ns + int(us * US)

        begin_ns = at(tasks[0]["ts"])
        queueing = self._tracer.start_span("queueing", parent, start_time=at(arrival_us))
        queueing.end(begin_ns)
        attributes = {"cellrt.tasks": len(tasks)}
        computing = self._tracer.start_span("computation", parent, attributes=attributes, start_time=begin_ns)
        for task in tasks if self._with_tasks else ():
            told = {name: task["args"][name] for name in ("task", "rows", "steps")}
            told |= {"worker": task["tid"], "took_us": task["dur"], "together_with": len(task["args"]["requests"]) - 1}
            computing.add_event(task["name"], told, at(task["ts"]))
        computing.end(max(at(task["ts"] + task["dur"]) for task in tasks))
