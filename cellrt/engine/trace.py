"""The record of an engine's tasks and requests while tracing is on."""

from __future__ import annotations

from collections import deque

from cellrt.core.state.event_log import read_events
from cellrt.core.state.tables import ADMITTED, Tables, Task
from cellrt.engine.request_group import RequestGroup
from cellrt.view.timeline import Timeline
from cellrt.view.timeline_spans import RequestSpan, TaskSpan
from cellrt.view.waits import Admission
from cellrt.worker.base import Done


class Trace:
    """The record of a timeline. It belongs to the holder of the manager's turn.

    Args:
        limit: the number of the last tasks, and of the last requests, that are kept. None: all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._tasks: deque[TaskSpan] = deque(maxlen=limit)
        self._requests: deque[RequestSpan] = deque(maxlen=limit)
        self._launched: dict[int, tuple[int, ...]] = {}

    def launch(self, task: int, sequences: tuple[int, ...]) -> None:
        """Record the requests of a task, while they are live."""
        self._launched[task] = sequences

    def complete(self, row: Task, worker: int, cell: str, done: Done) -> None:
        """Record a completed task; ``row`` is its row of the scheduler's table."""
        start_s, end_s = done.start_ns / 1e9, done.end_ns / 1e9
        number, rows, steps = int(row["number"]), int(row["rows"]), int(row["steps"])
        requests = self._launched.pop(done.task, ())
        self._tasks.append(TaskSpan(number, worker, cell, start_s, end_s, rows, steps, requests))

    def end(self, group: RequestGroup, number: int, now_ns: int) -> None:
        """Record a request that was answered."""
        arrival_s, now_s = group.arrival_ns / 1e9, now_ns / 1e9
        self._requests.append(RequestSpan(group.sequence_of(number), group.model.name, arrival_s, now_s))

    def timeline(self) -> Timeline:
        """Return the timeline so far."""
        return Timeline(list(self._tasks), list(self._requests))


def admission_of(tables: Tables, sequence: int, arrival_s: float) -> Admission | None:
    """Return a request's admission, from the event log; None if that does not reach back to its arrival.

    The first turn is the first after the arrival in which anything happened. Called in a turn.
    """
    arrival_ns, events_ns = round(arrival_s * 1e9), tables.events["now_ns"]
    admitted = [event.now_ns for event in read_events(tables, sequence) if event.what == ADMITTED]
    if not admitted or (events_ns > arrival_ns).all():  # what was never written has a 0
        return None
    turn_ns = int(events_ns[events_ns >= min(arrival_ns, admitted[0])].min())
    return Admission(turn_ns / 1e9, admitted[0] / 1e9)
