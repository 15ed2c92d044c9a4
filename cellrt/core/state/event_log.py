"""The event log: a bounded ring of the requests' events. An error shows the events of its request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import ADMITTED, COMPLETED, ENDED, FAILED, LAUNCHED, RELEASED, Tables
from cellrt.native.jit import inlined

NAMES = {
    ADMITTED: "admitted",
    RELEASED: "subgraph released",
    LAUNCHED: "launched",
    COMPLETED: "completed",
    FAILED: "failed",
    ENDED: "ended",
}


class Event(NamedTuple):
    """One line of the log: time in ns of the engine's clock, request sequence number, task number or -1."""

    now_ns: int
    sequence: int
    task: int
    what: int
    detail: int

    def __str__(self) -> str:
        task = f" task {self.task}" if self.task >= 0 else ""
        return f"{self.now_ns / 1e6:.3f} ms: request {self.sequence} {NAMES[self.what]}{task} ({self.detail})"


@inlined
def log_event(t: Tables, what: int, request_id: int, task: int, detail: int) -> None:
    """Append one event; the oldest is overwritten. An empty ring records nothing."""
    if t.events.size == 0:
        return
    settings = t.settings[0]
    event = t.events[settings.num_events % t.events.size]
    event.now_ns = settings.now_ns
    event.sequence = t.requests[request_id].sequence
    event.task = task
    event.what = what
    event.detail = detail
    settings.num_events += 1


def read_events(t: Tables, sequence: int | None) -> list[Event]:
    """Return the events that are still in the ring, of one request or of all."""
    count, size = int(t.settings["num_events"][0]), t.events.size
    if size == 0:
        return []
    numbers = np.arange(max(0, count - size), count)
    rows: NDArray[np.void] = t.events[numbers % size]
    if sequence is not None:
        rows = rows[rows["sequence"] == sequence]
    return [Event(*(int(field) for field in row)) for row in rows.tolist()]
