"""Kinds and cell types are added while tasks run: nobody waits, and no task loses its memory."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.state import task_layout as layout
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.record_layout import loop_limits
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import HOST, MAX_KINDS, NUM_PERMANENT
from tests.core.graphs import ONE_BY_ONE, add_step, chain, loop, make_processor

LARGE = 4096
"""A batch beyond what the smallest buffers hold."""


def admit(processor: Processor, program: np.ndarray) -> int:
    admitted = processor.admit(processor.compile(program), 0)
    assert admitted is not None
    return admitted[0]


def test_a_running_task_keeps_its_memory_when_the_buffers_grow():
    processor = make_processor(settings=SchedulerSettings(max_tasks_to_submit=1))
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 1, 1e-4)
    request = admit(processor, loop(cell, 9))
    (task,) = processor.schedule(1)
    of_worker = processor.task_buffer(task)
    before = of_worker.copy()
    add_step(processor, LARGE)
    add_step(processor, 2 * LARGE)
    assert np.array_equal(of_worker, before)
    assert np.shares_memory(processor.task_buffer(task), of_worker)
    assert broken_rules(processor.tables) == []
    of_worker[int(of_worker[layout.H_DONE_STEPS])] = -2  # the worker says that the loop stopped
    assert list(processor.complete(task, 0)) == [(request, NOTICE_DONE)]
    assert [done for _, done in loop_limits(processor.tables, request).values()] == [2]
    processor.release([request])
    assert broken_rules(processor.tables) == []


def test_a_task_formed_after_the_buffers_grew_has_the_size_of_the_new_ones():
    processor = make_processor(settings=ONE_BY_ONE)
    cell = add_step(processor, 4)
    admit(processor, chain(cell, 3))
    (first,) = processor.schedule(1)
    add_step(processor, LARGE)
    (second,) = processor.schedule(1)
    assert len(processor.task_buffer(second)) > len(processor.task_buffer(first))
    processor.complete(first, 0)
    processor.complete(second, 0)
    (third,) = processor.schedule(1)
    assert third == first and len(processor.task_buffer(third)) == len(processor.task_buffer(second))


def test_a_worker_may_be_lost_after_the_buffers_grew():
    processor = make_processor(settings=ONE_BY_ONE)
    cell = add_step(processor, 4)
    admit(processor, chain(cell, 3))
    processor.schedule(1)
    add_step(processor, LARGE)
    processor.lose_worker(1)
    assert processor.num_live == 0 and broken_rules(processor.tables) == []


@pytest.mark.parametrize("num_kinds", [1, 5])
def test_a_new_kind_finds_its_rows_free_and_leaves_the_others_as_they_are(num_kinds):
    processor = make_processor(2, settings=ONE_BY_ONE)
    cell = add_step(processor, 4)
    admit(processor, chain(cell, 3))
    (task,) = processor.schedule(1)
    processor.complete(task, 0)
    free = processor.tables.arenas["num_free"].copy()
    for _ in range(num_kinds):
        kind = processor.add_kind(100, 200)
        expected = {HOST * MAX_KINDS + kind: 200, MAX_KINDS + kind: 100, 2 * MAX_KINDS + kind: 100}
        assert {at: int(processor.tables.arenas["num_free"][at]) for at in expected} == expected
    old = [location * MAX_KINDS for location in range(3)]
    assert processor.tables.arenas["num_free"][old].tolist() == free[old].tolist()
    assert broken_rules(processor.tables) == []


def test_rows_are_taken_lowest_first_and_the_last_given_back_first():
    processor = make_processor(rows=8, settings=ONE_BY_ONE)
    cell = add_step(processor, 4)
    shape = processor.compile(chain(cell, 2))
    first, second = (processor.admit(shape, k) for k in range(2))
    assert first is not None and second is not None
    assert first[1][:3].tolist() == [NUM_PERMANENT, NUM_PERMANENT + 1, NUM_PERMANENT + 2]
    assert second[1][:3].tolist() == [NUM_PERMANENT + 3, NUM_PERMANENT + 4, NUM_PERMANENT + 5]
    processor.cancel(first[0])
    third = processor.admit(shape, 3)
    assert third is not None
    assert sorted(third[1][:3].tolist()) == first[1][:3].tolist()
