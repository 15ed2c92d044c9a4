"""The steps of a worker's turn on the scheduler's tables: complete a task, admit requests, form the next tasks.

When a task is completed, requests that are done leave with their results. Compiled code that runs tasks calls these
functions itself (``worker/cpu/run_tasks.py``); Python calls them through the processor.
"""

from __future__ import annotations

from cellrt.core.completion import completion
from cellrt.core.requests import join_leave
from cellrt.core.scheduling import schedule
from cellrt.core.state.tables import ANSWERS, LATE_AT, MANY_UNTOLD, SUBMITTED, TAKEN, TOLD, URGENT, WATCHED, Tables
from cellrt.native.atomics import load
from cellrt.native.jit import compiled
from cellrt.native.row_types import Matrix, Rows

_complete, _schedule = completion.complete, schedule.schedule
_join, _leave = join_leave.join, join_leave.leave


@compiled
def take_in(t: Tables, task_id: int, busy_ns: int, now_ns: int, notices: Matrix) -> int:
    """Complete a finished task, and let requests leave; return the number of notices for Python.

    See ``completion.complete`` and ``join_leave.leave``.
    """
    t.settings[0].now_ns = now_ns
    return _leave(t, notices, _complete(t, task_id, busy_ns, notices, 0), now_ns)


@compiled
def let_in(t: Tables, now_ns: int) -> bool:
    """Admit requests; return whether all that were handed in are admitted. See ``join_leave.join``."""
    t.settings[0].now_ns = now_ns
    return _join(t)


@compiled
def is_late(t: Tables, now_ns: int) -> bool:
    """Return whether requests may be late; Python ends those that are."""
    return t.door[LATE_AT] != 0 and now_ns > t.door[LATE_AT]


@compiled
def has_untold(t: Tables) -> bool:
    """Return whether there are answers of which Python has not notified clients yet."""
    return load(t.door, TOLD) < load(t.door, ANSWERS)


@compiled
def must_tell(t: Tables, now_ns: int, after_ns: int) -> bool:
    """Return whether Python must notify clients: one asks for it, answers are many, or one is ``after_ns`` old."""
    told, answers = load(t.door, TOLD), load(t.door, ANSWERS)
    if told == answers:
        return False
    if told < load(t.door, URGENT) or answers - told >= MANY_UNTOLD or load(t.door, WATCHED) != 0:
        return True
    return now_ns - t.answered[told % t.answered.size].ended_ns >= after_ns


@compiled
def has_news(t: Tables) -> bool:
    """Return whether clients of this process have handed in requests that no turn has seen."""
    return t.door[TAKEN] < load(t.door, SUBMITTED)


@compiled
def form_tasks(t: Tables, worker: int, idle_workers: int, now_ns: int, task_ids: Rows[int]) -> int:
    """Form tasks for a worker; return their number. See ``schedule.schedule``."""
    t.settings[0].idle_workers, t.settings[0].now_ns = idle_workers, now_ns
    return _schedule(t, worker, task_ids)
