"""The program of an acyclic graph of nodes that read each other, written in one compiled call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.program import CARRY, FIXED, LIST, OP_NODE, STEP
from cellrt.native.jit import compiled, making, short_allocating, short_entry

PICK = 4
"""Mode of an input whose values are listed; beside those of ``program.py``."""
FOR_EACH_SOURCE = 8
"""Added to the mode of an input that has a value for each source of a node."""


@short_entry
def is_dag(offsets: NDArray[np.int32], sources: NDArray[np.int32]) -> bool:
    """Return whether ``why_no_dag`` has nothing to say; offsets are two or more."""
    size = offsets.size - 1
    if offsets[0] != 0 or offsets[size] != sources.size:
        return False
    for node in range(size):
        if offsets[node + 1] < offsets[node] or offsets[node + 1] > sources.size:
            return False
        for k in range(offsets[node], offsets[node + 1]):
            if sources[k] < 0 or sources[k] >= node:
                return False
    return True


def why_no_dag(offsets: NDArray[np.integer], sources: NDArray[np.integer]) -> str:
    """Return why ``is_dag`` refuses these offsets and sources, or why they do not fit into 32 bits."""
    if offsets[0] != 0:
        return f"offsets begin with {int(offsets[0])}; expected 0"
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falling.size:
        node = int(falling[0])
        begin, end = int(offsets[node]), int(offsets[node + 1])
        return f"node {node}: expected offsets that do not decrease, got {begin} and then {end}"
    if offsets[-1] != sources.size:
        return f"offsets end with {int(offsets[-1])}; expected {sources.size}, as many as there are sources"
    readers = np.repeat(np.arange(offsets.size - 1), (offsets[1:] - offsets[:-1]).astype(np.int64))
    wrong = int(np.flatnonzero((sources < 0) | (sources >= readers))[0])
    reader, source = int(readers[wrong]), int(sources[wrong])
    what = "itself" if source == reader else f"node {source}"
    expected = f"a node before it, from 0 to {reader - 1}" if reader else "no sources, as no node comes before it"
    return f"node {reader} reads {what}; expected {expected}"


@compiled
def _given(mode: int, a: int, b: int, place: int, picked: NDArray[np.int32]) -> int:
    """Return the value that is given for a place."""
    if mode == PICK:
        return int(picked[a + place])
    return a + place * b if mode == STEP else a


@making
def write_nodes(
    order: NDArray[np.int32],
    starts: NDArray[np.int32],
    sources: NDArray[np.int32],
    ranks: NDArray[np.int32],
    leaf_type: int,
    inner_type: int,
    leaf_outputs: int,
    inner_outputs: int,
    leaf: NDArray[np.int32],
    inner: NDArray[np.int32],
    picked: NDArray[np.int32],
    first_value: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Write one NODE operation a node, in ``order``; node n reads ``sources[starts[n]:starts[n + 1]]``.

    ``leaf`` has (mode, a, b) for each input of nodes without sources, ``inner`` of the others. (LIST, output, -): that
    output of all sources; (CARRY, source, output): of one. Others are given: (FIXED, value, -); (STEP, base, stride)
    and (PICK, first, -) by the node's rank, the latter ``picked[first + rank]``; with ``FOR_EACH_SOURCE`` as many
    values as the node has sources, each by its place among all of these.

    Return (words, value id of each node's first output).
    """
    size = order.size
    width = 2 + 2 * max(leaf.shape[0], inner.shape[0])
    words, firsts = np.empty(size * width + sources.size * inner.shape[0], np.int32), np.empty(size, np.int32)
    value, end = first_value, 0
    for node in order:
        begin, count = starts[node], starts[node + 1] - starts[node]
        inputs = inner if count > 0 else leaf
        words[end], words[end + 1] = OP_NODE, inner_type if count > 0 else leaf_type
        end += 2
        for k in range(inputs.shape[0]):
            mode, a, b = inputs[k, 0], inputs[k, 1], inputs[k, 2]
            if mode != LIST and mode < FOR_EACH_SOURCE:
                words[end] = FIXED
                words[end + 1] = (
                    firsts[sources[begin + a]] + b if mode == CARRY else _given(mode, a, b, ranks[node], picked)
                )
                end += 2
                continue
            words[end], words[end + 1] = LIST, count
            for j in range(count):
                words[end + 2 + j] = (
                    firsts[sources[begin + j]] + a
                    if mode == LIST
                    else _given(mode - FOR_EACH_SOURCE, a, b, begin + j, picked)
                )
            end += 2 + count
        firsts[node] = value
        value += inner_outputs if count > 0 else leaf_outputs
    return words[:end], firsts


@short_allocating
def dag_program(
    offsets: NDArray[np.int32],
    sources: NDArray[np.int32],
    cell_type: int,
    num_outputs: int,
    inputs: NDArray[np.int32],
    picked: NDArray[np.int32],
    first_value: int,
) -> NDArray[np.int32]:
    """Write one NODE operation a node of one cell, in order, as ``write_nodes``, and return the words.

    ``offsets`` and ``sources`` must have passed ``is_dag``.
    """
    order = np.arange(offsets.size - 1).astype(np.int32)
    words: NDArray[np.int32] = write_nodes(
        order,
        offsets,
        sources,
        order,
        cell_type,
        cell_type,
        num_outputs,
        num_outputs,
        inputs,
        inputs,
        picked,
        first_value,
    )[0]
    return words
