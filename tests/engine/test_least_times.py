"""The least time of a request: its longest chain, by what is certain of the quickest step that there was."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.processor import Processor
from cellrt.core.state.constants import CERTAIN_PART, MAX_OVERHEAD_NS
from cellrt.core.state.settings import SchedulerSettings
from cellrt.engine.least_times import least_time
from tests.core.graphs import add_step, add_tree, chain, leaves, loop, make_processor, two_chains

QUICK_NS, SLOW_NS = 10_000_000, 30_000_000


def certain(steps: int, ns: int) -> float:
    """Of so many steps, where the quickest task took so long with one."""
    return pytest.approx(CERTAIN_PART * steps * (ns - MAX_OVERHEAD_NS))


def of(processor: Processor, program: np.ndarray) -> tuple[float, int, int]:
    """The least time of requests of a program."""
    return least_time(processor, processor.compile(program))


def run(processor: Processor, program: np.ndarray, ns: int) -> list[int]:
    """Runs a request whose tasks each take so long; returns the steps of each."""
    admitted, steps = processor.admit(processor.compile(program), 1), []
    assert admitted is not None
    while tasks := processor.schedule(1):
        for task in tasks:
            notices = processor.complete(task, ns)
            steps.append(processor.counts_of(task)[3])
    assert notices.done() == [admitted[0]]
    processor.finish(np.array([admitted[0]], np.int32))
    return steps


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_chain_takes_as_often_as_it_has_steps_what_the_quickest_step_took(steps):
    processor = make_processor(1)
    cell = add_step(processor, 8)
    for ns in (SLOW_NS, QUICK_NS, SLOW_NS):
        run(processor, chain(cell, 1), ns)
    assert of(processor, chain(cell, steps)) == (certain(steps, QUICK_NS), cell, steps)


def test_a_short_task_says_nothing_of_steps_in_a_long_run():
    processor = make_processor(1, SchedulerSettings())
    cell = add_step(processor, 8)
    assert run(processor, chain(cell, 1), MAX_OVERHEAD_NS) == [1]
    assert of(processor, chain(cell, 1000)).ns == 0
    processor.set_step_time(cell, 1, 1e-6)
    assert run(processor, chain(cell, 100), 2 * MAX_OVERHEAD_NS) == [100]
    assert of(processor, chain(cell, 1000)).ns == pytest.approx(CERTAIN_PART * 10 * MAX_OVERHEAD_NS)


def test_nothing_is_known_before_the_first_task_or_of_another_cell_with_its_number():
    processor = make_processor(1)
    cell = add_step(processor, 8)
    assert of(processor, chain(cell, 40)).ns == 0
    run(processor, chain(cell, 1), SLOW_NS)
    processor.remove_type(cell)
    assert of(processor, chain(cell, 40)).ns == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_chains_the_one_that_takes_longest_counts(is_first):
    processor = make_processor(1)
    quick, slow = add_step(processor, 8), add_step(processor, 8)
    run(processor, chain(quick, 1), QUICK_NS)
    run(processor, chain(slow, 1), SLOW_NS)
    program = two_chains(slow, quick, 7) if is_first else two_chains(quick, slow, 7)
    assert of(processor, program) == (certain(7, SLOW_NS), slow, 7)


def test_what_may_go_together_counts_once_and_a_loop_may_end_at_its_first_step():
    processor = make_processor(1)
    head, cell = add_tree(processor, 8), add_step(processor, 8)
    run(processor, leaves(head, 1), SLOW_NS)
    run(processor, chain(cell, 1), SLOW_NS)
    assert of(processor, leaves(head, 30)) == (certain(1, SLOW_NS), head, 1)
    assert of(processor, loop(cell, 30)) == (certain(1, SLOW_NS), cell, 1)
