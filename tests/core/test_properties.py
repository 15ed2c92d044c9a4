"""Random graphs, arrivals, failures, cancellations and lost workers: each request ends once, and right."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import NEVER
from tests.core.author import CELLS, Author
from tests.core.machine import Machine, Request
from tests.core.policies import ANY_POLICY
from tests.effort import examples

CONFIGURATIONS = st.builds(
    SchedulerSettings,
    max_tasks_to_submit=st.integers(1, 5),
    early_release=st.booleans(),
    runs=st.booleans(),
    join_budget_s=st.sampled_from([1e-4, 3e-4, 1e-2]),
    min_run_s=st.sampled_from([0.0, 2e-4, 1e-3]),
    max_wait_s=st.sampled_from([0.0, 1e-4, None]),
    fair_every=st.sampled_from([2, 16]),
    loops_ahead=st.sampled_from([None, 0, 1, 2, 3]),
)


MOST_GROWTH = 4


def interleave(machine: Machine, draw: random.Random, requests: list[Request], chaos: bool) -> None:
    """Plays requests against the machine in a random order of events, checking every invariant after each."""
    waiting = list(requests)
    workers = range(1, len(machine.streams) + 1)
    growth = draw.randint(0, MOST_GROWTH)
    for _ in range(20_000):
        if not waiting and not machine.live:
            break
        machine.processor.clock.set(machine.sequence * 1000)
        event = draw.random()
        worker = draw.choice(workers)
        if event < 0.3 and waiting:
            how = {"priority": draw.choice([0, 0, 3, 1]), "streamed": draw.choice([False, True])}
            times_ns = [draw.choice([NEVER, draw.randrange(1 << 20)]) for _ in range(2)]
            if machine.submit(waiting[0], deadline_ns=times_ns[0], schedule_by_ns=times_ns[1], **how):
                waiting.pop(0)
        elif event < 0.6 and machine.alive[worker - 1] and len(machine.streams[worker - 1]) < 5:
            machine.schedule(worker)
        elif event < 0.95 and machine.streams[worker - 1]:
            machine.finish(worker)
        elif event < 0.96 and growth > 0:
            growth -= 1
            machine.grow()
        elif chaos and event > 0.97 and machine.live:
            request = draw.choice(list(machine.live.values()))
            if not request.ends:
                machine.cancel(request)
        elif chaos and event > 0.969 and sum(machine.alive) > 1 and machine.alive[worker - 1]:
            machine.lose(worker)
        machine.check()
    assert not waiting and not machine.live, "work is left that nobody can do"


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(18))
@given(
    draw=st.randoms(use_true_random=False),
    configuration=CONFIGURATIONS,
    workers=st.integers(1, 3),
    max_batches=st.tuples(*(st.integers(1, 9) for _ in CELLS)),
    count=st.integers(1, 8),
    operations=st.integers(1, 10),
    policy=ANY_POLICY,
)
def test_every_request_gets_the_oracles_results(draw, configuration, workers, max_batches, count, operations, policy):
    requests = [Request(Author(draw).graph(operations)) for _ in range(count)]
    machine = Machine(workers, max_batches, configuration, policy=policy)
    interleave(machine, draw, requests, chaos=False)
    assert [request.ends for request in requests] == [["done"]] * count


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(18))
@given(
    draw=st.randoms(use_true_random=False),
    configuration=CONFIGURATIONS,
    workers=st.integers(1, 3),
    rows=st.sampled_from([150, 1024]),
    count=st.integers(1, 8),
    policy=ANY_POLICY,
)
def test_every_request_ends_once_under_failures(draw, configuration, workers, rows, count, policy):
    requests = [Request(Author(draw).graph(6)) for _ in range(count)]
    for request in requests:
        request.poisoned = draw.random() < 0.3
    machine = Machine(workers, (4,) * len(CELLS), configuration, rows=rows, policy=policy)
    interleave(machine, draw, requests, chaos=True)
    for request in requests:
        assert len(request.ends) == 1
        assert request.ends != ["done"] or not request.poisoned
