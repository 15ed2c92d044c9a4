"""What an engine counts is what ran."""

from __future__ import annotations

import torch

from cellrt.core.settings import SchedulerSettings
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
