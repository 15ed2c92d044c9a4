"""What a worker's turn does to the tables: a task that it finished is taken in, and its next tasks are formed.

Compiled code that runs tasks calls these two itself (``worker/cpu/run_tasks.py``); Python calls them through the
processor.
"""

from __future__ import annotations

from cellrt.core.completion import completion
from cellrt.core.scheduling import schedule
from cellrt.core.state.tables import Tables
from cellrt.native.jit import compiled
from cellrt.native.row_types import Matrix, Rows

_complete, _schedule = completion.complete, schedule.schedule


@compiled
def take_in(t: Tables, task_id: int, busy_ns: int, now_ns: int, notices: Matrix) -> int:
    """Takes a finished task out; returns the number of notices. See ``completion.complete``."""
    t.settings[0].now_ns = now_ns
    return _complete(t, task_id, busy_ns, notices, 0)


@compiled
def form_tasks(t: Tables, worker: int, idle_workers: int, now_ns: int, task_ids: Rows[int]) -> int:
    """Forms tasks for a worker; returns their number. See ``schedule.schedule``."""
    t.settings[0].idle_workers, t.settings[0].now_ns = idle_workers, now_ns
    return _schedule(t, worker, task_ids)
