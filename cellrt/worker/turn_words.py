"""Words with the state of the turn and the progress of an engine's workers, for compiled code and Python.

Each line is a cache line of its own, so that threads which change different ones do not slow each other down.
"""

from __future__ import annotations

import numpy as np

from cellrt.native.row_types import CACHE_LINE, Rows

LINE = CACHE_LINE // 8
TURN = 0
"""A flag; 1: a thread has the turn."""
NEWS = LINE
"""A flag; 1: there is news that no turn in Python has taken."""
NUM_TURNS = 2 * LINE
"""The number of turns that were taken in Python."""
BY_HAND = 3 * LINE
"""The reasons why a turn must be taken in Python: the sum of the flags below, or 0."""
ALWAYS, WHEN_IDLE = 1, 2
CALLED, HEARD = 4 * LINE, 5 * LINE
"""The number of calls of clients in other processes, as what they hand in lies in memory of theirs, which nobody may
read without the turn; and as many calls turns have heard."""

# Of each worker, from ``line_of`` on: counts of tasks since the start, each behind the one before it. ``COMPLETED``
# leaves out what a worker that died had not finished. ``REST`` is one of the words below; ``ENDS`` is 1 if the thread
# is to end after what was launched.
LAUNCHED, BEGUN, FINISHED, TAKEN_IN, COMPLETED, NUM_NOTICES, REST, ENDS = range(8)
# How a worker rests: not at all; until somebody has news or a task for it; for some time, unless it gets a task.
AWAKE, ASLEEP, AWAY = range(3)


def line_of(location: int) -> int:
    """Return where the words of a worker at a location (1, 2, ...) begin."""
    return (5 + location) * LINE


def num_words(num_workers: int) -> int:
    """Return the number of words of an engine with this many workers."""
    return (6 + num_workers) * LINE


def make_words(num_workers: int) -> Rows[int]:
    """Return the words of an engine with this many workers; the turn is free, and nothing was launched."""
    size = num_words(num_workers)
    room = np.zeros(size + LINE, np.int64)
    first = -(room.ctypes.data // 8) % LINE
    words: Rows[int] = room[first : first + size]  # type: ignore[assignment]
    return words
