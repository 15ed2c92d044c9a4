"""Which inputs of a cell a request gives by itself: what is wrong with a number there is the request's fault."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from cellrt.core.program import (
    CARRY,
    EACH,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NUM_WORDS,
    NUM_WORDS_BEFORE_INPUTS,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_MEMBER,
    OP_STATE,
    RANGE,
    STEP,
    WORDS_OF_INPUT,
)
from cellrt.graph.forgotten import read_by

AS_GIVEN = frozenset((FIXED, STEP, EACH, LIST, RANGE))
"""Modes of inputs whose sources are all named; others read what was computed, if not at the first step."""
BEGUN = frozenset((CARRY, NEXT, LAST))
"""Modes of inputs of which one value is named, for the first step."""
AT_FIRST = BEGUN | {LEADS}
"""Modes of inputs whose sources are all named for the first step."""


def are_given(
    program: bytes,
    ports: Sequence[tuple[int, int]],
    cell_type: int,
    places: Collection[int],
    is_first: bool = False,
) -> bool:
    """Whether all that a graph's nodes of a cell type read as certain inputs came with the request.

    Args:
        program: of ``core/program.py``.
        ports: of each cell type, by number, how many inputs and outputs it has.
        cell_type, places: whose inputs, and which, by their places.
        is_first: of loops, whether their first step is meant, and not the steps after.
    """
    modes = AS_GIVEN | AT_FIRST if is_first else AS_GIVEN
    words, given, at, num_values = array("i", program).tolist(), set[int](), 0, 0
    while at < len(words):
        op = words[at]
        if op in NUM_WORDS:
            count = words[at + 2] if op == OP_EXTERNAL else op in (OP_CONSTANT, OP_STATE)
            if op == OP_EXTERNAL:
                given.update(range(num_values, num_values + count))
            at, num_values = at + NUM_WORDS[op], num_values + count
            continue
        number, length = words[at + 1], words[at + 2] if op == OP_CHAIN else 1
        others = max(0, -words[at + 4]) if op == OP_MEMBER else 0
        at += NUM_WORDS_BEFORE_INPUTS[op]
        is_asked = cell_type in (number, *words[at : at + others])
        at += others
        num_inputs, num_outputs = ports[number]
        for place in range(num_inputs):
            mode = words[at]
            end = at + (2 + words[at + 1] if mode in (LIST, EACH) else WORDS_OF_INPUT.get(mode, 2))
            read = words[at + 1 : at + 2] if mode in BEGUN else read_by(words[at:end], length)
            if is_asked and place in places and not (mode in modes and given.issuperset(read)):
                return False
            at = end
        num_values += num_outputs * length
    return True
