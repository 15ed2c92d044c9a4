"""Spans of a request: only for clients that ask, with times that fit, and the tasks that it was in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cellrt.errors import DefinitionError
from cellrt.process.address import new_address
from cellrt.serve.app import kept_connected, make_app
from cellrt.serve.backend import Backend
from cellrt.serve.inference import InferenceService
from cellrt.serve.measures import Measures
from cellrt.serve.server_settings import Settings
from cellrt.serve.start_engine import start_engine
from cellrt.serve.telemetry import Traced, make_provider
from tests.steps import RAISE

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
TIME_S = 60.0


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """Of a server whose engine's process is there."""
    models = tuple(f"tests.serve.models:{name}" for name in ("chain", "letters"))
    made = Settings(models=models, workers=1, address=new_address())
    started = start_engine(made)
    started.wait()
    yield made
    started.end()


async def ask(
    settings: Settings, body: Any, traceparent: str, *, with_tasks: bool = False
) -> tuple[int, dict[str, Any]]:
    """The status of a request of its own server, and its spans by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    backend = Backend(settings)
    app = make_app(
        InferenceService(backend, Measures(is_shared=False)),
        lambda app: Traced(app, backend, provider, with_tasks=with_tasks),
    )
    async with asyncio.timeout(TIME_S), kept_connected(backend):
        await backend.is_connected.wait()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            path = "/v1/models/letters/infer" if isinstance(body["request"], str) else "/v1/models/chain/infer"
            answer = await http.post(path, json=body, headers={"traceparent": traceparent})
            expected = 3 if traceparent == ASKED and answer.status_code == 200 else 0
            while len(exporter.get_finished_spans()) < expected:
                await asyncio.sleep(0.01)
    return answer.status_code, {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_is_a_span_of_its_client_s_trace_with_its_parts_inside(settings: Settings) -> None:
    before_ns = time.time_ns()
    status, spans = await ask(settings, {"request": [[1, 2]] * 3}, ASKED)
    assert status == 200 and spans.keys() == {"request", "queueing", "computation"}
    request, queueing, computation = spans["request"], spans["queueing"], spans["computation"]
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in spans.values())
    assert f"{request.parent.span_id:016x}" == PARENT and request.kind.name == "SERVER"
    assert request.attributes["cellrt.model"] == "chain" and request.attributes["http.response.status_code"] == 200
    assert {queueing.parent.span_id, computation.parent.span_id} == {request.context.span_id}
    assert computation.events == ()

    slack_ns = 5_000_000  # two clocks are read one after the other
    assert queueing.end_time == computation.start_time
    times = [before_ns, request.start_time, queueing.start_time, computation.start_time, computation.end_time]
    for earlier, later in zip(times, [*times[1:], request.end_time]):
        assert earlier <= later + slack_ns


async def test_each_task_is_an_event_if_that_is_asked_for(settings: Settings) -> None:
    _, spans = await ask(settings, {"request": [[1, 2]] * 3}, ASKED, with_tasks=True)
    events = spans["computation"].events
    assert events and {event.name for event in events} == {"step"}
    assert sum(event.attributes["steps"] for event in events) == 3
    assert all(event.attributes["rows"] == 1 and event.attributes["together_with"] == 0 for event in events)
    assert len(events) == spans["computation"].attributes["cellrt.tasks"]


async def test_a_stream_has_its_spans_too(settings: Settings) -> None:
    status, spans = await ask(settings, {"request": "abc", "stream": True}, ASKED)
    assert status == 200 and spans.keys() == {"request", "queueing", "computation"}


@pytest.mark.parametrize("traceparent", [NOT_SAMPLED, "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
async def test_whoever_does_not_ask_gets_no_spans(settings: Settings, traceparent: str) -> None:
    assert await ask(settings, {"request": [[1, 2]]}, traceparent) == (200, {})


async def test_a_request_that_fails_is_a_span_that_says_so(settings: Settings) -> None:
    status, spans = await ask(settings, {"request": [[RAISE, 0]]}, ASKED)
    assert status == 500
    assert not spans["request"].status.is_ok and spans["request"].attributes["http.response.status_code"] == 500


def test_the_exporter_is_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    make_provider().shutdown()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none of them")
    with pytest.raises(DefinitionError, match="no exporter 'none of them' is installed"):
        make_provider()
