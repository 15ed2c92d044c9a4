"""Chains and loops as records: what they cost in the tables, and who waits for which of their steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.state.notices import NOTICE_FAILED
from cellrt.core.state.ports import Port
from cellrt.core.state.record_layout import outputs_of, record_at
from cellrt.core.state.tables import MAX_KINDS, NUM_PRIORITIES
from cellrt.core.templates.program import (
    CARRY,
    EACH,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_NODE,
    OP_RESULT,
    RANGE,
    STEP,
)
from tests.core.graphs import ONE_BY_ONE, SMALL, add_step, add_tree, admit, chain, make_processor, run

LOWER, UPPER = 0, 1


def two_layers(length: int, base: int, stride: int, count: int) -> NDArray[np.int32]:
    """A chain of ``length`` steps, and one above it that reads ``count`` of its outputs from ``base`` on."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, LOWER, length, STEP, 0, 1, CARRY, length]
    program += [OP_CHAIN, UPPER, count, STEP, length + 1 + base, stride, CARRY, length]
    return np.array([*program, OP_RESULT, 2 * length + count, 1, 1], np.int32)


def layered(workers: int = 1, early_release: bool = True) -> Processor:
    processor = make_processor(workers, settings=replace(ONE_BY_ONE, early_release=early_release))
    add_step(processor, 4)
    add_step(processor, 4, priority=1)
    return processor


def complete_all(processor: Processor) -> None:
    order = np.argsort(processor.tables.tasks["number"])
    for task in order[processor.tables.tasks["in_use"][order] > 0].tolist():
        processor.complete(task, 0)
    assert broken_rules(processor.tables) == []


@pytest.mark.parametrize(
    "make", [lambda n: chain(0, n), lambda n: two_layers(n, 0, 1, n), lambda n: pooled(n), lambda n: shown(n)]
)
def test_no_step_of_a_chain_has_a_row_in_a_table_of_nodes_values_links_or_subgraphs(make):
    limits = replace(SMALL, max_places=1 << 15)
    processor = make_processor(limits=limits, rows=1 << 14)
    add_step(processor, 4)
    add_step(processor, 4)
    add_tree(processor, 4)
    short, long = (processor.compile(make(length)) for length in (10, 5_000))
    for name in ("nodes", "values", "links", "subgraphs"):
        assert getattr(long.arrays, name).size == getattr(short.arrays, name).size, name
    assert long.num_bytes == short.num_bytes
    assert long.num_places <= 10_010, "a row number for each step of what is read or written step by step"
    assert long.fits


def pooled(length: int) -> NDArray[np.int32]:
    """A node that reads every step of a chain."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, LOWER, length, STEP, 0, 1, CARRY, length]
    program += [OP_NODE, 2, RANGE, length + 1, 1, length]
    return np.array([*program, OP_RESULT, 2 * length + 1, 1, 1], np.int32)


def shown(length: int) -> NDArray[np.int32]:
    """A chain of which every step is a result."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, LOWER, length, STEP, 0, 1, CARRY, length]
    return np.array([*program, OP_RESULT, length + 1, 1, length], np.int32)


def test_a_layer_follows_the_one_below_step_by_step_on_the_same_worker():
    processor = layered()
    admit(processor, two_layers(3, 0, 1, 3))
    assert [run(processor) for _ in range(7)] == [[LOWER], [UPPER], [LOWER], [UPPER], [LOWER], [UPPER], []]
    complete_all(processor)
    assert processor.num_live == 1, "done, and not read yet"


def test_a_layer_follows_the_one_below_whatever_a_request_before_it_has_done():
    processor = layered()
    admit(processor, chain(LOWER, 1))
    assert run(processor) == [LOWER]
    complete_all(processor)
    admit(processor, two_layers(2, 0, 1, 2))
    assert [run(processor) for _ in range(4)] == [[LOWER], [UPPER], [LOWER], [UPPER]]


def test_on_another_worker_a_layer_waits_until_the_step_below_is_done():
    processor = layered(workers=2)
    admit(processor, two_layers(3, 0, 1, 3))
    assert run(processor, worker=1) == [LOWER]
    assert run(processor, worker=2) == []
    complete_all(processor)
    assert run(processor, worker=2) == [UPPER]


def test_without_early_release_a_layer_waits_until_the_step_below_is_done():
    processor = layered(early_release=False)
    admit(processor, two_layers(2, 0, 1, 2))
    assert run(processor) == [LOWER]
    assert run(processor) == [LOWER], "the second step needs its own first alone"
    complete_all(processor)
    assert run(processor) == [UPPER]


def test_who_reads_backwards_waits_for_the_end():
    processor = layered()
    admit(processor, two_layers(4, 3, -1, 4))
    assert [run(processor) for _ in range(6)] == [[LOWER]] * 4 + [[UPPER]] * 2


def test_who_reads_every_second_step_waits_for_two():
    processor = layered()
    admit(processor, two_layers(4, 1, 2, 2))
    assert [run(processor) for _ in range(6)] == [[LOWER], [LOWER], [UPPER], [LOWER], [LOWER], [UPPER]]


def test_a_node_that_reads_the_third_step_waits_for_three():
    processor = layered()
    add_tree(processor, 4, priority=2)
    program = [OP_EXTERNAL, 0, 6, OP_CHAIN, LOWER, 5, STEP, 0, 1, CARRY, 5, OP_NODE, 2, LIST, 1, 6 + 2]
    admit(processor, np.array([*program, OP_RESULT, 11, 1, 1], np.int32))
    assert [run(processor) for _ in range(6)] == [[LOWER]] * 3 + [[2]] + [[LOWER]] * 2


def test_a_chain_over_outputs_of_nodes_begins_when_all_of_them_are_sent():
    processor = layered()
    program = [OP_EXTERNAL, 0, 2, *[OP_NODE, LOWER, FIXED, 0, FIXED, 1] * 2]
    program += [OP_CHAIN, UPPER, 3, EACH, 3, 2, 0, 3, CARRY, 1, OP_RESULT, 4, 1, 3]
    admit(processor, np.array(program, np.int32))
    assert [run(processor) for _ in range(5)] == [[LOWER], [UPPER], [UPPER], [UPPER], []]


def test_steps_that_carry_nothing_are_rows_of_one_task_and_who_follows_takes_them_together():
    processor = make_processor()
    plain = processor.add_type([Port(0)], [Port(0)], max_batch=4)
    upper = processor.add_type([Port(0)], [Port(0)], max_batch=16, priority=1)
    program = [OP_EXTERNAL, 0, 6, OP_CHAIN, plain, 6, STEP, 0, 1, OP_CHAIN, upper, 6, STEP, 6, 1]
    admit(processor, np.array([*program, OP_RESULT, 12, 1, 6], np.int32))
    formed = []
    while tasks := processor.schedule(1):
        assert broken_rules(processor.tables) == []
        formed += [(int(processor.tables.tasks[name][task]) for name in ("cell_type", "rows")) for task in tasks]
    assert [tuple(task) for task in formed] == [(plain, 4), (upper, 4), (plain, 2), (upper, 2)]
    complete_all(processor)
    assert processor.num_live == 1


def read_at(step: int) -> NDArray[np.int32]:
    """A chain of nine steps, of which a node reads one."""
    program = [OP_EXTERNAL, 0, 10, OP_CHAIN, LOWER, 9, STEP, 0, 1, CARRY, 9, OP_NODE, 2, LIST, 1, 10 + step]
    return np.array([*program, OP_RESULT, 19, 1, 1], np.int32)


@pytest.mark.parametrize(
    ("program", "steps"),
    [(chain(LOWER, 9), 8), (read_at(2), 2), (read_at(8), 8), (shown(9), 0), (two_layers(9, 0, 1, 9), 0)],
    ids=["its last is a result", "its third is read", "its last is read", "all are results", "it is followed"],
)
def test_the_first_steps_of_a_chain_that_nobody_looks_at_are_known_to_only_hand_on_its_state(program, steps):
    processor = layered()
    add_tree(processor, 4)
    request = admit(processor, program)
    tables = processor.tables
    first = int(tables.requests["first_subgraph"][request])
    assert record_at(tables.links, int(tables.subgraphs["record"][first])).plain == steps


def test_a_worker_is_lost_with_the_requests_whose_sequences_it_has():
    processor = make_processor(2)
    plain = processor.add_type([Port(0)], [Port(0)], max_batch=4)
    reads_all = add_tree(processor, 4)
    program = [OP_EXTERNAL, 0, 3, OP_CHAIN, plain, 3, STEP, 0, 1, OP_NODE, reads_all, RANGE, 3, 1, 3]
    request = admit(processor, np.array([*program, OP_RESULT, 6, 1, 1], np.int32))
    assert run(processor) == [plain]
    complete_all(processor)
    assert not processor.lose_worker(2)
    assert (request, NOTICE_FAILED) in list(processor.lose_worker(1))
    assert broken_rules(processor.tables) == []


def test_a_chain_keeps_two_rows_of_state_however_long_it_is():
    processor = make_processor()
    add_step(processor, 4)
    for length in (2, 900):
        needs = processor.compile(chain(0, length)).arrays.needs
        assert needs[0, 0] == 2, "the last state is a result, which lies at the host"
    request = admit(processor, chain(0, 900))
    taken = set()
    for _ in range(50):
        (task,) = processor.schedule(1)
        processor.complete(task, 0)
        subgraph = processor.tables.subgraphs[int(processor.tables.requests["first_subgraph"][request])]
        (state, _), *_ = outputs_of(processor.tables, subgraph)
        taken.add(int(state.row))
    assert len(taken) == 2


def test_state_moves_with_its_chain_to_another_worker_and_leaves_no_row_behind():
    processor = make_processor(2, settings=ONE_BY_ONE)
    add_step(processor, 4)
    request = admit(processor, chain(0, 40))
    for step in range(40):
        (task,) = processor.schedule(1 + step % 2)
        assert broken_rules(processor.tables) == []
        done = processor.complete(task, 0)
        assert broken_rules(processor.tables) == []
    assert [id for id, _ in done] == [request]
    processor.release([request])
    assert broken_rules(processor.tables) == []


def test_state_that_two_inputs_carry_gives_its_rows_back_once():
    processor = make_processor()
    processor.add_type([Port(0), Port(0, carry=0), Port(0, carry=0)], [Port(0)], max_batch=4)
    program = [OP_EXTERNAL, 0, 5, OP_CHAIN, 0, 4, STEP, 0, 1, CARRY, 4, CARRY, 4, OP_RESULT, 8, 1, 1]
    request = admit(processor, np.array(program, np.int32))
    while tasks := processor.schedule(1):
        for task in tasks:
            processor.complete(task, 0)
    processor.release([request])
    assert broken_rules(processor.tables) == []


def test_a_step_of_a_chain_counts_no_reads_of_a_node_beside_it_that_reads_what_another_worker_has():
    processor = make_processor(2, limits=replace(SMALL, max_nodes=8))
    cell, plain = add_step(processor, 2, priority=1), add_tree(processor, 8)
    maker = processor.add_type([Port(0)], [Port(0)], max_batch=1, priority=2)
    admit(processor, chain(cell, 1))
    program = [OP_EXTERNAL, 0, 1, OP_NODE, maker, FIXED, 0, *[OP_NODE, plain, LIST, 1, 0] * 5]  # all nodes there are
    program += [OP_NODE, plain, LIST, 1, 1, OP_NODE, cell, FIXED, 1, FIXED, 0, OP_RESULT, 7, 1, 2]
    admit(processor, np.array(program, np.int32))
    assert run(processor, worker=2) == [maker]
    complete_all(processor)
    (task,) = processor.schedule(1)
    assert [request for request, _ in processor.rows_in_flight(task)] == [0, 1]
    complete_all(processor)
    there = processor.tables.arenas[2 * MAX_KINDS]
    assert there["capacity"] - there["num_free"] == 1, "one more node is to read it"
    assert run(processor, worker=1) == [plain]
    complete_all(processor)
    assert there["capacity"] == there["num_free"]


def test_a_layer_reads_an_output_of_several_step_by_step():
    processor = make_processor()
    lower = processor.add_type([Port(0), Port(0, carry=0)], [Port(0), Port(0)], max_batch=4)
    upper = add_step(processor, 4, priority=1)
    program = [OP_EXTERNAL, 0, 4, OP_CHAIN, lower, 3, STEP, 0, 1, CARRY, 3]
    program += [OP_CHAIN, upper, 3, STEP, 5, 2, CARRY, 3, OP_RESULT, 12, 1, 1]
    admit(processor, np.array(program, np.int32))
    assert [run(processor) for _ in range(6)] == [[lower], [upper]] * 3


def test_a_layer_waits_for_a_worker_from_when_the_step_below_was_sent():
    processor = layered()
    processor.clock.set(10)
    admit(processor, two_layers(3, 0, 1, 3))
    processor.clock.set(20)
    assert run(processor) == [LOWER]
    assert processor.tables.since_ns[UPPER * NUM_PRIORITIES] == 20
