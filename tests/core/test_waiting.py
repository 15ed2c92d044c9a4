"""How long ready work waits: client priorities between cell types, and bounds in time (see ``schedule.py``)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policy import Policy
from cellrt.core.simulate import Arrival, SimulatedTask, simulate
from cellrt.core.state.notices import Notices
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.state.tables import NEVER, NUM_PRIORITIES
from cellrt.core.templates.sized_template import SizedTemplate
from tests.core.graphs import SMALL, add_step, add_tree, chain, leaves, make_processor
from tests.core.policies import ANY_POLICY
from tests.effort import LONG_IN_PYTHON

MS = 1e-3
DEFAULT = SchedulerSettings()
JOIN_S, RUN_S = DEFAULT.join_budget_s, DEFAULT.max_run_s
STEP_S = 0.1 * MS


def cost(cell_type: int, rows: int, steps: int) -> float:
    return STEP_S * steps


def make(
    num_types: int,
    given: SchedulerSettings = DEFAULT,
    num_workers: int = 1,
    max_batch: int = 16,
    limits: Limits = SMALL,
) -> Processor:
    """A processor with steps of equal cost; the first type has the highest priority of its own."""
    processor = make_processor(num_workers, given, limits, rows=1 << 15)
    for k in range(num_types):
        processor.set_step_time(add_step(processor, max_batch, priority=num_types - k), 1, STEP_S)
    return processor


def tasks_of(tasks: tuple[SimulatedTask, ...], cell_type: int) -> list[SimulatedTask]:
    return [task for task in tasks if task.cell_type == cell_type]


def length_ms(task: SimulatedTask) -> float:
    return round((task.end_s - task.start_s) / MS, 6)


def wait_ms(tasks: tuple[SimulatedTask, ...], request: int, arrival_s: float) -> float:
    """From a request's arrival to its first task."""
    return round((next(task.start_s for task in tasks if request in task.requests) - arrival_s) / MS, 6)


# One long request of a type, short ones of another.


def test_a_short_request_of_a_high_priority_goes_right_after_the_task_that_runs():
    processor = make(2)
    arrivals = [Arrival(0, chain(0, 3000), priority=0)]
    arrivals += [Arrival((7.05 + 5 * k) * MS, chain(1, 1), priority=3) for k in range(40)]
    tasks = simulate(processor, arrivals, cost).tasks
    for k, task in enumerate(tasks_of(tasks, 1), start=1):
        (running,) = (other for other in tasks if other.start_s <= arrivals[k].time_s < other.end_s)
        assert task.requests == (k,) and task.start_s == running.end_s


@pytest.mark.parametrize(("priority", "quiet_s"), [(3, 0.0), (1, 0.1)], ids=["higher", "equal"])
def test_runs_fit_the_join_budget_once_others_are_likely(priority, quiet_s):
    """Of a higher priority from the first one on; of the same when the time between arrivals is known to be short."""
    processor = make(2)
    arrivals = [Arrival(0, chain(0, 3000), priority=1)]
    arrivals += [Arrival((100 + 5 * k) * MS, chain(1, 1), priority=priority) for k in range(80)]
    long = tasks_of(simulate(processor, arrivals, cost).tasks, 0)
    assert max(map(length_ms, long)) == RUN_S / MS, "nobody was expected at first"
    first_s = 0.1 + RUN_S + quiet_s
    assert max(length_ms(task) for task in long if task.start_s > first_s) <= JOIN_S / MS


def test_a_long_silence_does_not_make_the_next_runs_long_for_long():
    processor = make(2)
    hour_s = 3600.0
    arrivals = [Arrival(hour_s, chain(0, 3000), priority=0)]
    arrivals += [Arrival(hour_s + 5 * k * MS, chain(1, 1), priority=3) for k in range(80)]
    long = tasks_of(simulate(processor, arrivals, cost).tasks, 0)
    assert max(length_ms(task) for task in long if task.start_s > hour_s + 0.2) <= JOIN_S / MS


@pytest.mark.parametrize(("num_workers", "num_others", "expected_ms"), [(1, 1, 3), (1, 0, 19.9), (2, 2, 3), (4, 2, 20)])
def test_a_run_fits_the_join_budget_while_another_type_waits_for_a_worker(num_workers, num_others, expected_ms):
    processor = make(1 + num_others, num_workers=num_workers)
    processor.clock.note_arrivals([k * 10**8 for k in range(90)])  # hardly any, so far
    arrivals = [Arrival(9.0, chain(k, 400)) for k in range(1 + num_others)]
    first = min(simulate(processor, arrivals, cost).tasks, key=lambda task: task.task)
    assert first.cell_type == 0 and length_ms(first) == expected_ms


def test_a_run_of_a_low_priority_fits_the_join_budget_while_a_higher_one_of_its_type_waits():
    processor = make(1, replace(DEFAULT, max_run_s=50 * MS), max_batch=1)
    arrivals = [Arrival(1.0, chain(0, 900), priority=0)]
    arrivals += [Arrival(2.0, chain(0, 200), priority=priority) for priority in (3, 3, 3, 3)]
    simulation = simulate(processor, [*arrivals, Arrival(2.0, chain(0, 500), priority=0)], cost)
    low = [task for task in simulation.tasks if task.requests == (5,)]
    assert low[0].start_s < simulation.finish_s[4], "it does not starve either"
    assert max(length_ms(task) for task in low if task.start_s < simulation.finish_s[4] - 1e-9) <= JOIN_S / MS


def test_a_step_that_was_measured_at_one_row_is_taken_to_be_longer_at_many():
    processor = make(1, max_batch=64)
    arrivals = [Arrival(0, chain(0, 40)) for _ in range(64)]
    first, *_ = simulate(processor, arrivals, lambda _, rows, steps: STEP_S * rows * steps).tasks
    assert (first.rows, first.steps) == (64, 1)


def test_a_step_that_was_never_measured_is_run_alone():
    processor = make_processor(2, DEFAULT)
    add_step(processor, 4)
    first, *_ = simulate(processor, [Arrival(1.0, chain(0, 400))], cost).tasks
    assert first.steps == 1


# Floods.


def test_chains_of_a_high_priority_pass_a_flood_of_another_type():
    processor = make_processor(1, replace(DEFAULT, max_run_s=JOIN_S))
    flood, trickle = add_step(processor, 16, priority=1), add_step(processor, 16)
    for cell in (flood, trickle):
        processor.set_step_time(cell, 16, MS)
    arrivals = [Arrival(0, chain(flood, 20), priority=0)] * 60
    arrivals += [Arrival((5 + 40 * k) * MS, chain(trickle, 20), priority=3) for k in range(4)]
    simulation = simulate(processor, arrivals, lambda _, rows, steps: MS * steps)
    latencies_ms = [1e3 * (end - arrivals[k].time_s) for k, end in enumerate(simulation.finish_s) if k >= 60]
    # Its 20 ms, 3 of the flood that run when it comes, and 3 more each time the flood has waited longer than 6.
    assert max(latencies_ms) <= 20 + 3 + 2 * 3


@pytest.mark.parametrize(
    "priorities", [(3, 0), (1, 1), *(pytest.param(each, marks=LONG_IN_PYTHON) for each in ((3, 2), (0, 0), (1, 0)))]
)
def test_a_flood_does_not_starve_another_type(priorities):
    processor = make_processor(1, DEFAULT)
    flood, trickle = add_tree(processor, 16, priority=1), add_tree(processor, 16)
    for cell in (flood, trickle):
        processor.set_step_time(cell, 16, MS)
    arrivals = [Arrival(0, leaves(flood, 16), priority=priorities[0]) for _ in range(60)]
    arrivals.append(Arrival(0.5 * MS, leaves(trickle, 1), priority=priorities[1]))
    tasks = simulate(processor, arrivals, lambda _, rows, steps: MS).tasks
    # 0.5 ms of what runs, two join budgets, the rest of what was submitted in a row.
    assert wait_ms(tasks, 60, 0.5 * MS) <= 0.5 + 6 + 3


def test_without_a_bound_a_flood_goes_first():
    processor = make_processor(1, replace(DEFAULT, max_wait_s=math.inf))
    flood, trickle = add_tree(processor, 16, priority=1), add_tree(processor, 16)
    arrivals = [Arrival(0, leaves(flood, 16), priority=1) for _ in range(60)]
    arrivals.append(Arrival(0.5 * MS, leaves(trickle, 1), priority=1))
    assert wait_ms(simulate(processor, arrivals, lambda _, rows, steps: MS).tasks, 60, 0.0) == 60


def test_many_low_types_do_not_hold_up_a_high_one_longer_than_one_would():
    processor = make(9)
    arrivals = [Arrival(0, chain(k, 400), priority=0) for k in range(8)]
    arrivals += [Arrival((50 + 15 * k) * MS, chain(8, 1), priority=1) for k in range(6)]
    tasks = simulate(processor, arrivals, cost).tasks
    for k in range(8, 14):
        assert wait_ms(tasks, k, arrivals[k].time_s) <= JOIN_S / MS


def test_after_a_long_task_the_higher_priority_goes_first_however_long_both_have_waited():
    processor = make_processor(1, DEFAULT)
    long, low, high = (add_tree(processor, 16) for _ in range(3))
    arrivals = [Arrival(0, leaves(long, 1), priority=1), Arrival(1 * MS, leaves(low, 1), priority=0)]
    arrivals += [Arrival((2 + k) * MS, leaves(high, 1), priority=3) for k in range(2)]
    tasks = simulate(processor, arrivals, lambda cell_type, rows, steps: 50 * MS if cell_type == long else MS).tasks
    assert [task.cell_type for task in tasks] == [long, high, low]


def shares(priorities: list[int]) -> list[float]:
    """The part of the first 200 ms that each type gets, all of them having enough to do."""
    processor = make(len(priorities), limits=replace(SMALL, max_nodes=1 << 16, max_values=1 << 17, max_links=1 << 18))
    arrivals = [Arrival(0, chain(k, 2100), priority=priority) for k, priority in enumerate(priorities)]
    tasks = tuple(task for task in simulate(processor, arrivals, cost).tasks if task.start_s < 0.2)
    return [sum(map(length_ms, tasks_of(tasks, k))) / 200 for k in range(len(priorities))]


def test_all_lower_priorities_get_a_share_of_a_worker_that_a_higher_one_could_fill():
    high, *lower = shares([3, 2, 1, 0])
    assert high > 0.6
    assert lower[0] >= lower[1] >= lower[2] > 0


@LONG_IN_PYTHON
def test_many_lower_types_share_a_third_of_the_time():
    high, *lower = shares([3] + [1] * 8)
    assert high > 0.6
    assert min(lower) > 0.02 and max(lower) - min(lower) <= 0.02


# The bounds, whatever comes.


class Watched(Processor):
    """Notes how long each backlog waits, from what is seen from outside: ready nodes, tasks and their ends."""

    def __init__(
        self, num_workers: int, given: SchedulerSettings, costs_s: list[float], policy: Policy | None = None
    ) -> None:
        super().__init__(num_workers, replace(SMALL, max_requests=128, max_subgraphs=4096), given, policy)
        self.costs_ns = [round(each * 1e9) for each in costs_s]
        self.waits: list[tuple[int, int, int, int]] = []
        """(backlog, since, until, what was queued), in ns."""
        self.seen: list[tuple[int, list[int]]] = []
        """(time, backlogs that are ready) of each call."""
        self.longest_ns: dict[int, int] = {}
        self._since: dict[int, tuple[int, int]] = {}
        self._ends = [0] * num_workers
        self._took: dict[int, set[int]] = {}

    @property
    def _now(self) -> int:
        return int(self.tables.settings["now_ns"][0])

    def _ready(self) -> list[int]:
        return np.flatnonzero(self.tables.ready.sum(1)).tolist()

    def _look(self) -> None:
        """Starts the wait of what became ready, and forgets what is not any more."""
        ready = self._ready()
        queued = max(0, *(end - self._now for end in self._ends))
        self._since = {each: self._since.get(each, (self._now, queued)) for each in ready}

    def admit(
        self,
        template: SizedTemplate,
        sequence: int,
        priority: int = 0,
        streamed: bool = False,
        session: int = -1,
        deadline_ns: int = NEVER,
        schedule_by_ns: int = NEVER,
    ) -> tuple[int, NDArray[np.int32]] | None:
        how = priority, streamed, session, deadline_ns, schedule_by_ns
        admitted = super().admit(template, sequence, *how)
        self._look()
        return admitted

    def complete(self, task: int, elapsed_ns: int) -> Notices:
        notices = super().complete(task, elapsed_ns)
        for each in self._took.pop(task):
            self._since.pop(each, None)
        self._look()
        return notices

    def schedule(self, worker: int, idle_workers: int = 1) -> list[int]:
        self.seen.append((self._now, self._ready()))
        before = dict(self._since)
        tasks = super().schedule(worker, idle_workers)
        for task in tasks:
            row = self.tables.tasks[task]
            cell_type, steps = int(row["cell_type"]), int(row["steps"])
            requests = [request for request, _ in self.rows_in_flight(task)]
            priorities = self.tables.requests["priority"][requests]
            self._took[task] = {cell_type * NUM_PRIORITIES + each for each in priorities.tolist()}
            for each in self._took[task]:
                if each in before:
                    since, queued = before.pop(each)
                    self.waits.append((each, since, self._now, queued))
                self._since.pop(each, None)
            elapsed = self.costs_ns[cell_type] * steps
            self.longest_ns[cell_type] = max(elapsed, self.longest_ns.get(cell_type, 0))
            self._ends[worker - 1] = max(self._now, self._ends[worker - 1]) + elapsed
        self._look()
        return tasks


def check_bounds(watched: Watched, join_s: float) -> None:
    """The two bounds of ``schedule.py``, at its default ``max_wait``."""
    join, longest = round(join_s * 1e9), watched.longest_ns
    max_wait = 2 * join
    n = len({backlog for _, ready in watched.seen for backlog in ready})
    rest = max(watched.waits, key=lambda wait: wait[3])[3] + sum(longest.values()) + max(join, *longest.values())
    any_ns = (n + 3) * (max_wait + join + (max_wait + join + rest))
    for backlog, since, until, queued in watched.waits:
        own, priority = divmod(backlog, NUM_PRIORITIES)
        met = {each for now, ready in watched.seen if since <= now <= until for each in ready}
        others = [divmod(each, NUM_PRIORITIES) for each in met if each // NUM_PRIORITIES != own or each < backlog]
        bound = any_ns
        if all(each % NUM_PRIORITIES <= priority for each in met):
            equal = sum(longest[cell_type] for cell_type, each in others if each == priority)
            low = max((max(join, longest[cell_type]) for cell_type, each in others if each < priority), default=0)
            bound = queued + max_wait + join + equal + low
        assert until - since <= bound + 1000, f"{backlog} waited {until - since} ns, not {bound} at most"


FLOODS = st.lists(
    st.tuples(
        st.integers(0, 4),  # cell type
        st.integers(0, 3),  # client priority
        st.integers(0, 40),  # start, in quarters of a join budget
        st.integers(0, 8),  # period, in the same
        st.integers(1, 12),  # requests
        st.integers(1, 30),  # steps of each
    ),
    min_size=1,
    max_size=6,
)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(
    floods=FLOODS,
    types=st.lists(
        st.tuples(st.sampled_from([0.1, 0.3, 1.0, 2.5]), st.integers(1, 6), st.integers(0, 3)), min_size=5, max_size=5
    ),
    num_workers=st.integers(1, 3),
    configuration=st.builds(
        SchedulerSettings,
        max_tasks_to_submit=st.integers(1, 5),
        runs=st.booleans(),
        early_release=st.booleans(),
        join_budget_s=st.just(MS),
    ),
    policy=ANY_POLICY.filter(lambda policy: policy.is_bounded),
)
def test_nothing_that_is_ready_waits_longer_than_the_bound(floods, types, num_workers, configuration, policy):
    """Each type: time of a step in ms, largest batch, priority."""
    processor = Watched(num_workers, configuration, [step * MS for step, _, _ in types], policy)
    processor.add_kind(4096, 4096)
    for step_ms, max_batch, priority in types:
        processor.set_step_time(add_step(processor, max_batch, priority=priority), 1, step_ms * MS)
    arrivals = [
        Arrival((start + k * period) * MS / 4, chain(cell_type, steps), priority=priority, deadline_s=MS * (start + k))
        for cell_type, priority, start, period, count, steps in floods
        for k in range(count)
    ]
    simulate(processor, arrivals, lambda cell_type, rows, steps: types[cell_type][0] * MS * steps)
    assert broken_rules(processor.tables) == []
    check_bounds(processor, MS)


@pytest.mark.parametrize(
    ("high", "low"),
    [
        pytest.param(30, 0, id="types of one priority"),
        pytest.param(100, 6, id="many of both", marks=LONG_IN_PYTHON),
        pytest.param(1, 6, id="one above many"),
        pytest.param(6, 1, id="many above one"),
    ],
)
def test_floods_of_many_types_keep_to_the_bound(high, low):
    watched = Watched(1, SchedulerSettings(runs=False, join_budget_s=MS), [0.1 * MS] * high + [MS] * low)
    watched.add_kind(4096, 4096)
    arrivals = []
    for k in range(high + low):
        cell_type = add_tree(watched, 1, priority=-k)
        watched.set_step_time(cell_type, 1, watched.costs_ns[k] / 1e9)
        arrivals.append(Arrival(0, leaves(cell_type, 30 if k < high else 10), priority=2 if k < high else 1))
    simulate(watched, arrivals, lambda cell_type, rows, steps: watched.costs_ns[cell_type] / 1e9)
    check_bounds(watched, MS)
