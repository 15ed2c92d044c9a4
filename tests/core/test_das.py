"""Deadline-aware scheduling does what TCB's pseudo-code does (section 5.2), and is worth what Theorem 5.1 says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES, das
from cellrt.core.scheduling.policy import Policy
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import NEVER
from cellrt.core.state.task_layout import H_SPANS, TaskView
from cellrt.core.templates.program import NOTHING, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.errors import DefinitionError
from tests.core.graphs import ONE_BY_ONE, add_step, chain, make_processor
from tests.effort import examples


@dataclass(frozen=True)
class Request:
    number: int
    arrives: int
    deadline: int
    length: int


def algorithm_1(waiting: list[Request], rows: int, size: int, eta: float, q: float) -> list[list[Request]]:
    """TCB's Algorithm 1: which requests go into each of ``rows`` batch rows of ``size`` words."""
    left, batch = list(waiting), [list[Request]() for _ in range(rows)]

    def put(some: list[Request], row: list[Request]) -> None:
        for request in some:
            if sum(each.length for each in row) + request.length <= size:
                row.append(request)
                left.remove(request)

    for row in batch:
        if sum(each.length for each in left) <= size:
            put(list(left), row)
            continue
        by_utility = sorted(left, key=lambda each: -1 / each.length)
        s = max(k for k in range(len(left) + 1) if sum(each.length for each in by_utility[:k]) <= size)
        first = by_utility[: math.ceil(eta * s)]
        put(first, row)
        mean = sum(1 / each.length for each in first) / len(first)
        by_deadline = sorted((each for each in left if 1 / each.length >= q * mean), key=lambda each: each.deadline)
        put(by_deadline, row)
        put([each for each in by_utility if each not in first and each not in by_deadline], row)
    return batch


def slot_by_slot(requests: list[Request], size: int, eta: float, q: float) -> dict[int, list[int]]:
    """What Algorithm 1 puts into the one row of each time slot."""
    found, waiting = dict[int, list[int]](), list(requests)
    for now in range(HORIZON):
        here = [each for each in waiting if each.arrives <= now <= each.deadline]
        (row,) = algorithm_1(here, 1, size, eta, q)
        waiting = [each for each in waiting if each not in row]
        if row:
            found[now] = [each.number for each in row]
    return found


def best_worth(requests: list[Request], size: int) -> float:
    """The most that any schedule is worth that knows all requests from the start."""

    def rest(k: int, room: tuple[int, ...]) -> float:
        if k == len(requests):
            return 0.0
        one, best = requests[k], rest(k + 1, room)
        for slot in range(one.arrives, min(one.deadline, HORIZON - 1) + 1):
            if room[slot] >= one.length:
                less = (*room[:slot], room[slot] - one.length, *room[slot + 1 :])
                best = max(best, 1 / one.length + rest(k + 1, less))
        return best

    return rest(0, (size,) * HORIZON)


def encoder(processor: Processor, size: int) -> int:
    """A cell that reads all rows of a request at once."""
    inputs = [Port(0), Port(0, is_span=True)]
    return processor.add_type(inputs, [Port(0)], max_batch=size, max_rows=size, is_whole=True)


def sentence(cell: int, length: int) -> NDArray[np.int32]:
    program = [OP_EXTERNAL, 0, length, OP_CHAIN, cell, length, STEP, 0, 1, NOTHING, 0]
    return np.array([*program, OP_RESULT, length, 1, length], np.int32)


def encoder_tasks(requests: list[Request], size: int, policy: Policy) -> dict[int, list[int]]:
    """The requests of each task, by its start, which is that of a time slot; without those that are late."""
    processor = make_processor(policy=policy, settings=ONE_BY_ONE)
    cell = encoder(processor, size)
    arrivals = [Arrival(each.arrives, sentence(cell, each.length), deadline_s=each.deadline) for each in requests]
    found = dict[int, list[int]]()
    for task in simulate(processor, arrivals, lambda *_: 1.0).tasks:
        its = [k for k in dict.fromkeys(task.requests) if requests[k].deadline >= task.start_s]
        if its:
            found[round(task.start_s)] = its
    return found


HORIZON = 9
SHARES = [0.1, 0.25, 0.5, 0.75, 0.9]
# Each pair is compiled, for a second; in `make slow` all are tried.
PAIRS = st.sampled_from([(0.5, 0.5), (0.5, 0.75), (0.1, 0.75), (0.9, 0.25), *product(SHARES, SHARES)][: examples(15)])
ETAS = st.sampled_from([0.5, 0.1, *SHARES][: examples(10)])
STORIES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), max_size=12).map(
    lambda some: [Request(k, *each) for k, each in enumerate((a, a + d, n) for a, d, n in sorted(some))]
)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(200))
@given(requests=STORIES, size=st.integers(6, 14), pair=PAIRS)
def test_each_time_slot_has_the_requests_of_the_pseudo_code_in_its_order(requests, size, pair):
    assert encoder_tasks(requests, size, das(*pair)) == slot_by_slot(requests, size, *pair)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(200))
@given(requests=STORIES.map(lambda some: some[:7]), size=st.integers(6, 9), pair=PAIRS)
def test_what_is_done_by_its_deadline_is_worth_the_proven_part_of_the_best(requests, size, pair):
    eta, q = pair
    tasks = encoder_tasks(requests, size, das(eta, q))
    worth = sum(1 / requests[k].length for its in tasks.values() for k in its)
    assert worth >= eta * q / (eta * q + 1) * best_worth(requests, size) - 1e-9


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(200))
@given(requests=STORIES.map(lambda some: [Request(each.number, 0, 0, each.length) for each in some[:9]]), eta=ETAS)
def test_one_batch_is_worth_the_share_of_the_best_that_is_chosen_by_worth(requests, eta):
    size = 10
    (row,) = algorithm_1(requests, 1, size, eta, 0.5)
    worth = sum(1 / each.length for each in row)
    assert worth >= eta * best_worth(requests, size) - 1e-9
    assert encoder_tasks(requests, size, das(eta, 0.5)).get(0, []) == [each.number for each in row]


def test_the_urgent_go_before_the_short_beyond_the_utility_dominant_set():
    """Ten rows: the shortest five fit (1, 1, 2, 2, 3), of which three are chosen for their worth. What is worth a half
    of their mean 5/6 is as short as 2; of these the deadline decides, and then the shortest of the rest."""
    lengths, deadlines = [3, 2, 1, 2, 1, 2, 4], [9, 9, 9, 8, 9, 1, 0]
    requests = [Request(k, 0, *each) for k, each in enumerate(zip(deadlines, lengths))]
    assert encoder_tasks(requests, 10, das(0.5, 0.5))[0] == [2, 4, 1, 5, 3]


def test_figure_3_whoever_arrives_while_a_batch_runs_is_chosen_among_for_the_next():
    """Batches of five words; of what waits when the first is done, the shortest goes first and then the urgent."""
    processor = make_processor(policy=das(0.5, 0.5), settings=ONE_BY_ONE)
    cell = encoder(processor, 5)
    story = [(0.0, 3, 9), (0.2, 2, 9), (0.4, 3, 9), (0.6, 3, 2), (2.5, 1, 9)]
    arrivals = [Arrival(at_s, sentence(cell, length), deadline_s=due_s) for at_s, length, due_s in story]
    tasks = simulate(processor, arrivals, lambda *_: 1.0).tasks
    assert [list(dict.fromkeys(task.requests)) for task in tasks] == [[0], [1, 3], [2], [4]]


def test_figure_4_one_flat_task_holds_the_rows_of_both_schemes():
    """Three batch rows of 90 words, of which the figure's twelve requests leave 25 empty; here nothing is padded."""
    lengths = [10, 20, 30, 30, 10, 15, 30, 30, 15, 15, 20, 20]
    requests = [Request(k, 0, 9, length) for k, length in enumerate(lengths)]
    processor = make_processor(policy=das(), settings=ONE_BY_ONE)
    cell = encoder(processor, 3 * 90)
    simulation = simulate(processor, [Arrival(0, sentence(cell, each)) for each in lengths], lambda *_: 1.0)
    assert [task.rows for task in simulation.tasks] == [sum(lengths)] == [245]
    by_rows = algorithm_1(requests, 3, 90, 0.5, 0.5)
    assert sorted(each.number for row in by_rows for each in row) == list(range(12))


def test_figure_5_positions_begin_anew_with_each_request_of_a_task():
    processor = make_processor(policy=das(), settings=ONE_BY_ONE)
    cell = encoder(processor, 16)
    for k, length in enumerate([4, 3, 5]):
        processor.admit(processor.compile(sentence(cell, length)), k)
    (task,) = processor.schedule(1)
    view = TaskView(buffer := processor.task_buffer(task))
    assert view.spans.tolist() == [0, 4, 7, 12]
    steps_at = buffer[H_SPANS] + view.spans.size
    assert buffer[steps_at : steps_at + 3].tolist() == [0, 0, 0]


def test_what_is_late_goes_last_also_where_it_has_begun():
    processor = make_processor(policy=das(), settings=ONE_BY_ONE)
    cell = add_step(processor, 1)
    ids = []
    for k, (length, deadline_ns) in enumerate([(3, 50), (9, NEVER)]):
        admitted = processor.admit(processor.compile(chain(cell, length)), k, deadline_ns=deadline_ns)
        assert admitted is not None
        ids.append(admitted[0])
    begun: list[int] = []
    for now in (0, 50, 51, 100):
        processor.clock.set(now)
        (task,) = processor.schedule(1)
        begun += [request for request, _ in processor.rows_in_flight(task)]
        processor.complete(task, 10)
    assert begun == [ids[0], ids[0], ids[1], ids[1]]


def test_of_equal_worth_what_has_begun_goes_by_when_it_must_be_done():
    processor = make_processor(policy=das(), settings=ONE_BY_ONE)
    cell = add_step(processor, 2)
    processor.clock.set(50)
    for k, times in enumerate([{}, {"deadline_ns": 900, "schedule_by_ns": 100}]):
        processor.admit(processor.compile(chain(cell, 3)), k, **times)
    processor.complete(*processor.schedule(1), 10)
    processor.clock.set(200)
    processor.admit(processor.compile(chain(cell, 3)), 2, deadline_ns=500)
    (task,) = processor.schedule(1)
    sequences = processor.tables.requests["sequence"]
    assert [int(sequences[request]) for request, _ in processor.rows_in_flight(task)] == [0, 2]


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
@pytest.mark.parametrize("is_recurrent", [False, True], ids=["encoder", "recurrent"])
def test_under_overload_more_is_done_in_time_than_in_any_other_order(is_recurrent):
    """Half as much again arrives as can be done: of TCB's Figure 15, the order of the policies by utility."""
    draw, count = np.random.default_rng(1), 500
    lengths = np.clip(draw.normal(20, 10, count).round(), 3, 40).astype(int)
    rows, size = (16, 16 / 20) if is_recurrent else (400, 400 / 20)
    times_s = draw.exponential(1 / (1.5 * size), count).cumsum()
    deadlines_s = times_s + draw.uniform(1, 120 if is_recurrent else 10, count)
    worth = {}
    for name, policy in POLICIES.items():
        processor = make_processor(policy=policy, settings=ONE_BY_ONE, limits=Limits(max_requests=512), rows=40_000)
        cell = add_step(processor, rows) if is_recurrent else encoder(processor, rows)
        make = chain if is_recurrent else sentence
        arrivals = [
            Arrival(float(time_s), make(cell, int(length)), deadline_s=float(deadline_s))
            for time_s, length, deadline_s in zip(times_s, lengths, deadlines_s)
        ]
        in_time = np.array(simulate(processor, arrivals, lambda *_: 1.0).finish_s) <= deadlines_s
        worth[name] = float((in_time / lengths).sum() / (1 / lengths).sum())
    assert max(worth, key=worth.__getitem__) == "deadline-aware-utility", worth
    assert worth["deadline-aware-utility"] > 1.3 * worth["first-come-first-served"]


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
def test_where_lengths_differ_little_no_less_is_begun_in_time_than_by_the_shortest_first():
    """TCB's lengths with a variance of 20, twice as many as can be done; nothing is worth half as much as another."""
    draw, count = np.random.default_rng(0), 1200
    lengths = np.clip(draw.normal(20, math.sqrt(20), count).round(), 3, 100).astype(int)
    times_s = draw.exponential(1 / 40, count).cumsum()
    begin_s = times_s + draw.uniform(2, 12, count)
    worth = {}
    for name in ("shortest-job-first", "deadline-aware-utility"):
        policy = replace(POLICIES[name], is_bounded=False)
        processor = make_processor(policy=policy, settings=ONE_BY_ONE, limits=Limits(max_requests=2048), rows=80_000)
        cell = encoder(processor, 400)
        arrivals = [
            Arrival(float(time_s), sentence(cell, int(length)), schedule_by_s=float(by_s))
            for time_s, length, by_s in zip(times_s, lengths, begin_s)
        ]
        done = np.isfinite(simulate(processor, arrivals, lambda *_: 1.0, drops_late=True).finish_s)
        worth[name] = float((done / lengths).sum() / (1 / lengths).sum())
    assert worth["deadline-aware-utility"] > worth["shortest-job-first"] - 0.003 > 0.6, worth


def test_of_equals_the_earlier_is_chosen():
    processor = make_processor(policy=das(), settings=ONE_BY_ONE)
    cell = add_step(processor, 2)
    for k in range(5):
        processor.admit(processor.compile(chain(cell, 1)), 4 - k)
    (task,) = processor.schedule(1)
    sequences = processor.tables.requests["sequence"]
    assert [int(sequences[request]) for request, _ in processor.rows_in_flight(task)] == [0, 1]


@pytest.mark.parametrize(("given", "told"), [((0, 0.5), "eta: .* got 0"), ((0.5, 1.0), "q: .* got 1.0")])
def test_shares_that_are_none_are_refused(given, told):
    with pytest.raises(DefinitionError, match=told):
        das(*given)


def test_it_is_known_by_name():
    assert POLICIES["deadline-aware-utility"].rank is not None and not POLICIES["deadline-aware-utility"].is_bounded
