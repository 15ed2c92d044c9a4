"""A request from submission to its end, and the queue in which requests wait for room in the tables and arenas."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from cellrt.core.policy import Job
from cellrt.engine.future import Channel, RequestFuture
from cellrt.engine.registry import Plan
from cellrt.engine.session_store import SessionRecord
from cellrt.errors import CellrtError

OLDEST_EVERY = 16
"""Every so many admissions the oldest request is the next, whatever the order says."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request from submission to its end."""

    future: RequestFuture
    plan: Plan
    model: str
    job: Job
    arrival_ns: int
    deadline_ns: int | None
    channel: Channel | None
    order: float
    """The policy's admission key."""
    lane: int
    session: SessionRecord | None = None
    id: int = -1
    """Its id in the processor once it is admitted."""
    results_at: int = -1
    num_streamed: int = 0
    ended: bool = False
    error: CellrtError | None = None


class WaitingRequests:
    """Requests in the order of their admission: by the client's priority, then by the policy, then by arrival.

    None starves: every ``OLDEST_EVERY``-th request that is admitted is the one that waited longest.
    """

    def __init__(self) -> None:
        self._by_order: list[tuple[int, float, int, LiveRequest]] = []
        self._by_arrival: deque[LiveRequest] = deque()
        self._num_admitted = 0

    def add(self, request: LiveRequest) -> None:
        """Adds a request; it leaves by being admitted or ended."""
        heapq.heappush(self._by_order, (-request.job.priority, request.order, request.job.sequence, request))
        self._by_arrival.append(request)

    def first(self) -> LiveRequest | None:
        """The request to admit next, or None."""
        by_order, by_arrival = self._by_order, self._by_arrival
        while by_order and (by_order[0][-1].id >= 0 or by_order[0][-1].ended):
            heapq.heappop(by_order)
        while by_arrival and (by_arrival[0].id >= 0 or by_arrival[0].ended):
            by_arrival.popleft()
        if not by_order:
            return None
        return by_arrival[0] if self._num_admitted % OLDEST_EVERY == 0 else by_order[0][-1]

    def count_admitted(self) -> None:
        """Notes that the first was admitted."""
        self._num_admitted += 1
