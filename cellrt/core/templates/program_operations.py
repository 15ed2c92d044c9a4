"""A program, read operation by operation, for all that do not compile it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import TYPE, CellType
from cellrt.core.templates.node_sets import DAG_HEAD, READ_WORDS, TREE_HEAD, written_out
from cellrt.core.templates.program import (
    EACH,
    LEADS,
    LIST,
    OP_CHAIN,
    OP_DAG,
    OP_MEMBER,
    OP_RESULTS,
    OP_TREE,
    SOURCE,
    STEP,
    UNIT,
    WORDS,
    WORDS_OF_INPUT,
    read_only,
)
from cellrt.native.row_types import Rows, new_table

Ports = Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]]
"""The numbers of inputs and outputs of each cell type."""


@dataclass(slots=True)
class Input:
    """An input of a unit.

    Attributes:
        mode: FIXED ...
        first, stride, count: the values that it names are ``first + k * stride``, if they are not listed; first is -1
            if it names none. Of STEP the count is the steps of its unit, of EMITTED the most that are emitted.
        output: which one of the step before it reads after the first.
        state: the number of the PAGES operation, for PAGED.
        value: for SAME and LAST an output of the own body, for EMITTED one of a loop.
        listed: those of LIST and EACH.
    """

    mode: int
    first: int = -1
    stride: int = -1
    count: int = 1
    output: int = -1
    state: int = -1
    value: int = -1
    unused: int = -1
    listed: list[int] = field(default_factory=list)

    def named(self) -> Sequence[int]:
        """Return the values that it names."""
        if self.mode in (LIST, EACH):
            return self.listed
        return [self.first + k * self.stride for k in range(self.count)] if self.first >= 0 else []

    def named_at(self, step: int) -> Sequence[int]:
        """Return the values that it names for a step; of what is carried, for the first one."""
        if self.mode in (STEP, LEADS):
            return [self.first + step * self.stride]
        return [self.listed[step]] if self.mode == EACH else self.named()


@dataclass(slots=True)
class Operation:
    """An operation of a program.

    Attributes:
        op: OP_EXTERNAL ...
        cell_type, stop, left, kind, row, start, page_size, keeps, state: as above; -1 if it has none.
        length: steps, of a loop at most; rows of a tensor; values of a result. 1 if nothing is said of it.
        first, stride: the values of a result, or of KEEP, are ``first + k * stride``.
        value: the first that it makes.
        inputs: the inputs of a unit.
        layers: cell types of the steps of a loop that are of different ones.
        at: where it begins in the program.
    """

    op: int
    cell_type: int = -1
    length: int = 1
    stop: int = -1
    left: int = -1
    kind: int = -1
    row: int = -1
    start: int = -1
    page_size: int = -1
    keeps: int = -1
    first: int = -1
    stride: int = -1
    state: int = -1
    value: int = -1
    inputs: list[Input] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    at: int = 0

    @property
    def is_unit(self) -> bool:
        """True if it is of a cell."""
        return WORDS[self.op][0] == UNIT

    @property
    def num_steps(self) -> int:
        """Steps of which each output is a value."""
        return self.length if self.op == OP_CHAIN else 1


def operations(program: bytes, ports: Ports) -> Iterator[Operation]:
    """Read a program; each node of a tree or dag is an operation.

    Args:
        program: its words.
        ports: the numbers of inputs and outputs of each cell type.
    """
    words = array("i", program).tolist()
    at = value = 0
    while at < len(words):
        if words[at] in (OP_TREE, OP_DAG, OP_RESULTS):
            left = read_only(np.array(words[at:], np.int32))
            words[at:] = written_out(left, _types_of(ports), value).tolist()
        made, at = _read(words, at, value, ports)
        value += made.length if WORDS[made.op][0] == SOURCE else 0
        value += ports[made.cell_type][1] * made.num_steps if made.is_unit else 0
        yield made


def _types_of(ports: Ports) -> Rows[CellType]:
    """Return rows of cell types that say what ``ports`` does."""
    numbers = list(ports) if isinstance(ports, Mapping) else list(range(len(ports)))
    types: Rows[CellType] = new_table(max(numbers, default=-1) + 1, TYPE)
    types["num_inputs"][numbers] = [ports[number][0] for number in numbers]
    types["num_outputs"][numbers] = [ports[number][1] for number in numbers]
    return types


def _read(words: list[int], at: int, value: int, ports: Ports) -> tuple[Operation, int]:
    """Read the operation at ``at``, which is no tree or dag; return where it ends."""
    made, end = Operation(words[at], value=value, at=at), at + 1
    table, names = WORDS[made.op]
    for name in names:
        setattr(made, name, words[end])
        end += 1
    if made.op == OP_MEMBER and made.left < 0:
        made.layers = words[end : end - made.left]
        end -= made.left
    if table == UNIT:
        for _ in range(ports[made.cell_type][0]):
            end = _read_input(words, end, made)
    return made, end


def _read_input(words: list[int], at: int, unit: Operation) -> int:
    """Read the next input of a unit; return where it ends."""
    made, end = Input(words[at]), at + 1
    for name in WORDS_OF_INPUT[made.mode]:
        setattr(made, name, words[end])
        end += 1
    if made.mode in (LIST, EACH):
        made.listed = words[end : end + made.count]
        end += made.count
    elif made.mode == STEP:
        made.count = unit.num_steps
    unit.inputs.append(made)
    return end


def rename_types(program: NDArray[np.int32], num_inputs: Sequence[int], ids: Sequence[int]) -> NDArray[np.int32]:
    """Return a copy of a program in which cell type ``k``, of ``num_inputs[k]`` inputs, is ``ids[k]``."""
    renamed, words, ports = program.copy(), program.tolist(), [(count, 0) for count in num_inputs]
    at = 0
    while at < len(words):
        if words[at] in (OP_TREE, OP_DAG, OP_RESULTS):
            named, end = _types_in_set(words, at, num_inputs)
        else:
            made, end = _read(words, at, 0, ports)
            layers = at + 1 + len(WORDS[made.op][1])
            named = [at + 1, *range(layers, layers + len(made.layers))] if made.is_unit else []
        renamed[named] = [ids[words[k]] for k in named]
        at = end
    return renamed


def _types_in_set(words: list[int], at: int, num_inputs: Sequence[int]) -> tuple[list[int], int]:
    """Return where the set at ``at`` names cell types, and where it ends."""
    if words[at] == OP_RESULTS:
        return [], at + 2 + words[at + 1]
    if words[at] == OP_DAG:
        head, arrays = DAG_HEAD + words[at + 4], words[at + 2] + 1 + words[at + 3]
        return [at + 1], at + head + READ_WORDS * num_inputs[words[at + 1]] + arrays
    read = READ_WORDS * (num_inputs[words[at + 1]] + num_inputs[words[at + 2]])
    return [at + 1, at + 2], at + TREE_HEAD + read + words[at + 5] + words[at + 3]
