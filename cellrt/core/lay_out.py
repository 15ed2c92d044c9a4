"""From a draft to rows for the tables: finds who waits for whom, cuts the graph into subgraphs, writes them down.

A chain or loop is a subgraph of its own, and has a record (``record_layout.py``). All ids count from the request's
first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import compiled, make_rows, making
from cellrt.core.partition import partition
from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NOTHING,
    OP_STATE,
    PAGED,
    RANGE,
    SAME,
    STEP,
    inputs_at,
    is_behind_member,
    last_member,
    next_input,
)
from cellrt.core.tables import CHAIN_NEXT, CROSSING, NODE, READS_AS_A_WHOLE, SUBGRAPH
from cellrt.core.uses import is_chain, is_inside


class Edges(NamedTuple):
    """Which units each unit reads: those of unit n are ``producers[starts[n]:starts[n + 1]]``, each once."""

    starts: NDArray[np.int32]
    producers: NDArray[np.int32]
    steps: NDArray[np.int32]  # steps of the producer that must be there before the unit begins; 0: it only follows
    follows: NDArray[np.int32]  # 1 if the unit follows the producer step by step


@compiled
def _maker_of(draft, program, types, value):
    """The unit that makes a value (of a state: what it begins with), and how many of its steps that takes; or -1."""
    maker = draft.makers[value]
    while maker < 0:
        at = draft.source_at[-1 - maker]
        if program[at] != OP_STATE or program[at + 2] < 0:
            return -1, 0
        value = program[at + 2]
        maker = draft.makers[value]
    if is_chain(draft, program, maker):
        return maker, 1 + (value - draft.unit_values[maker]) // types[draft.unit_types[maker]].num_outputs
    return last_member(draft, program, maker), 1


@compiled
def _note_edge(edges, seen, unit, end, producer, steps, follows):
    """Adds a producer of ``unit``, or takes it in where it is known; returns the new end."""
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


@compiled
def _most_edges(draft, program, types):
    """No fewer than there are: one for each word, but a run of evenly spaced values is few words and may have as many
    makers."""
    count = program.size
    for unit in range(draft.unit_at.size):
        at = inputs_at(program, draft.unit_at[unit])
        for _ in range(types[draft.unit_types[unit]].num_inputs):
            if program[at] == STEP:
                count += draft.unit_lengths[unit]
            elif program[at] in (RANGE, LEADS):
                count += program[at + 3]
            at = next_input(program, at)
    return count


@making
def find_edges(draft, program, types, ports):
    """Finds each unit's producers. Whoever uses a growing state comes after all that was appended before."""
    most = _most_edges(draft, program, types)
    edges = Edges(
        np.zeros(draft.unit_at.size + 1, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.int32),
    )
    seen, appenders = np.full(draft.unit_at.size, -1, np.int32), np.full(draft.pages.size, -1, np.int32)
    end = 0
    for unit in range(draft.unit_at.size):
        at = inputs_at(program, draft.unit_at[unit])
        edges.starts[unit] = end
        cell_type = types[draft.unit_types[unit]]
        if is_behind_member(draft, program, unit):  # so that the last comes after what any of them waits for
            end = _note_edge(edges, seen, unit, end, unit - 1, 0, 1)
        for port in range(cell_type.num_inputs):
            mode = program[at]
            if mode == PAGED:
                before = appenders[program[at + 1]]
                if before >= 0:
                    steps = draft.unit_lengths[before] if is_chain(draft, program, before) else 1
                    end = _note_edge(edges, seen, unit, end, last_member(draft, program, before), steps, 0)
                if ports[cell_type.first_port + port].appends:
                    appenders[program[at + 1]] = unit
            elif mode == NOTHING:
                pass
            elif mode == EMITTED:
                maker = last_member(draft, program, draft.makers[program[at + 1]])
                end = _note_edge(edges, seen, unit, end, maker, 1, 0)
            elif mode == SAME:
                end = _note_edge(edges, seen, unit, end, draft.makers[program[at + 1]], 0, 1)
            elif mode in (FIXED, CARRY, NEXT, LAST):
                maker, steps = _maker_of(draft, program, types, program[at + 1])
                end = _note_edge(edges, seen, unit, end, maker, steps, 0)
            elif mode in (LIST, EACH):
                for k in range(program[at + 1]):
                    maker, steps = _maker_of(draft, program, types, program[at + 2 + k])
                    end = _note_edge(edges, seen, unit, end, maker, steps, 0)
            else:
                base, stride = program[at + 1], program[at + 2]
                count = draft.unit_lengths[unit] if mode == STEP else program[at + 3]
                if is_inside(draft, program, types, base, stride, count):
                    maker, first = _maker_of(draft, program, types, base)
                    _, last = _maker_of(draft, program, types, base + (count - 1) * stride)
                    end = _note_edge(
                        edges, seen, unit, end, maker, 0 if mode == STEP else max(first, last), int(mode == STEP)
                    )
                else:
                    for k in range(count):
                        maker, steps = _maker_of(draft, program, types, base + k * stride)
                        end = _note_edge(edges, seen, unit, end, maker, steps, 0)
            at = next_input(program, at)
    edges.starts[draft.unit_at.size] = end
    return edges


@making
def cut(draft, types, edges):
    """Returns (subgraph of each unit, number of subgraphs, whether each is loose): a chain or loop has a type that
    nothing else has."""
    kinds = draft.unit_types.copy()
    for unit in range(kinds.size):
        if draft.unit_lengths[unit] > 0:
            kinds[unit] = types.size + unit
    return partition(kinds, edges.starts, edges.producers)


@compiled
def _follows(draft, program, types, ports, unit, before):
    """Whether node ``unit`` reads exactly the carried state of node ``before``, which has the same cell type."""
    cell_type = types[draft.unit_types[unit]]
    at = inputs_at(program, draft.unit_at[unit])
    carries = False
    for port in range(cell_type.num_inputs):
        carry, count, first = ports[cell_type.first_port + port].carry, 1, at + 1
        if program[at] == LIST:
            count, first = program[at + 1], at + 2
        for k in range(count):
            output = program[first + k] - draft.unit_values[before]
            if carry >= 0:
                if output != carry:
                    return False
                carries = True
            elif 0 <= output < cell_type.num_outputs:
                return False
        at = next_input(program, at)
    return carries


@compiled
def _num_refs(draft, program, types, unit):
    """Links of a node's inputs: a ragged one is its count, then its values."""
    cell_type = types[draft.unit_types[unit]]
    at = inputs_at(program, draft.unit_at[unit])
    count = 0
    for _ in range(cell_type.num_inputs):
        count += 1 + program[at + 1] if program[at] == LIST else 1 if program[at] == FIXED else 1 + program[at + 3]
        at = next_input(program, at)
    return count


@compiled
def _write_refs(draft, program, types, uses, unit, links, at):
    """Writes the values that a node reads relative to its own first value, so that no request has to move them."""
    first = uses.rows[draft.unit_values[unit]]
    word = inputs_at(program, draft.unit_at[unit])
    for _ in range(types[draft.unit_types[unit]].num_inputs):
        if program[word] == FIXED:
            links[at] = uses.rows[program[word + 1]] - first
            at += 1
        else:
            is_list = program[word] == LIST
            count = program[word + 1] if is_list else program[word + 3]
            links[at] = count
            for k in range(count):
                value = program[word + 2 + k] if is_list else program[word + 1] + k * program[word + 2]
                links[at + 1 + k] = uses.rows[value] - first
            at += 1 + count
        word = next_input(program, word)


@compiled
def _append_ready(nodes, subgraph, node):
    if subgraph.ready_tail >= 0:
        nodes[subgraph.ready_tail].next_ready = node
    else:
        subgraph.ready_head = node
    subgraph.ready_tail = node
    subgraph.num_ready += 1


@making
def write_nodes(draft, program, types, ports, uses, edges, group, subgraphs):
    """Returns (nodes by subgraph, their links, the most inputs that one has); counts what subgraphs wait for."""
    num_units = draft.unit_at.size
    new, num_readers = np.full(num_units, -1, np.int32), np.zeros(num_units, np.int32)
    for k in range(edges.starts[num_units]):
        num_readers[edges.producers[k]] += 1
    num_nodes = num_links = most = 0
    for unit in np.argsort(group, kind="mergesort"):
        if draft.unit_lengths[unit] == 0:
            new[unit] = num_nodes
            refs = _num_refs(draft, program, types, unit)
            num_links, most, num_nodes = num_links + refs + num_readers[unit], max(most, refs), num_nodes + 1
    nodes, links = make_rows(num_nodes, NODE), np.zeros(num_links, np.int32)
    at, before = 0, -1
    for unit in np.argsort(group, kind="mergesort"):
        k = new[unit]
        if k < 0:
            continue
        node, subgraph = nodes[k], subgraphs[group[unit]]
        node.subgraph, node.next_ready, node.first_link = group[unit], -1, at
        node.first_value = uses.rows[draft.unit_values[unit]]
        node.num_refs = _num_refs(draft, program, types, unit)
        _write_refs(draft, program, types, uses, unit, links, at)
        at += node.num_refs + num_readers[unit]
        subgraph.cell_type = draft.unit_types[unit]
        subgraph.nodes_left += 1
        if before >= 0 and group[before] == group[unit] and _follows(draft, program, types, ports, unit, before):
            nodes[k - 1].bits |= CHAIN_NEXT
        before = unit
    _write_readers(draft, edges, group, new, nodes, links, subgraphs)
    for k in range(num_nodes):
        if nodes[k].pending == 0:
            _append_ready(nodes, subgraphs[nodes[k].subgraph], k)
    return nodes, links, most


@compiled
def _write_readers(draft, edges, group, new, nodes, links, subgraphs):
    """Writes behind each node's inputs who reads it; counts what nodes and subgraphs wait for."""
    for unit in range(draft.unit_at.size):
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


@making
def make_subgraphs(draft, group, num_groups, is_loose):
    """The rows of subgraphs, with the types of chains and loops."""
    subgraphs = make_rows(num_groups, SUBGRAPH)
    for k in range(num_groups):
        subgraph = subgraphs[k]
        subgraph.ready_head, subgraph.ready_tail, subgraph.record = -1, -1, -1
        subgraph.previous, subgraph.next = -1, -1
        subgraph.is_loose = is_loose[k]
    for unit in range(draft.unit_at.size):
        if draft.unit_lengths[unit] > 0:
            subgraphs[group[unit]].cell_type = draft.unit_types[unit]
            subgraphs[group[unit]].nodes_left, subgraphs[group[unit]].is_loose = 1, 0
    return subgraphs
