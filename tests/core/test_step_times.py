"""How long a step takes, as the scheduler has measured it."""

from __future__ import annotations

import pytest

from cellrt.core.processor import Processor
from tests.core.graphs import add_step, chain, make_processor


def measured(*elapsed_ns: int) -> float:
    """The time of a step of one row after tasks of one step that took so long."""
    processor = make_processor()
    cell = add_step(processor, max_batch=4)
    assert processor.admit(processor.compile(chain(cell, len(elapsed_ns))), 0) is not None
    for elapsed in elapsed_ns:
        run(processor, elapsed)
    return float(processor.tables.step_ns[cell, 0])


def run(processor: Processor, elapsed_ns: int) -> None:
    (task,) = processor.schedule(1)
    processor.complete(task, elapsed_ns)


def test_the_first_time_is_taken_as_it_is():
    assert measured(2000) == 2000


def test_a_shorter_time_is_taken_at_once():
    assert measured(2000, 500) == 500


def test_a_longer_time_counts_for_a_hundredth_more():
    assert 2000 < measured(2000, 9000) <= 2021


def test_a_task_of_unknown_time_changes_nothing():
    assert measured(2000, 0) == 2000


@pytest.mark.parametrize(("rows", "of_measured"), [(1, 1), (2, 1), (4, 2), (7, 4), (8, 4)])
def test_a_size_that_was_not_measured_takes_as_long_as_a_larger_one_or_in_proportion_to_a_smaller_one(
    rows, of_measured
):
    processor = make_processor()
    cell = add_step(processor, max_batch=8)
    processor.set_step_time(cell, 2, 3000e-9)
    for _ in range(rows):
        assert processor.admit(processor.compile(chain(cell, 1)), 0) is not None
    (task,) = processor.schedule(1)
    assert processor.tables.tasks["expected_ns"][task] == pytest.approx(of_measured * 3000)
