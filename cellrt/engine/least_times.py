"""The least time that a request takes: one whose deadline comes before that is late, whatever else the engine does.

A chain's steps come one after the other, and none takes less than in the quickest task that there was. That task's own
costs are not its steps': a step by itself says nothing of one in a run of many, unless it takes much longer than those.
"""

from __future__ import annotations

from typing import NamedTuple

from cellrt.core.processor import Processor, SizedTemplate

HOST_NS = 500_000
"""A task takes no longer than that beside its steps."""
CERTAIN = 0.5
"""So much of the least time is counted: a step may be quicker than any before it."""


class LeastTime(NamedTuple):
    """The least time of a request, and the cell type of the chain that takes it, with its steps."""

    ns: float
    cell_type: int
    steps: int


class LeastTimes:
    """What is known of the least time of a step, by cell type. Belongs to the holder of the turn."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}
        """Of the quickest task its time for each of its steps, and what of that is certain."""

    def note_task(self, type_id: int, steps: int, busy_ns: int) -> None:
        """Takes in how long a complete task took, whose longest row had so many steps."""
        each_ns, known = busy_ns / steps, self._known.get(type_id)
        if known is None or each_ns < known[0]:
            self._known[type_id] = each_ns, CERTAIN * max(0, busy_ns - HOST_NS) / steps

    def forget(self, type_id: int) -> None:
        """Another cell may get this type's number."""
        self._known.pop(type_id, None)

    def of(self, processor: Processor, template: SizedTemplate) -> LeastTime:
        """The least time of requests of a template; 0 where nothing is known."""
        found, carries = LeastTime(0.0, -1, 0), processor.tables.types["carries"]
        for cell_type, longest in template.chains:
            steps = longest if carries[cell_type] else 1  # those that carry nothing are rows of one task
            ns = steps * self._known.get(cell_type, (0.0, 0.0))[1]
            if ns > found.ns:
                found = LeastTime(ns, cell_type, steps)
        return found
