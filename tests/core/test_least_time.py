"""The least time of a request: the longest of its chains, at half of the least that a step was measured to take."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.least_time import CERTAIN, LeastTime, least_time
from cellrt.core.processor import Processor
from tests.core.graphs import add_step, add_tree, chain, leaves, loop, make_processor, two_chains

QUICK_S, SLOW_S = 1e-4, 3e-4


def least(processor: Processor, program: np.ndarray) -> LeastTime:
    """That of requests of a program."""
    return least_time(processor.tables, processor.compile(program))


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_chain_takes_as_often_as_it_has_steps_what_the_quickest_step_took(steps):
    processor = make_processor(1)
    cell = add_step(processor, 8)
    processor.set_step_time(cell, 1, SLOW_S)
    processor.set_step_time(cell, 8, QUICK_S)
    found = least(processor, chain(cell, steps))
    assert found == (pytest.approx(CERTAIN * steps * QUICK_S * 1e9), cell, steps)


def test_nothing_is_known_before_a_step_was_measured():
    processor = make_processor(1)
    assert least(processor, chain(add_step(processor, 8), 40)).ns == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_chains_the_one_that_takes_longest_counts(is_first):
    processor = make_processor(1)
    quick, slow = add_step(processor, 8), add_step(processor, 8)
    processor.set_step_time(quick, 1, QUICK_S)
    processor.set_step_time(slow, 1, SLOW_S)
    found = least(processor, two_chains(slow, quick, 7) if is_first else two_chains(quick, slow, 7))
    assert found == (pytest.approx(CERTAIN * 7 * SLOW_S * 1e9), slow, 7)


def test_what_may_go_together_counts_once_and_a_loop_may_end_at_its_first_step():
    processor = make_processor(1)
    head, cell = add_tree(processor, 8), add_step(processor, 8)
    for each in (head, cell):
        processor.set_step_time(each, 1, SLOW_S)
    assert least(processor, leaves(head, 30)) == (pytest.approx(CERTAIN * SLOW_S * 1e9), head, 1)
    assert least(processor, loop(cell, 30)) == (pytest.approx(CERTAIN * SLOW_S * 1e9), cell, 1)
