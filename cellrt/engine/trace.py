"""What an engine keeps of its tasks and requests while tracing is on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cellrt.engine.records import Bulk
from cellrt.view.spans import RequestSpan, TaskSpan
from cellrt.view.timeline import Timeline
from cellrt.worker.base import Done


@dataclass
class Trace:
    """Notes of a timeline. Belongs to the holder of the manager's turn."""

    _tasks: list[TaskSpan] = field(default_factory=list)
    _requests: list[RequestSpan] = field(default_factory=list)
    _launched: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def launch(self, task: int, sequences: tuple[int, ...]) -> None:
        """Notes which requests a task is for, while they are live."""
        self._launched[task] = sequences

    def complete(self, row: np.void, worker: int, cell: str, done: Done) -> None:
        """Notes a completed task; ``row`` is its row of the scheduler's table."""
        start_s, end_s = done.start_ns / 1e9, done.end_ns / 1e9
        number, rows, steps = int(row["number"]), int(row["rows"]), int(row["steps"])
        requests = self._launched.pop(done.task, ())
        self._tasks.append(TaskSpan(number, worker, cell, start_s, end_s, rows, steps, requests))

    def end(self, bulk: Bulk, number: int, now_ns: int) -> None:
        """Notes a request that was answered."""
        arrival_s, now_s = bulk.arrival_ns / 1e9, now_ns / 1e9
        self._requests.append(RequestSpan(bulk.sequence_of(number), bulk.model.name, arrival_s, now_s))

    def timeline(self) -> Timeline:
        """The timeline so far."""
        return Timeline(list(self._tasks), list(self._requests))
