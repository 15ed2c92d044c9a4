"""A recorded program, and the nodes and values it stands for.

An unfolder's calls are recorded as a *program*: a flat int32 array of operations over value ids, in order. Equal
programs are equal graphs, so it is the key under which the compiled ``Template`` (``template.py``) is cached. Here it
is read into a ``Draft``: its operations by number. A chain, a loop or a member of one is one *unit* there, like a node.

Operations (value ids count up from 0 in order of creation; an operation's outputs take the next ids)::

    EXTERNAL kind count                   count values that come with the request
    CONSTANT kind row                     one value in a permanent row
    NODE     cell_type input*             one node
    CHAIN    cell_type length input*      ``length`` steps, each reading the carried state of the one before
    LOOP     cell_type limit stop input*  steps until output ``stop`` is true, or ``limit`` of them
    MEMBER   cell_type limit stop left cell_type* input*
                                          one cell of a loop of several, its *body*: the ``left`` operations that
                                          follow are the body's others. One of them, or none, has an output that says
                                          stop. ``left`` below 0: there are no others; -left types follow, of each step
    RESULT   base stride count            count values are results
    RESULT_STEPS value limit              an output of a loop is a result, of every step
    RESULT_LAST value                     an output of a loop is a result, of the last step
    STATE kind start                      one value: a state of the request's session before the request; if that is
                                          new, what value ``start`` is, or zeros for -1
    PAGES kind page_size keeps            a growing state; ``keeps``: it is a state of the request's session
    KEEP value base stride count          STATE value ``value`` is after step k what value ``base + k * stride`` is.
                                          Count 0: what value ``base`` is, once the whole request is done

    input = FIXED value | STEP base stride | EACH count value* | CARRY base
          | LIST count value* | RANGE base stride count | NEXT base output | PAGED state | NOTHING 0
          | EMITTED value limit | SAME value | LAST base value | LEADS base stride count output

STEP gives the i-th step of a chain value ``base + i * stride``, EACH the i-th of the values listed; CARRY gives the
first step ``base`` and each later one the output that the input port is carried from. LIST and RANGE are for ragged
inputs: RANGE is ``count`` values from ``base`` on. NEXT is as CARRY, of a cell that declares no carried input: from
output ``output``. EMITTED, for a ragged input, is a loop's output at every step that it took, of at most ``limit``: a
RESULT_STEPS of it follows. PAGED is the PAGES operation of that number; NOTHING is for inputs that nobody gives. SAME
and LAST are outputs of the own body: SAME of an earlier member at the same step, LAST of any at the step before, at the
first step ``base``. LEADS is as NEXT, of a cell with spans: the first step of the loop reads ``count`` rows, from value
``base`` on, and its outputs are those of the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import compiled, making

OP_EXTERNAL, OP_CONSTANT, OP_NODE, OP_CHAIN, OP_LOOP, OP_RESULT, OP_RESULT_STEPS, OP_RESULT_LAST, OP_STATE, OP_KEEP = (
    range(1, 11)
)
OP_PAGES, OP_MEMBER = 11, 12
FIXED, STEP, CARRY, LIST = range(4)
RANGE, EACH, NEXT, PAGED, NOTHING, EMITTED, SAME, LAST, LEADS = range(5, 14)  # 4 is ``dags.PICK``


NUM_WORDS = MappingProxyType(
    {
        OP_EXTERNAL: 3,
        OP_CONSTANT: 3,
        OP_RESULT: 4,
        OP_RESULT_STEPS: 3,
        OP_RESULT_LAST: 2,
        OP_STATE: 3,
        OP_KEEP: 5,
        OP_PAGES: 4,
    }
)
"""Words of each operation without inputs."""
WORDS_OF_INPUT = MappingProxyType({STEP: 3, NEXT: 3, EMITTED: 3, LAST: 3, RANGE: 4, LEADS: 5})
"""Words of an input by its mode, where they are not 2; LIST and EACH say how many follow."""
NUM_WORDS_BEFORE_INPUTS = MappingProxyType({OP_NODE: 2, OP_CHAIN: 3, OP_LOOP: 4, OP_MEMBER: 5})


def read_only(program: NDArray[np.int32]) -> NDArray[np.int32]:
    """A program that may not be written to, as one that comes as bytes may not: Numba compiles anew for each kind of
    array, and all that reads programs is compiled for this one alone."""
    if program.flags.writeable:
        program = program.view()
        program.flags.writeable = False
    return program


class Draft(NamedTuple):
    """A program by operation. *Units* are nodes, chains, loops and members of bodies, in order of creation; *sources*
    all else that makes values."""

    unit_types: NDArray[np.int32]
    unit_at: NDArray[np.int32]  # where its operation begins in the program
    unit_values: NDArray[np.int32]  # its first value
    unit_lengths: NDArray[np.int32]  # rows: a chain's steps, a loop's at most with those that lead it; 0 for a node
    source_at: NDArray[np.int32]
    source_values: NDArray[np.int32]
    makers: NDArray[np.int32]  # of each value: its unit, or -1 - its source
    results: NDArray[np.int32]  # where each operation that says of a result begins
    states: NDArray[np.int32]  # where each KEEP begins
    pages: NDArray[np.int32]  # where each PAGES begins


@compiled
def inputs_at(program, at):
    """Where the inputs of a unit's operation begin."""
    op = program[at]
    if op == OP_MEMBER:
        return at + 5 + max(0, -program[at + 4])
    return at + (2 if op == OP_NODE else 3 if op == OP_CHAIN else 4)


@compiled
def next_input(program, at):
    """Where the input behind the one at ``at`` begins."""
    mode = program[at]
    if mode in (LIST, EACH):
        return at + 2 + program[at + 1]
    return at + (3 if mode in (STEP, NEXT, EMITTED, LAST) else 4 if mode == RANGE else 5 if mode == LEADS else 2)


@compiled
def rows_that_lead(program, at, types):
    """Rows that the first step of a loop reads before its last one."""
    word, count = inputs_at(program, at), 0
    for _ in range(types[program[at + 1]].num_inputs):
        if program[word] == LEADS:
            count = program[word + 3] - 1
        word = next_input(program, word)
    return count


@compiled
def next_operation(program, at, types):
    """Where the operation behind the one at ``at`` begins, and how many values this one makes."""
    op = program[at]
    if op in (OP_NODE, OP_CHAIN, OP_LOOP, OP_MEMBER):
        cell_type = types[program[at + 1]]
        after = inputs_at(program, at)
        for _ in range(cell_type.num_inputs):
            after = next_input(program, after)
        return after, cell_type.num_outputs * (program[at + 2] if op == OP_CHAIN else 1)
    if op == OP_EXTERNAL:
        return at + 3, program[at + 2]
    if op in (OP_CONSTANT, OP_STATE):
        return at + 3, 1
    if op in (OP_RESULT, OP_PAGES):
        return at + 4, 0
    if op == OP_KEEP:
        return at + 5, 0
    return at + (3 if op == OP_RESULT_STEPS else 2), 0


@making
def read_program(program, types):
    """Reads a program into a Draft."""
    at = num_units = num_sources = num_results = num_states = num_pages = num_values = 0
    while at < program.size:
        op = program[at]
        at, count = next_operation(program, at, types)
        num_values += count
        if op in (OP_NODE, OP_CHAIN, OP_LOOP, OP_MEMBER):
            num_units += 1
        elif count > 0 or op == OP_EXTERNAL:
            num_sources += 1
        elif op == OP_KEEP:
            num_states += 1
        elif op == OP_PAGES:
            num_pages += 1
        else:
            num_results += 1
    draft = Draft(
        np.empty(num_units, np.int32),
        np.empty(num_units, np.int32),
        np.empty(num_units, np.int32),
        np.zeros(num_units, np.int32),
        np.empty(num_sources, np.int32),
        np.empty(num_sources, np.int32),
        np.empty(num_values, np.int32),
        np.empty(num_results, np.int32),
        np.empty(num_states, np.int32),
        np.empty(num_pages, np.int32),
    )
    at = unit = source = result = state = pages = value = 0
    while at < program.size:
        op = program[at]
        after, count = next_operation(program, at, types)
        if op in (OP_NODE, OP_CHAIN, OP_LOOP, OP_MEMBER):
            draft.unit_types[unit], draft.unit_at[unit], draft.unit_values[unit] = program[at + 1], at, value
            if op != OP_NODE:
                draft.unit_lengths[unit] = program[at + 2]
            if op == OP_LOOP:
                draft.unit_lengths[unit] += rows_that_lead(program, at, types)
            draft.makers[value : value + count] = unit
            unit += 1
        elif count > 0 or op == OP_EXTERNAL:
            draft.source_at[source], draft.source_values[source] = at, value
            draft.makers[value : value + count] = -1 - source
            source += 1
        elif op == OP_KEEP:
            draft.states[state] = at
            state += 1
        elif op == OP_PAGES:
            draft.pages[pages] = at
            pages += 1
        else:
            draft.results[result] = at
            result += 1
        at, value = after, value + count
    return draft


@compiled
def last_member(draft, program, unit):
    """The last unit of a unit's body, which ends when all of it does; of one that is no member, itself."""
    at = draft.unit_at[unit]
    return unit + max(0, program[at + 4]) if program[at] == OP_MEMBER else unit


@compiled
def is_behind_member(draft, program, unit):
    """Whether the unit before is a member of the same body."""
    return unit > 0 and last_member(draft, program, unit - 1) == last_member(draft, program, unit)


def rename_types(program: NDArray[np.int32], num_inputs: Sequence[int], ids: Sequence[int]) -> NDArray[np.int32]:
    """A copy of a program in which cell type ``k``, of ``num_inputs[k]`` inputs, is ``ids[k]``."""
    words, at = program.tolist(), 0
    while at < len(words):
        if words[at] in NUM_WORDS:
            at += NUM_WORDS[words[at]]
            continue
        op, known = words[at : at + 2]
        words[at + 1] = ids[known]
        if op == OP_MEMBER:
            for each in range(at + 5, at + 5 - words[at + 4]):
                words[each] = ids[words[each]]
            at += max(0, -words[at + 4])
        at += NUM_WORDS_BEFORE_INPUTS[op]
        for _ in range(num_inputs[known]):
            at += 2 + words[at + 1] if words[at] in (LIST, EACH) else WORDS_OF_INPUT.get(words[at], 2)
    return np.array(words, np.int32)
