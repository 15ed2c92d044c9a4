"""Steps of which nothing remains: a state was made again and again, and each step began anew.

That each call begins with zeros is as it should be for the first nodes of many chains or for leaves, whose outputs are
used. Where nobody reads what all calls but the last made, the state was forgotten: ``for w in words: s = g(x=w)``. In a
chain it is where a state's next value has another name than the state, as a plain tuple's have: then it is not carried.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
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
    OP_KEEP,
    OP_MEMBER,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    RANGE,
    SAME,
    STEP,
    WORDS_OF_INPUT,
)
from cellrt.definition.cell import Cell


def cells_that_forget(program: bytes, cells: Sequence[Cell]) -> list[Cell]:
    """Those of the cells, by number as the program has them, of which nothing but the last of several calls is read,
    while each call begins with zeros."""
    if not any(cell.carry for cell in cells):
        return []
    reading = _Reading(array("i", program).tolist(), cells)
    return [cell for number, cell in enumerate(cells) if cell.carry and reading.is_forgotten(number)]


def states_not_carried(program: bytes, cells: Sequence[Cell]) -> list[tuple[Cell, dict[str, str]]]:
    """Cells of chains with inputs that are the same at every step, each with the output that may be its next value: one
    of its spec that nobody reads, that is carried to no input, and whose name no author gave: of a plain tuple."""
    reading, found = _Reading(array("i", program).tolist(), cells), dict[str, tuple[Cell, dict[str, str]]]()
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

    def __init__(self, words: list[int], cells: Sequence[Cell]) -> None:
        self._words, self._cells = words, cells
        self._used: set[int] = set()
        self._zeros: set[int] = set()
        self._calls: dict[int, list[int]] = {}
        """First values of the calls of each cell that begin with zeros."""
        self._others: set[int] = set()
        """Cells with other nodes than these."""
        self.chains: list[tuple[int, int, int, list[str]]] = []
        """Of each chain of several steps: its cell, its first value, its length, and its inputs that are the same at
        every step."""
        at = self._num_values = 0
        while at < len(words):
            at = self._source_or_result(at) if words[at] in NUM_WORDS else self._unit(at)

    def is_forgotten(self, number: int) -> bool:
        """Whether a cell has calls that begin with zeros alone, several, and only the last one is read."""
        calls, count = self._calls.get(number, []), len(self._cells[number].outputs)
        are_read = [not self._used.isdisjoint(range(first, first + count)) for first in calls]
        return number not in self._others and len(calls) > 1 and are_read[-1] and not any(are_read[:-1])

    def is_unread(self, number: int, first: int, length: int) -> bool:
        """Whether nobody reads the output of a chain's cell that begins at a value, of any step."""
        count = len(self._cells[number].outputs)
        return self._used.isdisjoint(range(first, first + count * length, count))

    def _source_or_result(self, at: int) -> int:
        op, *numbers = self._words[at : at + NUM_WORDS[self._words[at]]]
        if op == OP_CONSTANT and numbers[1] == 0:
            self._zeros.add(self._num_values)
        if op in (OP_RESULT, OP_KEEP):
            base, stride, count = numbers[-3:]
            self._used.update(base + k * stride for k in range(max(1, count)))
        elif op in (OP_RESULT_STEPS, OP_RESULT_LAST):
            self._used.add(numbers[0])
        elif op == OP_STATE:
            self._used.add(numbers[1])
        if op in (OP_EXTERNAL, OP_CONSTANT, OP_STATE):
            self._num_values += numbers[1] if op == OP_EXTERNAL else 1
        return at + 1 + len(numbers)

    def _unit(self, at: int) -> int:
        op, number, length = self._words[at : at + 3]
        cell = self._cells[number]
        types = [number]
        start, at = at, at + NUM_WORDS_BEFORE_INPUTS[op]
        if op == OP_MEMBER and self._words[start + 4] < 0:
            types += self._words[at : at - self._words[start + 4]]
            at -= self._words[start + 4]
        is_fresh, same = op == OP_NODE, list[str]()
        for name in cell.inputs:
            mode, value = self._words[at : at + 2]
            size = 2 + value if mode in (LIST, EACH) else WORDS_OF_INPUT.get(mode, 2)
            self._used.update(read_by(self._words[at : at + size], length))
            is_fresh &= name not in cell.carry or (mode == FIXED and value in self._zeros)
            if mode == FIXED:
                same.append(name)
            at += size
        if op == OP_CHAIN and length > 1 and same:
            self.chains.append((number, self._num_values, length, same))
        if is_fresh:
            self._calls.setdefault(number, []).append(self._num_values)
        else:
            self._others.update(types)
        self._num_values += len(cell.outputs) * (length if op == OP_CHAIN else 1)
        return at


def read_by(words: list[int], length: int) -> Iterable[int]:
    """The values that an input of a unit reads, by its words."""
    mode, base = words[:2]
    if mode in (FIXED, CARRY, NEXT, SAME):
        return (base,)
    if mode == LAST:
        return words[1:]
    if mode in (LIST, EACH):
        return words[2:]
    if mode in (STEP, RANGE, LEADS):
        count = length if mode == STEP else words[3]
        return (base + k * words[2] for k in range(count))
    return (base,) if mode == EMITTED else ()
