"""What a worker's turn does to the tables: a task that it finished is completed and requests leave with their results,
new requests join, and the worker's next tasks are formed.

Compiled code that runs tasks calls these itself (``worker/cpu/run_tasks.py``); Python calls them through the processor.
"""

from __future__ import annotations

from cellrt.core.completion import completion
from cellrt.core.requests import door
from cellrt.core.scheduling import schedule
from cellrt.core.state.tables import ANSWERS, LATE_AT, MANY_UNTOLD, SUBMITTED, TAKEN, TOLD, URGENT, WATCHED, Tables
from cellrt.native.atomics import load
from cellrt.native.jit import compiled
from cellrt.native.row_types import Matrix, Rows

_complete, _schedule = completion.complete, schedule.schedule
_join, _leave = door.join, door.leave


@compiled
def take_in(t: Tables, task_id: int, busy_ns: int, now_ns: int, notices: Matrix) -> int:
    """Complete a task that is finished, and let requests leave; return the number of notices that are for Python. See
    ``completion.complete`` and ``door.leave``."""
    t.settings[0].now_ns = now_ns
    return _leave(t, notices, _complete(t, task_id, busy_ns, notices, 0), now_ns)


@compiled
def let_in(t: Tables, now_ns: int) -> bool:
    """Have requests join; return whether all that were handed in have. See ``door.join``."""
    t.settings[0].now_ns = now_ns
    return _join(t)


@compiled
def is_late(t: Tables, now_ns: int) -> bool:
    """Return whether requests may be late, which Python ends."""
    return t.door[LATE_AT] != 0 and now_ns > t.door[LATE_AT]


@compiled
def has_untold(t: Tables) -> bool:
    """Return whether there are answers that clients were not told of in Python."""
    return load(t.door, TOLD) < load(t.door, ANSWERS)


@compiled
def must_tell(t: Tables, now_ns: int, after_ns: int) -> bool:
    """Return whether clients must be told of answers: some ask for it, or there are many, or the first is so old."""
    told, answers = load(t.door, TOLD), load(t.door, ANSWERS)
    if told == answers:
        return False
    if told < load(t.door, URGENT) or answers - told >= MANY_UNTOLD or load(t.door, WATCHED) != 0:
        return True
    return now_ns - t.answered[told % t.answered.size].ended_ns >= after_ns


@compiled
def has_news(t: Tables) -> bool:
    """Return whether clients of this process have handed in what no turn has seen."""
    return t.door[TAKEN] < load(t.door, SUBMITTED)


@compiled
def form_tasks(t: Tables, worker: int, idle_workers: int, now_ns: int, task_ids: Rows[int]) -> int:
    """Forms tasks for a worker; returns their number. See ``schedule.schedule``."""
    t.settings[0].idle_workers, t.settings[0].now_ns = idle_workers, now_ns
    return _schedule(t, worker, task_ids)
