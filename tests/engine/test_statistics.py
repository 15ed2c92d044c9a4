"""What an engine counts is what ran."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellrt.core.processor import Processor
from cellrt.core.state.settings import SchedulerSettings
from cellrt.engine.statistics import TIME_BOUNDS_S, Statistics
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, loop_model, make_cells

_, _, LOOP = make_cells()
STEPS = 6
"""Steps that the loop takes, of nine that it may."""


def test_steps_that_a_loop_did_not_take_are_not_counted():
    engine = small_engine(settings=SchedulerSettings(join_budget_s=60.0), trace=True)
    engine.register(loop_model("loop", LOOP), warm_up=False)
    count = 5
    for _ in range(count):  # whole runs from the second on, when the time of a step is known
        assert engine.submit("loop", (torch.ones(WIDTH), 1)).result(WAIT_S)["n"] == STEPS
    assert engine.statistics()["cells"]["count"]["nodes"] == count * STEPS
    tasks = engine.timeline().tasks
    assert sum(task.steps for task in tasks) == count * STEPS
    assert max(task.steps for task in tasks) == STEPS
    close_and_check(engine)


@given(batches=st.lists(st.lists(st.integers(0, 70_000_000_000), max_size=700), max_size=4))
def test_every_time_is_in_its_bucket_whether_it_is_taken_in_yet_or_not(batches: list[list[int]]):
    statistics, now_ns = Statistics(Processor(1).tables), 1 << 60
    wanted = {name: [0] * (len(TIME_BOUNDS_S) + 1) for name in ("a", "b")}
    for number, values in enumerate(batches):
        name = "ab"[number % 2]
        for few in (values[:100], *([value] for value in values[100:])):
            started_ns = now_ns - np.array(few, np.int64)
            arrivals_ns = [(started - 7, 1) for started in started_ns.tolist()]
            statistics.count_done(name, arrivals_ns, started_ns, now_ns)
        for value in values:
            wanted[name][bisect_left(TIME_BOUNDS_S, value / 1e9)] += 1
        taken = statistics.snapshot({}, {"a": 0, "b": 0}, str, int, {})
        for its, bars in ((taken, [a + b for a, b in zip(*wanted.values())]), (taken["models"][name], wanted[name])):
            assert its["done"] == sum(bars) and its["histograms"]["computation"]["counts"] == bars
            assert its["histograms"]["queueing"]["counts"][0] == sum(bars)
    total = statistics.snapshot({}, {}, str, int, {})["histograms"]["computation"]["sum_s"]
    assert total == pytest.approx(sum(map(sum, batches)) / 1e9)
