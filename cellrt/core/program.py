"""From a recorded program to the tables of one cell graph.

An unfolder's calls are recorded as a *program*: a flat int32 array of operations over value ids, in order. Equal
programs are equal graphs, so its bytes are the key under which the compiled ``Shape`` is cached. Compiling numbers
the values and nodes, finds the edges, cuts the graph into subgraphs and counts the arena rows it needs at most.

Operations (value ids count up from 0 in order of creation; an operation's outputs take the next ids)::

    EXTERNAL kind count                   count values that come with the request
    CONSTANT kind row                     one value in a permanent row
    NODE     cell_type input*             one node
    CHAIN    cell_type length input*      ``length`` nodes, each reading the carried state of the one before
    LOOP     cell_type limit stop input*  one node that is repeated until output ``stop`` is true, or ``limit`` times
    RESULT   base stride count            count values are results
    RESULT_STEPS value limit              an output of a loop is a result, of every step
    RESULT_LAST value                     an output of a loop is a result, of the last step
    STATE kind                            one value: a state of the request's session before the request
    KEEP value base stride count          STATE value ``value`` is after step k what value ``base + k * stride`` is.
                                          Count 0: what value ``base`` is, once the whole request is done

    input = FIXED value | STEP base stride | CARRY base | LIST count value*

STEP gives the i-th node of a chain value ``base + i * stride``; CARRY gives the first node (or step) ``base`` and each
later one the output that the input port is carried from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.compiled import OpenShape, address_of, allocating
from cellrt.core.partition import partition
from cellrt.core.tables import (
    CARRIED,
    CHAIN_NEXT,
    CROSSING,
    EXTERNAL,
    HELD,
    KEPT,
    LAST_ONLY,
    LOOP,
    MAX_READERS,
    NODE,
    PERMANENT,
    STEPS,
    SUBGRAPH,
    VALUE,
    new_table,
)
from cellrt.errors import RequestTooLargeError

OP_EXTERNAL, OP_CONSTANT, OP_NODE, OP_CHAIN, OP_LOOP, OP_RESULT, OP_RESULT_STEPS, OP_RESULT_LAST, OP_STATE, OP_KEEP = (
    range(1, 11)
)
FIXED, STEP, CARRY, LIST = range(4)


class Shape(NamedTuple):
    """A compiled cell graph: rows for the tables, with ids relative to the request. Immutable, shared by requests."""

    nodes: NDArray[np.void]
    values: NDArray[np.void]
    links: NDArray[np.int32]
    subgraphs: NDArray[np.void]
    externals: NDArray[np.int32]  # value ids that come with the request
    results: NDArray[np.int32]  # kind of each result row
    states: NDArray[np.int32]  # for each state its value before and after the request
    needs: NDArray[np.int32]  # [kind, (worker rows, host rows)]: most rows of each kind live at once
    node_types: NDArray[np.int32]
    at: Any  # the address of the rows above


class Draft(NamedTuple):
    """The graph as recorded: nodes in order of creation, with their value refs."""

    node_types: NDArray[np.int32]
    node_values: NDArray[np.int32]
    ref_starts: NDArray[np.int32]  # [node + 1]
    refs: NDArray[np.int32]  # inputs in port order; a ragged input is its count, then its values
    loop_limits: NDArray[np.int32]
    loop_stops: NDArray[np.int32]
    producers: NDArray[np.int32]  # node of each value, or -1
    values: NDArray[np.void]
    results: NDArray[np.int32]
    states: NDArray[np.int32]  # [state, 4]: the words of KEEP


@allocating
def _measure_input(program, at):
    """Returns (refs of one node's input, position after it)."""
    mode = program[at]
    if mode == LIST:
        return 1 + program[at + 1], at + 2 + program[at + 1]
    if mode == STEP:
        return 1, at + 3
    return 1, at + 2


@allocating
def _measure(program, types):
    """Counts nodes, values, refs, result rows and states of a program."""
    at = num_nodes = num_values = num_refs = num_results = num_states = 0
    while at < program.size:
        op = program[at]
        if op == OP_EXTERNAL:
            num_values += program[at + 2]
            at += 3
        elif op == OP_CONSTANT:
            num_values += 1
            at += 3
        elif op == OP_RESULT:
            num_results += program[at + 3]
            at += 4
        elif op == OP_RESULT_STEPS:
            num_results += program[at + 2]
            at += 3
        elif op == OP_RESULT_LAST:
            num_results += 1
            at += 2
        elif op == OP_STATE:
            num_values += 1
            at += 2
        elif op == OP_KEEP:
            num_states += 1
            at += 5
        else:
            cell_type = types[program[at + 1]]
            count = 1
            if op == OP_NODE:
                at += 2
            elif op == OP_CHAIN:
                count = program[at + 2]
                at += 3
            else:
                at += 4
            for _ in range(cell_type.num_inputs):
                refs, at = _measure_input(program, at)
                num_refs += refs * count
            num_nodes += count
            num_values += count * cell_type.num_outputs
    return num_nodes, num_values, num_refs, num_results, num_states


@allocating
def _write_input(program, at, index, previous, carry, refs, end):
    """Writes the refs of one input of the ``index``-th node of an operation; returns the new end of refs."""
    mode = program[at]
    if mode == LIST:
        count = program[at + 1]
        refs[end] = count
        for k in range(count):
            refs[end + 1 + k] = program[at + 2 + k]
        return end + 1 + count
    if mode == STEP:
        refs[end] = program[at + 1] + index * program[at + 2]
    elif mode == CARRY and index > 0:
        refs[end] = previous + carry
    else:
        refs[end] = program[at + 1]
    return end + 1


@allocating
def _draft_nodes(program, at, types, ports, draft, node, value, ref_end):
    """Expands one NODE, CHAIN or LOOP; returns (position after it, next node, next value, end of refs)."""
    op, type_id = program[at], program[at + 1]
    num_inputs, num_outputs = types[type_id].num_inputs, types[type_id].num_outputs
    first_port = types[type_id].first_port
    count = program[at + 2] if op == OP_CHAIN else 1
    inputs = at + (2 if op == OP_NODE else 3 if op == OP_CHAIN else 4)
    if op == OP_LOOP:
        draft.loop_limits[node] = program[at + 2]
        draft.loop_stops[node] = program[at + 3]
    after = inputs
    for index in range(count):
        after = inputs
        draft.node_types[node] = type_id
        draft.node_values[node] = value
        for port in range(num_inputs):
            carry = ports[first_port + port].carry
            if op == OP_LOOP and program[after] == CARRY:
                draft.values[value + carry].bits |= CARRIED
            ref_end = _write_input(program, after, index, value - num_outputs, carry, draft.refs, ref_end)
            _, after = _measure_input(program, after)
        for output in range(num_outputs):
            draft.producers[value + output] = node
            draft.values[value + output].kind = ports[first_port + num_inputs + output].kind
        node += 1
        value += num_outputs
        draft.ref_starts[node] = ref_end
    return after, node, value, ref_end


@allocating
def _add_result(draft, value, count, flags, result):
    draft.values[value].result = result
    draft.values[value].bits |= flags
    for k in range(count):
        draft.results[result + k] = draft.values[value].kind
    return result + count


@allocating
def _fill(program, types, ports, draft):
    """Runs the program: fills the draft's arrays."""
    at = node = value = ref_end = result = state = 0
    while at < program.size:
        op = program[at]
        if op == OP_EXTERNAL:
            for k in range(program[at + 2]):
                draft.values[value + k].kind = program[at + 1]
                draft.values[value + k].bits = EXTERNAL
            value += program[at + 2]
            at += 3
        elif op == OP_CONSTANT:
            draft.values[value].kind = program[at + 1]
            draft.values[value].row = program[at + 2]
            draft.values[value].bits = PERMANENT
            value += 1
            at += 3
        elif op == OP_RESULT:
            for k in range(program[at + 3]):
                result = _add_result(draft, program[at + 1] + k * program[at + 2], 1, 0, result)
            at += 4
        elif op == OP_RESULT_STEPS:
            result = _add_result(draft, program[at + 1], program[at + 2], STEPS, result)
            at += 3
        elif op == OP_RESULT_LAST:
            result = _add_result(draft, program[at + 1], 1, LAST_ONLY, result)
            at += 2
        elif op == OP_STATE:
            draft.values[value].kind = program[at + 1]
            value += 1
            at += 2
        elif op == OP_KEEP:
            draft.states[state] = program[at + 1 : at + 5]
            state += 1
            at += 5
        else:
            at, node, value, ref_end = _draft_nodes(program, at, types, ports, draft, node, value, ref_end)


@allocating
def _mark_states(draft):
    """Gives every state a reader after the last; marks as KEPT what each step of one chain or loop leaves.

    Of several chains, nothing is KEPT: the value before the request stays until the end (see ``states.py``).
    """
    states = draft.states
    is_one = True
    for k in range(len(states)):
        last, first_last = _value_after(states[k]), _value_after(states[0])
        is_one = is_one and states[k, 3] > 0 and draft.producers[last] == draft.producers[first_last]
    for k in range(len(states)):
        draft.values[_value_after(states[k])].readers += 1
        if is_one:
            draft.values[states[k, 0]].bits |= KEPT
            for step in range(states[k, 3]):
                draft.values[states[k, 1] + step * states[k, 2]].bits |= KEPT
        else:
            draft.values[states[k, 0]].readers += 1


@allocating
def _value_after(state):
    """The value that a state has after the request; ``state`` has the words of KEEP."""
    return state[1] + max(0, state[3] - 1) * state[2]


def draft_program(program: NDArray[np.int32], types: NDArray[np.void], ports: NDArray[np.void]) -> Draft:
    """Expands a program into nodes and refs, in order of creation."""
    num_nodes, num_values, num_refs, num_results, num_states = _measure(program, types)
    values = new_table(num_values, VALUE)
    values["row"] = -1
    values["result"] = -1
    draft = Draft(
        node_types=np.zeros(num_nodes, np.int32),
        node_values=np.zeros(num_nodes, np.int32),
        ref_starts=np.zeros(num_nodes + 1, np.int32),
        refs=np.zeros(num_refs, np.int32),
        loop_limits=np.zeros(num_nodes, np.int32),
        loop_stops=np.full(num_nodes, -1, np.int32),
        producers=np.full(num_values, -1, np.int32),
        values=values,
        results=np.zeros(num_results, np.int32),
        states=np.zeros((num_states, 4), np.int32),
    )
    _fill(program, types, ports, draft)
    _mark_states(draft)
    return draft


@allocating
def _edges(draft, types, ports):
    """Finds each node's distinct producers and counts the readers of each value.

    Returns (starts [node + 1], producers): the producers of node n are ``producers[starts[n]:starts[n + 1]]``.
    Starts is empty if a value has more than MAX_READERS readers.
    """
    num_nodes = draft.node_types.size
    starts = np.zeros(num_nodes + 1, np.int32)
    producers = np.empty(draft.refs.size, np.int32)
    seen = np.full(num_nodes, -1, np.int32)
    end = 0
    for node in range(num_nodes):
        at = draft.ref_starts[node]
        first_port = types[draft.node_types[node]].first_port
        for port in range(types[draft.node_types[node]].num_inputs):
            count = 1
            if ports[first_port + port].ragged:
                count = draft.refs[at]
                at += 1
            for k in range(count):
                value = draft.refs[at + k]
                if draft.values[value].readers == MAX_READERS:
                    return starts[:0], producers
                draft.values[value].readers += 1
                producer = draft.producers[value]
                if producer >= 0 and seen[producer] != node:
                    seen[producer] = node
                    producers[end] = producer
                    end += 1
            at += count
        starts[node + 1] = end
    return starts, producers[:end]


@allocating
def _follows(draft, types, ports, node, before):
    """Whether ``node`` reads exactly the carried state of ``before``, which has the same cell type."""
    at = draft.ref_starts[node]
    first_port = types[draft.node_types[node]].first_port
    num_outputs = types[draft.node_types[node]].num_outputs
    carries = False
    for port in range(types[draft.node_types[node]].num_inputs):
        carry, count = ports[first_port + port].carry, 1
        if ports[first_port + port].ragged:
            count = draft.refs[at]
            at += 1
        for k in range(count):
            output = draft.refs[at + k] - draft.node_values[before]
            if carry >= 0:
                if output != carry:
                    return False
                carries = True
            elif 0 <= output < num_outputs:
                return False
        at += count
    return carries


@allocating
def _write_nodes(draft, types, ports, starts, producers, order, group, nodes, links, subgraphs):
    """Fills nodes, links and subgraphs with nodes renumbered by ``order`` (new -> old)."""
    num_nodes = order.size
    new = np.empty(num_nodes, np.int32)
    num_consumers = np.zeros(num_nodes, np.int32)
    for k in range(num_nodes):
        new[order[k]] = k
    for k in range(producers.size):
        num_consumers[producers[k]] += 1
    at = 0
    for k in range(num_nodes):
        old = order[k]
        node, subgraph = nodes[k], subgraphs[group[old]]
        node.subgraph, node.next_ready = group[old], -1
        node.first_value, node.first_link = draft.node_values[old], at
        node.num_refs = draft.ref_starts[old + 1] - draft.ref_starts[old]
        for output in range(types[draft.node_types[old]].num_outputs):
            if draft.values[draft.node_values[old] + output].bits & KEPT:
                node.bits |= HELD
        _write_refs(draft, types[draft.node_types[old]], ports, old, links, at)
        at += node.num_refs + num_consumers[old]
        subgraph.cell_type = draft.node_types[old]
        subgraph.nodes_left += 1
        if draft.loop_limits[old] > 0:
            node.bits |= LOOP
            subgraph.loop_limit, subgraph.loop_stop = draft.loop_limits[old], draft.loop_stops[old]
        elif k > 0 and group[order[k - 1]] == group[old] and _follows(draft, types, ports, old, order[k - 1]):
            nodes[k - 1].bits |= CHAIN_NEXT
    for k in range(num_nodes):
        old = order[k]
        for j in range(starts[old], starts[old + 1]):
            producer = nodes[new[producers[j]]]
            links[producer.first_link + producer.num_refs + producer.num_consumers] = k - new[producers[j]]
            producer.num_consumers += 1
            if producer.subgraph == nodes[k].subgraph:
                nodes[k].pending += 1
            else:
                subgraphs[nodes[k].subgraph].waiting += 1
                producer.bits |= CROSSING
    for k in range(num_nodes):
        if nodes[k].pending == 0:
            _append_ready(nodes, subgraphs[nodes[k].subgraph], k)


@allocating
def _write_refs(draft, cell_type, ports, node, links, at):
    """Writes the values a node reads relative to its own first value, so that no request has to move them."""
    from_ref = draft.ref_starts[node]
    for port in range(cell_type.num_inputs):
        count = 1
        if ports[cell_type.first_port + port].ragged:
            count = draft.refs[from_ref]
            links[at] = count
            at, from_ref = at + 1, from_ref + 1
        for k in range(count):
            links[at + k] = draft.refs[from_ref + k] - draft.node_values[node]
        at, from_ref = at + count, from_ref + count


@allocating
def _append_ready(nodes, subgraph, node):
    if subgraph.ready_tail >= 0:
        nodes[subgraph.ready_tail].next_ready = node
    else:
        subgraph.ready_head = node
    subgraph.ready_tail = node
    subgraph.num_ready += 1


@allocating
def _count_needs(draft, nodes, values, types, ports, subgraphs, needs):
    """Counts the rows of each kind that can be live at once, whatever the order of execution.

    State handed from step to step of a chain or loop takes two rows (the old and the new) however long the chain;
    every other output that has a reader takes one. A session's state may lie here or at the host.
    """
    for value in range(values.size):
        if values[value].bits & EXTERNAL and values[value].readers > 0:
            needs[values[value].kind, 1] += 1
    for result in range(draft.results.size):
        needs[draft.results[result], 1] += 1
    for state in range(len(draft.states)):
        needs[values[draft.states[state, 0]].kind] += 1
    in_chain = False
    for k in range(nodes.size):
        cell_type = types[subgraphs[nodes[k].subgraph].cell_type]
        is_loop = nodes[k].bits & LOOP != 0
        chained = nodes[k].bits & CHAIN_NEXT != 0
        for output in range(cell_type.num_outputs):
            value = values[nodes[k].first_value + output]
            carried = chained and _is_carried(ports, cell_type, output)
            if is_loop:
                needs[value.kind, 0] += 2 if value.readers > 0 or value.bits & CARRIED else 0
                continue
            if carried and not in_chain:
                needs[value.kind, 0] += 2
            if value.readers > (1 if carried else 0):
                needs[value.kind, 0] += 1
        in_chain = chained


@allocating
def _is_carried(ports, cell_type, output):
    for port in range(cell_type.num_inputs):
        if ports[cell_type.first_port + port].carry == output:
            return True
    return False


def compile_shape(draft: Draft, types: NDArray[np.void], ports: NDArray[np.void], num_kinds: int) -> Shape:
    """Cuts a draft into subgraphs and lays it out as rows for the tables.

    Raises RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    starts, producers = _edges(draft, types, ports)
    if starts.size == 0:
        raise RequestTooLargeError(f"an output has more than {MAX_READERS} readers in one graph")
    is_loop = draft.loop_limits > 0
    # A loop is a subgraph of its own: give each a type that no other node has.
    kinds_of_node = np.where(is_loop, types.size + np.cumsum(is_loop), draft.node_types).astype(np.int32)
    group, num_groups = partition(kinds_of_node, starts, producers)
    order = np.argsort(group, kind="stable").astype(np.int32)
    nodes = new_table(order.size, NODE)
    subgraphs = new_table(num_groups, SUBGRAPH)
    for field in ("ready_head", "ready_tail", "previous", "next", "loop_stop"):
        subgraphs[field] = -1
    links = np.zeros(draft.refs.size + producers.size, np.int32)
    _write_nodes(draft, types, ports, starts, producers, order, group, nodes, links, subgraphs)
    needs = np.zeros((num_kinds, 2), np.int32)
    _count_needs(draft, nodes, draft.values, types, ports, subgraphs, needs)
    externals = np.flatnonzero(draft.values["bits"] & EXTERNAL).astype(np.int32)
    states = np.array([(state[0], _value_after(state)) for state in draft.states], np.int32).reshape(-1)
    rows = OpenShape(nodes, draft.values, links, subgraphs, externals, draft.results, states, needs)
    return Shape(*rows, node_types=draft.node_types[order], at=address_of(rows))
