"""What a request waited for: a story worked out by hand."""

from __future__ import annotations

import pytest

from cellrt.view.timeline_spans import RequestSpan, TaskSpan
from cellrt.view.waits import Admission, Wait, waits_of


def span(task: int, worker: int, start_s: float, end_s: float, *requests: int) -> TaskSpan:
    return TaskSpan(task, worker, "step", start_s, end_s, 1, 1, requests)


REQUEST = RequestSpan(7, "mine", 1.0, 10.0)
FIRST, OTHER, LATER = span(0, 1, 0.0, 3.0, 1), span(1, 1, 6.0, 8.0, 2), span(4, 2, 6.0, 9.0, 2)
AT_ONCE = Admission(1.5, 1.5)
"""It is admitted in the first turn after its arrival."""
TASKS = [FIRST, span(2, 1, 4.0, 5.0, 7), OTHER, span(3, 1, 8.5, 9.5, 7, 2), LATER]


def told(wait: Wait) -> tuple[float, ...]:
    return wait.admission_s, wait.worker_s, wait.scheduler_s, wait.unknown_s


def test_a_wait_is_for_the_worker_and_its_tasks_or_else_for_the_scheduler() -> None:
    waits = waits_of(TASKS, REQUEST, AT_ONCE)
    assert list(waits) == [2, 3]
    assert told(waits[2]) == (0.0, 2.0, 1.0, 0.0) and waits[2].worker_ran == (FIRST,)
    assert told(waits[3]) == (0.0, 2.0, 1.5, 0.0) and waits[3].worker_ran == (OTHER,)
    assert [wait.total_s for wait in waits.values()] == [3.0, 3.5]


def test_it_is_for_admission_while_turns_do_not_admit() -> None:
    for turn_s, admitted_s, parts in ((1.0, 1.5, (0.5, 1.5)), (1.5, 2.0, (0.5, 1.5)), (2.0, 3.5, (1.5, 1.0))):
        wait = waits_of(TASKS, REQUEST, Admission(turn_s, admitted_s))[2]
        assert told(wait)[:2] == parts and wait.total_s == 3.0 and wait.worker_ran == (FIRST,)


def test_what_is_not_remembered_is_not_guessed() -> None:
    assert told(waits_of(TASKS, REQUEST, None)[2]) == (0.0, 0.0, 0.0, 3.0)
    without_first = waits_of(TASKS[1:], REQUEST, AT_ONCE)
    assert told(without_first[2]) == (0.0, 0.0, 0.0, 3.0)
    assert told(without_first[3]) == (0.0, 2.0, 1.5, 0.0)


def test_what_runs_beside_a_task_of_its_own_is_no_wait() -> None:
    tasks = [span(0, 1, 1.0, 5.0, 7), span(1, 2, 2.0, 3.0, 7), span(2, 2, 3.0, 6.0, 1), span(3, 2, 6.0, 7.0, 7)]
    waits = waits_of(tasks, REQUEST, AT_ONCE)
    assert [wait.total_s for wait in waits.values()] == [0.0, 0.0, 1.0]
    assert told(waits[3]) == pytest.approx((0.0, 1.0, 0.0, 0.0))
