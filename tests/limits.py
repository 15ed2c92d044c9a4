"""Small tables: tests make many, and the validator reads all of them at every step."""

from __future__ import annotations

from cellrt.core.state.settings import Limits

SMALL = Limits(
    max_requests=64,
    max_nodes=4096,
    max_values=8192,
    max_links=32_768,
    max_subgraphs=2048,
    max_places=65_536,
    max_tasks=32,
    max_sessions=16,
    max_events=256,
)
