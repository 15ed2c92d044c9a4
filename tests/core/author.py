"""Random programs of integer cells, and what they must give: the oracle knows no tasks.

Every cell is a linear function modulo a prime, so any row read too late, too early or from the wrong place shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from cellrt.core.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    STEP,
)

PRIME = 1_000_003


@dataclass(frozen=True)
class Cell:
    """A cell type of integers; ``carry[i]`` is the output that input i is carried from, or -1."""

    number: int
    carry: tuple[int, ...]
    ragged: tuple[bool, ...]
    num_outputs: int

    def __call__(self, inputs: list[int | list[int]]) -> list[int]:
        total = 7 * self.number
        for k, value in enumerate(inputs):
            values = value if isinstance(value, list) else [value]
            total += sum((3 + 2 * k + 5 * j) * v for j, v in enumerate(values)) + len(values)
        return [(total * (j + 2) + j) % PRIME for j in range(self.num_outputs)]


def stops(value: int) -> bool:
    """Whether a loop's stop output says stop."""
    return value % 3 == 0


CELLS = (
    Cell(0, (-1, 0), (False, False), 1),
    Cell(1, (-1, 0, 1), (False, False, False), 3),
    Cell(2, (-1, -1), (False, False), 1),
    Cell(3, (-1, -1), (True, False), 2),
    Cell(4, (0, -1), (False, True), 2),
)


@dataclass
class Graph:
    """A random program with what the oracle expects of it."""

    program: list[int]
    externals: list[int]
    results: list[int]
    """Expected results in order; a loop's missing steps are -1."""


class Author:
    """Draws a random program, evaluating each value as it goes: the oracle."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.program: list[int] = []
        self.values: list[int] = []
        self.externals: list[int] = []
        self.expected: list[int] = []
        self.inputs: set[int] = set()
        self.loops: list[tuple[int, int, list[list[int]]]] = []

    def graph(self, operations: int) -> Graph:
        self.external(self.draw.randint(1, 4))
        self.program += [OP_CONSTANT, 0, 1]
        self.values.append(11)
        produced: list[int] = []
        while not produced or operations > 0:
            operations -= 1
            choice = self.draw.choice("nnncclte")
            if choice == "e":
                self.external(1)
            else:
                first = len(self.values)
                {"n": self.node, "c": self.chain, "l": self.loop, "t": self.tree}[choice]()
                produced += range(first, len(self.values))
        in_loops = {base + k for base, outputs, _ in self.loops for k in range(outputs)}
        plain = [value for value in produced if value not in in_loops and value not in self.inputs]
        for value in self.draw.sample(plain, min(len(plain), self.draw.randint(1, 5))):
            self.program += [OP_RESULT, value, 1, 1]
            self.expected.append(self.values[value])
        for base, outputs, history in self.loops:
            self.loop_results(base, outputs, history)
        if not self.expected:
            self.program += [OP_RESULT_LAST, self.loops[0][0]]
            self.expected.append(self.loops[0][2][-1][0])
        return Graph(self.program, self.externals, self.expected)

    def loop_results(self, base: int, outputs: int, history: list[list[int]]) -> None:
        limit = self.limits[base]
        if self.draw.random() < 0.7:
            self.program += [OP_RESULT_STEPS, base, limit]
            self.expected += [step[0] for step in history] + [-1] * (limit - len(history))
            if outputs > 1 and self.draw.random() < 0.5:
                self.program += [OP_RESULT_LAST, base + 1]
                self.expected.append(history[-1][1])
        elif self.draw.random() < 0.7:
            self.program += [OP_RESULT_LAST, base]
            self.expected.append(history[-1][0])

    def external(self, count: int) -> None:
        self.program += [OP_EXTERNAL, 0, count]
        values = [self.draw.randrange(PRIME) for _ in range(count)]
        self.inputs.update(range(len(self.values), len(self.values) + count))
        self.values += values
        self.externals += values

    def any_value(self) -> int:
        recent = max(0, len(self.values) - 6)
        return (
            self.draw.randrange(recent, len(self.values))
            if self.draw.random() < 0.5
            else self.draw.randrange(len(self.values))
        )

    def node(self, cell: Cell | None = None) -> None:
        cell = cell or self.draw.choice(CELLS)
        self.program += [OP_NODE, cell.number]
        inputs: list[int | list[int]] = []
        for ragged in cell.ragged:
            if ragged:
                refs = [self.any_value() for _ in range(self.draw.randint(0, 4))]
                self.program += [LIST, len(refs), *refs]
                inputs.append([self.values[ref] for ref in refs])
            else:
                ref = self.any_value()
                self.program += [FIXED, ref]
                inputs.append(self.values[ref])
        self.values += cell(inputs)

    def tree(self) -> None:
        """A complete binary tree of leaves (cell 2) and inner nodes (cell 3)."""
        level = []
        for _ in range(self.draw.choice([2, 4, 8])):
            level.append(len(self.values))
            self.node(CELLS[2])
        while len(level) > 1:
            above = []
            for k in range(0, len(level), 2):
                ref, children = self.any_value(), level[k : k + 2]
                above.append(len(self.values))
                self.program += [OP_NODE, 3, LIST, 2, *children, FIXED, ref]
                self.values += CELLS[3]([[self.values[child] for child in children], self.values[ref]])
            level = above

    def chain(self) -> None:
        cell = self.draw.choice([CELLS[0], CELLS[1], CELLS[4]])
        length = self.draw.randint(1, 9)
        self.external(length)
        first = len(self.values) - length
        sources: list[tuple[int, ...]] = []
        for port, carry in enumerate(cell.carry):
            if carry >= 0:
                sources.append((CARRY, self.any_value()))
            elif cell.ragged[port]:
                refs = [self.any_value() for _ in range(self.draw.randint(0, 3))]
                sources.append((LIST, len(refs), *refs))
            else:
                sources.append((STEP, first, 1) if self.draw.random() < 0.8 else (FIXED, self.any_value()))
        self.program += [OP_CHAIN, cell.number, length, *(word for source in sources for word in source)]
        before: list[int] = []
        for step in range(length):
            inputs: list[int | list[int]] = []
            for port, source in enumerate(sources):
                if source[0] == LIST:
                    inputs.append([self.values[ref] for ref in source[2:]])
                elif source[0] == STEP:
                    inputs.append(self.values[first + step])
                elif source[0] == CARRY and step > 0:
                    inputs.append(before[cell.carry[port]])
                else:
                    inputs.append(self.values[source[1]])
            before = cell(inputs)
            self.values += before

    limits: dict[int, int]

    def loop(self) -> None:
        cell = self.draw.choice([CELLS[0], CELLS[1], CELLS[4]])
        limit, stop = self.draw.randint(1, 9), self.draw.choice([-1, 0, cell.num_outputs - 1])
        inputs: list[int | list[int]] = []
        words: list[int] = []
        for port, carry in enumerate(cell.carry):
            if cell.ragged[port]:
                refs = [self.any_value() for _ in range(self.draw.randint(0, 3))]
                words += [LIST, len(refs), *refs]
                inputs.append([self.values[ref] for ref in refs])
            else:
                ref = self.any_value()
                words += [CARRY if carry >= 0 else FIXED, ref]
                inputs.append(self.values[ref])
        self.program += [OP_LOOP, cell.number, limit, stop, *words]
        history: list[list[int]] = []
        while len(history) < limit:
            history.append(cell(inputs))
            inputs = [history[-1][carry] if carry >= 0 else inputs[port] for port, carry in enumerate(cell.carry)]
            if stop >= 0 and stops(history[-1][stop]):
                break
        self.loops.append((len(self.values), cell.num_outputs, history))
        self.limits = {**getattr(self, "limits", {}), len(self.values): limit}
        self.values += history[-1]
