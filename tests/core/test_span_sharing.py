"""Who begins at which worker, of loops and chains that stay where their pages are: together where a step of all takes
no longer than one of some, else shared out."""

from __future__ import annotations

import pytest

from tests.core.page_machine import numbers
from tests.core.talkers import SPEAK, Talk, Talkers

FLAT = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0}
"""ms of a step by its rows, where memory brings all weights for any number of them."""
STEEP = {1: 1.0, 2: 1.9, 4: 3.8, 8: 7.6, 16: 15.2, 32: 30.4}
BOTH = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 16: 2.4, 32: 4.8}


def machine_of(times: dict[int, float], count: int, workers: int = 2) -> Talkers:
    """Requests of three numbers each, the first of nine, of which none has begun."""
    machine = Talkers(workers, 200, 200, 0, max_rows=64, max_batch=32)
    for rows, each_ms in times.items():
        machine.processor.set_step_time(SPEAK, rows, 1e-3 * each_ms)
    begin(machine, count)
    return machine


def begin(machine: Talkers, count: int) -> None:
    for seed in range(count):
        count = 3 if seed else 9
        assert machine.begin(Talk(numbers(count, seed), limit=20, leading=count, may_stop=False))


def spans_of(machine: Talkers, worker: int, idle_workers: int) -> int:
    """Of the task that a worker gets; 0: it gets none."""
    tasks = machine.processor.schedule(worker, idle_workers)
    machine.flights[worker - 1] += [(task, machine.processor.task_buffer(task)) for task in tasks]
    return sum(len({id for id, _ in machine.processor.rows_in_flight(task)}) for task in tasks)


@pytest.mark.parametrize(("workers", "shares"), [(2, [4, 3]), (3, [3, 2, 2])])
def test_requests_that_come_at_once_are_shared_out_among_idle_workers(workers, shares):
    machine = machine_of(STEEP, 7, workers)
    assert [spans_of(machine, k + 1, workers - k) for k in range(workers)] == shares
    machine.check()


def test_they_stay_together_where_a_step_of_all_takes_as_long_as_one_of_half():
    machine = machine_of(FLAT, 6)
    assert (spans_of(machine, 1, 2), spans_of(machine, 2, 1)) == (6, 0)


def test_an_idle_worker_takes_the_steps_of_those_that_are_its_own_whatever_others_get():
    machine = machine_of(STEEP, 2)
    assert spans_of(machine, 1, 2) == 1
    machine.finish(1)
    begin(machine, 3)
    assert spans_of(machine, 1, 2) == 1 + 2  # of the four that no worker has


def run(machine: Talkers, count: int) -> None:
    """Tasks of the first worker alone, which take as long as is said."""
    for _ in range(count):
        machine.schedule(1)
        (task, _) = machine.flights[0][0]
        rows = int(machine.processor.tables.tasks["rows"][task])
        elapsed_ms = BOTH[min(32, 1 << (rows - 1).bit_length())]
        machine.run(*machine.flights[0].pop(), 1)
        machine.take(machine.processor.complete(task, int(1e6 * elapsed_ms)))


@pytest.mark.parametrize(("running", "new", "taken"), [(3, 1, 0), (10, 6, 6)])
def test_who_comes_later_is_left_to_a_busy_worker_unless_two_are_faster(running, new, taken):
    machine = machine_of(BOTH, running)
    run(machine, 2)
    machine.processor.clock.set(10_000_000)
    assert spans_of(machine, 1, 1) == running
    begin(machine, new)
    assert spans_of(machine, 2, 1) == taken
