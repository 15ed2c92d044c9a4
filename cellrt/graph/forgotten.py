"""Finds cells that an unfolder calls again and again without their state, as if each step were the first.

That each call begins with zeros is as it should be for the first nodes of many chains or for leaves, whose outputs are
used. Where nobody reads what all calls but the last made, the state was forgotten: ``for w in words: s = g(x=w)``. In a
chain it is where a state's next value has another name than the state, as a plain tuple's have: then it is not carried.
"""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.core.templates.program import FIXED, OP_CHAIN, OP_CONSTANT, OP_NODE
from cellrt.core.templates.program_operations import Operation, operations
from cellrt.definition.cell import Cell


def cells_that_forget(program: bytes, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose carried state is probably forgotten by mistake.

    These are cells that a program calls several times, each time with zeros as state, while only the last call's output
    is read. ``cells`` are in the order in which the program numbers them.
    """
    if not any(cell.carry for cell in cells):
        return []
    reading = _Reading(program, cells)
    return [cell for number, cell in enumerate(cells) if cell.carry and reading.is_forgotten(number)]


def states_not_carried(program: bytes, cells: Sequence[Cell]) -> list[tuple[Cell, dict[str, str]]]:
    """Return cells of chains that may forget to carry a state, with the input and the output that may be its next
    value.

    The input is the same at every step. The output has its spec, nobody reads it, no input carries it, and it belongs
    to a plain tuple, so no author named it.
    """
    reading, found = _Reading(program, cells), dict[str, tuple[Cell, dict[str, str]]]()
    for number, first, length, names in reading.chains:
        cell = cells[number]
        unread = [name for place, name in enumerate(cell.outputs) if reading.is_unread(number, first + place, length)]
        left = [name for name in unread if name not in cell.carry.values() and name.removeprefix("output").isdecimal()]
        lost: dict[str, str] = {}
        for name in names:
            alike = next((output for output in left if cell.outputs[output] == cell.inputs[name]), None)
            if alike is not None:
                left.remove(alike)
                lost[name] = alike
        if lost:
            found.setdefault(cell.identity, (cell, lost))
    return list(found.values())


class _Reading:
    """A program, read for what is read of it."""

    def __init__(self, program: bytes, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._used: set[int] = set()
        self._zeros: set[int] = set()
        self._calls: dict[int, list[int]] = {}
        """First values of the calls of each cell that begin with zeros."""
        self._others: set[int] = set()
        """Cells with other nodes than these."""
        self.chains: list[tuple[int, int, int, list[str]]] = []
        """The chains of several steps: cell, first value, length, and the inputs that are the same at every step."""
        for operation in operations(program, [(len(cell.inputs), len(cell.outputs)) for cell in cells]):
            self._note_used(operation)
            if operation.is_unit:
                self._note_unit(operation)
            elif operation.op == OP_CONSTANT and operation.row == 0:
                self._zeros.add(operation.value)

    def is_forgotten(self, number: int) -> bool:
        """Return whether a cell has calls that begin with zeros alone, several, and only the last one is read."""
        calls, count = self._calls.get(number, []), len(self._cells[number].outputs)
        are_read = [not self._used.isdisjoint(range(first, first + count)) for first in calls]
        return number not in self._others and len(calls) > 1 and are_read[-1] and not any(are_read[:-1])

    def is_unread(self, number: int, first: int, length: int) -> bool:
        """Return whether no operation reads this output of a chain, at any step."""
        count = len(self._cells[number].outputs)
        return self._used.isdisjoint(range(first, first + count * length, count))

    def _note_used(self, operation: Operation) -> None:
        """Note the values that are read."""
        self._used.add(operation.start)
        self._used.update(operation.first + k * operation.stride for k in range(max(1, operation.length)))
        for source in operation.inputs:
            self._used.update(source.named())
            self._used.add(source.value)

    def _note_unit(self, unit: Operation) -> None:
        cell = self._cells[unit.cell_type]
        sources = dict(zip(cell.inputs, unit.inputs))
        same = [name for name, source in sources.items() if source.mode == FIXED]
        if unit.op == OP_CHAIN and unit.length > 1 and same:
            self.chains.append((unit.cell_type, unit.value, unit.length, same))
        carried = [source for name, source in sources.items() if name in cell.carry]
        if unit.op == OP_NODE and all(one.mode == FIXED and one.first in self._zeros for one in carried):
            self._calls.setdefault(unit.cell_type, []).append(unit.value)
        else:
            self._others.update((unit.cell_type, *unit.layers))
