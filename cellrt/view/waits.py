"""Explains what a request waited for before each of its tasks, as far as a timeline shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cellrt.view.timeline_spans import RequestSpan, TaskSpan


class Admission(NamedTuple):
    """The time of the first turn after a request's arrival, and the time of its admission; mostly the same."""

    turn_s: float
    admitted_s: float


@dataclass(frozen=True)
class Wait:
    """The time before one task of a request in which no other task of it ran; its parts add up to it.

    Attributes:
        admission_s: while turns did not admit the request, as there was no room or its session's last request ran.
        worker_s: after that, while the task's worker ran other tasks.
        scheduler_s: while that worker had nothing to do: until a turn formed the task, or a small batch was delayed.
        unknown_s: before the first event that is remembered.
        worker_ran: the other tasks of ``worker_s``.
    """

    admission_s: float
    worker_s: float
    scheduler_s: float
    unknown_s: float
    worker_ran: tuple[TaskSpan, ...]

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.admission_s + self.worker_s + self.scheduler_s + self.unknown_s


def waits_of(tasks: Iterable[TaskSpan], request: RequestSpan, admission: Admission | None) -> dict[int, Wait]:
    """Return the waits of a request, by task.

    Args:
        tasks: all that are remembered, of whatever request.
        request: whose waits they are.
        admission: when it was admitted, on the spans' clock; None: that is not remembered.
    """
    by_start = sorted(tasks, key=lambda task: task.start_s)
    is_whole = any(task.task == 0 for task in by_start)  # they are numbered from 0: only the last ones are kept
    ran: defaultdict[int, list[TaskSpan]] = defaultdict(list)  # by worker, so far
    waits: dict[int, Wait] = {}
    begin_s = request.arrival_s
    for task in by_start:
        before = ran[task.worker]
        if request.request in task.requests:
            end_s = max(begin_s, task.start_s)
            known_s = begin_s if is_whole else min(end_s, max(begin_s, (before or [task])[0].start_s))
            if waits:
                waits[task.task] = _wait(begin_s, known_s, end_s, end_s, end_s, before)
            elif admission is None:
                waits[task.task] = _wait(begin_s, end_s, end_s, end_s, end_s, before)
            else:
                turn_s, admitted_s = (min(max(begin_s, moment_s), end_s) for moment_s in admission)
                waits[task.task] = _wait(begin_s, known_s, turn_s, admitted_s, end_s, before)
            begin_s = max(begin_s, task.end_s)
        before.append(task)
    return waits


def _wait(
    begin_s: float, known_s: float, turn_s: float, admitted_s: float, end_s: float, before: Sequence[TaskSpan]
) -> Wait:
    """Return a wait; from ``known_s`` on, what its worker ran meanwhile is the last of ``before``."""
    first, first_s = _busy(before, known_s, turn_s)
    last, last_s = _busy(before, max(known_s, admitted_s), end_s)
    worker_ran = tuple(dict.fromkeys([*first, *last]))
    unknown_s = min(known_s, turn_s) - begin_s + max(0.0, known_s - admitted_s)
    admission_s, worker_s = admitted_s - turn_s, first_s + last_s
    scheduler_s = max(0.0, end_s - begin_s - unknown_s - admission_s - worker_s)
    return Wait(admission_s, worker_s, scheduler_s, unknown_s, worker_ran)


def _busy(tasks: Sequence[TaskSpan], begin_s: float, end_s: float) -> tuple[list[TaskSpan], float]:
    """Return the tasks of one worker that ran in an interval, by start, and how much of it they filled."""
    ran, busy_s = [], 0.0
    for task in reversed(tasks):
        if task.end_s <= begin_s:
            break
        from_s, until_s = max(begin_s, task.start_s), min(end_s, task.end_s)
        if until_s > from_s:  # what two of a device share counts once
            ran.append(task)
            busy_s += until_s - from_s
            end_s = from_s
    return ran[::-1], busy_s
