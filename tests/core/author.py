"""Random programs of integer cells, and what they must give: the oracle knows no tasks.

Every cell is a linear function modulo a prime, so any row read too late, too early or from the wrong place shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cellrt.core.templates.program import (
    CARRY,
    EACH,
    FIXED,
    LAST,
    LIST,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    RANGE,
    SAME,
    STEP,
)

PRIME = 1_000_003


@dataclass(frozen=True)
class Cell:
    """A cell type of integers; ``carry[i]`` is the output that input i is carried from, or -1.

    The kinds of rows of its inputs and outputs are 0 unless they are given.
    """

    number: int
    carry: tuple[int, ...]
    ragged: tuple[bool, ...]
    num_outputs: int
    input_kinds: tuple[int, ...] = ()
    output_kinds: tuple[int, ...] = ()

    def kind_of_input(self, port: int) -> int:
        """The kind of rows that an input reads."""
        return self.input_kinds[port] if self.input_kinds else 0

    def kind_of_output(self, output: int) -> int:
        """The kind of rows of an output."""
        return self.output_kinds[output] if self.output_kinds else 0

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
ALIKE = (CELLS[0], CELLS[2])
"""Cells of the same inputs and outputs, as integers go: what is carried does not matter in a loop of several."""


@dataclass
class Graph:
    """A random program with what the oracle expects of it."""

    program: list[int]
    externals: list[int]
    results: list[int]
    """Expected results in order; a loop's missing steps are -1."""
    external_kinds: list[int] = field(default_factory=list)
    """The kind of each external's row, and below of each result's; none: 0."""
    result_kinds: list[int] = field(default_factory=list)


class Author:
    """Draws a random program, evaluating each value as it goes: the oracle."""

    KINDS = "nnncclbte"
    """What it draws of: nodes, chains, loops, bodies, trees, and what comes with the request."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.program: list[int] = []
        self.values: list[int] = []
        self.externals: list[int] = []
        self.expected: list[int] = []
        self.inputs: set[int] = set()
        self.loops: list[tuple[int, int, list[list[int]]]] = []
        self.sequences: list[tuple[int, int, int]] = []
        """(first value, stride, steps) of each tensor and each output of a chain."""

    def graph(self, operations: int) -> Graph:
        self.external(self.draw.randint(1, 4))
        self.program += [OP_CONSTANT, 0, 1]
        self.values.append(11)
        produced: list[int] = []
        while not produced or operations > 0:
            operations -= 1
            choice = self.draw.choice(self.KINDS)
            if choice == "e":
                self.external(1)
            else:
                first = len(self.values)
                {"n": self.node, "c": self.chain, "l": self.loop, "b": self.body, "t": self.tree}[choice]()
                produced += range(first, len(self.values))
        in_loops = {base + k for base, outputs, _ in self.loops for k in range(outputs)}
        plain = [value for value in produced if value not in in_loops and value not in self.inputs]
        whole = self.whole_results()
        plain = [value for value in plain if value not in whole]
        for value in self.draw.sample(plain, min(len(plain), self.draw.randint(1, 5))):
            self.program += [OP_RESULT, value, 1, 1]
            self.expected.append(self.values[value])
        for base, outputs, history in self.loops:
            self.loop_results(base, outputs, history)
        if not self.expected:
            self.program += [OP_RESULT_LAST, self.loops[0][0]]
            self.expected.append(self.loops[0][2][-1][0])
        return Graph(self.program, self.externals, self.expected)

    def whole_results(self) -> set[int]:
        """Has some chains give an output of every step, in order or backwards; returns the values."""
        given: set[int] = set()
        for base, stride, count in self.sequences:
            if base in self.inputs or self.draw.random() < 0.7:
                continue
            if self.draw.random() < 0.3:
                base, stride = base + (count - 1) * stride, -stride
            self.program += [OP_RESULT, base, stride, count]
            values = range(base, base + stride * count, stride)
            self.expected += [self.values[value] for value in values]
            given.update(values)
        return given

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
        self.sequences.append((len(self.values), 1, count))
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
                source = self.many()
                self.program += source
                inputs.append([self.values[ref] for ref in self.listed(source)])
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
        """A chain over a tensor, over the steps of another chain (forwards, backwards, or some of them), or a list."""
        cell = self.draw.choice(CELLS)
        stepped = self.steps()
        first = len(self.values)
        sources: list[tuple[int, ...]] = []
        for port, carry in enumerate(cell.carry):
            if carry >= 0:
                sources.append((CARRY, self.any_value()))
            elif cell.ragged[port]:
                sources.append(self.many())
            else:
                sources.append(stepped if self.draw.random() < 0.8 else (FIXED, self.any_value()))
        length = self.length_of(stepped)
        self.program += [OP_CHAIN, cell.number, length, *(word for source in sources for word in source)]
        before: list[int] = []
        for step in range(length):
            inputs: list[int | list[int]] = []
            for port, source in enumerate(sources):
                if source[0] in (LIST, RANGE):
                    inputs.append([self.values[ref] for ref in self.listed(source)])
                elif source[0] == STEP:
                    inputs.append(self.values[source[1] + step * source[2]])
                elif source[0] == EACH:
                    inputs.append(self.values[source[2 + step]])
                elif source[0] == CARRY and step > 0:
                    inputs.append(before[cell.carry[port]])
                else:
                    inputs.append(self.values[source[1]])
            before = cell(inputs)
            self.values += before
        self.sequences += [(first + output, cell.num_outputs, length) for output in range(cell.num_outputs)]
        self.last_length = length

    def steps(self) -> tuple[int, ...]:
        """Words of an input with a value for each step; notes how many there are."""
        choice = self.draw.random()
        if choice < 0.2:
            refs = [self.any_value() for _ in range(self.draw.randint(1, 6))]
            return (EACH, len(refs), *refs)
        if choice < 0.6 and self.sequences:
            base, stride, count = self.part()
        else:
            count = self.draw.randint(1, 9)
            self.external(count)
            base, stride = len(self.values) - count, 1
        self.last_length = count
        return (STEP, base, stride)

    def length_of(self, stepped: tuple[int, ...]) -> int:
        return stepped[1] if stepped[0] == EACH else self.last_length

    def part(self) -> tuple[int, int, int]:
        """(base, stride, count) of some steps of a tensor or chain, in order or backwards."""
        base, stride, count = self.draw.choice(self.sequences)
        every = self.draw.choice([1, 1, 1, 2, 3])
        first = self.draw.randrange(count)
        count = -(-(count - first) // every)
        base, stride = base + first * stride, stride * every
        if self.draw.random() < 0.4:
            base, stride = base + (count - 1) * stride, -stride
        return base, stride, count

    def many(self) -> tuple[int, ...]:
        """Words of a ragged input."""
        if self.sequences and self.draw.random() < 0.6:
            return (RANGE, *self.part())
        refs = [self.any_value() for _ in range(self.draw.randint(0, 4))]
        return (LIST, len(refs), *refs)

    @staticmethod
    def listed(source: tuple[int, ...]) -> list[int]:
        """The values that ``many`` names."""
        if source[0] == LIST:
            return list(source[2:])
        return [source[1] + k * source[2] for k in range(source[3])]

    limits: dict[int, int]

    def loop(self) -> None:
        cell = self.draw.choice([CELLS[0], CELLS[1], CELLS[4]])
        limit, stop = self.draw.randint(1, 9), self.draw.choice([-1, 0, cell.num_outputs - 1])
        inputs: list[int | list[int]] = []
        words: list[int] = []
        for port, carry in enumerate(cell.carry):
            if cell.ragged[port]:
                source = self.many()
                words += source
                inputs.append([self.values[ref] for ref in self.listed(source)])
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

    def body(self) -> None:
        """A loop of several cells, which read each other at the same step or the one before."""
        cells = [self.draw.choice(CELLS) for _ in range(self.draw.randint(1, 4))]
        layers: list[Cell] = []
        if self.draw.random() < 0.3:  # one of another cell at each step
            layers = [self.draw.choice(ALIKE) for _ in range(self.draw.randint(1, 6))]
            cells = layers[:1]
        limit, first = len(layers) or self.draw.randint(1, 6), len(self.values)
        sources: list[list[tuple[int, ...]]] = []
        for number, cell in enumerate(cells):
            sources.append([self.many() if ragged else self.member_source(cells, number) for ragged in cell.ragged])
            first = len(self.values)  # lists of numbers come with the request
        stop = self.draw.choice([None, *((k, j) for k, cell in enumerate(cells) for j in range(cell.num_outputs))])
        starts = [first + sum(cell.num_outputs for cell in cells[:k]) for k in range(len(cells) + 1)]
        for number, cell in enumerate(cells):
            output = stop[1] if stop and stop[0] == number else -1
            self.program += [OP_MEMBER, cell.number, limit, output, -len(layers) or len(cells) - 1 - number]
            self.program += [layer.number for layer in layers]
            for mode, *words in sources[number]:
                if mode in (SAME, LAST):
                    words[-2:] = [starts[words[-2]] + words[-1]]
                self.program += [mode, *words]
        history: list[list[list[int]]] = []
        while len(history) < limit:
            made: list[list[int]] = []
            for number, cell in enumerate(layers[len(history) :][:1] or cells):
                made.append(cell([self.member_input(source, made, history) for source in sources[number]]))
            history.append(made)
            if stop and stops(made[stop[0]][stop[1]]):
                break
        for number, cell in enumerate(cells):
            self.loops.append((starts[number], cell.num_outputs, [made[number] for made in history]))
            self.limits = {**getattr(self, "limits", {}), starts[number]: limit}
            self.values += history[-1][number]

    def member_source(self, cells: list[Cell], number: int) -> tuple[int, ...]:
        """An input of member ``number``: SAME and LAST have a member and an output instead of a value."""
        choice = self.draw.random()
        if choice < 0.4 and number:
            maker = self.draw.randrange(number)
            return (SAME, maker, self.draw.randrange(cells[maker].num_outputs))
        if choice < 0.8:
            maker = self.draw.randrange(len(cells))
            return (LAST, self.any_value(), maker, self.draw.randrange(cells[maker].num_outputs))
        return (FIXED, self.any_value())

    def member_input(
        self, source: tuple[int, ...], made: list[list[int]], history: list[list[list[int]]]
    ) -> int | list[int]:
        """What an input is after the members ``made`` of this step and the steps of ``history``."""
        if source[0] == SAME:
            return made[source[1]][source[2]]
        if source[0] == LAST and history:
            return history[-1][source[2]][source[3]]
        if source[0] in (LIST, RANGE):
            return [self.values[ref] for ref in self.listed(source)]
        return self.values[source[1]]
