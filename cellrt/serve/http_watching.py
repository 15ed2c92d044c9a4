"""Handlers for people and scrapers: ``/metrics``, ``/debug``, the OpenAPI document, and pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from cellrt.errors import DefinitionError, DeviceError, RequestError
from cellrt.serve.http import json_response
from cellrt.serve.inference import InferenceService, error_json
from cellrt.serve.metrics import EngineMetrics
from cellrt.serve.oip import MOST_DIGITS
from cellrt.serve.openapi import MOST_SHOWN, document

US = 1e6
END = b"# EOF\n"
PAGES = {"/": "page.html", "/docs": "docs.html"}


class WatchingHandlers:
    """The handlers. ``service``: its engine and counts are shown."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._backend = service, service.backend

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all handlers."""
        pages = [Route(path, self.page, name=name) for path, name in PAGES.items()]
        return [
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/debug/statistics", self.statistics),
            Route("/debug/timeline", self.timeline),
            Route("/debug/requests/{id}", self.request_story),
            *pages,
        ]

    async def metrics(self, request: Request) -> Response:
        """Return counts of the engine and of all front ends."""
        try:
            counts, models = await self._backend.call("statistics"), await self._backend.call("models")
        except DeviceError:
            counts, models = None, []
        registry = CollectorRegistry()
        registry.register(EngineMetrics(counts, models))
        if "application/openmetrics-text" not in request.headers.get("accept", ""):
            text = b"".join(map(generate_latest, (registry, self._service.measures.registry)))
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        engine, own = map(exposition.generate_latest, (registry, self._service.measures.registry))
        return Response(engine.removesuffix(END) + own, media_type=exposition.CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        entries = await self._backend.call("models")
        models = []
        for entry in entries:
            if entry["is_loaded"]:
                with suppress(DefinitionError):  # one that cannot be served: its own answers say why
                    models.append(await self._backend.model(entry["name"]))
        return json_response(document(models, has_keys=bool(self._backend.settings.api_keys)))

    async def statistics(self, request: Request) -> Response:
        """Return the result of ``Engine.statistics``, for the live page."""
        return json_response(await self._backend.call("statistics"))

    async def timeline(self, request: Request) -> Response:
        """Return the last requests and tasks as a Chrome trace, for Perfetto."""
        self._refuse_without_timeline()
        given = request.query_params.get("count", "1000")
        if not given.isdecimal() or len(given) > MOST_DIGITS or not 0 < int(given) <= MOST_SHOWN:
            raise RequestError(f"count: expected 1 to {MOST_SHOWN}, got {given!r:.40}")
        events = await self._backend.call("timeline_events", count=int(given))
        return Response(events, media_type="application/json")

    async def request_story(self, request: Request) -> Response:
        """Return the tasks of a request, with its waits before each and their reasons;
        ``?format=trace``: for Perfetto.
        """
        self._refuse_without_timeline()
        format = request.query_params.get("format")
        if format not in (None, "trace"):
            raise RequestError(f"format: expected trace, or none, got {format!r:.40}")
        try:
            events = await self._backend.call("timeline_events", request=request.path_params["id"])
        except RequestError as error:
            return json_response(error_json(error), 404)
        if format == "trace":
            return Response(events, media_type="application/json")
        return json_response(story(msgspec.json.decode(events)["traceEvents"]))

    def _refuse_without_timeline(self) -> None:
        if not self._backend.settings.timeline:
            raise RequestError("this server keeps no timeline: start it with --timeline 2000")

    async def page(self, request: Request) -> Response:
        """Return a page for people."""
        return HTMLResponse(files("cellrt.serve").joinpath(PAGES[request.url.path]).read_text())


def story(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the tasks of one request, in order, from the events of its Chrome trace; times in seconds from its
    arrival.
    """
    begin, end = (
        next(event for event in events if event["ph"] == mark and event["name"] != "queueing") for mark in "be"
    )
    tasks = []
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        tasks.append(
            {
                "cell": event["name"],
                "worker": event["tid"],
                **event["args"]["waited"],
                "start_s": (event["ts"] - begin["ts"]) / US,
                "took_s": event["dur"] / US,
                **{name: event["args"][name] for name in ("task", "rows", "steps")},
                "together_with": len(event["args"]["requests"]) - 1,
            }
        )
    return {"model": begin["name"], "took_s": (end["ts"] - begin["ts"]) / US, "tasks": tasks}
