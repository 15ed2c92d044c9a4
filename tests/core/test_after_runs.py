"""What follows a run in one row of tasks: who ended in it goes before the next run, and costs no turn."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state import task_layout as layout
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates.program import CARRY, FIXED, LIST, OP_CHAIN, OP_EXTERNAL, OP_NODE, OP_RESULT, STEP
from tests.core.graphs import add_step, add_tree, admit, chain, leaves, make_processor, run

STEP_S, SHORT_S = 1e-4, 5e-5
ENDS, GOES_ON = 40, 90
"""Lengths of a chain that ends first, and of one that goes on."""
SETTINGS = SchedulerSettings(join_budget_s=10.0, min_run_s=ENDS * STEP_S)


def with_heads(cell: int, length: int, heads: list[int]) -> NDArray[np.int32]:
    """A chain, whose last state goes through cells of ``add_tree``, one after the other."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, cell, length, STEP, 0, 1, CARRY, length]
    for k, head in enumerate(heads):
        program += [OP_NODE, head, LIST, 1, 2 * length + k]
    return np.array([*program, OP_RESULT, 2 * length + len(heads), 1, 1], np.int32)


def prepared(head_s: float, num_workers: int = 1) -> tuple[Processor, int, int]:
    """A processor, and a cell of chains and one of heads whose times are known; 0: not of the heads."""
    processor = make_processor(num_workers, SETTINGS)
    cell, head = add_step(processor, 8), add_tree(processor, 8)
    processor.set_step_time(cell, 1, STEP_S)
    if head_s:
        processor.set_step_time(head, 1, head_s)
    return processor, cell, head


def goes_on(processor: Processor) -> list[bool]:
    """Of each task in flight, whether the next comes before a turn."""
    tasks = np.flatnonzero(processor.tables.tasks["in_use"]).tolist()
    return [bool(processor.task_buffer(task)[layout.H_GOES_ON]) for task in tasks]


def test_what_the_ended_rows_of_a_run_made_ready_follows_it_without_a_turn():
    processor, cell, head = prepared(SHORT_S)
    for length in (ENDS, GOES_ON):
        admit(processor, with_heads(cell, length, [head, head]))
    assert run(processor) == [cell, head, head]
    assert processor.tables.tasks["steps"][0] == ENDS, "the run ends with the first of its rows"
    assert goes_on(processor) == [True, True, False]


@pytest.mark.parametrize("head_s", [0.0, 4e-4], ids=["not known", "too long"])
def test_what_is_not_known_to_be_short_has_a_turn_of_its_own(head_s):
    processor, cell, head = prepared(head_s)
    for length in (ENDS, GOES_ON):
        admit(processor, with_heads(cell, length, [head]))
    assert run(processor) == [cell]
    assert goes_on(processor) == [False]


def test_what_follows_a_run_is_short_all_together():
    processor, cell, head = prepared(2e-4)
    admit(processor, with_heads(cell, ENDS, [head, head]))
    assert run(processor) == [cell, head]


def test_a_run_in_which_rows_end_is_the_last_of_its_type_until_the_next_turn():
    processor, cell, _ = prepared(SHORT_S)
    for length in (ENDS, GOES_ON, GOES_ON):
        admit(processor, chain(cell, length))
    assert run(processor) == [cell], "the place of who ended is taken"


def test_rows_that_another_idle_worker_may_take_do_not_follow():
    processor, cell, head = prepared(SHORT_S, num_workers=2)
    admit(processor, with_heads(cell, ENDS, [head]))
    admit(processor, leaves(head, 1))
    assert run(processor) == [cell, head]
    assert processor.tables.tasks["rows"][1] == 2, "what is ready joins what follows anyhow"
    other, cell, head = prepared(SHORT_S, num_workers=2)
    admit(other, chain(cell, ENDS))
    admit(other, leaves(head, 1))
    assert run(other) == [cell]


def test_what_carries_a_state_does_not_follow():
    processor, cell, _ = prepared(0.0)
    second = add_step(processor, 8)
    processor.set_step_time(second, 1, SHORT_S)
    program = [OP_EXTERNAL, 0, ENDS + 2, OP_CHAIN, cell, ENDS, STEP, 0, 1, CARRY, ENDS]
    program += [OP_NODE, second, FIXED, ENDS + 1, FIXED, 2 * ENDS + 1, OP_RESULT, 2 * ENDS + 2, 1, 1]
    admit(processor, np.array(program, np.int32))
    assert run(processor) == [cell]


def test_what_ended_rows_made_ready_waits_for_more_while_it_would_cost_much_beside_the_runs():
    processor = make_processor(settings=SchedulerSettings(join_budget_s=10.0, min_run_s=ENDS * STEP_S / 10))
    cell, head = add_step(processor, 1), add_tree(processor, 8)
    processor.set_step_time(cell, 1, STEP_S / 10)
    processor.set_step_time(head, 1, SHORT_S)
    admit(processor, with_heads(cell, ENDS, [head]))
    admit(processor, chain(cell, GOES_ON))
    assert run(processor) == [cell]
    processor.clock.set(round(ENDS * STEP_S * 1e8))
    processor.complete(0, 0)
    assert run(processor) == [cell, head], "a full task goes first, and then it was long enough"


@pytest.mark.parametrize(("num_workers", "run_s"), [(1, 0.7e-3), (2, 1.4e-3), (8, 1.4e-3)])
def test_several_workers_have_longer_runs_but_not_ever_longer_ones(num_workers, run_s):
    processor = make_processor(num_workers, SchedulerSettings())
    assert processor.tables.settings["min_run_ns"][0] == pytest.approx(run_s * 1e9)
