"""BatchMaker's own examples, to the last number: Figure 2.5 (section 2.3) and the TreeLSTM of section 2.4.4.

The text fixes: requests 1 to 4 arrive at 0; 1 has length 2, 2 and 3 have length 3, 4 has length 5; 5 has
arrived at 2, 6 and 7 at 3, 8 at 5; under graph batching the second batch runs from 5 to 12. Only the figure
has the lengths of 5 to 8: 5, 7, 3 and 1. Where in its unit of time a request arrives is our choice.
"""

from __future__ import annotations

import numpy as np

from cellrt.core.simulate import Arrival, Simulation, simulate
from cellrt.core.state.settings import SchedulerSettings
from tests.core.graphs import add_step, add_tree, chain, make_processor, tree

BATCH = 4
FROM_TEXT = [(0.0, 2), (0.0, 3), (0.0, 3), (0.0, 5)]
FROM_FIGURE = [(1.5, 5), (2.5, 7), (2.5, 3), (4.5, 1)]
TRACE = FROM_TEXT + FROM_FIGURE


def unit_cost(cell_type: int, rows: int, steps: int) -> float:
    return 1.0


def figure() -> Simulation:
    processor = make_processor()
    cell = add_step(processor, BATCH)
    arrivals = [Arrival(time_s, chain(cell, length)) for time_s, length in TRACE]
    return simulate(processor, arrivals, unit_cost)


def graph_batching(trace: list[tuple[float, int]]) -> list[float]:
    """When each request is done if whole graphs are batched: each batch lasts as long as its longest."""
    finish_s: list[float] = []
    now = 0.0
    for k in range(0, len(trace), BATCH):
        batch = trace[k : k + BATCH]
        now = max(now, *(time_s for time_s, _ in batch)) + max(length for _, length in batch)
        finish_s += [now] * len(batch)
    return finish_s


def test_graph_batching_ends_at_5_and_12():
    assert graph_batching(TRACE) == [5, 5, 5, 5, 12, 12, 12, 12]
    assert max(length for _, length in FROM_FIGURE) == 7


def test_cellular_batching_returns_each_request_when_its_last_cell_is_done():
    finish_s = figure().finish_s
    assert finish_s[:4] == [2, 3, 3, 5]  # the text
    assert finish_s[4:] == [7, 10, 6, 6]  # the figure
    assert all(a <= b for a, b in zip(finish_s, graph_batching(TRACE)))


def test_cellular_batching_forms_the_tasks_of_the_text():
    tasks = figure().tasks
    requests = [tuple(sorted(request + 1 for request in task.requests)) for task in tasks]
    assert requests[:4] == [(1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4, 5), (4, 5, 6, 7)]
    assert requests[4:] == [(4, 5, 6, 7), (5, 6, 7, 8), (5, 6), (6,), (6,), (6,)]
    assert [(task.start_s, task.end_s) for task in tasks] == [(k, k + 1) for k in range(10)]
    assert {task.steps for task in tasks} == {1}


def tree_lstm(max_batch: int, early_release: bool, count: int = 1) -> list[tuple[int, int, float]]:
    """Runs trees of 16 leaves that arrive together; returns (cell type, rows, start) of each task."""
    settings = SchedulerSettings(early_release=early_release)
    processor = make_processor(settings=settings)
    leaf, inner = add_tree(processor, max_batch), add_tree(processor, max_batch, priority=1)
    simulation = simulate(processor, [Arrival(0, tree(leaf, inner, 16))] * count, unit_cost)
    return [(task.cell_type, task.rows, task.start_s) for task in simulation.tasks]


def test_the_leaves_of_a_tree_are_one_subgraph_and_what_reads_them_is_another():
    """In the paper each of the 16 leaves is one by itself; see ``partition.py``."""
    processor = make_processor()
    leaf, inner = add_tree(processor, 16), add_tree(processor, 16)
    shape = processor.compile(tree(leaf, inner, 16))
    subgraphs = shape.arrays.subgraphs
    assert np.bincount(shape.arrays.nodes["subgraph"]).tolist() == [16, 15]
    assert subgraphs["cell_type"].tolist() == [leaf, inner]
    assert subgraphs["waiting"].tolist() == [0, 16]
    assert subgraphs["is_loose"].tolist() == [1, 0]


def test_a_tree_runs_its_leaves_then_its_levels():
    leaf, inner = 0, 1
    whole = [(leaf, 16, 0), (inner, 8, 1), (inner, 4, 2), (inner, 2, 3), (inner, 1, 4)]
    assert tree_lstm(16, early_release=False) == whole
    assert tree_lstm(16, early_release=True) == whole
    quarters = [(leaf, 4, k) for k in range(4)]
    levels = [(inner, 4, 4), (inner, 4, 5), (inner, 4, 6), (inner, 2, 7), (inner, 1, 8)]
    assert tree_lstm(4, early_release=False) == quarters + levels


def test_the_tops_of_two_trees_share_tasks():
    leaf, inner = 0, 1
    leaves = [(leaf, 16, 0), (leaf, 16, 1)]
    levels = [(inner, 16, 2), (inner, 8, 3), (inner, 4, 4), (inner, 2, 5)]
    assert tree_lstm(16, early_release=False, count=2) == leaves + levels
