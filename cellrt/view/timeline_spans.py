"""Records of when one task or one request ran. Times are seconds on one clock with an arbitrary zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskSpan:
    """One task: ``rows`` rows of one cell type, for ``steps`` successive steps, on one worker.

    ``requests`` holds the request of each node; a request with several nodes in the task may stand there several
    times, and a picture then writes their number into its box.
    """

    task: int
    worker: int
    cell: str
    start_s: float
    end_s: float
    rows: int
    steps: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class RequestSpan:
    """One request from its arrival until its result (or error) was handed back."""

    request: int
    label: str
    arrival_s: float
    finish_s: float


def first_starts(tasks: Iterable[TaskSpan]) -> dict[int, float]:
    """Request to the start of its first task, in seconds."""
    starts: dict[int, float] = {}
    for task in tasks:
        for request in task.requests:
            starts[request] = min(task.start_s, starts.get(request, task.start_s))
    return starts
