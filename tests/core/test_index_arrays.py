"""What a task says of its inputs, where the properties of whole requests do not look."""

from __future__ import annotations

import numpy as np
import pytest

from cellrt.core.processor import Processor
from cellrt.core.state import task_layout as layout
from cellrt.core.state.ports import Port
from cellrt.core.state.tables import HOST
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import (
    CARRY,
    EMITTED,
    FIXED,
    LIST,
    NOTHING,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    STEP,
)
from tests.core.graphs import add_step, add_tree, admit, make_processor


def add_spanned(processor: Processor, outputs: int) -> int:
    """Adds a cell of one input that is told which rows are of one node."""
    return processor.add_type([Port(0), Port(0, is_span=True)], [Port(0)] * outputs, max_batch=4)


def only_task(processor: Processor, inputs: int) -> TaskView:
    (task,) = processor.schedule(1)
    return TaskView(processor.task_buffer(task), inputs, 1)


def test_rows_that_are_the_same_at_every_location_are_read_where_the_task_runs():
    processor = make_processor()
    add_tree(processor, 4)
    admit(processor, np.array([OP_CONSTANT, 0, 0, OP_NODE, 0, LIST, 1, 0, OP_RESULT, 1, 1, 1], np.int32))
    (source, count, *_) = only_task(processor, 1).inputs[0]
    assert (source, count) == (-2, 1)


def test_an_input_that_says_which_rows_are_of_one_node_has_no_rows():
    processor = make_processor()
    cell = add_spanned(processor, 1)
    program = [OP_EXTERNAL, 0, 3, OP_CHAIN, cell, 3, STEP, 0, 1, NOTHING, 0, OP_RESULT, 3, 1, 3]
    admit(processor, np.array(program, np.int32))
    view = only_task(processor, 2)
    source, count, rows_at, offsets_at = view.inputs[1]
    assert (source, count, offsets_at) == (-2, 0, -1)
    assert layout.HEADER < rows_at < view.buffer.size


def test_loops_of_a_cell_with_spans_share_a_task_if_the_same_output_says_stop():
    processor = make_processor()
    cell = add_spanned(processor, 2)
    for stop in (0, 1, 0):
        program = [OP_EXTERNAL, 0, 1, OP_LOOP, cell, 5, stop, FIXED, 0, NOTHING, 0, OP_RESULT_LAST, 2]
        admit(processor, np.array(program, np.int32))
    tasks = [task for _ in range(3) for task in processor.schedule(1)]
    assert [[id for id, _ in processor.rows_in_flight(task)] for task in tasks] == [[0, 2], [1]]


@pytest.mark.parametrize("streamed", [False, True])
def test_who_reads_what_a_loop_emits_reads_the_rows_of_its_results(streamed):
    processor = make_processor()
    step, reader = add_step(processor, 4), add_tree(processor, 4)
    program = [OP_EXTERNAL, 0, 2, OP_LOOP, step, 3, -1, FIXED, 0, CARRY, 1, OP_NODE, reader, EMITTED, 2, 3]
    program += [OP_RESULT_STEPS, 2, 3, OP_RESULT, 3, 1, 1]
    admitted = processor.admit(processor.compile(np.array(program, np.int32)), 0, streamed=streamed)
    assert admitted is not None
    written: list[int] = []
    for _ in range(3):
        (task,) = processor.schedule(1)
        view = TaskView(processor.task_buffer(task), 2, 1)
        rows_at, count = view.outputs[0][layout.OUT_RESULT_ROWS], view.outputs[0][layout.OUT_RESULTS]
        written += view.buffer[rows_at : rows_at + count].tolist()
        processor.complete(task, 0)
    view = only_task(processor, 1)
    source, count, rows_at, _ = view.inputs[0]
    assert (source, view.buffer[rows_at : rows_at + count].tolist()) == (HOST, written)


def test_rows_go_back_to_the_arena_of_their_kind():
    processor = make_processor()
    processor.add_kind(64, 64)
    leaf = processor.add_type([Port(1)], [Port(1)], max_batch=4)
    inner = processor.add_type([Port(1), Port(1)], [Port(0)], max_batch=4)
    program = [OP_EXTERNAL, 1, 2, OP_NODE, leaf, FIXED, 0, OP_NODE, leaf, FIXED, 1]
    admit(processor, np.array([*program, OP_NODE, inner, FIXED, 2, FIXED, 3, OP_RESULT, 4, 1, 1], np.int32))
    for _ in range(2):
        (task,) = processor.schedule(1)
        processor.complete(task, 0)
    processor.release([0])
    arenas = processor.tables.arenas
    assert arenas["num_free"].tolist() == arenas["capacity"].tolist()
