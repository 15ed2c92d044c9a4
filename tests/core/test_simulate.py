"""The simulated worker: cases worked out by hand, and the same trace twice gives the same actions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.simulate import Arrival, Simulation, simulate
from cellrt.core.state.settings import SchedulerSettings
from cellrt.errors import RequestError, RequestTooLargeError
from tests.core.graphs import (
    SMALL,
    add_step,
    add_tree,
    chain,
    leaves,
    loop,
    make_processor,
    tree,
    two_chains,
)
from tests.core.page_machine import Paged, PageMachine


def unit_cost(cell_type: int, rows: int, steps: int) -> float:
    """A second a step."""
    return float(steps)


def spans(simulation: Simulation) -> list[tuple[int, float, float, tuple[int, ...]]]:
    return [(task.worker, task.start_s, task.end_s, task.requests) for task in simulation.tasks]


def test_two_workers_share_chains_of_one_type():
    processor = make_processor(2)
    cell = add_step(processor, 2)
    arrivals = [Arrival(0, chain(cell, length)) for length in (2, 1, 3)] + [Arrival(1, chain(cell, 1))]
    simulation = simulate(processor, arrivals, unit_cost)
    assert spans(simulation) == [
        (1, 0, 1, (0, 1)),
        (2, 0, 1, (2,)),
        (1, 1, 2, (0, 2)),  # request 2 had no task running: it moved to worker 1
        (2, 1, 2, (3,)),
        (1, 2, 3, (2,)),
    ]
    assert simulation.finish_s == [2, 1, 3, 2]


def test_two_workers_of_different_task_lengths():
    processor = make_processor(2)
    slow, quick = add_tree(processor, 4, priority=1), add_tree(processor, 4)
    arrivals = [Arrival(0, leaves(slow, 1)), Arrival(0.25, leaves(quick, 3)), Arrival(0.5, leaves(quick, 2))]
    simulation = simulate(processor, arrivals, lambda cell, rows, steps: 2.0 if cell == slow else rows / 4)
    assert spans(simulation) == [(1, 0, 2, (0,)), (2, 0.25, 1, (1, 1, 1)), (2, 1, 1.5, (2, 2))]
    assert simulation.finish_s == [2, 1, 1.5]


@pytest.mark.parametrize(
    ("queue_depth", "expected"),
    [
        (1, [(0, 1, (0,)), (1, 2, (0, 1)), (2, 3, (0,))]),
        (2, [(0, 1, (0,)), (1, 2, (0,)), (2, 3, (0, 1))]),
        (3, [(0, 1, (0,)), (1, 2, (0,)), (2, 3, (0,)), (3, 4, (1,))]),
    ],
)
def test_a_newcomer_joins_behind_the_tasks_outstanding(queue_depth, expected):
    processor = make_processor()
    cell = add_step(processor, 4)
    arrivals = [Arrival(0, chain(cell, 3)), Arrival(0.5, chain(cell, 1))]
    simulation = simulate(processor, arrivals, unit_cost, queue_depth=queue_depth)
    assert [(task.start_s, task.end_s, task.requests) for task in simulation.tasks] == expected


def test_loops_take_the_steps_they_are_told():
    processor = make_processor()
    cell = add_step(processor, 4)
    arrivals = [Arrival(0, loop(cell, 9), loop_steps=(steps,)) for steps in (2, 5, 9)]
    simulation = simulate(processor, [*arrivals, Arrival(0, loop(cell, 3))], unit_cost)
    assert simulation.finish_s == [2, 5, 9, 3]


@pytest.mark.parametrize(
    ("min_run_s", "expected", "finish_s"),
    [
        (0.0, [(1, 0, 2, (0, 1)), (1, 2, 3, (1, 2)), (1, 3, 7, (2,)), (1, 7, 8, (2,))], [2, 3, 8]),
        (3.0, [(1, 0, 3, (0, 1)), (1, 3, 7, (2,)), (1, 7, 9, (2,))], [3, 3, 9]),
    ],
    ids=["at once", "when it has taken so long"],
)
@pytest.mark.parametrize("are_loops", [True, False], ids=["loops", "chains"])
def test_a_run_ends_with_the_first_of_its_rows_that_ends(min_run_s, expected, finish_s, are_loops):
    processor = make_processor(settings=SchedulerSettings(1, join_budget_s=4.0, min_run_s=min_run_s))
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 2, 1.0)

    def request(time_s: float, steps: int) -> Arrival:
        if are_loops:
            return Arrival(time_s, loop(cell, 9), loop_steps=(steps,))
        return Arrival(time_s, chain(cell, steps))

    simulation = simulate(processor, [request(0, 2), request(0, 3), request(0.5, 6)], unit_cost)
    assert [(*moment, tuple(sorted(rows))) for *moment, rows in spans(simulation)] == expected
    assert simulation.finish_s == finish_s


def test_what_is_late_ends_and_leaves_its_place_to_others():
    """One at a time: the first is done, the second is dropped in its third step, the third before it is admitted; the
    fourth has begun in time."""
    processor = make_processor(limits=replace(SMALL, max_requests=2))
    cell = add_step(processor, 1)
    arrivals = [
        Arrival(0, chain(cell, 3), deadline_s=3),
        Arrival(0, chain(cell, 4), deadline_s=5.5),
        Arrival(0, chain(cell, 2), schedule_by_s=2.5),
        Arrival(1, chain(cell, 3), schedule_by_s=6.5),
    ]
    simulation = simulate(processor, arrivals, unit_cost, drops_late=True)
    assert simulation.finish_s == [3, math.inf, math.inf, 9]
    assert [task.requests for task in simulation.tasks] == [(0,)] * 3 + [(1,)] * 3 + [(3,)] * 3
    assert simulation.requests[2].admission_s == math.inf
    assert processor.num_live == 0 and not broken_rules(processor.tables)
    processor = make_processor(limits=replace(SMALL, max_requests=2))
    add_step(processor, 1)
    assert simulate(processor, arrivals, unit_cost).finish_s == [3, 7, 9, 12]


def test_what_must_begin_at_once_is_dropped_as_it_comes():
    processor = make_processor()
    cell = add_step(processor, 1)
    simulation = simulate(processor, [Arrival(1, chain(cell, 1), schedule_by_s=1)], unit_cost, drops_late=True)
    assert simulation.finish_s == [math.inf] and simulation.tasks == ()


def test_requests_wait_for_room_in_order():
    processor = make_processor(limits=replace(SMALL, max_requests=2))
    cell = add_step(processor, 4)
    simulation = simulate(processor, [Arrival(0, chain(cell, 2))] * 3 + [Arrival(0.5, chain(cell, 1))], unit_cost)
    assert [request.admission_s for request in simulation.requests] == [0, 0, 2, 2]
    assert simulation.finish_s == [2, 2, 4, 3]


def test_what_cannot_run_is_refused():
    processor = make_processor()
    cell = add_step(processor, 4)
    with pytest.raises(RequestTooLargeError, match="5002 at the host"):
        simulate(processor, [Arrival(0, chain(cell, 5000))], unit_cost)
    for wrong in (
        Arrival(-1, chain(cell, 1)),
        Arrival(0, np.zeros(0, np.int32)),
        Arrival(0, loop(cell, 3), loop_steps=(4,)),
        Arrival(0, chain(cell, 3), loop_steps=(1,)),
    ):
        with pytest.raises(RequestError):
            simulate(processor, [wrong], unit_cost)
    with pytest.raises(ValueError, match="queue depth"):
        simulate(processor, [], unit_cost, queue_depth=0)
    assert simulate(processor, [], unit_cost) == Simulation((), ())


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 8)), max_size=12),
    num_workers=st.integers(1, 3),
    queue_depth=st.integers(1, 3),
    runs=st.booleans(),
    early_release=st.booleans(),
)
def test_the_same_trace_gives_the_same_actions(arrivals, num_workers, queue_depth, runs, early_release):
    def cost(cell_type: int, rows: int, steps: int) -> float:
        return 1e-4 * steps + 1e-6 * rows

    def play() -> tuple[Simulation, bytes]:
        settings = SchedulerSettings(runs=runs, early_release=early_release, join_budget_s=3e-4)
        processor = make_processor(num_workers, settings)
        step, later = add_step(processor, 3), add_step(processor, 4, priority=1)
        leaf, inner = add_tree(processor, 5), add_tree(processor, 3, priority=1)
        makers = (
            lambda size: chain(step, size),
            lambda size: two_chains(step, later, size),
            lambda size: loop(later, size),
            lambda size: tree(leaf, inner, size),
        )
        trace = [Arrival(1e-4 * ticks, makers[what](8 if what == 3 else size)) for ticks, what, size in arrivals]
        simulation = simulate(
            processor, trace, lambda _, rows, steps: 1e-4 * steps + 1e-6 * rows, queue_depth=queue_depth
        )
        assert broken_rules(processor.tables) == []
        return simulation, processor.tables.events.tobytes()

    first, second = play(), play()
    assert first == second
    assert all(request.finish_s > request.arrival_s for request in first[0].requests)
    ends: dict[int, float] = {}
    for task in first[0].tasks:
        assert task.start_s >= ends.get(task.worker, 0.0), "a worker does one task at a time, in order"
        ends[task.worker] = task.end_s


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_whose_pages_run_out_are_suspended_and_finish(workers):
    """Each comes to eight pages, of which a worker has ten."""
    machine = PageMachine(workers, pages=10, host_pages=40)
    arrivals = [Arrival(0, Paged([7, 8, 9], num_written=12).program) for _ in range(6)]
    simulation = simulate(machine.processor, arrivals, lambda *_: 1.0)
    assert min(simulation.finish_s) > 0
    assert machine.processor.num_live == 0 and broken_rules(machine.processor.tables) == []


def test_copies_of_pages_delay_the_tasks_that_need_them():
    def last_end(page_s: float) -> float:
        machine = PageMachine(1, pages=10, host_pages=40)
        arrivals = [Arrival(0, Paged([7, 8, 9], num_written=12).program) for _ in range(2)]
        return max(simulate(machine.processor, arrivals, lambda *_: 1.0, page_s=page_s).finish_s)

    later_s = last_end(0.25) - last_end(0.0)
    assert later_s >= 0.5 and later_s % 0.25 == 0, "out and back"


def test_a_step_takes_longer_for_the_rows_that_it_reads():
    machine = PageMachine(1, pages=20, host_pages=0, max_rows=4)
    read = [Paged([7, 8, 9]).program, Paged([1, 2]).program]
    ends = [
        simulate(
            machine.processor, [Arrival(0, one)], lambda *_: 1.0, reading=lambda _, rows_read: 0.001 * rows_read
        ).finish_s[0]
        for one in read
    ]
    assert ends == [pytest.approx(1.006), pytest.approx(1.003)]  # rows 1, 2 and 3; 1 and 2
    (end,) = simulate(
        machine.processor,
        [Arrival(0, Paged([7, 8, 9], num_written=2).program)],
        lambda *_: 1.0,
        reading=lambda _, rows_read: 0.001 * rows_read,
    ).finish_s
    assert end == pytest.approx(3.006 + 0.001 * (1 + 3 + 2 + 3))
