"""Small cell types and programs for tests of the scheduler, and a processor that has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policy import Policy
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    STEP,
)
from cellrt.core.templates.sized_template import SizedTemplate
from tests.limits import SMALL

ONE_BY_ONE = SchedulerSettings(max_tasks_to_submit=1, runs=False)
"""Algorithm 1 alone: a step at a time, a task at a time."""


def make_processor(
    num_workers: int = 1,
    settings: SchedulerSettings = ONE_BY_ONE,
    limits: Limits = SMALL,
    rows: int = 4096,
    policy: Policy | None = None,
) -> Processor:
    """A processor with one kind of rows and no cell types yet."""
    processor = Processor(num_workers, limits, settings, policy)
    processor.add_kind(rows, rows)
    return processor


def add_step(processor: Processor, max_batch: int, min_batch: int = 1, priority: int = 0) -> int:
    """Adds a recurrent cell (x, carried h) -> h."""
    inputs = [Port(0), Port(0, carry=0)]
    return processor.add_type(inputs, [Port(0)], max_batch=max_batch, min_batch=min_batch, priority=priority)


def add_tree(processor: Processor, max_batch: int, priority: int = 0) -> int:
    """Adds a cell (any number of children) -> h."""
    return processor.add_type([Port(0, ragged=True)], [Port(0)], max_batch=max_batch, priority=priority)


def chain(cell: int, length: int) -> NDArray[np.int32]:
    """A chain of ``add_step`` nodes; the last state is the result."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, cell, length, STEP, 0, 1, CARRY, length]
    return np.array([*program, OP_RESULT, 2 * length, 1, 1], np.int32)


def two_chains(first: int, second: int, length: int) -> NDArray[np.int32]:
    """A chain of one cell whose last state starts a chain of another, as an encoder and a decoder."""
    program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, first, length, STEP, 0, 1, CARRY, length]
    program += [OP_CHAIN, second, length, STEP, 0, 1, CARRY, 2 * length]
    return np.array([*program, OP_RESULT, 3 * length, 1, 1], np.int32)


def loop(cell: int, limit: int) -> NDArray[np.int32]:
    """One ``add_step`` node repeated until its only output says stop."""
    program = [OP_EXTERNAL, 0, 2, OP_LOOP, cell, limit, 0, FIXED, 0, CARRY, 1]
    return np.array([*program, OP_RESULT_LAST, 2], np.int32)


def leaves(cell: int, count: int) -> NDArray[np.int32]:
    """Nodes of an ``add_tree`` cell that do not depend on each other, all of them results."""
    program = [OP_EXTERNAL, 0, 1]
    for _ in range(count):
        program += [OP_NODE, cell, LIST, 1, 0]
    return np.array([*program, OP_RESULT, 1, 1, count], np.int32)


def tree(leaf: int, inner: int, num_leaves: int) -> NDArray[np.int32]:
    """A complete binary tree: both cells are of ``add_tree``; the root is the result."""
    program = [OP_EXTERNAL, 0, num_leaves]
    for k in range(num_leaves):
        program += [OP_NODE, leaf, LIST, 1, k]
    level, value = list(range(num_leaves, 2 * num_leaves)), 2 * num_leaves
    while len(level) > 1:
        above = list(range(value, value + len(level) // 2))
        for k in range(len(above)):
            program += [OP_NODE, inner, LIST, 2, level[2 * k], level[2 * k + 1]]
        level, value = above, above[-1] + 1
    return np.array([*program, OP_RESULT, level[0], 1, 1], np.int32)


def compile_small(program: NDArray[np.int32]) -> SizedTemplate:
    """Compiles a program whose cells are a step (type 0) and a tree (type 1), for tests that need no more."""
    processor = make_processor()
    add_step(processor, 4)
    add_tree(processor, 4)
    return processor.compile(program)


def admit(processor: Processor, program: NDArray[np.int32]) -> int:
    """Admits a request; returns its id."""
    admitted = processor.admit(processor.compile(program), 0)
    assert admitted is not None
    return admitted[0]


def run(processor: Processor, worker: int = 1) -> list[int]:
    """Schedules once at a worker; returns the cell types of the tasks, which stay in flight."""
    tasks = processor.schedule(worker)
    assert broken_rules(processor.tables) == []
    return [int(processor.tables.tasks["cell_type"][task]) for task in tasks]
