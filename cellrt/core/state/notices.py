"""Notices to the driver, when a task is complete or a worker is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

NOTICE_DONE = 1
"""All nodes are complete: read the results, then call ``release``."""
NOTICE_FAILED = 2
"""A cell failed on this request: it is dead from now on."""
NOTICE_RELEASED = 3
"""A dead request gave back its last row."""
NOTICE_STEPS = 4
"""A streamed request has new results."""
NOTICE_SESSION = 5
"""A request of the door that had been answered gave its session back."""


class Notices:
    """Request ids, and for each one of the ``NOTICE_`` constants, in order.

    They are two lists of numbers: a pair for each would take longer to make than all that the scheduler does with a
    step.
    """

    __slots__ = ("ids", "whats")

    def __init__(self, pairs: NDArray[Any]) -> None:
        """Take the notices from ``pairs`` ``[n, 2]``."""
        self.ids: list[int]
        self.whats: list[int]
        self.ids, self.whats = pairs.T.tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.ids, self.whats)

    def done(self) -> list[int]:
        """Return the requests that are done."""
        count = self.whats.count(NOTICE_DONE)
        if count == len(self.ids):
            return self.ids
        return [id for id, what in self if what == NOTICE_DONE] if count else []
