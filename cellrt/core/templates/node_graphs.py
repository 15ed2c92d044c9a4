"""Programs of nodes alone, as trees, dags and graphs written call by call are: a short way to their templates.

Most of these are seen once, and a request waits for each. They have no lengths, no sequences and no states, and a value
of the program is a row of ``values``. What is made here is, array by array, what ``template.py`` makes of the same
program; it takes half the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.pointers import OpenTemplate, template_at
from cellrt.core.state.tables import (
    CHAIN_NEXT,
    EXTERNAL,
    MAX_READERS,
    NO_ROW,
    PERMANENT,
    CellType,
    PortInfo,
)
from cellrt.core.templates.lay_out import Edges, write_readers
from cellrt.core.templates.node_sets import has_sets, write_out
from cellrt.core.templates.partition import in_order, partition
from cellrt.core.templates.program import (
    FIXED,
    LIST,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_NODE,
    OP_RESULT,
)
from cellrt.core.templates.template import (
    FITS,
    MOST_REFS,
    NUM_EXTERNALS,
    NUM_PLACES,
    NUM_RESULTS,
    NUM_STEPS,
    OWN_ADDRESS,
    count_needs_of_nodes,
    has_room,
    make_room,
)
from cellrt.native.jit import compiled, making, short_allocating
from cellrt.native.row_types import Rows

Ints = NDArray[np.int32]

NO_NODES, HAS_SETS = 0, 1
"""Sizes of what is made of a program that is not of nodes alone; that has trees and dags, which are to be written
out."""
UNITS, VALUES, SOURCES, EXTERNALS, RESULTS, PLACES, REFS, LISTS = range(8)
"""The counts of a program: ``PLACES`` are rows that are results, ``REFS`` values that nodes name, ``LISTS`` inputs
that list theirs."""


class Nodes(NamedTuple):
    """A program of nodes alone."""

    words: Ints
    units: Ints  # where each NODE begins
    firsts: Ints  # the first value of each
    makers: Ints  # of each value: its unit, or -1 for none
    sources: Ints  # where each EXTERNAL and CONSTANT begins
    results: Ints  # where each RESULT begins


@compiled
def _count(words: Ints, types: Rows[CellType], counts: NDArray[np.int64]) -> bool:
    """Count what a program has; return whether that is all, and it is of nodes."""
    at = 0
    while at < words.size:
        op = words[at]
        if op == OP_NODE:
            cell_type = types[words[at + 1]]
            counts[UNITS] += 1
            counts[VALUES] += cell_type.num_outputs
            at += 2
            for _ in range(cell_type.num_inputs):
                if words[at] != FIXED and words[at] != LIST:
                    return False
                count = 1 if words[at] == FIXED else words[at + 1]
                counts[REFS] += count
                counts[LISTS] += int(words[at] == LIST)
                at += 2 + (count if words[at] == LIST else 0)
        elif op in (OP_EXTERNAL, OP_CONSTANT):
            counts[SOURCES] += 1
            counts[EXTERNALS] += int(op == OP_EXTERNAL)
            counts[VALUES] += words[at + 2] if op == OP_EXTERNAL else 1
            at += 3
        elif op == OP_RESULT:
            counts[RESULTS] += 1
            counts[PLACES] += words[at + 3]
            at += 4
        else:
            return False
    return bool(counts[UNITS] > 0)


@making
def _read(words: Ints, types: Rows[CellType], counts: NDArray[np.int64]) -> Nodes:
    """Note where the operations of a program are, and who makes its values."""
    nodes = Nodes(
        words,
        np.empty(counts[UNITS], np.int32),
        np.empty(counts[UNITS], np.int32),
        np.empty(counts[VALUES], np.int32),
        np.empty(counts[SOURCES], np.int32),
        np.empty(counts[RESULTS], np.int32),
    )
    at = value = units = sources = results = 0
    while at < words.size:
        op, first, maker = words[at], value, -1
        if op == OP_NODE:
            nodes.units[units], nodes.firsts[units], maker = at, value, units
            cell_type = types[words[at + 1]]
            value += cell_type.num_outputs
            at += 2
            for _ in range(cell_type.num_inputs):
                at += 2 + (words[at + 1] if words[at] == LIST else 0)
            units += 1
        elif op == OP_RESULT:
            nodes.results[results] = at
            at, results = at + 4, results + 1
        else:
            nodes.sources[sources] = at
            value += words[at + 2] if op == OP_EXTERNAL else 1
            at, sources = at + 3, sources + 1
        for k in range(first, value):
            nodes.makers[k] = maker
    return nodes


@making
def _find_edges(nodes: Nodes, types: Rows[CellType], num_refs: int, readers: Ints) -> Edges:
    """Find the units that each unit reads, in order, and count who reads each value."""
    num_units = nodes.units.size
    edges = Edges(
        np.empty(num_units + 1, np.int32), np.empty(num_refs, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
    )
    seen, end = np.full(num_units, -1, np.int32), 0
    for unit in range(num_units):
        edges.starts[unit] = end
        at = nodes.units[unit] + 2
        for _ in range(types[nodes.words[at - 1]].num_inputs):
            count = 1 if nodes.words[at] == FIXED else nodes.words[at + 1]
            at += 1 if nodes.words[at] == FIXED else 2
            for k in range(at, at + count):
                value = nodes.words[k]
                readers[value] += 1
                before = nodes.makers[value]
                if before >= 0 and seen[before] != unit:
                    seen[before] = unit
                    edges.producers[end] = before
                    end += 1
            at += count
    edges.starts[num_units] = end
    return edges


@compiled
def _are_sources_read(nodes: Nodes, readers: Ints) -> bool:
    """Return whether each tensor of the request is read: else none of its rows are values, and it may have a length.
    And whether only nodes are results."""
    value = 0
    for source in nodes.sources:
        while nodes.makers[value] >= 0:
            value += 1
        is_read, count = nodes.words[source] == OP_CONSTANT, 1
        if not is_read:
            count = nodes.words[source + 2]
        for k in range(value, value + count):
            is_read |= readers[k] > 0
        if not is_read:
            return False
        value += count
    for result in nodes.results:
        for k in range(nodes.words[result + 3]):
            if nodes.makers[nodes.words[result + 1] + k * nodes.words[result + 2]] < 0:
                return False
    return True


@compiled
def _write_values(
    template: OpenTemplate, nodes: Nodes, types: Rows[CellType], ports: Rows[PortInfo], readers: Ints
) -> bool:
    """Write values, tensors and results; return whether no value has too many readers."""
    values, fits, value, count = template.values, True, 0, 0
    for k in range(values.size):
        values[k].row, values[k].result, values[k].readers = NO_ROW, -1, min(readers[k], MAX_READERS)
        fits &= readers[k] <= MAX_READERS
    # Values that no node makes: constants, and tensors of the request.
    for source in nodes.sources:
        while nodes.makers[value] >= 0:
            value += 1
        kind = nodes.words[source + 1]
        if nodes.words[source] == OP_CONSTANT:
            values[value].row, values[value].bits, values[value].kind = nodes.words[source + 2], PERMANENT, kind
            value += 1
            continue
        template.externals[count, 0], template.externals[count, 1] = nodes.words[source + 2], -1
        template.externals[count, 2] = value
        count += 1
        for _ in range(nodes.words[source + 2]):
            values[value].bits, values[value].kind = EXTERNAL, kind
            value += 1
    # Values that nodes make.
    for unit in range(nodes.units.size):
        cell_type = types[nodes.words[nodes.units[unit] + 1]]
        for k in range(cell_type.num_outputs):
            values[nodes.firsts[unit] + k].kind = ports[cell_type.first_port + cell_type.num_inputs + k].kind
    # Results, with the place of each value among them.
    place = 0
    for k in range(nodes.results.size):
        at = nodes.results[k]
        first, stride, length = nodes.words[at + 1], nodes.words[at + 2], nodes.words[at + 3]
        template.lists[k, 0], template.lists[k, 1] = values[first].kind, length
        for j in range(length):
            values[first + j * stride].result = place + j
        place += length
    return fits


@compiled
def _goes_on(nodes: Nodes, types: Rows[CellType], ports: Rows[PortInfo], unit: int, before: int) -> bool:
    """Return whether a node reads exactly the carried state of another of its cell type."""
    words, at, carries = nodes.words, nodes.units[unit] + 2, False
    cell_type = types[words[at - 1]]
    for port in range(cell_type.num_inputs):
        carry = ports[cell_type.first_port + port].carry
        count = 1 if words[at] == FIXED else words[at + 1]
        at += 1 if words[at] == FIXED else 2
        for k in range(at, at + count):
            output = words[k] - nodes.firsts[before]
            if carry >= 0:
                if output != carry:
                    return False
                carries = True
            elif 0 <= output < cell_type.num_outputs:
                return False
        at += count
    return carries


@compiled
def _write_refs(template: OpenTemplate, nodes: Nodes, types: Rows[CellType], unit: int, end: int) -> int:
    """Write what a node reads to links from ``end`` on, relative to its own first value; return where that ends."""
    words, links, at = nodes.words, template.links, nodes.units[unit] + 2
    for _ in range(types[words[at - 1]].num_inputs):
        count = 1
        if words[at] == LIST:
            count = links[end] = words[at + 1]
            end += 1
        at += 1 if words[at] == FIXED else 2
        for k in range(at, at + count):
            links[end] = words[k] - nodes.firsts[unit]
            end += 1
        at += count
    return end


@making
def _write_nodes(
    template: OpenTemplate,
    nodes: Nodes,
    types: Rows[CellType],
    ports: Rows[PortInfo],
    edges: Edges,
    group: Ints,
    num_readers: Ints,
) -> int:
    """Write nodes by subgraph, and their links; return the most inputs that one has."""
    new, at, k, before, most = np.empty(group.size, np.int32), 0, 0, -1, 0
    for unit in in_order(group):
        node, subgraph = template.nodes[k], template.subgraphs[group[unit]]
        end = _write_refs(template, nodes, types, unit, at)
        node.subgraph, node.next_ready, node.first_link, node.num_refs = group[unit], -1, at, end - at
        node.first_value = nodes.firsts[unit]
        most, at = max(most, end - at), end + num_readers[unit]
        subgraph.cell_type = nodes.words[nodes.units[unit] + 1]
        subgraph.nodes_left += 1
        if before >= 0 and group[before] == group[unit] and types[subgraph.cell_type].carries:
            if _goes_on(nodes, types, ports, unit, before):
                template.nodes[k - 1].bits |= CHAIN_NEXT
        new[unit], before, k = k, unit, k + 1
    write_readers(edges, group, new, template.nodes, template.links, template.subgraphs)
    return most


@making
def _lay_out(
    nodes: Nodes,
    counts: NDArray[np.int64],
    types: Rows[CellType],
    ports: Rows[PortInfo],
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return what ``compile_nodes`` does of a program of nodes alone; of size 0 if a tensor of the request is not
    read."""
    # Find the edges, and cut the graph into subgraphs.
    readers = np.zeros(counts[VALUES], np.int32)
    edges = _find_edges(nodes, types, counts[REFS], readers)
    if not _are_sources_read(nodes, readers):
        return np.empty(0, np.int64)
    kinds, num_readers = np.empty(nodes.units.size, np.int32), np.zeros(nodes.units.size, np.int32)
    for unit in range(kinds.size):
        kinds[unit] = nodes.words[nodes.units[unit] + 1]
    for k in range(edges.starts[kinds.size]):
        num_readers[edges.producers[k]] += 1
    group, num_groups, is_loose = partition(kinds, edges.starts, edges.producers)
    # Make room for the template's arrays.
    num_links = counts[REFS] + counts[LISTS] + edges.starts[kinds.size]
    sizes = np.array(
        (
            kinds.size,
            readers.size,
            num_links,
            num_groups,
            counts[EXTERNALS],
            counts[RESULTS],
            0,
            kind_rows.shape[0],
            0,
        )
    )
    made = make_room(sizes)
    template = template_at(made[OWN_ADDRESS])
    # Write the arrays.
    for k in range(num_groups):
        subgraph = template.subgraphs[k]
        subgraph.ready_head, subgraph.ready_tail, subgraph.record = -1, -1, -1
        subgraph.previous, subgraph.next, subgraph.is_loose = -1, -1, is_loose[k]
    fits = _write_values(template, nodes, types, ports, readers)
    made[MOST_REFS] = _write_nodes(template, nodes, types, ports, edges, group, num_readers)
    _write_needs(template, types, ports)
    # Write the header, with whether an empty engine has room for such a request.
    for k in range(template.externals.shape[0]):
        made[NUM_EXTERNALS] += template.externals[k, 0]
    made[NUM_RESULTS] = made[NUM_PLACES] = counts[PLACES]
    made[NUM_STEPS] = kinds.size if fits else -1
    made[FITS] = has_room(
        template.nodes,
        template.values,
        template.links,
        template.subgraphs,
        template.lists,
        template.states,
        template.needs,
        template.pages,
        made[NUM_PLACES],
        made[MOST_REFS],
        limits,
        kind_rows,
    )
    return made


@making
def _write_needs(template: OpenTemplate, types: Rows[CellType], ports: Rows[PortInfo]) -> None:
    """Write down the rows of each kind that can be live at once."""
    needs, values = np.zeros(template.needs.shape, np.int64), template.values
    for k in range(template.lists.shape[0]):
        needs[template.lists[k, 0], 1] += template.lists[k, 1]
    for k in range(values.size):
        if values[k].bits & EXTERNAL and values[k].readers > 0:
            needs[values[k].kind, 1] += 1
    count_needs_of_nodes(types, ports, template.nodes, values, template.subgraphs, needs)
    for kind in range(needs.shape[0]):
        template.needs[kind, 0], template.needs[kind, 1] = needs[kind, 0], needs[kind, 1]


@short_allocating
def compile_nodes(
    program: Ints,
    types: Rows[CellType],
    ports: Rows[PortInfo],
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the words of the template of a program of nodes alone, with the memory of its arrays behind them. Of
    others an array of NO_NODES or HAS_SETS words.

    Args:
        program: words of ``program.py``.
        types, ports: those of the tables.
        limits, kind_rows: those of an empty engine (see ``compile_program``).
    """
    words, counts = write_out(program, types, 0), np.zeros(8, np.int64)
    if _count(words, types, counts):
        made = _lay_out(_read(words, types, counts), counts, types, ports, limits, kind_rows)
        if made.size > 0:
            return made
    return np.empty(HAS_SETS if has_sets(program, types) else NO_NODES, np.int64)
