"""The requests that wait for room, and those that have a deadline, in order.

Requests that have left take no memory for long.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice

from cellrt.core.processor import Processor
from cellrt.engine.least_times import least_time
from cellrt.engine.request_group import RequestGroup

OLDEST_EVERY = 16
"""The number of admissions after which the oldest request is the next, whatever the order."""
SLACK, FEW = 64, 8
TRIED_EVERY = 16
"""The number of hopeless submissions of a model of which one is tried."""


class WaitingRequests:
    """Requests in the order of their admission: by the client's priority, then by the policy, then by arrival.

    None waits for ever: every ``OLDEST_EVERY``-th request that is admitted is the one that waited longest. As long as
    they arrive in their order, which is usual, nothing is searched.
    """

    def __init__(self) -> None:
        self._line: deque[RequestGroup] = deque()
        """The groups by arrival."""
        self._heap: list[tuple[tuple[int, float], int, RequestGroup]] | None = None
        """The same by their order; None as long as that is the same order."""
        self._num_gone = 0
        self._num_admitted = 1  # the first is not the oldest's turn

    def __len__(self) -> int:
        return len(self._line)

    def add(self, group: RequestGroup) -> None:
        """Add a group with waiting requests; it leaves by ``note_gone``, and may come again for others."""
        is_new, group.is_in_line = not group.is_in_line, True
        if is_new and self._heap is None and self._line and _order(group) < _order(self._line[-1]):
            self._heap = [_order(one) for one in self._line]
            heapq.heapify(self._heap)
        if self._heap is not None:
            heapq.heappush(self._heap, _order(group))
        if is_new:
            self._line.append(group)

    def first(self) -> RequestGroup | None:
        """Return the group that has the request to admit next; None if none waits."""
        line = self._line
        while line and not line[0].num_waiting:
            line.popleft().is_in_line = False
        if self._heap is None or not line:
            self._heap = None
            return line[0] if line else None
        while not self._heap[0][2].num_waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._num_admitted % OLDEST_EVERY else line[0]

    def run(self, first: RequestGroup, most: int) -> list[tuple[RequestGroup, Sequence[int]]]:
        """Return the requests of ``first`` to admit next, and of the groups after it that may be admitted with them.

        They are at most this many, and no more than come before the turn of the oldest.
        """
        if self._heap is not None and self._heap[0][2] is not self._line[0]:
            until_oldest = -self._num_admitted % OLDEST_EVERY
            return [(first, first.waiting(min(most, until_oldest or 1)))]
        found = [(first, first.waiting(most))]
        left = most - len(found[0][1])
        if self._heap is None and len(self._line) > 1:
            for group in islice(self._line, 1, None):
                before, numbers = found[-1]
                if not left or len(numbers) < before.num_waiting:
                    break
                if group.num_waiting:
                    if not group.goes_with(first):
                        break
                    found.append((group, group.waiting(left)))
                    left -= len(found[-1][1])
        return found

    def note_admitted(self, count: int) -> None:
        """Note that this many requests were admitted."""
        self._num_admitted += count

    def note_gone(self) -> None:
        """Note that no request of a group waits any more: the last was admitted, or has ended."""
        if self._line and not self._line[0].num_waiting:
            self.first()
            return
        self._num_gone += 1
        if self._num_gone > SLACK and 2 * self._num_gone > len(self._line):
            self._num_gone = 0
            for group in self._line:
                group.is_in_line = group.num_waiting > 0
            self._line = deque(group for group in self._line if group.is_in_line)
            if self._heap is not None:
                self._heap = [_order(group) for group in self._line]
                heapq.heapify(self._heap)


def _order(group: RequestGroup) -> tuple[tuple[int, float], int, RequestGroup]:
    """Return the key that sorts groups: no two have one number."""
    return (-group.priority, group.order), group.sequence, group


class Deadlines:
    """Requests by the times by which they must be done and must have begun.

    Args:
        processor: has their templates' cell types.
        name_of: returns the name of a cell type, by its id.
    """

    def __init__(self, processor: Processor, name_of: Callable[[int], str]) -> None:
        self._processor, self._name_of = processor, name_of
        self._num_hopeless: Counter[str] = Counter()
        """The number of requests by model that could not be done in time so far."""
        self._heap: list[tuple[int, int, bool, RequestGroup]] = []
        """Groups by time; the flag says whether it is the time by which they must have begun."""
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: RequestGroup) -> None:
        """Add the requests of a group if they have a deadline."""
        for is_begun, time_ns in enumerate((group.deadline_ns, group.schedule_by_ns)):
            if time_ns is not None:
                heapq.heappush(self._heap, (time_ns, group.sequence, bool(is_begun), group))

    def note_answered(self, group: RequestGroup) -> None:
        """Note that no request of a group needs a deadline any more; amortised constant time."""
        if group.deadline_ns is group.schedule_by_ns is None:
            return
        self._num_gone += (group.deadline_ns is not None) + (group.schedule_by_ns is not None)
        if self._num_gone > FEW and 2 * self._num_gone > len(self._heap):
            self._heap = [item for item in self._heap if not item[-1].is_over]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def is_hopeless(self, group: RequestGroup) -> bool:
        """Return whether new requests of a group cannot be done in time; from any thread."""
        if group.deadline_ns is None:
            return False
        return least_time(self._processor, group.plan.template).ns > group.deadline_ns - group.arrival_ns

    def why_late(self, group: RequestGroup) -> str | None:
        """Return why new requests of a group with a deadline cannot be done in time; None if they might be.

        One of some such requests is tried all the same, so that times which were measured in a bad moment are
        corrected.
        """
        allowed_ns = (group.deadline_ns or 0) - group.arrival_ns
        ns, cell_type, steps = least_time(self._processor, group.plan.template)
        if ns <= allowed_ns:
            return None
        self._num_hopeless[group.model.name] += 1
        if self._num_hopeless[group.model.name] % TRIED_EVERY == 0:
            return None
        which = f"a chain of {steps} steps" if steps > 1 else "a step"
        return (
            f"model {group.model.name!r}: cannot be done within {allowed_ns / 1e9:.9g} s: {which} of "
            f"{self._name_of(cell_type)} takes {ns / 1e9:.3g} s or more"
        )

    @property
    def next_ns(self) -> int | None:
        """The earliest time of a request that has not ended."""
        if not self._heap:
            return None
        while self._heap and self._heap[0][-1].is_over:
            heapq.heappop(self._heap)
            self._num_gone = max(0, self._num_gone - 1)
        return self._heap[0][0] if self._heap else None

    def take_late(self, now_ns: int) -> tuple[RequestGroup, bool] | None:
        """Take a group of which a time has passed; return it, and whether its requests must have begun by that time.

        Return None if there is none. The caller ends the requests that are late.
        """
        if not self._heap:
            return None
        next_ns = self.next_ns
        if next_ns is None or next_ns > now_ns:
            return None
        _, _, is_begun, group = heapq.heappop(self._heap)
        self._num_gone -= 1  # it will be counted when the group is answered, and is gone by then
        return group, is_begun
