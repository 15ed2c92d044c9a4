"""ORCA's scheduling of iterations (sections 3 and 4.2): who takes part in which, in which order; and of whole requests,
which it is compared with.

An iteration is a task. A request reads a prompt of some rows, in its first iteration or in pieces, and then goes on row
by row.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.simulate import Arrival, Simulation, simulate
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.task_layout import TaskView
from tests.core.graphs import make_processor
from tests.core.page_machine import PAGE_SIZE, numbers
from tests.core.talkers import Talk, Talkers
from tests.core.test_das import encoder, sentence
from tests.effort import LONG_IN_PYTHON, examples

PLENTY = 200
"""Pages, of two rows each: nobody lacks one."""
Trace = list[tuple[float, int, int]]
"""When each request arrives, how many rows its prompt has, and how many iterations it takes from the end of it on."""


def machine_of(max_bs: int, most: int, workers: int = 1, pages: int = PLENTY, **others: bool) -> Processor:
    machine = Talkers(workers, pages, 4 * pages, 0, max_rows=most, max_batch=max_bs, **others)
    return machine.processor


def play(processor: Processor, trace: Trace, pieces: bool = False) -> Simulation:
    """Iterations of one second. In pieces, all of a prompt but its last row is read before the first iteration that
    makes something; else the prompt is the first."""
    arrivals = [
        Arrival(time_s, Talk(numbers(rows), limit=steps, leading=1 if pieces else rows, may_stop=False).program)
        for time_s, rows, steps in trace
    ]
    simulation = simulate(processor, arrivals, lambda *_: 1.0)
    assert broken_rules(processor.tables) == [] and processor.num_live == 0
    return simulation


def iterations(simulation: Simulation) -> list[list[int]]:
    """The requests of each, in order."""
    return [list(dict.fromkeys(task.requests)) for task in simulation.tasks]


def pages_of(rows: int, steps: int) -> int:
    """The pages of a request, ``max_tokens``: its prompt is followed by all that it says but the last."""
    return -(-(rows + steps - 1) // PAGE_SIZE)


def select(trace: Trace, max_bs: int, n_slots: int = PLENTY) -> list[list[int]]:
    """ORCA's Algorithm 1 with one worker, where a slot is a page: which requests run each iteration."""
    left, now, found = {k: steps for k, (_, _, steps) in enumerate(trace)}, 0.0, list[list[int]]()
    reserved = dict[int, int]()
    while left:
        pool = sorted((k for k in left if trace[k][0] <= now), key=lambda k: (trace[k][0], k))
        batch = list[int]()
        for k in pool:
            if len(batch) == max_bs:
                break
            if k not in reserved:
                slots = pages_of(*trace[k][1:])
                if sum(reserved.values()) + slots > n_slots:
                    break
                reserved[k] = slots
            batch.append(k)
        if not batch:
            now = min(trace[k][0] for k in left)
            continue
        for k in batch:
            left[k] -= 1
            if not left[k]:
                del left[k], reserved[k]
        found.append(batch)
        now += 1.0
    return found


TRACES = st.lists(st.tuples(st.integers(0, 16).map(lambda ticks: ticks / 2), st.integers(1, 6), st.integers(1, 6)))
TRACES = TRACES.map(lambda trace: sorted(trace[:8]))
POLICY = st.sampled_from([None, POLICIES["first-come-first-served"]])


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@given(trace=TRACES, max_bs=st.integers(1, 4), policy=POLICY)
def test_iteration_by_iteration_it_is_the_pseudo_code(trace, max_bs, policy):
    processor = machine_of(max_bs, 32, steps_first=False, policy=policy)
    assert iterations(play(processor, trace)) == select(trace, max_bs)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@given(trace=TRACES, max_bs=st.integers(1, 4), n_slots=st.integers(6, 12))
def test_who_begins_has_slots_for_all_that_it_may_say_and_nobody_begins_before_one_that_waits(trace, max_bs, n_slots):
    processor = machine_of(max_bs, 32, pages=n_slots, steps_first=False, reserve_pages=True)
    assert iterations(play(processor, trace)) == select(trace, max_bs, n_slots)


def overtaken(simulation: Simulation, trace: Trace) -> bool:
    """Whether a request ran fewer iterations than one that arrived later, before it was done."""
    ran, total = Counter[int](), Counter(k for batch in iterations(simulation) for k in batch)
    for batch in iterations(simulation):
        ran.update(batch)
        for k in range(len(trace)):
            if ran[k] < total[k] and any(ran[later] > ran[k] for later in range(k + 1, len(trace))):
                return True
    return False


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@given(trace=TRACES, max_bs=st.integers(1, 4), most=st.integers(1, 8), pieces=st.booleans())
def test_who_arrived_earlier_has_run_as_many_iterations_or_more(trace, max_bs, most, pieces):
    processor = machine_of(max_bs, max(most, 1 if pieces else 6), steps_first=False)
    assert not overtaken(play(processor, trace, pieces), trace)


def test_single_steps_overtake_a_prompt_that_comes_in_pieces_unless_all_is_in_order():
    """Of four rows a task: one reads nine, and four that come behind it one each."""
    trace: Trace = [(0, 9, 1), *[(0, 1, 3)] * 4]
    first, in_order = (play(machine_of(4, 4, steps_first=each), trace, pieces=True) for each in (True, False))
    assert iterations(first)[:3] == [[1, 2, 3, 4]] * 3 and overtaken(first, trace)
    assert iterations(in_order) == [[0], [0], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [4]]


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@example(trace=[(0, 1, 1), (0.5, 2, 1), (0.5, 5, 1), (1, 2, 1)], max_bs=3, workers=1)
@given(trace=TRACES, max_bs=st.integers(1, 4), workers=st.integers(1, 2))
def test_prompts_apart_are_in_no_task_with_single_steps(trace, max_bs, workers):
    most = 8
    simulation = play(machine_of(max_bs, most, workers, prompts_apart=True), trace)
    for task in simulation.tasks:
        counts = list(Counter(task.requests).values())
        if sum(counts) == most:
            counts.pop()  # of the prompt that fills it there may be one row
        assert len({count > 1 for count in counts}) == 1


def test_prompts_apart_go_first_and_those_that_have_begun_wait_meanwhile():
    trace: Trace = [(0, 1, 3), (0.5, 4, 2), (0.5, 3, 1)]
    together, apart = (play(machine_of(4, 8, prompts_apart=each), trace) for each in (False, True))
    assert iterations(together) == [[0], [0, 1, 2], [0, 1]]
    assert iterations(apart) == [[0], [1, 2], [0, 1], [0]]


def test_in_order_nobody_goes_before_one_that_does_not_fit():
    def tasks_of(steps_first: bool) -> list[list[int]]:
        processor = make_processor(settings=SchedulerSettings(1, steps_first=steps_first))
        cell = encoder(processor, 8)
        return iterations(simulate(processor, [Arrival(0, sentence(cell, n)) for n in (5, 6, 2)], lambda *_: 1.0))

    assert tasks_of(True) == [[0, 2], [1]]
    assert tasks_of(False) == [[0], [1, 2]]


def test_one_word_is_no_single_step_of_a_cell_that_reads_all_at_once():
    processor = make_processor(settings=SchedulerSettings(1), policy=POLICIES["earliest-deadline-first"])
    cell = encoder(processor, 4)
    arrivals = [Arrival(0, sentence(cell, 1), deadline_s=9), Arrival(0, sentence(cell, 4), deadline_s=1)]
    assert iterations(simulate(processor, arrivals, lambda *_: 1.0)) == [[1], [0]]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize(
    "others",
    [{"steps_first": False}, {"joins": False}, {"reserve_pages": True}, {"prompts_apart": True}],
    ids=["in order", "nobody joins", "reserved", "prompts apart"],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=LONG_IN_PYTHON), 2])
def test_everybody_ends_also_where_pages_run_out(policy, others, workers):
    processor = Talkers(workers, 12, 60, 0, max_rows=4, policy=policy, **others).processor
    arrivals = [
        Arrival(k % 3, Talk(numbers(1 + 3 * k % 8), limit=9, may_stop=False).program, deadline_s=20 - k)
        for k in range(8)
    ]
    assert min(simulate(processor, arrivals, lambda *_: 1.0).finish_s) > 0
    assert processor.num_live == 0 and broken_rules(processor.tables) == []


# The figures.

FIGURE_3: Trace = [(0, 2, 4), (0, 2, 2)]
"""x1 makes "this is great <end>", x2 "you <end>"."""


def test_figure_3_who_ends_early_is_answered_then():
    simulation = play(machine_of(4, 8), FIGURE_3)
    assert simulation.finish_s == [4, 2]
    assert [task.rows for task in simulation.tasks] == [4, 2, 1, 1], "no row for who has ended"


def test_figure_3_who_comes_late_joins_after_the_iteration_that_runs():
    simulation = play(machine_of(4, 8), [*FIGURE_3, (1.5, 3, 1)])
    assert simulation.finish_s == [4, 2, 3]
    assert iterations(simulation)[2] == [0, 2]


def test_pages_of_who_has_ended_are_another_s_while_the_rest_of_the_batch_goes_on():
    """TCB's early cleaning (section 4.2.2): five pages, of which x1 may need three and x2 two, as the third does."""
    processor = machine_of(4, 8, pages=5, steps_first=False, reserve_pages=True)
    simulation = play(processor, [*FIGURE_3, (0, 2, 2)])
    assert iterations(simulation) == [[0, 1], [0, 1], [0, 2], [0, 2]]


FIGURE_4: Trace = [(0, 2, 5), (0.5, 1, 4), (1.5, 2, 3), (1.5, 3, 2)]
"""x1 has run two iterations and x2 one when x3 and x4 have arrived, with two and three rows of input."""


def test_figures_4_and_5_one_iteration_of_requests_in_any_phase_is_one_flat_batch():
    """x14, x22, x31, x32, x41, x42 and x43: seven rows, which only attention splits."""
    simulation = play(machine_of(4, 8, steps_first=False), FIGURE_4)
    assert iterations(simulation)[:3] == [[0], [0, 1], [0, 1, 2, 3]]
    assert [task.rows for task in simulation.tasks][:3] == [2, 2, 7]
    assert simulation.tasks[2].requests == (0, 1, 2, 2, 3, 3, 3)


def test_figure_5_each_request_is_a_span_of_the_task_with_pages_of_its_own():
    machine = Talkers(1, PLENTY, 0, 0, max_rows=8, steps_first=False)
    for has_run, (_, rows, steps) in zip((True, True, False, False), FIGURE_4):
        assert machine.begin(Talk(numbers(rows), limit=steps, leading=rows, may_stop=False))
        if has_run:
            machine.schedule(1)
            machine.finish(1)
    machine.schedule(1)
    ((_, buffer),) = machine.flights[0]
    assert TaskView(buffer).spans.tolist() == [0, 1, 2, 4, 7]
    machine.finish(1)  # which checks what each read: its own rows alone


# Whole requests.


def test_requests_that_do_not_join_begin_together_when_all_before_them_have_ended():
    trace: Trace = [*FIGURE_3, (1.5, 3, 1), (2.5, 1, 2)]
    simulation = play(machine_of(4, 8, joins=False), trace)
    assert simulation.finish_s == [4, 2, 5, 6]
    assert [sorted(batch) for batch in iterations(simulation)] == [[0, 1], [0, 1], [0], [0], [2, 3], [3]]


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@given(
    trace=TRACES,
    max_bs=st.integers(1, 4),
    workers=st.integers(1, 2),
    pieces=st.booleans(),
    steps_first=st.booleans(),
)
def test_nobody_joins_those_that_run(trace, max_bs, workers, pieces, steps_first):
    processor = machine_of(max_bs, 6, workers, joins=False, steps_first=steps_first)
    simulation = play(processor, trace, pieces)
    for worker in range(1, workers + 1):
        batch, left = set[int](), set[int]()
        ends = {k: n for n, task in enumerate(simulation.tasks) for k in task.requests}
        for n, task in enumerate(simulation.tasks):
            if task.worker == worker:
                batch = batch if left else set(task.requests)
                assert set(task.requests) <= batch
                left = {k for k in batch if ends[k] > n}
