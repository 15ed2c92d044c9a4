"""Random graphs on random engines give what running their nodes one by one gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.core.policies import ANY_POLICY
from tests.effort import examples
from tests.engine.author import OPERATIONS, make_unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.zoo import make_zoo

REQUESTS = st.lists(
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 1 << 16)), min_size=1, max_size=4),
    min_size=1,
    max_size=16,
)
ENGINES = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 3),
        "policy": ANY_POLICY,
        "settings": st.builds(
            SchedulerSettings,
            max_tasks_to_submit=st.integers(1, 5),
            early_release=st.booleans(),
            runs=st.booleans(),
            join_budget_s=st.sampled_from([1e-6, 1e-4, 1.0]),
            max_wait_s=st.sampled_from([0.0, 1e-4, None]),
            fair_every=st.sampled_from([2, 16]),
        ),
        "queue_depth": st.integers(1, 4),
        # 128 or 4,096 rows of four floats at each worker: with few rows, requests wait to be admitted.
        "arena_bytes": st.sampled_from([2048, 65_536]),
        "debug": st.booleans(),
    }
)
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(25))


@THOROUGH
@given(
    requests=REQUESTS,
    options=ENGINES,
    max_batch=st.sampled_from([1, 2, 3, 8, 64]),
    padded=st.booleans(),
    priorities=st.lists(st.integers(0, 3), min_size=16, max_size=16),
)
def test_results_are_those_of_the_nodes_one_by_one(requests, options, max_batch, padded, priorities):
    unfolder = make_unfolder(make_zoo(max_batch, padded))
    engine = small_engine(**options)
    try:
        engine.register(unfolder, warm_up=False)
        futures = [
            engine.submit(unfolder.name, request, priority=priority) for request, priority in zip(requests, priorities)
        ]
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(unfolder, request))
        engine.check()
        assert engine.statistics()["done"] == len(requests)
    finally:
        close_and_check(engine)


LATE = ("deadline", "schedule_by")


@THOROUGH
@given(
    requests=REQUESTS,
    options=ENGINES,
    max_batch=st.sampled_from([1, 3, 64]),
    ends=st.lists(st.sampled_from(["wait", "cancel", "deadline", "schedule_by", "drop"]), min_size=16, max_size=16),
    moments=st.lists(st.integers(0, 15), min_size=16, max_size=16),
)
def test_each_request_ends_once_however_it_ends(requests, options, max_batch, ends, moments):
    unfolder = make_unfolder(make_zoo(max_batch))
    engine = small_engine(**options)
    try:
        engine.register(unfolder, warm_up=False)
        num_ended = [0] * len(requests)
        futures = []
        for k, (request, end, moment) in enumerate(zip(requests, ends, moments)):
            how = {end: 2e-4 * (1 + moment)} if end in LATE else {}
            future = engine.submit(unfolder.name, request, **how)
            future.add_done_callback(lambda _, k=k: num_ended.__setitem__(k, num_ended[k] + 1))
            futures.append(None if end == "drop" else future)
            victim = futures[moment % len(futures)]
            if ends[moment % len(futures)] == "cancel" and victim is not None:
                victim.cancel()
        for k, (request, future) in enumerate(zip(requests, futures)):
            if future is None:
                continue
            error = error_of(future)
            if error is None:
                assert_same(future.result(), run_one_by_one(unfolder, request))
            else:
                assert type(error).__name__ == ("CancelledError" if ends[k] == "cancel" else "DeadlineError")
                assert ends[k] in ("cancel", *LATE)
        assert engine.drain(WAIT_S)
        assert num_ended == [1] * len(requests)
        engine.check()
    finally:
        close_and_check(engine)


def test_an_example_is_recorded_as_requests_are_whatever_was_registered_before():
    """It is unfolded before its cells have types: those of models that are gone are given out again."""
    engine = small_engine()
    first, second = make_zoo(3), make_zoo(8)
    engine.register(make_unfolder(first, "first"), warm_up=False)
    engine.register(Unfolder("gone", lambda graph, x: second.fork(x=second.leaf(x=x).h), torch.zeros(4)), warm_up=False)
    engine.unregister("gone")
    assert engine.drain(WAIT_S)
    unfolder = make_unfolder(second, "second")
    engine.register(unfolder, warm_up=False)
    model = engine._models["second"]
    engine.graph("second", unfolder.example)
    assert len(model.plans_by_program) == 1
    assert_same(engine.submit("second", unfolder.example).result(WAIT_S), run_one_by_one(unfolder, unfolder.example))
    close_and_check(engine)


def test_a_last_step_is_right_beside_rows_of_the_same_task_that_show_every_step():
    zoo = make_zoo(64)

    def unfold(graph, request):
        token, shows_every_step = request
        loop = graph.loop(zoo.decoder, max_steps=9, until="stop", token=token, mood=torch.ones(4))
        return {"h": loop.h} if shows_every_step else {"h": loop.last.h}

    model = Unfolder("mixed", unfold, (1, True))
    engine = small_engine(settings=SchedulerSettings(join_budget_s=1.0))
    engine.register(model, warm_up=False)
    requests = [(token, token % 3 == 0) for token in range(1, 11)]
    for request, future in zip(requests, engine.submit_many("mixed", requests)):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


@pytest.mark.parametrize(("nodes", "chains"), [(64, 6), (200, 20)])
def test_chains_over_the_outputs_of_many_nodes_wait_for_each_of_them(nodes, chains):
    """Few words of a program say so, and many edges come of it."""
    first = cell(lambda x: x + 1, {"x": (4,)}, name="first")
    decay = cell(lambda x, h: {"h": 0.5 * h + x}, {"x": (4,), "h": (4,)}, carry={"h": "h"}, name="decay", max_batch=32)

    def unfold(graph, x):
        begin = first(x=x).output
        made = [first(x=begin).output for _ in range(nodes)]
        return {"h": [graph.chain(decay, x=made).last.h for _ in range(chains)]}

    model = Unfolder("edges", unfold, torch.zeros(4))
    engine = small_engine()
    engine.register(model, warm_up=False)
    assert_same(engine.submit("edges", torch.ones(4)).result(WAIT_S), run_one_by_one(model, torch.ones(4)))
    close_and_check(engine)
