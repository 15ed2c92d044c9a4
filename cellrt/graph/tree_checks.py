"""Checks of the parents of a tree, in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.node_sets import children_of
from cellrt.native.jit import short_allocating

MOST_LISTED = 8
"""Nodes that an error names at most."""


@short_allocating
def count_leaves(parents: NDArray[np.int32]) -> tuple[int, int, int]:
    """Return how many nodes have no children, and the least and most children that the others have. Or (-1, 0, 0) if
    parents are not node numbers with one root, (-2, 0, 0) for a cycle.
    """
    size, roots, leaves, fewest, most = parents.size, 0, 0, parents.size, 0
    for node in range(size):
        if parents[node] < -1 or parents[node] >= size:
            return -1, 0, 0
        roots += parents[node] < 0
    if roots != 1:
        return -1, 0, 0
    starts, _, order = children_of(parents)
    if order.size < size:
        return -2, 0, 0
    for node in range(size):
        count = starts[node + 1] - starts[node]
        if count == 0:
            leaves += 1
        else:
            fewest, most = min(fewest, count), max(most, count)
    return leaves, fewest, most


def why_no_tree(parents: NDArray[np.int32]) -> str:
    """Return why ``count_leaves`` refuses these parents."""
    wrong = np.flatnonzero((parents < -1) | (parents >= parents.size))
    if wrong.size:
        node = int(wrong[0])
        return (
            f"node {node} has parent {int(parents[node])}; expected a node number from 0 to {parents.size - 1}, or -1 "
            "for the root"
        )
    roots = np.flatnonzero(parents == -1)
    if roots.size > 1:
        count = "two" if roots.size == 2 else str(roots.size)
        return f"{count} roots: nodes {_listed(roots)}; expected parent -1 for exactly one node"
    found = _cycle(parents)
    cycle = f"nodes {_listed(found)} form a cycle" if len(found) > 1 else f"node {found[0]} is its own parent, a cycle"
    return cycle if roots.size else f"no root: expected parent -1 for one node; {cycle}"


def _cycle(parents: NDArray[np.int32]) -> list[int]:
    """Return the nodes of the first cycle that the parents lead to, each before its parent."""
    seen_from = np.full(parents.size, -1, np.int64)
    for start in range(parents.size):
        node = start
        while node >= 0 and seen_from[node] < 0:
            seen_from[node] = start
            node = int(parents[node])
        if node >= 0 and seen_from[node] == start:
            cycle = [node]
            while parents[cycle[-1]] != node:
                cycle.append(int(parents[cycle[-1]]))
            return cycle
    return []


def _listed(nodes: Sequence[int] | NDArray[np.int64]) -> str:
    """Node numbers for an error, the first few of many."""
    numbers = [str(int(node)) for node in nodes[:MOST_LISTED]]
    if len(nodes) > MOST_LISTED:
        return f"{', '.join(numbers)}, ..."
    return " and ".join([", ".join(numbers[:-1]), numbers[-1]]) if len(numbers) > 1 else numbers[0]
