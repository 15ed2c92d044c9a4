"""Algorithm 1, case by case: which cell type goes first, how tasks are cut, and who may run what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.state import task_layout as layout
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates.program import FIXED, OP_EXTERNAL, OP_NODE, OP_RESULT
from tests.core.graphs import (
    ONE_BY_ONE,
    add_step,
    add_tree,
    chain,
    leaves,
    loop,
    make_processor,
    tree,
    two_chains,
)


def admit(
    processor: Processor, program: NDArray[np.int32], sequence: int = 0, priority: int = 0, streamed: bool = False
) -> int:
    admitted = processor.admit(processor.compile(program), sequence, priority, streamed)
    assert admitted is not None
    return admitted[0]


def schedule(processor: Processor, worker: int = 1) -> list[tuple[int, int]]:
    """(Cell type, rows) of the tasks that one decision forms."""
    tasks = processor.schedule(worker)
    assert broken_rules(processor.tables) == []
    rows = processor.tables.tasks[tasks]
    return list(zip(rows["cell_type"].tolist(), rows["rows"].tolist()))


def complete(processor: Processor, *tasks: int) -> None:
    for task in tasks:
        for request, what in processor.complete(task, 0):
            if what == NOTICE_DONE:
                processor.release([request])
    assert broken_rules(processor.tables) == []


def running(processor: Processor) -> list[int]:
    return np.flatnonzero(processor.tables.tasks["in_use"]).tolist()


def requests_of(processor: Processor, task: int) -> list[int]:
    return [request for request, _ in processor.rows_in_flight(task)]


# Which cell type (lines 5-10).


def test_a_type_with_a_full_batch_goes_before_any_priority():
    processor = make_processor()
    low, high = add_tree(processor, 4), add_tree(processor, 4, priority=9)
    admit(processor, leaves(low, 4))
    admit(processor, leaves(high, 3))
    assert schedule(processor) == [(low, 4)]


def test_a_type_without_running_tasks_goes_before_a_higher_priority():
    processor = make_processor()
    low, high = add_tree(processor, 4), add_tree(processor, 4, priority=9)
    admit(processor, leaves(high, 3))
    assert schedule(processor) == [(high, 3)]
    admit(processor, leaves(high, 3))
    admit(processor, leaves(low, 1))
    assert schedule(processor) == [(low, 1)]
    assert schedule(processor) == [(high, 3)]
    assert schedule(processor) == []


@pytest.mark.parametrize("counts", [(5, 7), (3, 2)], ids=["full batches", "no running tasks"])
def test_of_one_criterion_the_highest_priority_goes_first(counts):
    processor = make_processor()
    low, high = add_tree(processor, 4, priority=-1), add_tree(processor, 4)
    admit(processor, leaves(low, counts[0]))
    admit(processor, leaves(high, counts[1]))
    assert schedule(processor)[0][0] == high
    processor.set_priority(low, 2)
    admit(processor, leaves(high, 8))
    admit(processor, leaves(low, 8))
    assert schedule(processor)[0][0] == low


@pytest.mark.parametrize("counts", [(8, 1), (1, 1), (1, 8)])
def test_a_higher_client_priority_goes_before_full_batches_and_priorities_of_types(counts):
    processor = make_processor()
    first, second = add_tree(processor, 4, priority=9), add_tree(processor, 4)
    admit(processor, leaves(first, counts[0]), priority=1)
    admit(processor, leaves(second, counts[1]), priority=2)
    assert schedule(processor)[0][0] == second


def test_what_is_left_of_a_batch_goes_to_lower_client_priorities():
    processor = make_processor(settings=replace(ONE_BY_ONE, max_tasks_to_submit=3))
    cell = add_tree(processor, 4)
    low, high = admit(processor, leaves(cell, 9), priority=0), admit(processor, leaves(cell, 2), priority=3)
    assert schedule(processor) == [(cell, 4)], "the second task would have been of the low priority alone"
    assert requests_of(processor, running(processor)[0]) == [high, high, low, low]


def test_under_fcfs_the_type_with_the_oldest_request_goes_first():
    processor = make_processor(policy=POLICIES["first-come-first-served"])
    old, new = add_tree(processor, 4), add_tree(processor, 4, priority=9)
    admit(processor, leaves(old, 1), sequence=1)
    admit(processor, leaves(new, 1), sequence=2)
    assert schedule(processor) == [(old, 1)]


def test_under_fcfs_a_request_that_runs_elsewhere_makes_its_type_no_older():
    processor = make_processor(2, policy=POLICIES["first-come-first-served"])
    first, second = add_step(processor, 4), add_step(processor, 4)
    admit(processor, chain(first, 3), sequence=1)
    admit(processor, chain(second, 3), sequence=2)
    assert schedule(processor, 1) + schedule(processor, 1) == [(first, 1), (second, 1)]
    admit(processor, chain(second, 1), sequence=3)
    admit(processor, chain(first, 1), sequence=4)
    assert schedule(processor, 2) == [(second, 1)]


# How tasks are cut (lines 12-23).


def test_at_most_max_tasks_in_a_row_and_the_rest_later():
    processor = make_processor(settings=replace(ONE_BY_ONE, max_tasks_to_submit=3))
    cell = add_tree(processor, 4)
    admit(processor, leaves(cell, 14))
    assert schedule(processor) == [(cell, 4)] * 3
    assert schedule(processor) == [(cell, 2)]


@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (6, [4]), (7, [4, 3])])
def test_only_the_first_task_may_be_below_the_smallest_batch(count, sizes):
    processor = make_processor(settings=replace(ONE_BY_ONE, max_tasks_to_submit=5))
    cell = add_step(processor, 4, min_batch=3)
    for _ in range(count):
        admit(processor, chain(cell, 1))
    assert schedule(processor) == [(cell, size) for size in sizes]


def test_tasks_in_a_row_fit_the_join_budget():
    processor = make_processor(settings=SchedulerSettings(runs=False, join_budget_s=1e-3))
    cell = add_tree(processor, 4)
    processor.set_step_time(cell, 4, 0.4e-3)
    admit(processor, leaves(cell, 20))
    assert schedule(processor) == [(cell, 4)] * 2


def test_a_task_takes_requests_in_order_of_arrival():
    processor = make_processor()
    cell = add_step(processor, 3)
    requests = [admit(processor, chain(cell, 2), sequence=sequence) for sequence in range(3)]
    assert schedule(processor) == [(cell, 3)]
    assert requests_of(processor, running(processor)[0]) == requests


# Who may run what (lines 20-22 and 27).


def test_a_subgraph_in_flight_stays_at_its_worker():
    processor = make_processor(2)
    cell = add_step(processor, 4)
    admit(processor, chain(cell, 3))
    assert schedule(processor, worker=1) == [(cell, 1)]
    assert schedule(processor, worker=2) == []
    assert schedule(processor, worker=1) == [(cell, 1)]
    first, second = running(processor)
    complete(processor, first)
    assert schedule(processor, worker=2) == [], "one task of it is still running"
    complete(processor, second)
    assert schedule(processor, worker=2) == [(cell, 1)], "unpinned: any worker may go on with it"


def test_a_pinned_subgraph_is_passed_over_not_waited_for():
    processor = make_processor(2)
    cell = add_step(processor, 4)
    admit(processor, chain(cell, 3))
    assert schedule(processor, worker=1) == [(cell, 1)]
    second = admit(processor, chain(cell, 3))
    assert schedule(processor, worker=2) == [(cell, 1)]
    assert requests_of(processor, running(processor)[1]) == [second]


def test_leaves_of_one_request_run_at_several_workers_and_end_with_any_that_is_lost():
    processor = make_processor(2)
    cell = add_tree(processor, 2)
    request = admit(processor, leaves(cell, 4))
    assert schedule(processor, worker=1) == schedule(processor, worker=2) == [(cell, 2)]
    assert broken_rules(processor.tables) == []
    _, left = running(processor)
    assert list(processor.lose_worker(1)) == [(request, NOTICE_FAILED)]
    assert list(processor.complete(left, 0)) == [(request, NOTICE_RELEASED)]
    assert (processor.num_live, broken_rules(processor.tables)) == (0, [])


# Early release.


def test_with_early_release_a_subgraph_follows_its_producers_before_they_complete():
    processor = make_processor(2)
    encoder, decoder = add_step(processor, 4), add_step(processor, 4, priority=1)
    admit(processor, two_chains(encoder, decoder, 1))
    assert schedule(processor, worker=1) == [(encoder, 1)]
    assert schedule(processor, worker=2) == [], "only a stream keeps order"
    assert schedule(processor, worker=1) == [(decoder, 1)]
    complete(processor, *running(processor))
    assert processor.num_live == 0


def test_without_early_release_a_subgraph_waits_for_completion():
    processor = make_processor(2, settings=replace(ONE_BY_ONE, early_release=False))
    encoder, decoder = add_step(processor, 4), add_step(processor, 4)
    admit(processor, two_chains(encoder, decoder, 1))
    assert schedule(processor, worker=1) == [(encoder, 1)]
    assert schedule(processor, worker=1) == []
    complete(processor, *running(processor))
    assert schedule(processor, worker=2) == [(decoder, 1)]


def test_producers_at_two_workers_are_waited_for():
    processor = make_processor(2)
    leaf, inner = add_tree(processor, 1), add_tree(processor, 4, priority=1)
    admit(processor, tree(leaf, inner, 2))
    assert schedule(processor, worker=1) == [(leaf, 1)]
    assert schedule(processor, worker=2) == [(leaf, 1)]
    assert schedule(processor, worker=1) == schedule(processor, worker=2) == []
    left, right = running(processor)
    complete(processor, left)
    assert schedule(processor, worker=2) == []
    complete(processor, right)
    assert schedule(processor, worker=1) == [(inner, 1)]


# Nothing waits for ever.


@pytest.mark.parametrize("max_wait_s", [0.5e-3, 5e-3, None])
def test_a_type_of_low_priority_goes_first_once_it_has_waited_too_long(max_wait_s):
    processor = make_processor(settings=replace(ONE_BY_ONE, max_wait_s=max_wait_s))
    low, high = add_tree(processor, 4), add_tree(processor, 4, priority=9)
    low_request = admit(processor, leaves(low, 1))
    for now_ms in range(20):
        processor.clock.set(now_ms * 1_000_000)
        while processor.tables.ready.sum() < 8:
            admit(processor, leaves(high, 4))
        waited_too_long = now_ms > (6 if max_wait_s is None else 1e3 * max_wait_s)
        assert [cell for cell, _ in schedule(processor)] == [low if waited_too_long else high]
        complete(processor, *running(processor))
        if waited_too_long:
            break
    assert processor.tables.requests["state"][low_request] == 0


# Runs.

STEP_S = 1e-4


def lengths(settings: SchedulerSettings, now_s: float, count: int = 1, streamed: bool = False) -> list[int]:
    """Steps of the tasks that run chains of 24 to their end, with nobody else arriving."""
    processor = make_processor(settings=settings)
    cell = add_step(processor, 4)
    processor.set_step_time(cell, count, STEP_S)
    processor.clock.set(round(now_s * 1e9))
    for _ in range(count):
        admit(processor, chain(cell, 24), streamed=streamed)
    steps: list[int] = []
    while processor.num_live:
        tasks = processor.schedule(1)
        steps += processor.tables.tasks["steps"][tasks].tolist()
        complete(processor, *tasks)
    return steps


@pytest.mark.parametrize(
    ("budget_s", "expected"), [(1e-3, [10, 10, 4]), (0.35e-3, [3] * 8), (0.25e-3, [2] * 12), (1e-5, [1] * 24)]
)
def test_a_run_fits_the_join_budget(budget_s, expected):
    assert lengths(SchedulerSettings(join_budget_s=budget_s), 0.0) == expected
    assert lengths(SchedulerSettings(join_budget_s=budget_s), 0.0, count=3) == expected


def test_a_run_is_a_whole_chain_when_nobody_is_expected():
    assert lengths(SchedulerSettings(join_budget_s=1e-5), now_s=1.0) == [24]


def test_a_run_takes_nodes_each_of_which_carries_the_state_of_the_one_before():
    processor = make_processor(settings=SchedulerSettings())
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 1, STEP_S)
    program = [OP_EXTERNAL, 0, 6]
    for k in range(5):
        program += [OP_NODE, cell, FIXED, k, FIXED, 5 + k]
    admit(processor, np.array([*program, OP_RESULT, 10, 1, 1], np.int32))
    (task,) = processor.schedule(1)
    assert processor.tables.tasks["steps"][task] == 5


@pytest.mark.parametrize(("x", "h"), [(2, 1), (2, 2), (0, 1)])
def test_a_run_takes_no_node_that_reads_the_one_before_otherwise_or_not_at_all(x, h):
    processor = make_processor(settings=SchedulerSettings())
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 1, STEP_S)
    program = [OP_EXTERNAL, 0, 2, OP_NODE, cell, FIXED, 0, FIXED, 1, OP_NODE, cell, FIXED, x, FIXED, h]
    admit(processor, np.array([*program, OP_RESULT, 2, 1, 2], np.int32))
    while tasks := processor.schedule(1):
        assert set(processor.tables.tasks["steps"][tasks].tolist()) == {1}
        complete(processor, *tasks)


def test_no_run_is_longer_than_the_longest():
    assert lengths(SchedulerSettings(join_budget_s=1e-5, max_run_s=1e-3), now_s=1.0) == [10, 10, 4]
    assert lengths(SchedulerSettings(join_budget_s=1e-3, max_run_s=1e-5), now_s=1.0) == [10, 10, 4]


def test_a_run_of_a_streamed_request_fits_the_join_budget_whoever_is_expected():
    assert lengths(SchedulerSettings(join_budget_s=1e-3), now_s=1.0, streamed=True) == [10, 10, 4]


def test_runs_can_be_switched_off():
    assert lengths(SchedulerSettings(runs=False), now_s=1.0) == [1] * 24


def test_chains_of_different_lengths_leave_a_run_at_their_ends():
    processor = make_processor(settings=SchedulerSettings())
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 4, STEP_S)
    requests = [admit(processor, chain(cell, length)) for length in (2, 9, 5)]
    (task,) = processor.schedule(1)
    buffer = processor.task_buffer(task)
    assert buffer[int(buffer[layout.H_BATCH_SIZES]) :][:9].tolist() == [3, 3, 2, 2, 2, 1, 1, 1, 1]
    assert requests_of(processor, task) == [requests[1], requests[2], requests[0]]
    complete(processor, task)
    assert processor.num_live == 0


# What a complete task says of itself.


def test_a_complete_task_has_the_steps_and_nodes_that_ran():
    processor = make_processor(settings=SchedulerSettings())
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 4, STEP_S)
    for _ in range(3):
        admit(processor, loop(cell, 20))
    (task,) = processor.schedule(1)
    row, buffer = processor.tables.tasks[task : task + 1], processor.task_buffer(task)
    assert (row["steps"][0], row["positions"][0]) == (20, 60), "planned"
    done_at = int(buffer[layout.H_DONE_STEPS])
    buffer[done_at : done_at + 3] = [-2, -7, 20]
    buffer[int(buffer[layout.H_FAILED]) + 1] = 1
    processor.complete(task, 1000)
    assert (row["steps"][0], row["positions"][0]) == (20, 22), "of a row that failed nothing counts"
