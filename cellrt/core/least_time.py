"""The least time that a request takes: one whose deadline comes before that is late, whatever else the engine does.

A chain's steps come one after the other, and a step takes no less than in the quickest batch that was measured
(``step_times.py``). Nothing else counts: not what is before it in the queue, nor that one cell waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

from cellrt.core.sized_template import SizedTemplate
from cellrt.core.tables import Tables

CERTAIN = 0.5
"""So much of the least measured time is counted: a step may be quicker than any before it."""


class LeastTime(NamedTuple):
    """The least time of a request, and the cell type of the chain that takes it, with its steps."""

    ns: float
    cell_type: int
    steps: int


def least_time(t: Tables, template: SizedTemplate) -> LeastTime:
    """That of requests of a template; 0 where no step was measured."""
    found = LeastTime(0.0, -1, 0)
    for cell_type, longest in template.chains:
        measured = t.step_ns[cell_type]
        measured = measured[measured > 0]
        steps = longest if t.types["carries"][cell_type] else 1  # those that carry nothing are rows of one task
        if measured.size and (ns := CERTAIN * steps * float(measured.min())) > found.ns:
            found = LeastTime(ns, cell_type, steps)
    return found
