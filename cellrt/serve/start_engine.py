"""Starting the engine's process of a server, with its models."""

from __future__ import annotations

from itertools import zip_longest

from cellrt.process.starting import Started
from cellrt.serve.server_settings import Settings
from cellrt.worker.cores import num_cores

MOST_WORKERS = 30
"""The most CPU workers of an engine."""


def workers_of(settings: Settings) -> int | list[str]:
    """Return the engine's ``workers``: by default a CPU worker for each core that the front ends leave."""
    if settings.workers is None:
        return max(1, min(MOST_WORKERS, num_cores() - settings.front_ends))
    return list(settings.workers) if isinstance(settings.workers, tuple) else settings.workers


def start_engine(settings: Settings) -> Started:
    """Start the engine's process without waiting for it; it ends when its last worker has died. Raise DeviceError."""
    options = {
        "workers": workers_of(settings),
        "max_queue": settings.max_queued_requests,
        "max_queue_rows": settings.max_queued_rows,
        "trace": settings.timeline or False,
        "compile": settings.compile,
        **settings.engine.for_engine(),
    }
    limits = {"max_queue": settings.max_queued_per_model, "max_queue_rows": settings.max_queued_rows_per_model}
    models = [
        (model, {**limits, "max_batch": max_batch})
        for model, max_batch in zip_longest(settings.models, settings.max_batch)
    ]
    return Started(settings.address, options, models, ends_without_workers=True)
