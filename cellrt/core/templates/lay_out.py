"""The first layout of a draft as rows for the tables: the edges between units, the subgraphs, the nodes.

A chain or loop is a subgraph of its own, and has a record (``record_layout.py``). All ids count from the request's
first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import CHAIN_NEXT, CROSSING, NODE, READS_AS_A_WHOLE, SUBGRAPH, Node, Subgraph
from cellrt.core.templates.partition import in_order, partition
from cellrt.core.templates.program import (
    EMITTED,
    FIXED,
    PAGED,
    SAME,
    STEP,
    Draft,
    InputRow,
    is_behind_member,
    is_chain,
    last_member,
    named,
    num_named,
)
from cellrt.core.templates.sums import Sum, position_of
from cellrt.core.templates.uses import Ints, Uses
from cellrt.native.jit import compiled, inlined, make_rows, making
from cellrt.native.row_types import Rows


class Edges(NamedTuple):
    """The units that each unit reads: those of unit n are ``producers[starts[n]:starts[n + 1]]``, each once."""

    starts: Ints
    producers: Ints
    steps: NDArray[np.int64]  # sums: steps of the producer that must be there before; 0: it only follows
    follows: Ints  # 1 if the unit follows the producer step by step


@compiled
def _maker_of(draft: Draft, value: int) -> tuple[int, Sum]:
    """Return the unit that makes a value, and how many of its steps that takes; or -1.

    For a state, the value is the one that the state begins with.
    """
    maker = draft.makers[value]
    while maker < 0:
        value = draft.sources[-1 - maker].start
        if value < 0:
            return -1, 0
        maker = draft.makers[value]
    unit = draft.units[maker]
    if is_chain(draft, maker):
        step = (value - unit.value) // draft.types[unit.cell_type].num_outputs
        return maker, 1 + position_of(unit.length, step)
    return last_member(draft, maker), 1


@compiled
def _note_edge(edges: Edges, seen: Ints, unit: int, end: int, producer: int, steps: Sum, follows: int) -> int:
    """Add a producer of ``unit``, or merge it with the same one; return the new end."""
    if producer < 0:
        return end
    at = seen[producer]
    if at < edges.starts[unit]:
        at = seen[producer] = end
        edges.producers[at], edges.steps[at], edges.follows[at] = producer, 0, 0
        end += 1
    edges.steps[at] = max(edges.steps[at], steps)
    edges.follows[at] |= follows
    return end


@inlined
def _note_input(draft: Draft, edges: Edges, seen: Ints, unit: int, end: int, given: InputRow) -> int:
    """Add the producers that an input reads; return the new end."""
    if given.mode == EMITTED:
        return int(_note_edge(edges, seen, unit, end, last_member(draft, draft.makers[given.value]), 1, 0))
    if given.mode == SAME:
        return int(_note_edge(edges, seen, unit, end, draft.makers[given.value], 0, 1))
    if given.is_whole:
        maker, first = _maker_of(draft, given.first)
        last = _maker_of(draft, named(draft, given, num_named(given) - 1))[1]
        follows = int(given.mode == STEP)
        return int(_note_edge(edges, seen, unit, end, maker, 0 if follows else max(first, last), follows))
    for k in range(num_named(given)):
        maker, steps = _maker_of(draft, named(draft, given, k))
        end = _note_edge(edges, seen, unit, end, maker, steps, 0)
    return end


@making
def find_edges(draft: Draft) -> Edges:
    """Return each unit's producers.

    A unit that uses a growing state comes after everything that was appended before.
    """
    # Make room for the most edges there can be.
    most = draft.units.size + draft.inputs.size
    for at in range(draft.inputs.size):
        most += 0 if draft.inputs[at].is_whole else num_named(draft.inputs[at])
    edges = Edges(
        np.zeros(draft.units.size + 1, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.int64),
        np.empty(most, np.int32),
    )
    seen, appenders = np.full(draft.units.size, -1, np.int32), np.full(draft.pages.size, -1, np.int32)
    end = 0
    for unit in range(draft.units.size):
        operation, cell_type = draft.units[unit], draft.types[draft.units[unit].cell_type]
        edges.starts[unit] = end
        if is_behind_member(draft, unit):  # so that the last comes after what any of them waits for
            end = _note_edge(edges, seen, unit, end, unit - 1, 0, 1)
        for port in range(cell_type.num_inputs):
            given = draft.inputs[operation.input + port]
            if given.mode != PAGED:
                end = _note_input(draft, edges, seen, unit, end, given)
                continue
            # Steps that append to one growing state go one after the other.
            before = appenders[given.state]
            if before >= 0:
                steps = draft.lengths[before] if is_chain(draft, before) else 1
                end = _note_edge(edges, seen, unit, end, last_member(draft, before), steps, 0)
            if draft.ports[cell_type.first_port + port].appends:
                appenders[given.state] = unit
    edges.starts[draft.units.size] = end
    return edges


@making
def cut(draft: Draft, edges: Edges) -> tuple[Ints, int, NDArray[np.uint8]]:
    """Return (subgraph of each unit, number of subgraphs, whether each is loose).

    A chain or loop counts as a type of its own, so that it is a subgraph of its own.
    """
    kinds = np.empty(draft.units.size, np.int32)
    for unit in range(kinds.size):
        kinds[unit] = draft.types.size + unit if draft.lengths[unit] > 0 else draft.units[unit].cell_type
    group, count, is_loose = partition(kinds, edges.starts, edges.producers)
    return group, count, is_loose


@compiled
def _follows(draft: Draft, unit: int, before: int) -> bool:
    """Return whether node ``unit`` reads exactly the carried state of node ``before``, which has the same cell type."""
    cell_type, carries = draft.types[draft.units[unit].cell_type], False
    for port in range(cell_type.num_inputs):
        given, carry = draft.inputs[draft.units[unit].input + port], draft.ports[cell_type.first_port + port].carry
        for k in range(num_named(given)):
            output = named(draft, given, k) - draft.units[before].value
            if carry >= 0:
                if output != carry:
                    return False
                carries = True
            elif 0 <= output < cell_type.num_outputs:
                return False
    return carries


@compiled
def _num_refs(draft: Draft, unit: int) -> int:
    """Return how many links the inputs of a node take: a ragged one has its count, then its values."""
    count, first = 0, draft.units[unit].input
    for at in range(first, first + draft.types[draft.units[unit].cell_type].num_inputs):
        count += num_named(draft.inputs[at]) + int(draft.inputs[at].mode != FIXED)
    return count


@compiled
def _write_refs(draft: Draft, uses: Uses, unit: int, links: Ints, at: int) -> None:
    """Write the values that a node reads relative to its own first value, so that no request has to move them."""
    operation = draft.units[unit]
    first = uses.rows[operation.value]
    for k in range(operation.input, operation.input + draft.types[operation.cell_type].num_inputs):
        given, count = draft.inputs[k], num_named(draft.inputs[k])
        if given.mode != FIXED:
            links[at] = count
            at += 1
        for j in range(count):
            links[at + j] = uses.rows[named(draft, given, j)] - first
        at += count


@compiled
def _append_ready(nodes: Rows[Node], subgraph: Subgraph, node: int) -> None:
    if subgraph.ready_tail >= 0:
        nodes[subgraph.ready_tail].next_ready = node
    else:
        subgraph.ready_head = node
    subgraph.ready_tail = node
    subgraph.num_ready += 1


@making
def write_nodes(
    draft: Draft, uses: Uses, edges: Edges, group: Ints, subgraphs: Rows[Subgraph]
) -> tuple[Rows[Any], Ints, int]:
    """Return (nodes by subgraph, their links, the most inputs of one); count the producers that subgraphs wait for."""
    num_units = draft.units.size
    # Number the nodes by subgraph, and count their links.
    new, num_readers = np.full(num_units, -1, np.int32), np.zeros(num_units, np.int32)
    for k in range(edges.starts[num_units]):
        num_readers[edges.producers[k]] += 1
    num_nodes = num_links = most = 0
    order = in_order(group)
    for unit in order:
        if draft.lengths[unit] == 0:
            new[unit] = num_nodes
            refs = _num_refs(draft, unit)
            num_links, most, num_nodes = num_links + refs + num_readers[unit], max(most, refs), num_nodes + 1
    # Write each node with its inputs, and leave room for its readers after them.
    nodes, links = make_rows(num_nodes, NODE), np.zeros(num_links, np.int32)
    at, before = 0, -1
    for unit in order:
        k = new[unit]
        if k < 0:
            continue
        node, subgraph = nodes[k], subgraphs[group[unit]]
        node.subgraph, node.next_ready, node.first_link = group[unit], -1, at
        node.first_value = uses.rows[draft.units[unit].value]
        node.num_refs = _num_refs(draft, unit)
        _write_refs(draft, uses, unit, links, at)
        at += node.num_refs + num_readers[unit]
        subgraph.cell_type = draft.units[unit].cell_type
        subgraph.nodes_left += 1
        if before >= 0 and group[before] == group[unit] and _follows(draft, unit, before):
            nodes[k - 1].bits |= CHAIN_NEXT
        before = unit
    write_readers(edges, group, new, nodes, links, subgraphs)
    return nodes, links, most


@compiled
def write_readers(
    edges: Edges, group: Ints, new: Ints, nodes: Rows[Node], links: Ints, subgraphs: Rows[Subgraph]
) -> None:
    """Write behind each node's inputs who reads it; count what nodes and subgraphs wait for, and list the nodes that
    are ready. ``new``: of each unit its node, or -1."""
    for unit in range(new.size):
        for k in range(edges.starts[unit], edges.starts[unit + 1]):
            before = edges.producers[k]
            if new[before] < 0:
                if edges.steps[k] > 0:
                    subgraphs[group[unit]].waiting += 1
                continue
            node = nodes[new[before]]
            at = node.first_link + node.num_refs + node.num_consumers
            node.num_consumers += 1
            if new[unit] >= 0:
                links[at] = new[unit] - new[before]
            else:
                links[at] = READS_AS_A_WHOLE + group[unit] - group[before]
            if group[unit] == group[before]:
                nodes[new[unit]].pending += 1
            else:
                subgraphs[group[unit]].waiting += 1
                node.bits |= CROSSING
    for k in range(nodes.size):
        if nodes[k].pending == 0:
            _append_ready(nodes, subgraphs[nodes[k].subgraph], k)


@making
def make_subgraphs(draft: Draft, group: Ints, num_groups: int, is_loose: NDArray[np.uint8]) -> Rows[Any]:
    """Return the rows of subgraphs, with the types of chains and loops."""
    subgraphs: Rows[Subgraph] = make_rows(num_groups, SUBGRAPH)
    for k in range(num_groups):
        subgraph = subgraphs[k]
        subgraph.ready_head, subgraph.ready_tail, subgraph.record = -1, -1, -1
        subgraph.previous, subgraph.next = -1, -1
        subgraph.is_loose = is_loose[k]
    for unit in range(draft.units.size):
        if draft.lengths[unit] > 0:
            subgraphs[group[unit]].cell_type = draft.units[unit].cell_type
            subgraphs[group[unit]].nodes_left, subgraphs[group[unit]].is_loose = 1, 0
    return subgraphs
