"""More that the scheduler is asked to do than chains of one layer: layers that follow each other, and trees.

As in ``overhead.py`` the processor is driven as the engine drives it, with tasks that end at once and take one step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.record import Recorder
from benchmarks.trees import Tree, parse_like_trees
from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.templates.program import CARRY, FIXED, OP_CHAIN, OP_EXTERNAL, OP_NODE, OP_RESULT, STEP

LENGTH = 24
NUM_WORDS = 1_000
ROWS = 128
"""The room for each kind and request: more than any of them holds."""


class Case(NamedTuple):
    """A processor, the template of each request, and how many nodes they have together."""

    processor: Processor
    templates: list[SizedTemplate]
    num_nodes: int
    num_workers: int
    is_streamed: bool


def make_processor(num_workers: int, num_requests: int) -> Processor:
    """Return a processor with room for so many requests, and one kind of rows, number 0."""
    limits = Limits(
        max_requests=num_requests,
        max_nodes=ROWS * num_requests,
        max_values=ROWS * num_requests,
        max_links=4 * ROWS * num_requests,
        max_subgraphs=ROWS * num_requests,
        max_events=0,
    )
    processor = Processor(num_workers, limits, SchedulerSettings(runs=False))
    processor.add_kind(ROWS * num_requests, ROWS * num_requests)
    return processor


def two_layers(batch: int, num_requests: int) -> Case:
    """Return chains of two layers, of which the second follows the first and every step is streamed, on two workers."""
    processor = make_processor(2, num_requests)
    ports = [Port(0), Port(0, carry=0)], [Port(0)]
    first, second = (processor.add_type(*ports, max_batch=batch) for _ in range(2))
    program = [OP_EXTERNAL, 0, LENGTH + 1, OP_CHAIN, first, LENGTH, STEP, 0, 1, CARRY, LENGTH]
    program += [OP_CHAIN, second, LENGTH, STEP, LENGTH + 1, 1, CARRY, LENGTH, OP_RESULT, 2 * LENGTH + 1, 1, LENGTH]
    template = processor.compile(np.array(program, np.int32))
    return Case(processor, [template] * num_requests, 2 * LENGTH * num_requests, 2, True)


def program_of(tree: Tree, leaf: int, inner: int) -> list[int]:
    """Return a tree as nodes of two cell types; its words come with the request."""
    num_leaves, leaves, children = len(tree.tokens), 0, iter(tree.children.tolist())
    program = [OP_EXTERNAL, 0, num_leaves]
    for level in tree.levels.tolist():
        if level == 0:
            program += [OP_NODE, leaf, FIXED, leaves]
            leaves += 1
        else:
            left, right = next(children)
            program += [OP_NODE, inner, FIXED, num_leaves + left, FIXED, num_leaves + right]
    return [*program, OP_RESULT, num_leaves + len(tree.levels) - 1, 1, 1]


def trees(batch: int, num_requests: int) -> Case:
    """Return trees like a treebank's, on one worker."""
    processor, drawn = make_processor(1, num_requests), parse_like_trees(num_requests, NUM_WORDS, 0)
    leaf = processor.add_type([Port(0)], [Port(0)], max_batch=batch)
    inner = processor.add_type([Port(0), Port(0)], [Port(0)], max_batch=batch, priority=1)
    programs = [np.array(program_of(tree, leaf, inner), np.int32) for tree in drawn]
    num_nodes = sum(len(tree.levels) for tree in drawn)
    return Case(processor, [processor.compile(program) for program in programs], num_nodes, 1, False)


def node_ns(case: Case, rounds: int) -> float:
    """Return the median over rounds: scheduling and completion, nanoseconds a node. The first round does not count."""
    processor, times = case.processor, []
    for _ in range(rounds + 1):
        for sequence, template in enumerate(case.templates):
            if processor.admit(template, sequence, streamed=case.is_streamed) is None:
                raise RuntimeError(f"no room for request {sequence}")
        done: list[int] = []
        start, is_more = time.perf_counter(), True
        while is_more:
            tasks = [task for worker in range(case.num_workers) for task in processor.schedule(worker + 1)]
            for task in tasks:
                done += processor.complete(task, 0).done()
            is_more = bool(tasks)
        times.append(1e9 * (time.perf_counter() - start) / case.num_nodes)
        processor.release(done)
        if processor.num_live:
            raise RuntimeError(f"{processor.num_live} requests have not ended")
    return statistics.median(times[1:])


CASES: tuple[tuple[str, Callable[[int, int], Case], int], ...] = (
    ("two layers, streamed, 2 workers", two_layers, 512),
    ("trees", trees, 64),
    ("trees", trees, 512),
)


def run_cases(recorder: Recorder, rounds: int) -> None:
    """Measure all."""
    for name, make, batch in CASES:
        recorder.add(
            "core", f"{name}: scheduling and completion", node_ns(make(batch, 1_024), rounds), "ns/node", batch=batch
        )
