"""The program of a whole tree, written in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.program import CARRY
from cellrt.graph.dag_program import write_nodes
from cellrt.native.jit import making, short_allocating

MOST_LISTED = 8
"""Nodes that an error names at most."""


@making
def _children(parents: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return the children of each node in order (starts, children), and the nodes, every child before its parent."""
    size = parents.size
    starts = np.zeros(size + 1, np.int32)
    for node in range(size):
        if parents[node] >= 0:
            starts[parents[node] + 1] += 1
    for node in range(size):
        starts[node + 1] += starts[node]
    children = np.zeros(size, np.int32)
    fill = starts.copy()
    order = np.empty(size, np.int32)
    waiting = np.zeros(size, np.int32)
    end = 0
    for node in range(size):
        parent = parents[node]
        if parent >= 0:
            children[fill[parent]] = node
            fill[parent] += 1
        waiting[node] = starts[node + 1] - starts[node]
        if waiting[node] == 0:
            order[end] = node
            end += 1
    done = 0
    while done < end:
        parent = parents[order[done]]
        done += 1
        if parent >= 0:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                order[end] = parent
                end += 1
    return starts, children, order[:end]


@short_allocating
def count_leaves(parents: NDArray[np.int32]) -> int:
    """Return how many nodes have no children; or -1 if parents are not node numbers with one root, -2 for a cycle."""
    size, roots, leaves = parents.size, 0, 0
    for node in range(size):
        if parents[node] < -1 or parents[node] >= size:
            return -1
        roots += parents[node] < 0
    if roots != 1:
        return -1
    starts, _, order = _children(parents)
    if order.size < size:
        return -2
    for node in range(size):
        leaves += starts[node] == starts[node + 1]
    return leaves


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


@short_allocating
def tree_program(
    parents: NDArray[np.int32],
    leaf_type: int,
    inner_type: int,
    leaf_outputs: int,
    inner_outputs: int,
    leaf_words: NDArray[np.int32],
    inner_words: NDArray[np.int32],
    picked: NDArray[np.int32],
    first_value: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Write one NODE operation a tree node, children first.

    ``leaf_words`` and ``inner_words`` are ``leaf`` and ``inner`` of ``write_nodes``; a node's rank is that among its
    kind.

    Return (words, value id of each node's first output, problem): problem is -1 for none, or a node whose number of
    children is not the one that its inputs name. ``parents`` must have passed ``count_leaves``.
    """
    starts, children, order = _children(parents)
    ranks = np.empty(parents.size, np.int32)
    leaves = inners = named = 0
    for k in range(inner_words.shape[0]):
        if inner_words[k, 0] == CARRY:
            named = max(named, inner_words[k, 1] + 1)
    for node in range(parents.size):
        count = starts[node + 1] - starts[node]
        if count == 0:
            ranks[node] = leaves
            leaves += 1
        else:
            if named > 0 and count != named:
                return parents[:0], ranks, node
            ranks[node] = inners
            inners += 1
    words, firsts = write_nodes(
        order,
        starts,
        children,
        ranks,
        leaf_type,
        inner_type,
        leaf_outputs,
        inner_outputs,
        leaf_words,
        inner_words,
        picked,
        first_value,
    )
    return words, firsts, -1
