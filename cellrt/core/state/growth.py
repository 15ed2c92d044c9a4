"""Growth while tasks run: more kinds of rows, and buffers that hold larger tasks.

The scheduler's own arrays are replaced between two of its calls. But a worker has a view of its task's buffer, and
writes its answers there, until the task is complete. So a running task keeps its memory, and its contents are copied to
the new buffers twice: now, for readers, and when the answers are there.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import MAX_KINDS, Tables
from cellrt.core.state.task_layout import H_NOTES
from cellrt.native.row_types import Rows


def lazy_zeros(count: int) -> Rows[int]:
    """Return zeros whose memory pages are allocated when they are first touched.

    NumPy's are so only by chance: the C library keeps freed memory of up to 32 MiB, and clears it again all at once.
    """
    made: Any = np.frombuffer(mmap.mmap(-1, max(1, 4 * count)), np.int32, count)
    zeros: Rows[int] = made
    return zeros


def with_more_rows(t: Tables, count: int) -> Tables:
    """Return tables with ``count`` more places at the ends of ``free_rows`` and ``holders``.

    The cost is that of the rows in the stacks and of those that were ever taken, not of the capacity.
    """
    grown, holders = lazy_zeros(t.free_rows.size + count), lazy_zeros(t.free_rows.size + count)
    for arena in t.arenas[t.arenas["num_free"] > t.arenas["num_fresh"]]:
        first = int(arena["first"])
        used = slice(first + int(arena["num_fresh"]), first + int(arena["num_free"]))
        grown[used] = t.free_rows[used]
    for kind in np.flatnonzero(t.kinds["is_paged"]).tolist():
        for arena in t.arenas[kind::MAX_KINDS]:
            first = int(arena["first"])
            taken = slice(first, first + int(arena["capacity"]) - int(arena["num_fresh"]))
            holders[taken] = t.holders[taken]
    return t._replace(free_rows=grown, holders=holders)


class TaskBuffers:
    """The memory of tasks: of those that have run since before the buffers grew, and of all others."""

    def __init__(self) -> None:
        self.older: dict[int, NDArray[np.int32]] = {}
        """The memory of tasks that have run since before the buffers grew; nearly always there are none."""

    def of(self, t: Tables, task: int) -> NDArray[np.int32]:
        """Return the buffer that a task's worker has."""
        if task in self.older:
            return self.older[task]
        size = t.ints.size // t.tasks.size
        return t.ints[task * size : (task + 1) * size]

    def grow(self, t: Tables, size: int) -> Tables:
        """Return tables whose buffers have ``size`` ints each, more than before."""
        self.older = {task: self.of(t, task) for task in np.flatnonzero(t.tasks["in_use"]).tolist()}
        t.settings["buffer_ints"] = size
        grown = t._replace(ints=lazy_zeros(size * t.tasks.size))
        for task in self.older:
            self._copy(grown, task)
        return grown

    def take_over(self, t: Tables, task: int) -> None:
        """Copy a task's answers if it has run since before the buffers grew; its worker is done with them."""
        if task in self.older:
            self._copy(t, task)
            del self.older[task]

    def _copy(self, t: Tables, task: int) -> None:
        """Copy an older buffer, whose notes move to the end of the new one (see ``task_layout.py``)."""
        older, size = self.older[task], int(t.settings["buffer_ints"][0])
        buffer, notes = t.ints[task * size : (task + 1) * size], int(older[H_NOTES])
        buffer[:notes] = older[:notes]
        buffer[size - (older.size - notes) :] = older[notes:]
        buffer[H_NOTES] = size - (older.size - notes)
