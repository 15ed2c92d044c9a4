"""The least time of a request: its longest chain, by what is certain of the quickest step that there was."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.processor import Processor
from cellrt.engine.least_times import CERTAIN, HOST_NS, LeastTimes
from tests.core.graphs import add_step, add_tree, chain, leaves, loop, make_processor, two_chains

QUICK_NS, SLOW_NS = 10_000_000, 30_000_000


def certain(steps: int, ns: int) -> float:
    """Of so many steps, where the quickest task took so long with one."""
    return pytest.approx(CERTAIN * steps * (ns - HOST_NS))


def of(known: LeastTimes, processor: Processor, program: np.ndarray) -> tuple[float, int, int]:
    """The least time of requests of a program."""
    return known.of(processor, processor.compile(program))


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_chain_takes_as_often_as_it_has_steps_what_the_quickest_step_took(steps):
    processor, known = make_processor(1), LeastTimes()
    cell = add_step(processor, 8)
    for ns in (SLOW_NS, QUICK_NS, SLOW_NS):
        known.note_task(cell, 1, ns)
    assert of(known, processor, chain(cell, steps)) == (certain(steps, QUICK_NS), cell, steps)


def test_a_short_task_says_nothing_of_steps_in_a_long_run():
    processor, known = make_processor(1), LeastTimes()
    cell = add_step(processor, 8)
    known.note_task(cell, 1, HOST_NS)
    assert of(known, processor, chain(cell, 1000)).ns == 0
    known.note_task(cell, 100, 2 * HOST_NS)
    assert of(known, processor, chain(cell, 1000)).ns == pytest.approx(CERTAIN * 10 * HOST_NS)


def test_nothing_is_known_before_the_first_task_or_of_another_cell_with_its_number():
    processor, known = make_processor(1), LeastTimes()
    cell = add_step(processor, 8)
    assert of(known, processor, chain(cell, 40)).ns == 0
    known.note_task(cell, 1, SLOW_NS)
    known.forget(cell)
    assert of(known, processor, chain(cell, 40)).ns == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_chains_the_one_that_takes_longest_counts(is_first):
    processor, known = make_processor(1), LeastTimes()
    quick, slow = add_step(processor, 8), add_step(processor, 8)
    known.note_task(quick, 1, QUICK_NS)
    known.note_task(slow, 1, SLOW_NS)
    program = two_chains(slow, quick, 7) if is_first else two_chains(quick, slow, 7)
    assert of(known, processor, program) == (certain(7, SLOW_NS), slow, 7)


def test_what_may_go_together_counts_once_and_a_loop_may_end_at_its_first_step():
    processor, known = make_processor(1), LeastTimes()
    head, cell = add_tree(processor, 8), add_step(processor, 8)
    for each in (head, cell):
        known.note_task(each, 1, SLOW_NS)
    assert of(known, processor, leaves(head, 30)) == (certain(1, SLOW_NS), head, 1)
    assert of(known, processor, loop(cell, 30)) == (certain(1, SLOW_NS), cell, 1)
