"""Requests in order: those that wait for room, those that have a deadline. Who has left takes no memory for long."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cellrt.core.moves import LiveState
from cellrt.engine.records import LiveRequest

K = TypeVar("K")

OLDEST_EVERY = 16
"""Every so many admissions the oldest request is the next, whatever the order says."""
SLACK = 64


class Ordered(Generic[K]):
    """A heap of requests by a key. Those that have left stay until they are on top or the larger part of it."""

    def __init__(self, is_gone: Callable[[LiveRequest], bool]) -> None:
        self._is_gone = is_gone
        self._heap: list[tuple[K, int, LiveRequest]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, key: K, request: LiveRequest) -> None:
        """Adds a request."""
        heapq.heappush(self._heap, (key, request.job.sequence, request))

    def first(self) -> tuple[K, LiveRequest] | None:
        """The least key and its request, or None."""
        while self._heap and self._is_gone(self._heap[0][2]):
            heapq.heappop(self._heap)
            self._num_gone = max(0, self._num_gone - 1)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def note_gone(self) -> None:
        """Takes in that a request in it has left; amortised constant time."""
        self._num_gone += 1
        if self._num_gone > SLACK and 2 * self._num_gone > len(self._heap):
            self._heap = [item for item in self._heap if not self._is_gone(item[2])]
            heapq.heapify(self._heap)
            self._num_gone = 0


class WaitingRequests:
    """Requests in the order of their admission: by the client's priority, then by the policy, then by arrival.

    None starves: every ``OLDEST_EVERY``-th request that is admitted is the one that waited longest.
    """

    def __init__(self) -> None:
        self._by_order: Ordered[tuple[int, float]] = Ordered(lambda request: request.state is not LiveState.WAITING)
        self._by_arrival: OrderedDict[LiveRequest, None] = OrderedDict()
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, request: LiveRequest) -> None:
        """Adds a request; it leaves by ``remove``."""
        self._by_order.push((-request.job.priority, request.order), request)
        self._by_arrival[request] = None

    def first(self) -> LiveRequest | None:
        """The request to admit next, or None."""
        if not self._by_arrival:
            return None
        if self._num_admitted % OLDEST_EVERY == 0:
            return next(iter(self._by_arrival))
        first = self._by_order.first()
        return None if first is None else first[1]

    def remove(self, request: LiveRequest) -> None:
        """Takes a request out: it was admitted, or has ended."""
        del self._by_arrival[request]
        self._by_order.note_gone()
        self._num_admitted += request.state is LiveState.ADMITTED


class Deadlines:
    """Requests by their deadline."""

    def __init__(self) -> None:
        self._by_time: Ordered[int] = Ordered(lambda request: request.is_answered)

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, request: LiveRequest) -> None:
        """Adds a request if it has a deadline."""
        if request.deadline_ns is not None:
            self._by_time.push(request.deadline_ns, request)

    def note_answered(self, request: LiveRequest) -> None:
        """Takes in that a request needs no deadline any more."""
        if request.deadline_ns is not None:
            self._by_time.note_gone()

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline of a request that has not ended."""
        first = self._by_time.first()
        return None if first is None else first[0]

    def take_late(self, now_ns: int) -> LiveRequest | None:
        """A request whose deadline has passed, or None; the caller ends it."""
        first = self._by_time.first()
        return None if first is None or first[0] > now_ns else first[1]
