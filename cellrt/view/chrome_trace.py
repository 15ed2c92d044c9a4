"""A timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Tasks are
complete events (``X``) in a row for each worker. A request is a nestable asynchronous event (``b`` to ``e``) from its
arrival to its answer, and inside it another from its arrival to the start of its first task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cellrt.view.timeline_spans import RequestSpan, TaskSpan, first_starts
from cellrt.view.waits import Wait

WORKERS, REQUESTS = 1, 2
"""The two processes that the viewer shows."""
Event = dict[str, Any]


def save_chrome_trace(tasks: Sequence[TaskSpan], requests: Sequence[RequestSpan], path: Path) -> None:
    """Write tasks and requests as JSON."""
    path.write_text(json.dumps(chrome_trace(tasks, requests)))


def chrome_trace(
    tasks: Sequence[TaskSpan], requests: Sequence[RequestSpan], waits: Mapping[int, Wait] | None = None
) -> dict[str, Any]:
    """Return tasks and requests in the format, for JSON; times are from ``zero_s`` on the spans' own clock.

    ``waits``: by task, what the one request that is shown waited for.
    """
    zero_s = min((*(span.arrival_s for span in requests), *(task.start_s for task in tasks)), default=0.0)
    events = [*_names(tasks), *_task_events(tasks, waits or {}, zero_s), *_request_events(tasks, requests, zero_s)]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"zero_s": zero_s}}


def _names(tasks: Sequence[TaskSpan]) -> Iterator[Event]:
    """Yield the events that name the viewer's rows."""
    for process, name in ((WORKERS, "workers"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for worker in sorted({task.worker for task in tasks}):
        yield {"ph": "M", "pid": WORKERS, "tid": worker, "name": "thread_name", "args": {"name": f"worker {worker}"}}


def _task_events(tasks: Sequence[TaskSpan], waits: Mapping[int, Wait], zero_s: float) -> Iterator[Event]:
    for task in tasks:
        waited = {"waited": _wait(waits[task.task])} if task.task in waits else {}
        yield {
            "ph": "X",
            "cat": "task",
            "name": task.cell,
            "pid": WORKERS,
            "tid": task.worker,
            "ts": _microseconds(task.start_s - zero_s),
            "dur": _microseconds(task.end_s - task.start_s),
            "args": {
                "task": task.task,
                "rows": task.rows,
                "steps": task.steps,
                "requests": list(dict.fromkeys(task.requests)),
                **waited,
            },
        }


def _wait(wait: Wait) -> dict[str, Any]:
    """Return how long a wait was, and for what."""
    ran = [{"task": task.task, "cell": task.cell} for task in wait.worker_ran]
    parts = {name: getattr(wait, name) for name in ("admission_s", "worker_s", "scheduler_s", "unknown_s")}
    return {"waited_s": wait.total_s, "waited_for": {**parts, "worker_ran": ran}}


def _request_events(tasks: Sequence[TaskSpan], requests: Sequence[RequestSpan], zero_s: float) -> Iterator[Event]:
    starts = first_starts(tasks)
    for span in requests:
        common = {"cat": "request", "id": span.request, "pid": REQUESTS, "tid": 0}
        arrival_us, finish_us = _microseconds(span.arrival_s - zero_s), _microseconds(span.finish_s - zero_s)
        name = span.label or f"request {span.request}"
        yield {"ph": "b", "name": name, "ts": arrival_us, "args": {"request": span.request}, **common}
        if span.request in starts:
            yield {"ph": "b", "name": "queueing", "ts": arrival_us, **common}
            yield {"ph": "e", "name": "queueing", "ts": _microseconds(starts[span.request] - zero_s), **common}
        yield {"ph": "e", "name": name, "ts": finish_us, **common}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
