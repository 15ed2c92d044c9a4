"""A recorded program, and the nodes and values it stands for.

An unfolder's calls are recorded as a *program*: a flat int32 array of operations over value ids, in order. Equal
programs are equal graphs, so it is the key under which the compiled ``Shape`` (``shape.py``) is cached. Here it is
expanded into a ``Draft``: numbered nodes and values.

Operations (value ids count up from 0 in order of creation; an operation's outputs take the next ids)::

    EXTERNAL kind count                   count values that come with the request
    CONSTANT kind row                     one value in a permanent row
    NODE     cell_type input*             one node
    CHAIN    cell_type length input*      ``length`` nodes, each reading the carried state of the one before
    LOOP     cell_type limit stop input*  one node that is repeated until output ``stop`` is true, or ``limit`` times
    RESULT   base stride count            count values are results
    RESULT_STEPS value limit              an output of a loop is a result, of every step
    RESULT_LAST value                     an output of a loop is a result, of the last step
    STATE kind start                      one value: a state of the request's session before the request; if that is
                                          new, what value ``start`` is, or zeros for -1
    KEEP value base stride count          STATE value ``value`` is after step k what value ``base + k * stride`` is.
                                          Count 0: what value ``base`` is, once the whole request is done

    input = FIXED value | STEP base stride | CARRY base | LIST count value*

STEP gives the i-th node of a chain value ``base + i * stride``; CARRY gives the first node (or step) ``base`` and each
later one the output that the input port is carried from.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import allocating, make_rows
from cellrt.core.tables import CARRIED, EXTERNAL, KEPT, LAST_ONLY, PERMANENT, STARTS, STEPS, VALUE

OP_EXTERNAL, OP_CONSTANT, OP_NODE, OP_CHAIN, OP_LOOP, OP_RESULT, OP_RESULT_STEPS, OP_RESULT_LAST, OP_STATE, OP_KEEP = (
    range(1, 11)
)
FIXED, STEP, CARRY, LIST = range(4)


NUM_WORDS = MappingProxyType(
    {OP_EXTERNAL: 3, OP_CONSTANT: 3, OP_RESULT: 4, OP_RESULT_STEPS: 3, OP_RESULT_LAST: 2, OP_STATE: 3, OP_KEEP: 5}
)
"""Words of each operation without inputs."""
NUM_WORDS_BEFORE_INPUTS = MappingProxyType({OP_NODE: 2, OP_CHAIN: 3, OP_LOOP: 4})


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
            at += 3
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
def _add_state(draft, value, kind, start):
    """A state of the session. What it begins with if that is new is made before it is read, and held to the end."""
    draft.values[value].kind = kind
    if start >= 0:
        draft.values[value].row = STARTS - start
        draft.values[start].readers += 1
        draft.producers[value] = draft.producers[start]


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
            _add_state(draft, value, program[at + 1], program[at + 2])
            value += 1
            at += 3
        elif op == OP_KEEP:
            draft.states[state] = program[at + 1 : at + 5]
            state += 1
            at += 5
        else:
            at, node, value, ref_end = _draft_nodes(program, at, types, ports, draft, node, value, ref_end)


@allocating
def _mark_states(draft):
    """Gives every state a reader after the last; marks as KEPT what each step of one chain or loop leaves.

    Of several chains, nothing is KEPT: the value before the request stays until the end (see ``session_state.py``).
    """
    states = draft.states
    is_one = True
    for k in range(len(states)):
        last, first_last = value_after(states[k]), value_after(states[0])
        is_one = is_one and states[k, 3] > 0 and draft.producers[last] == draft.producers[first_last]
    for k in range(len(states)):
        draft.values[value_after(states[k])].readers += 1
        if is_one:
            draft.values[states[k, 0]].bits |= KEPT
            for step in range(states[k, 3]):
                draft.values[states[k, 1] + step * states[k, 2]].bits |= KEPT
        else:
            draft.values[states[k, 0]].readers += 1


@allocating
def value_after(state):
    """The value that a state has after the request; ``state`` has the words of KEEP."""
    return state[1] + max(0, state[3] - 1) * state[2]


@allocating
def draft_program(program, types, ports):
    """Expands a program into nodes and refs, in order of creation."""
    num_nodes, num_values, num_refs, num_results, num_states = _measure(program, types)
    values = make_rows(num_values, VALUE)
    for k in range(num_values):
        values[k].row, values[k].result = -1, -1
    draft = Draft(
        np.zeros(num_nodes, np.int32),
        np.zeros(num_nodes, np.int32),
        np.zeros(num_nodes + 1, np.int32),
        np.zeros(num_refs, np.int32),
        np.zeros(num_nodes, np.int32),
        np.full(num_nodes, -1, np.int32),
        np.full(num_values, -1, np.int32),
        values,
        np.zeros(num_results, np.int32),
        np.zeros((num_states, 4), np.int32),
    )
    _fill(program, types, ports, draft)
    _mark_states(draft)
    return draft


def rename_types(program: NDArray[np.int32], num_inputs: Sequence[int], ids: Sequence[int]) -> NDArray[np.int32]:
    """A copy of a program in which cell type ``k``, of ``num_inputs[k]`` inputs, is ``ids[k]``."""
    words, at = program.tolist(), 0
    while at < len(words):
        if words[at] in NUM_WORDS:
            at += NUM_WORDS[words[at]]
            continue
        op, known = words[at : at + 2]
        words[at + 1] = ids[known]
        at += NUM_WORDS_BEFORE_INPUTS[op]
        for _ in range(num_inputs[known]):
            at += 2 + words[at + 1] if words[at] == LIST else 3 if words[at] == STEP else 2
    return np.array(words, np.int32)
