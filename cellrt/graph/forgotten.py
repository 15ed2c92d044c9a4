"""Calls of which nothing remains: a cell that carries a state was called again and again, and each time began anew.

That each call begins with zeros is as it should be for the first nodes of many chains or for leaves, whose outputs are
used. Where nobody reads what all calls but the last made, the state was forgotten: ``for w in words: s = g(x=w)``.
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
        at = self._num_values = 0
        while at < len(words):
            at = self._source_or_result(at) if words[at] in NUM_WORDS else self._unit(at)

    def is_forgotten(self, number: int) -> bool:
        """Whether a cell has calls that begin with zeros alone, several, and only the last one is read."""
        calls, count = self._calls.get(number, []), len(self._cells[number].outputs)
        are_read = [not self._used.isdisjoint(range(first, first + count)) for first in calls]
        return number not in self._others and len(calls) > 1 and are_read[-1] and not any(are_read[:-1])

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
        is_fresh = op == OP_NODE
        for name in cell.inputs:
            mode, value = self._words[at : at + 2]
            size = 2 + value if mode in (LIST, EACH) else WORDS_OF_INPUT.get(mode, 2)
            self._used.update(read_by(self._words[at : at + size], length))
            is_fresh &= name not in cell.carry or (mode == FIXED and value in self._zeros)
            at += size
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
