"""What never fits is refused by name, and what just fits is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.ports import Port
from cellrt.core.state.tables import MAX_KINDS, VALUE
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    LIST,
    NOTHING,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_KEEP,
    OP_NODE,
    OP_PAGES,
    OP_RESULT,
    OP_STATE,
    PAGED,
    STEP,
)
from cellrt.core.templates.sized_template import SizedTemplate
from cellrt.errors import DefinitionError, RequestTooLargeError
from tests.core.graphs import add_step, add_tree, admit, chain, make_processor
from tests.effort import LONG_IN_PYTHON
from tests.limits import SMALL

LIMITS = {
    "nodes": "max_nodes",
    "values": "max_values",
    "links": "max_links",
    "subgraphs": "max_subgraphs",
    "rows of results and sequences, and pages": "max_places",
}


def compile_with(program: NDArray[np.int32], **limits: int) -> tuple[SizedTemplate, str | None]:
    """A template, and why it is too large."""
    processor = make_processor(limits=replace(SMALL, **limits))
    add_step(processor, 4)
    add_tree(processor, 4)
    return said_of(processor, program)


def said_of(processor: Processor, program: NDArray[np.int32]) -> tuple[SizedTemplate, str | None]:
    template = processor.compile(program)
    return template, processor.why_too_large(template, ["numbers"])


def kept_tree() -> NDArray[np.int32]:
    """A chain, a tree and a state that is kept: some of all that tables hold."""
    program = [*chain(0, 3), *[OP_EXTERNAL, 0, 2, OP_STATE, 0, -1]]
    program += [OP_NODE, 1, LIST, 2, 7, 8, OP_NODE, 1, LIST, 3, 9, 10, 6, OP_KEEP, 9, 11, 1, 0]
    return np.array([*program, OP_RESULT, 11, 1, 1], np.int32)


@pytest.mark.parametrize("what", LIMITS)
def test_a_request_fits_in_tables_that_hold_just_so_much_as_it_is_said_to_want(what):
    template, why = compile_with(kept_tree(), **{LIMITS[what]: 0})
    assert why is not None
    wanted, _, said = why.partition(" ")
    assert said == f"{what}, the tables hold 0"
    assert not template.fits
    assert compile_with(kept_tree(), **{LIMITS[what]: int(wanted)})[1] is None
    assert not compile_with(kept_tree(), **{LIMITS[what]: int(wanted) - 1})[0].fits


@pytest.mark.parametrize(("rows", "fits"), [(8, True), (7, False)])
def test_a_request_fits_in_arenas_that_have_just_its_rows(rows, fits):
    processor = make_processor(rows=rows)
    add_step(processor, 4)
    add_tree(processor, 4)
    template, why = said_of(processor, chain(0, 6))  # six inputs, the first state and the result at the host
    assert template.fits == fits
    assert (why is None) == fits


def test_the_rows_of_state_are_of_the_kind_of_their_output():
    processor = make_processor()
    processor.add_kind(8, 8)
    cell = processor.add_type([Port(1, carry=0), Port(0)], [Port(1)], max_batch=4)
    program = [OP_EXTERNAL, 0, 3, OP_EXTERNAL, 1, 1, OP_CHAIN, cell, 3, CARRY, 3, STEP, 0, 1, OP_RESULT, 6, 1, 1]
    needs = processor.compile(np.array(program, np.int32)).arrays.needs
    assert needs.tolist() == [[0, 3], [2, 2]], "at a worker two rows of state; at the host what comes, and the result"


def test_there_are_as_many_kinds_as_a_value_can_name():
    processor = make_processor()
    for _ in range(processor.num_kinds, MAX_KINDS):
        processor.add_kind(1, 1)
    with pytest.raises(DefinitionError, match="more than 256 different row shapes"):
        processor.add_kind(1, 1)
    assert np.iinfo(VALUE["kind"]).max == MAX_KINDS - 1


def many(count: int) -> NDArray[np.int32]:
    """A node with so many inputs."""
    listed = [k % 4000 for k in range(count)]
    return np.array([OP_EXTERNAL, 0, 4000, OP_NODE, 1, LIST, count, *listed, OP_RESULT, 4000, 1, 1], np.int32)


def test_a_node_has_at_most_as_many_inputs_as_are_said_to_be_possible():
    template, why = compile_with(many(20_000))
    assert why is not None
    assert not template.fits
    most = int(why.partition("at most ")[2].split()[0])
    assert "inputs" in why
    assert compile_with(many(most - 1))[1] is None
    assert not compile_with(many(most))[0].fits, "its number of inputs is a link too"


def test_a_node_of_just_the_most_inputs_is_not_too_large_once_a_larger_batch_has_made_room_for_it():
    processor = make_processor(limits=replace(SMALL, max_links=1 << 17))
    add_step(processor, 4)
    add_tree(processor, 4)
    templates = [processor.compile(many(count)) for count in (17_988, 17_989)]
    add_tree(processor, 1_200)
    assert not any(template.fits for template in templates)
    first, second = (processor.why_too_large(template, ["numbers"]) for template in templates)
    assert first is None
    assert "a node with 17990 inputs, at most 17989 are possible" in str(second)


def test_a_task_takes_no_more_nodes_than_its_buffer_has_room_for_the_inputs_of():
    processor = make_processor(limits=replace(SMALL, max_links=1 << 17))
    cell, count = add_tree(processor, 8), 9_000
    listed = [k % 4000 for k in range(count)]
    program = [OP_EXTERNAL, 0, 4000, *[OP_NODE, cell, LIST, count, *listed] * 8, OP_RESULT, 4000, 1, 8]
    assert processor.admit(processor.compile(np.array(program, np.int32)), 0) is not None
    (task,) = processor.schedule(1)
    rows, ints = int(processor.tables.tasks["rows"][task]), len(processor.task_buffer(task))
    assert rows == ints // (2 * count), "for each input its row, and a note of the row to give back"


@pytest.mark.parametrize(
    "inputs",
    [pytest.param([Port(0, ragged=True)], marks=LONG_IN_PYTHON), [Port(0, ragged=True), Port(0, is_span=True)]],
)
@pytest.mark.parametrize(
    ("chains", "taken"), [([(8, 9_000), (8, 9_000)], [0, 0, 0]), ([(1, 9_000), (8, 15_000)], [0, 1])]
)
def test_a_task_takes_no_more_steps_of_chains_than_its_buffer_has_room_for_the_inputs_of(inputs, chains, taken):
    """Each chain: its steps, and how many rows each of them reads, for each of which the buffer has two ints."""
    processor = make_processor(limits=replace(SMALL, max_links=1 << 17))
    cell, program, first = processor.add_type(inputs, [Port(0)], max_batch=8), [OP_EXTERNAL, 0, 4000], 4000
    for steps, count in chains:
        program += [OP_CHAIN, cell, steps, LIST, count, *(k % 4000 for k in range(count))]
        program += [NOTHING, 0] * (len(inputs) - 1)
    for steps, _ in chains:
        program += [OP_RESULT, first, 1, steps]
        first += steps
    admit(processor, np.array(program, np.int32))
    (task,) = processor.schedule(1)
    assert (~TaskView(processor.task_buffer(task)).nodes).tolist() == taken


def test_nodes_that_hand_on_their_state_need_two_rows_however_many_they_are():
    processor = make_processor()
    add_step(processor, 4)
    program = [OP_EXTERNAL, 0, 5]
    for k in range(4):
        program += [OP_NODE, 0, FIXED, k, FIXED, 4 + k]
    needs = processor.compile(np.array([*program, OP_RESULT, 8, 1, 1], np.int32)).arrays.needs
    assert needs.tolist() == [[2, 6]], "at the host what comes, and the result"


def test_a_value_has_as_many_readers_as_read_it_and_the_state_after_it():
    processor = make_processor()
    add_tree(processor, 4)
    program = [OP_EXTERNAL, 0, 1, OP_STATE, 0, -1, OP_NODE, 0, LIST, 2, 0, 1, OP_KEEP, 1, 2, 1, 0]
    template = processor.compile(np.array([*program, OP_RESULT, 2, 1, 1], np.int32))
    assert template.arrays.values["readers"].tolist() == [1, 2, 1]
    admitted = processor.admit(template, 0, session=processor.open_session() or 0)
    assert admitted is not None
    assert admitted[1][1] == -1, "a new session brings no state"


def test_a_value_with_more_readers_than_can_be_counted_is_refused():
    processor = make_processor()
    add_tree(processor, 4)
    read = [OP_EXTERNAL, 0, 1, OP_NODE, 0, LIST, 40_000, *[0] * 40_000]
    with pytest.raises(RequestTooLargeError, match="readers in one graph"):
        processor.compile(np.array([*read, *read[3:], OP_RESULT, 1, 1, 2], np.int32))


def test_what_a_chain_keeps_step_by_step_is_no_reader_of_its_last_step():
    processor = make_processor()
    add_step(processor, 4)
    program = [OP_EXTERNAL, 0, 4, OP_STATE, 0, -1, OP_CHAIN, 0, 4, STEP, 0, 1, CARRY, 4, OP_KEEP, 4, 5, 1, 4]
    values = processor.compile(np.array([*program, OP_RESULT, 8, 1, 1], np.int32)).arrays.values
    assert values["readers"].tolist() == [2, 0], "the state before, until the chain begins and the session has another"


def test_a_cell_that_reads_pages_and_any_number_of_rows_has_room_in_a_task():
    processor = make_processor()
    processor.add_kind(8, 8, is_paged=True)
    ports = [Port(0, ragged=True), Port(1, page_size=4, appends=True)]
    cell = processor.add_type(ports, [Port(0)], max_batch=4)
    program = [OP_EXTERNAL, 0, 2, OP_PAGES, 1, 4, 0, OP_CHAIN, cell, 1, LIST, 2, 0, 1, PAGED, 0, OP_RESULT, 2, 1, 1]
    admit(processor, np.array(program, np.int32))
    assert len(processor.schedule(1)) == 1
