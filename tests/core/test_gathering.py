"""A few rows wait for company, or let others in first: what must be known for that, and when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.state.settings import SchedulerSettings
from tests.core.graphs import add_tree, admit, leaves, make_processor

STEP_NS = 100_000
ENOUGH = 8
"""As many rows take as long as one; more take longer in proportion."""
BUDGET_S = 1e-3
SETTINGS = SchedulerSettings(runs=False, join_budget_s=BUDGET_S)


def schedule(processor: Processor, worker: int = 1) -> list[tuple[int, int]]:
    """(Cell type, rows) of the tasks that one decision forms."""
    tasks = processor.schedule(worker)
    assert broken_rules(processor.tables) == []
    rows = processor.tables.tasks[tasks]
    return list(zip(rows["cell_type"].tolist(), rows["rows"].tolist()))


def measure(processor: Processor, cell: int) -> None:
    """Has the scheduler find out how long steps take."""
    for rows in (1, ENOUGH, 4 * ENOUGH):
        admit(processor, leaves(cell, rows))
        (task,) = processor.schedule(1)
        for request, _ in processor.complete(task, STEP_NS * max(1, rows // ENOUGH)):
            processor.release([request])


def make(num_workers: int, settings: SchedulerSettings = SETTINGS) -> tuple[Processor, int, int]:
    """A processor at time 1 s with two cell types whose times are known, the second of higher priority."""
    processor = make_processor(num_workers, settings)
    low, high = add_tree(processor, 64), add_tree(processor, 64, priority=1)
    for cell in (low, high):
        measure(processor, cell)
    processor.clock.set(10**9)
    return processor, low, high


# Who goes first.


def test_what_makes_a_large_task_goes_before_a_few_rows_of_a_higher_priority():
    processor, low, high = make(1)
    admit(processor, leaves(high, 2))
    admit(processor, leaves(low, ENOUGH))
    assert schedule(processor) == [(low, ENOUGH)]


def test_of_several_that_make_large_tasks_the_priority_decides():
    processor, low, high = make(1)
    admit(processor, leaves(low, 4 * ENOUGH))
    admit(processor, leaves(high, ENOUGH))
    assert schedule(processor) == [(high, ENOUGH)]


def test_where_no_larger_batch_was_measured_only_a_full_one_is_large():
    processor = make_processor(1, SETTINGS)
    low, high = add_tree(processor, 64), add_tree(processor, 64, priority=1)
    admit(processor, leaves(high, 2))
    admit(processor, leaves(low, 4 * ENOUGH))
    assert schedule(processor)[0] == (high, 2)


def test_a_row_of_small_tasks_ends_where_another_type_has_enough_for_a_large_one():
    processor = make_processor(1, SETTINGS)
    narrow, wide = add_tree(processor, 2), add_tree(processor, 64)
    measure(processor, wide)
    admit(processor, leaves(narrow, 3))
    admit(processor, leaves(wide, ENOUGH))
    assert schedule(processor) == [(narrow, 2)]
    assert schedule(processor) == [(wide, ENOUGH)]
    assert schedule(processor) == [(narrow, 1)]


# What an idle worker leaves to another.


def test_a_few_rows_are_left_to_a_worker_that_is_free_soon():
    processor, cell, _ = make(2)
    admit(processor, leaves(cell, ENOUGH))
    assert schedule(processor, 1) == [(cell, ENOUGH)]
    admit(processor, leaves(cell, ENOUGH - 1))
    assert schedule(processor, 2) == []
    assert 0 < processor.left_s <= BUDGET_S
    assert schedule(processor, 1) == [(cell, ENOUGH - 1)]
    assert processor.left_s == 0


def test_enough_rows_for_a_large_task_are_not_left():
    processor, cell, _ = make(2)
    admit(processor, leaves(cell, ENOUGH))
    schedule(processor, 1)
    admit(processor, leaves(cell, ENOUGH))
    assert schedule(processor, 2) == [(cell, ENOUGH)]


def test_nothing_is_left_to_workers_that_are_idle():
    processor, cell, _ = make(2)
    admit(processor, leaves(cell, 1))
    assert schedule(processor, 2) == [(cell, 1)]


def test_nothing_is_left_to_a_worker_that_is_busy_for_longer_than_the_join_budget():
    processor, cell, _ = make(2, replace(SETTINGS, join_budget_s=STEP_NS / 2e9))
    admit(processor, leaves(cell, ENOUGH))
    schedule(processor, 1)
    admit(processor, leaves(cell, 1))
    assert schedule(processor, 2) == [(cell, 1)]


def test_a_worker_that_is_late_is_waited_for_but_not_for_ever():
    processor, cell, _ = make(2)
    admit(processor, leaves(cell, ENOUGH))
    schedule(processor, 1)
    admit(processor, leaves(cell, 1))
    processor.clock.set(10**9 + 5 * STEP_NS)
    assert schedule(processor, 2) == []
    processor.clock.set(10**9 + STEP_NS + round(1e9 * BUDGET_S))
    assert schedule(processor, 2) == [(cell, 1)]


def test_without_the_switch_an_idle_worker_takes_what_is_ready():
    processor, cell, _ = make(2, replace(SETTINGS, gather=False))
    admit(processor, leaves(cell, ENOUGH))
    schedule(processor, 1)
    admit(processor, leaves(cell, 1))
    assert schedule(processor, 2) == [(cell, 1)]


@pytest.mark.parametrize(("ready", "first"), [(ENOUGH, ENOUGH), (3 * ENOUGH, 12)])
def test_idle_workers_share_what_is_ready_in_tasks_that_are_not_small(ready, first):
    processor, cell, _ = make(2)
    admit(processor, leaves(cell, ready))
    sizes = [processor.tables.tasks["rows"][processor.schedule(worker, 3 - worker)].tolist() for worker in (1, 2)]
    assert sizes == [[first], [ready - first] if ready > first else []]
