"""Where a request's results are, once it is done."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_STEPS,
    STEP,
)
from tests.core.author import CELLS, Graph
from tests.core.graphs import add_step, make_processor
from tests.core.machine import Machine, Request


def test_results_of_several_requests_at_some_positions_are_those_of_each():
    processor = make_processor()
    cell = add_step(processor, 4)
    program = [OP_EXTERNAL, 0, 4, OP_CHAIN, cell, 3, STEP, 0, 1, CARRY, 3, OP_RESULT, 4, 1, 3]
    ids, rows = processor.admit_many(processor.compile(np.array(program, np.int32)), np.arange(3))
    while tasks := processor.schedule(1):
        for task in tasks:
            processor.complete(task, 0)
    each = [processor.tables.places[first : first + 3].tolist() for first in rows[:, -1]]
    assert len({row for result in each for row in result}) == 9
    found = processor.result_rows(np.array([ids[2], ids[0]], np.int32), np.array([2, 0], np.int32))
    assert found.tolist() == [[each[2][2], each[2][0]], [each[0][2], each[0][0]]]


def test_a_template_counts_what_comes_what_goes_and_what_is_done():
    processor = make_processor()
    cell = add_step(processor, 4)
    program = [OP_EXTERNAL, 0, 6, OP_CHAIN, cell, 3, STEP, 0, 1, CARRY, 5, OP_LOOP, cell, 7, -1, FIXED, 0, CARRY, 8]
    program += [OP_NODE, cell, FIXED, 4, FIXED, 5]
    program += [OP_RESULT, 6, 1, 3, OP_RESULT_STEPS, 9, 7, OP_RESULT, 10, 1, 1]
    template = processor.compile(np.array(program, np.int32))
    assert (template.num_externals, template.num_results, template.num_steps) == (6, 3 + 7 + 1, 3 + 7 + 1)
    assert template.num_places == template.num_results + template.num_externals, "a row of each that is read by step"
    assert template.most_refs == 2


@pytest.mark.parametrize("backwards", [False, True])
def test_every_step_of_a_chain_is_a_result_in_order_or_backwards_beside_one_of_a_node(backwards):
    given = [5, 7, 11, 13]
    program = [OP_EXTERNAL, 0, 4, OP_CHAIN, 0, 3, STEP, 0, 1, CARRY, 3, OP_NODE, 2, FIXED, 0, FIXED, 1]
    state, steps = given[3], list[int]()
    for x in given[:3]:
        (state,) = CELLS[0]([x, state])
        steps.append(state)
    program += [OP_RESULT, 7, 1, 1, OP_RESULT, *((6, -1) if backwards else (4, 1)), 3]
    expected = CELLS[2](list(given[:2])) + (steps[::-1] if backwards else steps)
    play(Graph(program, given, expected))


def play(graph: Graph) -> None:
    """Runs a request alone, whose results must be those expected."""
    machine, request = Machine(1, (4,) * len(CELLS), SchedulerSettings()), Request(graph)
    assert machine.submit(request)
    while machine.live:
        machine.schedule(1)
        machine.finish(1)
    assert request.ends == ["done"]


def test_the_outputs_of_one_step_may_be_read_one_by_one_as_if_they_were_steps():
    given = [5, 7]
    program = [OP_EXTERNAL, 0, 2, OP_CHAIN, 1, 2, STEP, 0, 1, CARRY, 0, CARRY, 1]
    program += [OP_CHAIN, 0, 3, STEP, 5, 1, CARRY, 0, OP_RESULT, 10, 1, 1]
    made = CELLS[1]([5, 5, 7])
    made, state = CELLS[1]([7, *made[:2]]), given[0]
    for x in made:
        (state,) = CELLS[0]([x, state])
    play(Graph(program, given, [state]))


def test_a_step_of_a_chain_that_carries_nothing_is_read_though_nothing_else_is_a_value():
    program = [OP_EXTERNAL, 0, 3, OP_CHAIN, 2, 3, STEP, 0, 1, STEP, 0, 1, OP_NODE, 2, FIXED, 4, FIXED, 4]
    (made,) = CELLS[2]([7, 7])
    play(Graph([*program, OP_RESULT, 6, 1, 1], [5, 7, 11], CELLS[2]([made, made])))
