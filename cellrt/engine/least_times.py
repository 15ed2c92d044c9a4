"""The least time that a request takes: a request with an earlier deadline is late, whatever else the engine does.

A chain's steps come one after the other. None takes less than the certain part of the time of the quickest task so far
(``core/state/step_times.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from cellrt.core.processor import Processor, SizedTemplate


class LeastTime(NamedTuple):
    """The least time of a request, and the cell type of the chain that takes it, with its steps."""

    ns: float
    cell_type: int
    steps: int


def least_time(processor: Processor, template: SizedTemplate) -> LeastTime:
    """Return the least time of requests of a template; 0 if nothing is known."""
    found, tables = LeastTime(0.0, -1, 0), processor.tables
    for cell_type, longest in template.chains:
        steps = longest if tables.types["carries"][cell_type] else 1  # those that carry nothing are rows of one task
        ns = steps * float(tables.counts["certain_ns"][cell_type])
        if ns > found.ns:
            found = LeastTime(ns, cell_type, steps)
    return found
