"""Cuts a cell graph into subgraphs: connected nodes of one cell type (BatchMaker section 2.4.4).

Same type and connected is not enough: in A1 -> B -> A2 with A1 -> A2 the two A's would wait for B and B for them.
So nodes are grouped by cell type *and* level, the largest number of type changes on a path from the inputs. An edge
between two groups always goes to a higher level (same type: the levels differ; another type: one more change), so the
graph of subgraphs is acyclic.
"""

from __future__ import annotations

import numpy as np

from cellrt.core.jit import allocating


@allocating
def _find(parent, node):
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@allocating
def partition(node_types, starts, producers):
    """Returns (subgraph of each node, number of subgraphs); nodes come in topological order.

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
    group = np.full(num_nodes, -1, np.int32)
    num_groups = 0
    for node in np.argsort(level, kind="mergesort"):
        root = _find(parent, node)
        if group[root] < 0:
            group[root] = num_groups
            num_groups += 1
        group[node] = group[root]
    return group, num_groups
