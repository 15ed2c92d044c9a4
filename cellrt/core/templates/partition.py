"""The partition of a cell graph into subgraphs: connected nodes of one cell type (BatchMaker section 2.4.4).

Same type and connected is not enough: in A1 -> B -> A2 with A1 -> A2 the two A's would wait for B and B for them. So
nodes are grouped by cell type *and* level, the largest number of type changes on a path from the inputs. An edge
between two groups always goes to a higher level (same type: the levels differ; another type: one more change), so the
graph of subgraphs is acyclic.

Nodes that read no other node, and would each be alone, are one *loose* subgraph for each cell type, as a tree's leaves
are. All are ready at once, whatever their neighbours, so that a row in the tables and a place in a queue for each would
be wasted work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.native.jit import allocating, making


@making
def _find(parent: NDArray[np.int32], node: int) -> int:
    """Return the first of the nodes that are grouped with a node."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@making
def _put_together(
    node_types: NDArray[np.int32], starts: NDArray[np.int32], parent: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """Group the nodes that read no node and are alone; return which nodes these are."""
    is_loose, sizes = np.zeros(parent.size, np.uint8), np.zeros(parent.size, np.int32)
    for node in range(parent.size):
        sizes[_find(parent, node)] += 1
    first = np.full(node_types.max() + 1 if node_types.size else 0, -1, np.int32)
    for node in range(parent.size):
        if starts[node] == starts[node + 1] and parent[node] == node and sizes[node] == 1:
            if first[node_types[node]] < 0:
                first[node_types[node]] = node
            parent[node] = first[node_types[node]]
            is_loose[node] = 1
    return is_loose


@making
def in_order(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the positions of the numbers, the lowest first and equal ones in order; none is below 0."""
    ends = np.zeros(numbers.max() + 2 if numbers.size else 1, np.int32)
    for k in range(numbers.size):
        ends[numbers[k] + 1] += 1
    for number in range(1, ends.size):
        ends[number] += ends[number - 1]
    order = np.empty(numbers.size, np.int32)
    for k in range(numbers.size):
        order[ends[numbers[k]]] = k
        ends[numbers[k]] += 1
    return order


@allocating
def partition(
    node_types: NDArray[np.int32], starts: NDArray[np.int32], producers: NDArray[np.int32]
) -> tuple[NDArray[np.int32], int, NDArray[np.uint8]]:
    """Return (subgraph of each node, number of subgraphs, whether each is loose); nodes come in topological order.

    ``producers[starts[n]:starts[n + 1]]`` are the distinct nodes that node n reads. Subgraphs are numbered by level,
    then by their first node, so that a subgraph's number is higher than those it depends on.
    """
    num_nodes = node_types.size
    level = np.zeros(num_nodes, np.int32)
    parent = np.arange(num_nodes).astype(np.int32)
    for node in range(num_nodes):
        for k in range(starts[node], starts[node + 1]):
            before = producers[k]
            level[node] = max(level[node], level[before] + (node_types[before] != node_types[node]))
    for node in range(num_nodes):
        for k in range(starts[node], starts[node + 1]):
            before = producers[k]
            if node_types[before] == node_types[node] and level[before] == level[node]:
                a, b = _find(parent, before), _find(parent, node)
                parent[max(a, b)] = min(a, b)
    alone = _put_together(node_types, starts, parent)
    group, is_loose = np.full(num_nodes, -1, np.int32), np.zeros(num_nodes, np.uint8)
    num_groups = 0
    for node in in_order(level):
        root = _find(parent, node)
        if group[root] < 0:
            group[root], is_loose[num_groups] = num_groups, alone[root]
            num_groups += 1
        group[node] = group[root]
    return group, num_groups, is_loose[:num_groups]
