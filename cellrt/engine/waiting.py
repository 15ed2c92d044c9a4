"""Requests in order: those that wait for room, those that have a deadline. Who has left takes no memory for long."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from cellrt.engine.records import Bulk

K = TypeVar("K")

OLDEST_EVERY = 16
"""Every so many admissions the oldest request is the next, whatever the order says."""
SLACK = 64


class Ordered(Generic[K]):
    """Bulks by a key, least first, and in the order of their arrival.

    Keys that never fall, which is usual, cost no search. Those that have left stay until they are first or the larger
    part.
    """

    def __init__(self, is_gone: Callable[[Bulk], bool]) -> None:
        self._is_gone = is_gone
        self._line: deque[tuple[K, int, Bulk]] = deque()
        """Ascending: those that were no less than the last when they came."""
        self._heap: list[tuple[K, int, Bulk]] = []
        """The others."""
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    @property
    def is_line(self) -> bool:
        """Whether they came in their order: then no other order is theirs."""
        return not self._heap

    def behind_first(self) -> Iterator[Bulk]:
        """Those that came in their order, but for the first; some may have left."""
        return (bulk for _, _, bulk in islice(self._line, 1, None))

    def push(self, key: K, bulk: Bulk) -> None:
        """Adds a bulk."""
        item = key, bulk.job.sequence, bulk
        if not self._line or self._line[-1][:2] <= item[:2]:  # type: ignore[operator]
            self._line.append(item)
        else:
            heapq.heappush(self._heap, item)

    def first(self) -> tuple[K, Bulk] | None:
        """The least key and its bulk, or None."""
        line, heap, is_gone = self._line, self._heap, self._is_gone
        while line and is_gone(line[0][2]):
            line.popleft()
            self._num_gone = max(0, self._num_gone - 1)
        while heap and is_gone(heap[0][2]):
            heapq.heappop(heap)
            self._num_gone = max(0, self._num_gone - 1)
        if not line and not heap:
            return None
        item = line[0] if not heap or (line and line[0][:2] < heap[0][:2]) else heap[0]  # type: ignore[operator]
        return item[0], item[2]

    def note_gone(self) -> None:
        """Takes in that a bulk in it has left; amortised constant time."""
        self._num_gone += 1
        if self._num_gone > SLACK and 2 * self._num_gone > len(self):
            self._line = deque(item for item in self._line if not self._is_gone(item[2]))
            self._heap = [item for item in self._heap if not self._is_gone(item[2])]
            heapq.heapify(self._heap)
            self._num_gone = 0


class WaitingRequests:
    """Requests in the order of their admission: by the client's priority, then by the policy, then by arrival.

    None starves: every ``OLDEST_EVERY``-th request that is admitted is the one that waited longest.
    """

    def __init__(self) -> None:
        self._by_order: Ordered[tuple[int, float]] = Ordered(_waits_no_more)
        self._by_arrival: Ordered[int] = Ordered(_waits_no_more)
        self._num_arrived = 0
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, bulk: Bulk) -> None:
        """Adds the requests of a bulk; it leaves by ``note_gone``."""
        self._num_arrived += 1
        bulk.place = self._num_arrived
        self._by_order.push((-bulk.job.priority, bulk.order), bulk)
        self._by_arrival.push(bulk.place, bulk)

    def first(self) -> Bulk | None:
        """The bulk that has the request to admit next; None if none waits."""
        oldest = self._by_arrival.first()
        if oldest is None:
            return None
        first = self._by_order.first()
        return oldest[1] if first is None or not self._num_admitted % OLDEST_EVERY else first[1]

    def run(self, first: Bulk, most: int) -> list[tuple[Bulk, Sequence[int]]]:
        """The requests of ``first`` to admit next, and of those behind it that may be admitted with them.

        At most so many, and no more than come before the turn of the oldest.
        """
        oldest = self._by_arrival.first()
        if oldest is None or oldest[1] is not first:
            return [(first, first.waiting(min(most, -self._num_admitted % OLDEST_EVERY)))]
        is_first = (by_order := self._by_order.first()) is not None and by_order[1] is first
        found = [(first, first.waiting(most if is_first else 1))]
        left = most - len(found[0][1])
        if self._by_order.is_line and first.session is None and left:
            for bulk in self._by_order.behind_first():
                if not bulk.goes_with(first) or not left:
                    break
                if bulk.num_waiting:
                    found.append((bulk, bulk.waiting(left)))
                    left -= len(found[-1][1])
        return found

    def note_admitted(self, count: int) -> None:
        """Takes in that so many requests were admitted."""
        self._num_admitted += count

    def note_gone(self) -> None:
        """Takes in that no request of a bulk waits any more: the last was admitted, or has ended."""
        self._by_order.note_gone()
        self._by_arrival.note_gone()


def _waits_no_more(bulk: Bulk) -> bool:
    return not bulk.num_waiting


class Deadlines:
    """Requests by their deadline."""

    def __init__(self) -> None:
        self._by_time: Ordered[int] = Ordered(lambda bulk: not bulk.num_left)

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, bulk: Bulk) -> None:
        """Adds the requests of a bulk if they have a deadline."""
        if bulk.deadline_ns is not None:
            self._by_time.push(bulk.deadline_ns, bulk)

    def note_answered(self, bulk: Bulk) -> None:
        """Takes in that no request of a bulk needs a deadline any more."""
        if bulk.deadline_ns is not None:
            self._by_time.note_gone()

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline of a request that has not ended."""
        first = self._by_time.first()
        return None if first is None else first[0]

    def take_late(self, now_ns: int) -> Bulk | None:
        """A bulk whose deadline has passed, or None; the caller ends it."""
        first = self._by_time.first()
        return None if first is None or first[0] > now_ns else first[1]
