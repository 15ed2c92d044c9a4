"""Many nodes that a program says as arrays: a tree by the parents of its nodes, an acyclic graph by what each reads.

So a program of a tree has a word for each node and not five, its bytes tell one shape from another, and nobody who
records one looks at a node. Readers of a program have its TREE and DAG operations written out as NODEs first, so what
they mean is said here alone. The same holds for RESULTS, which are many results.

The nodes of a set are numbered; NODEs of a dag are in that order, those of a tree come after their children: leaves
first. ``read`` are three words (mode, a, b) for each input of a cell, of a tree's leaves
and then of its inner nodes. (LIST, output, -): that output of all sources, which are a tree node's children; (CARRY,
source, output): of one. Others are given: (FIXED, value, -); (STEP, base, stride) and (PICK, first, -) by the node's
rank, the latter ``values[first + rank]``; with ``FOR_EACH_SOURCE`` as many values as the node has sources, each by its
place among all of these. A node's rank is its number; in a tree its place among the leaves, or among the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import CellType
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_DAG,
    OP_EXTERNAL,
    OP_NODE,
    OP_RESULT,
    OP_RESULTS,
    OP_TREE,
    SOURCE,
    STEP,
    TABLES,
    UNIT,
    end_of,
)
from cellrt.native.jit import compiled, making, short_allocating
from cellrt.native.row_types import Rows

PICK = 4
"""Mode of an input whose values are listed; beside those of ``program.py``."""
FOR_EACH_SOURCE = 8
"""Added to the mode of an input that has a value for each source of a node."""
READ_WORDS = 3
TREE_HEAD, DAG_HEAD = 6, 5
"""Words in front of the inputs."""

Ints = NDArray[np.int32]


@making
def children_of(parents: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the children of each node in order (starts, children), and the nodes, every child before its parent: as
    many as are not in a cycle, or above one."""
    size = parents.size
    starts = np.zeros(size + 1, np.int32)
    # Count the children of each node, so that each knows where its list starts.
    for node in range(size):
        if parents[node] >= 0:
            starts[parents[node] + 1] += 1
    for node in range(size):
        starts[node + 1] += starts[node]
    # Fill the lists, and begin the order with the nodes that have no children.
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
    # Append each node when its last child is in the order.
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
def first_values(parents: Ints, leaf_outputs: int, inner_outputs: int, first: int) -> Ints:
    """Return the value id of the first output of each node of a tree, in the order of its parents; ``first``: of the
    first NODE."""
    starts, _, order = children_of(parents)
    firsts = np.empty(parents.size, np.int32)
    for node in order:
        firsts[node] = first
        first += inner_outputs if starts[node + 1] > starts[node] else leaf_outputs
    return firsts


@compiled
def _num_for_each(program: Ints, at: int, num_inputs: int) -> int:
    """Return how many of the inputs at ``at`` have a value for each source."""
    count = 0
    for k in range(num_inputs):
        mode = program[at + READ_WORDS * k]
        count += int(mode == LIST or mode >= FOR_EACH_SOURCE)
    return count


@compiled
def _num_read(program: Ints, at: int, types: Rows[CellType]) -> int:
    """Return how many inputs the cells of the set at ``at`` have."""
    count = types[program[at + 1]].num_inputs
    return int(count + types[program[at + 2]].num_inputs if program[at] == OP_TREE else count)


@compiled
def _end_of_set(program: Ints, at: int, types: Rows[CellType]) -> int:
    """Return where the set at ``at`` ends."""
    if program[at] == OP_RESULTS:
        return int(at + 2 + program[at + 1])
    read = READ_WORDS * _num_read(program, at, types)
    if program[at] == OP_TREE:
        return int(at + TREE_HEAD + read + program[at + 5] + program[at + 3])
    return int(at + DAG_HEAD + read + program[at + 4] + program[at + 2] + 1 + program[at + 3])


@compiled
def _num_written(program: Ints, at: int, types: Rows[CellType]) -> int:
    """Return how many words the set at ``at`` is, written out."""
    if program[at] == OP_RESULTS:
        return int(4 * program[at + 1])
    num_inputs = types[program[at + 1]].num_inputs
    if program[at] == OP_DAG:
        each = _num_for_each(program, at + DAG_HEAD, num_inputs)
        return int(program[at + 2] * (2 + 2 * num_inputs) + program[at + 3] * each)
    size, leaves, others = program[at + 3], program[at + 4], types[program[at + 2]].num_inputs
    each = _num_for_each(program, at + TREE_HEAD + READ_WORDS * num_inputs, others)
    return int(leaves * (2 + 2 * num_inputs) + (size - leaves) * (2 + 2 * others) + (size - 1) * each)


@compiled
def _given(program: Ints, at: int, mode: int, place: int, values: int) -> int:
    """Return the value that the input at ``at`` is given for a place; those that are listed begin at ``values``."""
    if mode == PICK:
        return int(program[values + program[at + 1] + place])
    return int(program[at + 1] + place * program[at + 2] if mode == STEP else program[at + 1])


@making
def _write_nodes(
    program: Ints,
    at: int,
    read_at: int,
    values: int,
    types: Rows[CellType],
    order: Ints,
    starts: Ints,
    sources: Ints,
    words: Ints,
    end: int,
    value: int,
) -> tuple[int, int]:
    """Write the NODEs of the set at ``at`` in ``order`` to words from ``end`` on; node n reads
    ``sources[starts[n]:starts[n + 1]]``, their values are from ``value`` on. Return where both end."""
    is_tree, firsts, ranks = program[at] == OP_TREE, np.empty(order.size, np.int32), np.empty(order.size, np.int32)
    # Number leaves among the leaves, and other nodes among the others: these are their rows in given tensors.
    num_leaves = num_others = 0
    for node in range(order.size):
        is_leaf = is_tree and starts[node] == starts[node + 1]
        ranks[node] = num_leaves if is_leaf else num_others
        num_leaves, num_others = num_leaves + int(is_leaf), num_others + int(not is_leaf)
    # Write each node: its cell type, and then its inputs.
    for node in order:
        begin, count = starts[node], starts[node + 1] - starts[node]
        is_inner = is_tree and count > 0
        type_id = program[at + 2] if is_inner else program[at + 1]
        read = read_at + READ_WORDS * (types[program[at + 1]].num_inputs if is_inner else 0)
        words[end], words[end + 1] = OP_NODE, type_id
        end += 2
        for k in range(read, read + READ_WORDS * types[type_id].num_inputs, READ_WORDS):
            mode = program[k]
            if mode == LIST or mode >= FOR_EACH_SOURCE:
                words[end], words[end + 1] = LIST, count
                end += 2
                for j in range(begin, begin + count):
                    if mode == LIST:
                        words[end] = firsts[sources[j]] + program[k + 1]
                    else:
                        words[end] = _given(program, k, mode - FOR_EACH_SOURCE, j, values)
                    end += 1
                continue
            words[end] = FIXED
            if mode == CARRY:
                words[end + 1] = firsts[sources[begin + program[k + 1]]] + program[k + 2]
            else:
                words[end + 1] = _given(program, k, mode, ranks[node], values)
            end += 2
        firsts[node] = value
        value += types[type_id].num_outputs
    return end, value


@making
def _write_set(program: Ints, at: int, types: Rows[CellType], words: Ints, end: int, value: int) -> tuple[int, int]:
    """Write out the set at ``at``, as ``_write_nodes``."""
    if program[at] == OP_RESULTS:
        for k in range(at + 2, at + 2 + program[at + 1]):
            words[end], words[end + 1], words[end + 2], words[end + 3] = OP_RESULT, program[k], 1, 1
            end += 4
        return end, value
    is_tree = program[at] == OP_TREE
    read = at + (TREE_HEAD if is_tree else DAG_HEAD)
    values = read + READ_WORDS * _num_read(program, at, types)
    arrays = values + program[at + (5 if is_tree else 4)]
    if is_tree:
        starts, sources, order = children_of(program[arrays : arrays + program[at + 3]].copy())
    else:
        order = np.arange(program[at + 2]).astype(np.int32)
        starts = program[arrays : arrays + order.size + 1].copy()
        sources = program[arrays + order.size + 1 : arrays + order.size + 1 + program[at + 3]].copy()
    last, end_value = _write_nodes(program, at, read, values, types, order, starts, sources, words, end, value)
    return last, end_value


@compiled
def _num_values(program: Ints, at: int, types: Rows[CellType]) -> int:
    """Return how many values the operation at ``at`` makes; it is no set."""
    table = TABLES[program[at]]
    if table == SOURCE:
        return int(program[at + 2]) if program[at] == OP_EXTERNAL else 1
    if table != UNIT:
        return 0
    return int(types[program[at + 1]].num_outputs * (program[at + 2] if program[at] == OP_CHAIN else 1))


@compiled
def has_sets(program: Ints, types: Rows[CellType]) -> bool:
    """Return whether a program has sets."""
    at = 0
    while at < program.size:
        if program[at] in (OP_TREE, OP_DAG, OP_RESULTS):
            return True
        at = end_of(program, at, types)
    return False


@making
def write_out(program: Ints, types: Rows[CellType], value: int) -> Ints:
    """Return a program, or what is left of one from value id ``value`` on, with its sets written out."""
    size = at = 0
    while at < program.size:
        if program[at] in (OP_TREE, OP_DAG, OP_RESULTS):
            size, at = size + _num_written(program, at, types), _end_of_set(program, at, types)
        else:
            end = end_of(program, at, types)
            size, at = size + end - at, end
    words = np.empty(size, np.int32)
    at = end = 0
    while at < program.size:
        if program[at] in (OP_TREE, OP_DAG, OP_RESULTS):
            end, value = _write_set(program, at, types, words, end, value)
            at = _end_of_set(program, at, types)
            continue
        value += _num_values(program, at, types)
        for k in range(at, end_of(program, at, types)):
            words[end] = program[k]
            end, at = end + 1, at + 1
    return words


@short_allocating
def written_out(program: Ints, types: Rows[CellType], value: int) -> Ints:
    """Return a program with its sets written out as nodes (``write_out``)."""
    words: Ints = write_out(program, types, value)
    return words
