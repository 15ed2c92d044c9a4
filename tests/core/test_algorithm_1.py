"""With all that was added switched off, the scheduler does task by task what the paper's pseudo-code does.

The pseudo-code is Algorithm 1 of BatchMaker (dissertation section 2.4.3). ``Algorithm1`` is its transliteration, line
by line, and knows nothing of the core. ``NumReadyNodes`` counts what the worker may take: a type all of whose ready
nodes are pinned elsewhere would give an empty batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.state.settings import SchedulerSettings
from tests.core.graphs import add_step, add_tree, chain, leaves, make_processor, tree, two_chains
from tests.effort import examples


@dataclass(eq=False)
class Node:
    cell_type: int
    request: int
    waits_for: int = 0
    readers: list[Node] = field(default_factory=list)
    subgraph: Subgraph | None = None


@dataclass(eq=False)
class Subgraph:
    cell_type: int
    nodes_left: int
    external: int = 0
    ready: deque[Node] = field(default_factory=deque)
    pinned: int | None = None
    running: int = 0


class Algorithm1:
    def __init__(self, cell_types: list[tuple[int, int, int]], most: int) -> None:
        """Cell types: largest batch, smallest batch, priority."""
        self.types, self.most = cell_types, most
        self.queues: list[list[Subgraph]] = [[] for _ in cell_types]
        self.num_running = [0] * len(cell_types)

    def schedule(self, worker: int) -> list[list[Node]]:
        ready = {ct: self.num_ready(ct, worker) for ct in range(len(self.types))}
        s = [ct for ct in ready if ready[ct] >= self.types[ct][0]]
        s = s or [ct for ct in ready if self.num_running[ct] == 0 and ready[ct] > 0]
        s = s or [ct for ct in ready if ready[ct] > 0]
        return self.batch(max(s, key=lambda ct: self.types[ct][2]), worker) if s else []

    def num_ready(self, ct: int, worker: int) -> int:
        return sum(len(each.ready) for each in self.queues[ct] if each.pinned in (None, worker))

    def batch(self, ct: int, worker: int) -> list[list[Node]]:
        tasks: list[list[Node]] = []
        while len(tasks) < self.most:
            batch = self.form_batched_task(ct, worker)
            if not batch or (len(batch) < self.types[ct][1] and tasks):
                break
            self.num_running[ct] += 1
            tasks.append(batch)
            for subgraph in {node.subgraph: None for node in batch}:
                subgraph.pinned = worker
            for node in batch:
                node.subgraph.ready.remove(node)
                node.subgraph.running += 1
                self.update_nodes_dependency(node)
        return tasks

    def update_nodes_dependency(self, node: Node) -> None:
        node.subgraph.nodes_left -= 1
        for reader in node.readers:
            if reader.subgraph is node.subgraph:
                reader.waits_for -= 1
                if reader.waits_for == 0:
                    reader.subgraph.ready.append(reader)
        if node.subgraph.nodes_left == 0:
            self.queues[node.cell_type].remove(node.subgraph)

    def form_batched_task(self, ct: int, worker: int) -> list[Node]:
        batch: list[Node] = []
        for subgraph in self.queues[ct]:
            if subgraph.pinned in (None, worker):
                for node in subgraph.ready:
                    batch.append(node)
                    if len(batch) == self.types[ct][0]:
                        return batch
        return batch

    def complete(self, batch: list[Node]) -> None:
        """Unpins subgraphs without a running task, and hands on those whose external dependencies are satisfied."""
        self.num_running[batch[0].cell_type] -= 1
        for node in batch:
            node.subgraph.running -= 1
            node.subgraph.pinned = node.subgraph.pinned if node.subgraph.running else None
            for reader in node.readers:
                if reader.subgraph is not node.subgraph:
                    self.arrive(reader.subgraph, 1)

    def arrive(self, subgraph: Subgraph, done: int = 0) -> None:
        subgraph.external -= done
        if subgraph.external == 0:
            self.queues[subgraph.cell_type].append(subgraph)


# What the paper's request processor makes of a request: nodes, and connected ones of one cell type as a subgraph.


def subgraph_of(nodes: list[Node]) -> Subgraph:
    made = Subgraph(nodes[0].cell_type, len(nodes))
    for node in nodes:
        node.subgraph = made
        if node.waits_for == 0:
            made.ready.append(node)
    return made


def chain_of(cell_type: int, request: int, length: int) -> list[Node]:
    nodes = [Node(cell_type, request, int(k > 0)) for k in range(length)]
    for before, after in pairwise(nodes):
        before.readers.append(after)
    return nodes


def unfold(kind: str, request: int, types: tuple[int, int, int, int], size: int) -> list[Subgraph]:
    first, second, leaf, inner = types
    if kind == "chain":
        return [subgraph_of(chain_of(first, request, size))]
    if kind == "leaves":
        return [subgraph_of([Node(leaf, request)]) for _ in range(size)]
    if kind == "two chains":
        lower, upper = chain_of(first, request, size), chain_of(second, request, size)
        made = [subgraph_of(lower), subgraph_of(upper)]
        lower[-1].readers.append(upper[0])
        made[1].external = 1
        return made
    level = [Node(leaf, request) for _ in range(1 << size)]
    made = [subgraph_of([node]) for node in level]
    inside: list[Node] = []
    num_leaves = len(level)
    while len(level) > 1:
        above = [Node(inner, request, 2 if inside else 0) for _ in range(len(level) // 2)]
        for k, node in enumerate(above):
            for child in level[2 * k : 2 * k + 2]:
                child.readers.append(node)
        for node in above:
            node.waits_for = 2 if level[0].cell_type == inner and inside else 0
        inside += above
        level = above
    if inside:
        made.append(subgraph_of(inside))
        made[-1].external = num_leaves
    return made


KINDS = ("chain", "leaves", "two chains", "tree")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from(KINDS), st.integers(1, 5)),
        st.tuples(st.just("schedule"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("complete"), st.integers(1, 3), st.just(0)),
    ),
    max_size=60,
)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(60))
@given(
    events=EVENTS,
    batches=st.tuples(*(st.integers(1, 6) for _ in range(4))),
    smallest=st.tuples(*(st.integers(1, 4) for _ in range(4))),
    priorities=st.permutations(range(4)),
    most=st.integers(1, 5),
    workers=st.integers(1, 3),
)
def test_any_story_goes_task_by_task_as_the_paper_says(events, batches, smallest, priorities, most, workers):
    smallest = [min(each, batch) for each, batch in zip(smallest, batches)]
    processor = make_processor(workers, SchedulerSettings.algorithm_1(max_tasks_to_submit=most))
    for k in range(4):
        if k < 2:
            add_step(processor, batches[k], smallest[k], priority=priorities[k])
        else:
            add_tree(processor, batches[k], priority=priorities[k])
            smallest[k] = 1
    paper = Algorithm1(list(zip(batches, smallest, priorities)), most)
    streams: list[deque[tuple[int, list[Node]]]] = [deque() for _ in range(workers)]
    number_of: dict[int, int] = {}
    programs = {
        "chain": lambda size: chain(0, size),
        "leaves": lambda size: leaves(2, size),
        "two chains": lambda size: two_chains(0, 1, size),
        "tree": lambda size: tree(2, 3, 1 << size),
    }
    rest = 400 * [(what, worker, 0) for worker in range(1, workers + 1) for what in ("schedule", "complete")]
    for number, (what, which, size) in enumerate([*events, *rest]):
        if what == "arrive":
            admitted = processor.admit(processor.compile(programs[which](size)), number)
            assert admitted is not None
            number_of[admitted[0]] = number
            for subgraph in unfold(which, number, (0, 1, 2, 3), size):
                if subgraph.external == 0:
                    paper.arrive(subgraph)
        elif what == "schedule" and which <= workers and len(streams[which - 1]) < 2:
            tasks, expected = processor.schedule(which), paper.schedule(which)
            found = [[number_of[request] for request, _ in processor.rows_in_flight(task)] for task in tasks]
            assert found == [[node.request for node in batch] for batch in expected]
            assert [int(processor.tables.tasks["cell_type"][task]) for task in tasks] == [
                b[0].cell_type for b in expected
            ]
            streams[which - 1].extend(zip(tasks, expected))
        elif what == "complete" and which <= workers and streams[which - 1]:
            task, batch = streams[which - 1].popleft()
            for request, _ in processor.complete(task, 1000):
                processor.finish(np.array([request], np.int32))
            paper.complete(batch)
        if processor.num_live == 0 and number >= len(events):
            break
    assert processor.num_live == 0 and broken_rules(processor.tables) == []
