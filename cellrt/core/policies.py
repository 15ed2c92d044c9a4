"""The policies that are there. ``docs/policies.md`` says how to write another."""

from __future__ import annotations

from typing import Any

from cellrt.core.policy import Policy


def by_length(waiting: Any, asked: Any) -> None:
    """Score what waits by its request's nodes."""
    for k in range(waiting.size):
        waiting[k].score = waiting[k].length


def by_deadline(waiting: Any, asked: Any) -> None:
    """Score what waits by when it must be done; what has no deadline comes last."""
    for k in range(waiting.size):
        waiting[k].score = waiting[k].deadline_ns


def lowest_score(ready: Any, asked: Any) -> int:
    """Choose the cell type that has the first in order of all that waits."""
    best = 0
    for k in range(1, ready.size):
        if ready[k].first_score < ready[best].first_score:
            best = k
    return best


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(),
        Policy("first-come-first-served", by_first=True),
        Policy("shortest-job-first", by_length, admit_by="length"),
        Policy("earliest-deadline-first", by_deadline, lowest_score, by_first=True, admit_by="deadline"),
    )
}
"""By name; the first, BatchMaker's Algorithm 1, is the default."""
