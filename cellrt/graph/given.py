"""Finds the cell inputs that come with the request itself. A bad number in one of them is the request's fault."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cellrt.core.templates.program import (
    CARRY,
    EACH,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    OP_EXTERNAL,
    RANGE,
    STEP,
)
from cellrt.core.templates.program_operations import operations

AS_GIVEN = frozenset((FIXED, STEP, EACH, LIST, RANGE))
"""Modes of inputs whose sources are all named; others read what was computed, if not at the first step."""
AT_FIRST = frozenset((CARRY, NEXT, LAST, LEADS))
"""Modes of inputs whose sources are all named for the first step."""


def are_given(
    program: bytes,
    ports: Sequence[tuple[int, int]],
    cell_type: int,
    indices: Collection[int],
    is_first: bool = False,
) -> bool:
    """Return whether all that a graph's nodes of a cell type read as certain inputs came with the request.

    Args:
        program: a recorded program (``core/templates/program.py``).
        ports: the numbers of inputs and outputs of each cell type, by its number.
        cell_type, indices: whose inputs, and which, by their indices.
        is_first: whether the first step of loops is meant, and not the steps after it.
    """
    modes, given = AS_GIVEN | AT_FIRST if is_first else AS_GIVEN, set[int]()
    for operation in operations(program, ports):
        if operation.op == OP_EXTERNAL:
            given.update(range(operation.value, operation.value + operation.length))
        if cell_type in (operation.cell_type, *operation.layers):
            read = [source for index, source in enumerate(operation.inputs) if index in indices]
            if not all(source.mode in modes and given.issuperset(source.named()) for source in read):
                return False
    return True
