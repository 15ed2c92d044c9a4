"""A policy says who goes first among what has one client priority, and which cell type; everybody gets a turn."""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import pytest

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.scheduling.policy import Policy, policy_of
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.settings import POLICY_NAMES
from cellrt.core.state.tables import NEVER
from cellrt.errors import DefinitionError
from tests.core.graphs import ONE_BY_ONE, add_step, add_tree, chain, leaves, loop, make_processor, two_chains
from tests.core.policies import AGAINST_ALL, BROKEN, latest

SHORTEST, DEADLINE = POLICIES["shortest-job-first"], POLICIES["earliest-deadline-first"]


def admit(processor: Processor, program, sequence: int, priority: int = 0, deadline_ns: int = NEVER) -> int:
    admitted = processor.admit(processor.compile(program), sequence, priority, deadline_ns=deadline_ns)
    assert admitted is not None
    return admitted[0]


def run_one(processor: Processor) -> list[int]:
    """The requests of the next task, each once, which is complete then."""
    (task,) = processor.schedule(1)
    found = list(dict.fromkeys(request for request, _ in processor.rows_in_flight(task)))
    for request, what in processor.complete(task, 1000):
        assert what == NOTICE_DONE
        processor.finish(np.array([request], np.int32))
    assert broken_rules(processor.tables) == []
    return found


def order_of(processor: Processor) -> list[int]:
    """The requests in the order of their first task."""
    found: dict[int, None] = {}
    while processor.num_live:
        found |= dict.fromkeys(run_one(processor))
    return list(found)


def test_the_shortest_goes_first_and_equals_in_order_of_arrival():
    processor = make_processor(policy=SHORTEST)
    cell = add_step(processor, 1)
    long, middle, other, short = (admit(processor, chain(cell, n), k) for k, n in enumerate([9, 4, 4, 1]))
    assert order_of(processor) == [short, middle, other, long]


def test_the_earliest_deadline_goes_first_and_what_has_none_last():
    processor = make_processor(policy=DEADLINE)
    cell = add_step(processor, 1)
    times = [NEVER, 900, 100, 500]
    requests = [admit(processor, chain(cell, 2), k, deadline_ns=time) for k, time in enumerate(times)]
    assert order_of(processor) == [requests[k] for k in (2, 3, 1, 0)]


def test_the_earlier_of_done_by_and_begun_by_is_the_deadline_of_what_has_not_begun():
    processor = make_processor(policy=DEADLINE)
    cell = add_step(processor, 1)
    times = [(300, NEVER), (900, 200), (100, 500), (NEVER, 400)]
    for k, (done_ns, begun_ns) in enumerate(times):
        processor.admit(processor.compile(chain(cell, 1)), k, deadline_ns=done_ns, schedule_by_ns=begun_ns)
    assert order_of(processor) == [2, 1, 0, 3]


def noting_the_first(waiting, asked):
    for k in range(waiting.size):
        if waiting[k].sequence == 0:
            asked.kept[0] = waiting[k].deadline_ns


@pytest.mark.parametrize(
    ("done_ns", "begun_ns", "before", "after"),
    [
        (900, 100, 100, 900),
        (150, NEVER, 150, 150),
        (NEVER, 300, 300, 300),
        (NEVER, 100, 100, 200),
        (NEVER, NEVER, NEVER, NEVER),
    ],
    ids=["both", "done by", "begun by", "begun by, which is past", "neither"],
)
def test_what_a_policy_is_shown_as_the_deadline_before_a_request_has_begun_and_after(done_ns, begun_ns, before, after):
    processor = make_processor(policy=Policy("noting the first", noting_the_first), settings=ONE_BY_ONE)
    cell = add_step(processor, 1)
    processor.admit(processor.compile(chain(cell, 3)), 0, deadline_ns=done_ns, schedule_by_ns=begun_ns)
    admit(processor, chain(cell, 3), 1)
    shown = []
    for now_ns in (50, 200):
        processor.clock.set(now_ns)
        run_one(processor)
        shown.append(int(processor.tables.asked["kept"][0, 0]))
    assert shown == [before, after]


def test_a_long_request_that_began_in_time_does_not_go_before_one_that_must_be_done_earlier():
    processor = make_processor(policy=DEADLINE, settings=ONE_BY_ONE)
    cell = add_step(processor, 1)
    processor.clock.set(50)
    long, _ = processor.admit(processor.compile(chain(cell, 9)), 0, deadline_ns=900, schedule_by_ns=100)
    assert run_one(processor) == [long]
    processor.clock.set(200)
    short, _ = processor.admit(processor.compile(chain(cell, 2)), 1, deadline_ns=500, schedule_by_ns=400)
    assert [run_one(processor) for _ in range(3)] == [[short], [short], [long]]


@pytest.mark.parametrize("policy", [DEADLINE, POLICIES["deadline-aware-utility"]], ids=["earliest", "utility"])
def test_what_has_begun_is_not_late_by_when_it_had_to_begin_and_goes_on_before_the_next(policy):
    processor = make_processor(policy=policy, settings=ONE_BY_ONE)
    cell = add_step(processor, 1)
    how = {"schedule_by_ns": 100}
    processor.clock.set(50)
    begun, _ = processor.admit(processor.compile(chain(cell, 3)), 0, **how)
    assert run_one(processor) == [begun]
    late, _ = processor.admit(processor.compile(chain(cell, 3)), 1, **how)
    processor.clock.set(200)
    other, _ = processor.admit(processor.compile(chain(cell, 3)), 2, schedule_by_ns=300)
    found = list(dict.fromkeys(run_one(processor)[0] for _ in range(8)))
    assert found.index(begun) < found.index(other)
    if policy is not DEADLINE:
        assert found == [begun, other, late]


def test_the_cell_type_with_the_earliest_deadline_goes_first():
    processor = make_processor(policy=DEADLINE)
    full, other = add_tree(processor, 2, priority=9), add_tree(processor, 2)
    admit(processor, leaves(full, 2), 0, deadline_ns=500)
    urgent = admit(processor, leaves(other, 1), 1, deadline_ns=100)
    assert run_one(processor) == [urgent]


def test_a_client_priority_comes_before_the_policy():
    processor = make_processor(policy=SHORTEST)
    cell = add_step(processor, 1)
    short, long = admit(processor, chain(cell, 1), 0, priority=1), admit(processor, chain(cell, 9), 1, priority=2)
    assert order_of(processor) == [long, short]


def test_the_order_is_that_of_a_task_where_it_takes_several():
    processor = make_processor(policy=AGAINST_ALL)
    cell = add_step(processor, 3)
    requests = [admit(processor, chain(cell, 1), k) for k in range(7)]
    assert run_one(processor) == requests[:3:-1]
    assert run_one(processor) == requests[3:0:-1]


def test_every_so_many_tasks_begin_with_the_first_that_arrived():
    processor = make_processor(policy=Policy("latest", latest), settings=replace(ONE_BY_ONE, fair_every=4))
    cell = add_step(processor, 1)
    first = admit(processor, chain(cell, 1), 0)
    taken: list[int] = []
    for k in range(1, 12):
        admit(processor, chain(cell, 1), k)
        taken += run_one(processor)
    assert first in taken[:4]


def test_without_bounds_what_never_comes_first_waits():
    unbounded = Policy("latest", latest, is_bounded=False)
    processor = make_processor(policy=unbounded, settings=replace(ONE_BY_ONE, fair_every=4, max_wait_s=0.0))
    cell = add_step(processor, 1)
    first = admit(processor, chain(cell, 1), 0)
    for k in range(1, 40):
        latest_one = admit(processor, chain(cell, 1), k)
        assert run_one(processor) == [latest_one] != [first]


def test_a_policy_that_raises_leaves_the_order_of_arrival_and_is_counted():
    processor = make_processor(policy=BROKEN)
    cell = add_step(processor, 1)
    requests = [admit(processor, chain(cell, 1), k) for k in range(5)]
    assert order_of(processor) == requests
    assert processor.tables.settings["policy_errors"][0] > 0


def noting(waiting, asked):
    for k in range(waiting.size):
        if waiting[k].sequence == 7 and waiting[k].left == 2:
            asked.kept[0] = waiting[k].length
            asked.kept[1] = waiting[k].admitted_ns
            asked.kept[2] = waiting[k].deadline_ns
            asked.kept[3] = waiting[k].has_begun
            asked.kept[4] = asked.client_priority * 100 + asked.worker * 10 + asked.most
            asked.kept[5] = asked.now_ns


def test_a_policy_is_shown_what_it_may_look_at():
    processor = make_processor(policy=Policy("noting", noting))
    cell = add_step(processor, 1)
    processor.clock.set(5000)
    admit(processor, chain(cell, 3), 7, priority=2, deadline_ns=9000)
    processor.clock.set(6000)
    admit(processor, chain(cell, 3), 8, priority=2)
    run_one(processor)
    run_one(processor)
    assert processor.tables.asked["kept"][0, :6].tolist() == [3, 5000, 9000, 1, 211, 6000]


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda cell: chain(cell, 5), 5),
        (lambda cell: two_chains(cell, cell, 4), 8),
        (lambda cell: loop(cell, 7), 7),
    ],
    ids=["chain", "two chains", "loop"],
)
def test_a_requests_length_is_its_nodes(make, length):
    processor = make_processor()
    cell = add_step(processor, 4)
    request = admit(processor, make(cell), 0)
    assert int(processor.tables.requests["length"][request]) == length


def test_policies_are_given_by_name_by_object_and_by_module():
    assert list(POLICIES) == list(POLICY_NAMES)
    assert policy_of(None, POLICIES) == Policy()
    assert policy_of("shortest-job-first", POLICIES) is SHORTEST
    assert policy_of(AGAINST_ALL, POLICIES) is AGAINST_ALL
    assert policy_of("tests.core.policies:AGAINST_ALL", POLICIES) is AGAINST_ALL


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("fifo", "expected a Policy, one of batchmaker, .* got 'fifo'"),
        (5, "expected a Policy"),
        ("nowhere_at_all:x", "cannot import"),
        ("tests.core.policies:nothing", "cannot import"),
        ("tests.core.policies:latest", "is <function latest"),
    ],
)
def test_what_is_no_policy_is_refused(given, told):
    with pytest.raises(DefinitionError, match=told):
        policy_of(given, POLICIES)


def test_what_a_policy_cannot_have_is_refused():
    with pytest.raises(DefinitionError, match="admit_by: expected one of arrival, length, deadline, got 'luck'"):
        Policy("lucky", admit_by="luck")
    with pytest.raises(DefinitionError, match="rank: expected a function or None, got 5"):
        Policy("odd", rank=5)  # type: ignore[arg-type]


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
@pytest.mark.parametrize(
    "rank", [lambda waiting, asked: waiting.heard_of, lambda waiting, asked: waiting[0].heard_of], ids=["rows", "row"]
)
def test_a_function_that_numba_cannot_compile_is_refused_with_the_reason(rank):
    with pytest.raises(DefinitionError, match="policy 'odd': rank cannot be compiled(?s:.*)heard_of"):
        make_processor(policy=Policy("odd", rank))
