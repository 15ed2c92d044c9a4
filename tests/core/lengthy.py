"""Random programs of all operations, whose graphs are compiled and not run: most name only the first and last steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.ports import Port
from cellrt.core.templates.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NOTHING,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_PAGES,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    PAGED,
    RANGE,
    SAME,
    SOURCE,
    STEP,
    WORDS,
    WORDS_OF_INPUT,
)
from cellrt.core.templates.program_operations import operations
from tests.core.graphs import make_processor

ROWS, PAGE = 0, 1
"""Kinds."""
ADD, TWO, MANY, SPAN, WRITE, READ = range(6)
PORTS = (
    ([Port(ROWS), Port(ROWS, carry=0)], 1),
    ([Port(ROWS), Port(ROWS, carry=0), Port(ROWS, carry=1)], 3),
    ([Port(ROWS, ragged=True), Port(ROWS)], 2),
    ([Port(ROWS), Port(ROWS, is_span=True)], 1),
    ([Port(ROWS), Port(PAGE, page_size=4, appends=True)], 2),
    ([Port(ROWS), Port(PAGE, page_size=4)], 1),
)
NUM_PORTS = [(len(inputs), num_outputs) for inputs, num_outputs in PORTS]
"""Inputs and outputs of each cell, as ``operations`` is told."""


def processor_of_all() -> Processor:
    """A processor with cells of all kinds of inputs, by number."""
    processor = make_processor()
    processor.add_kind(1000, 1000, is_paged=True)
    for ports, num_outputs in PORTS:
        processor.add_type(ports, [Port(ROWS)] * num_outputs, max_batch=4)
    return processor


def with_lengths(
    program: NDArray[np.int32], ports: Sequence[tuple[int, int]], lengths: NDArray[np.int32], others: Sequence[int]
) -> NDArray[np.int32]:
    """Return a program that has ``lengths``, with others in their place."""
    swap, words, read = dict(zip(lengths.tolist(), others)), program.copy(), list(operations(program.tobytes(), ports))
    renamed, long, end = {-1: -1}, set[int](), 0
    for made in read:
        if made.is_unit or WORDS[made.op][0] == SOURCE:
            width, steps = (
                ports[made.cell_type][1] if made.is_unit else 1,
                made.length if made.op in (OP_EXTERNAL, OP_CHAIN) else 1,
            )
            longer = swap.get(steps, steps) - steps
            for place in range(width * steps):
                renamed[made.value + place] = end + place + (longer * width if place >= width else 0)
                long |= {made.value + place} if steps > 1 else set()
            end += (steps + longer) * width

    def write(at: int, names: Sequence[str], is_run: bool, first: int) -> None:
        for k, name in enumerate(names, at):
            if name in ("first", "value", "start", "state"):
                words[k] = renamed.get(int(words[k]), int(words[k]))
            elif name in ("length", "count") and (not is_run or first in long):
                words[k] = swap.get(int(words[k]), int(words[k]))

    for made in read:
        names = WORDS[made.op][1]
        write(made.at + 1, names, made.op in (OP_RESULT, OP_KEEP), made.first)
        at = made.at + 1 + len(names) + len(made.layers)
        for one in made.inputs:
            names = WORDS_OF_INPUT[one.mode]
            if one.mode in (LIST, EACH):
                names = ("listed", *["value"] * one.count)
            elif one.mode == PAGED:
                names = ("pages",)
            write(at + 1, names, one.mode in (RANGE, LEADS), one.first)
            at += 1 + len(names)
    return words


class Lengthy:
    """Draws a program."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.program = draw, list[int]()
        self.num_values = self.num_pages = 0
        self.states: list[int] = []
        self.emitted: list[tuple[int, int]] = []
        self.ends: list[int] = []
        """Values that may be named whatever the lengths."""
        self.sequences: list[tuple[int, int, int, bool]] = []
        """(first value, stride, steps, whether cells made it)."""
        self.loops: list[tuple[int, int]] = []
        """(output, limit)."""

    def graph(self, operations: int) -> list[int]:
        """Draw so many operations and what is a result."""
        self.external(self.length())
        for _ in range(operations):
            self.draw.choice(
                (self.node, self.chain, self.chain, self.chain, self.loop, self.body, self.layers, self.source)
            )()
        self.node()
        self.results()
        return self.program

    def length(self) -> int:
        """Draw a length, often one that was there before."""
        return self.draw.choice((1, 2, 3, 3, 3, 5, 7))

    def value(self) -> int:
        """Draw a value, seldom one that may be in between."""
        return self.draw.randrange(self.num_values) if self.draw.random() < 0.02 else self.draw.choice(self.ends)

    def sequence(self) -> tuple[int, int, int]:
        """Draw (base, stride, count) of all steps of something, in order or backwards, seldom of some steps."""
        base, stride, count, _ = self.draw.choice(self.sequences)
        if self.draw.random() < 0.05:
            count = self.draw.randint(1, count)
        return (base, stride, count) if self.draw.random() < 0.7 else (base + (count - 1) * stride, -stride, count)

    def makes(self, cell: int, steps: int = 1) -> None:
        """Note the values of a unit."""
        width, first = PORTS[cell][1], self.num_values
        self.num_values += steps * width
        for output in range(width):
            self.ends += {first + output, self.num_values - width + output}
            if steps > 1:
                self.sequences.append((first + output, width, steps, True))

    def external(self, count: int) -> None:
        self.program += [OP_EXTERNAL, ROWS, count]
        self.sequences.append((self.num_values, 1, count, False))
        self.ends += {self.num_values, self.num_values + count - 1}
        self.num_values += count

    def source(self) -> None:
        choice = self.draw.random()
        if choice < 0.3:
            self.external(self.length())
        elif choice < 0.5:
            self.program += [OP_PAGES, PAGE, 4, self.draw.randint(0, 1)]
            self.num_pages += 1
        else:
            start = self.draw.choice((-1, self.value()))
            self.program += [OP_STATE, ROWS, start] if choice < 0.8 else [OP_CONSTANT, ROWS, 1]
            if choice < 0.8:
                self.states.append(self.num_values)
            self.ends.append(self.num_values)
            self.num_values += 1

    def many(self) -> list[int]:
        """Words of a ragged input."""
        choice = self.draw.random()
        if choice < 0.3 and self.loops:
            loop = self.draw.choice(self.loops)
            self.emitted.append(loop)
            return [EMITTED, *loop]
        if choice < 0.7:
            return [RANGE, *self.sequence()]
        values = [self.value() for _ in range(self.draw.randint(0, 3))]
        return [LIST, len(values), *values]

    def pages(self) -> list[int]:
        if not self.num_pages:
            return []
        return [PAGED, self.draw.randrange(self.num_pages)]

    def inputs(self, cell: int, read: list[list[int]]) -> list[int]:
        """Words of the inputs of a cell, of which ``read`` has those of plain ones."""
        words: list[int] = []
        for port in PORTS[cell][0]:
            if port.is_span:
                words += [NOTHING, 0]
            elif port.page_size:
                words += self.pages()
            elif port.ragged:
                words += self.many()
            elif port.carry >= 0 and read[0][0] != FIXED:
                words += [CARRY, self.value()]
            else:
                words += self.draw.choice(read)
        return words

    def cell(self) -> int:
        return self.draw.choice((ADD, TWO, MANY, SPAN, WRITE, READ) if self.num_pages else (ADD, TWO, MANY, SPAN))

    def node(self) -> None:
        cell = self.cell()
        self.program += [OP_NODE, cell, *self.inputs(cell, [[FIXED, self.value()], [FIXED, self.value()]])]
        self.makes(cell)

    def chain(self) -> None:
        cell, (base, stride, count) = self.cell(), self.sequence()
        read = [[STEP, base, stride], [FIXED, self.value()]]
        if self.draw.random() < 0.05:
            read.append([EACH, count, *(self.value() for _ in range(count))])
        self.program += [OP_CHAIN, cell, count, *self.inputs(cell, read)]
        self.makes(cell, count)

    def loop(self) -> None:
        cell, limit = self.cell(), self.length()
        begin = [NEXT, self.value(), 0]
        if cell in (SPAN, WRITE) and self.draw.random() < 0.7:
            begin = [LEADS, *self.sequence(), 0]
        elif cell in (ADD, TWO):
            begin = [CARRY, self.value()]
        self.program += [OP_LOOP, cell, limit, self.draw.choice((-1, 0)), *self.inputs(cell, [begin])]
        self.loops.append((self.num_values, limit))
        self.makes(cell)

    def body(self) -> None:
        limit, first, count = self.length(), self.num_values, self.draw.randint(1, 3)
        for member in range(count):
            words = [
                LAST,
                self.draw.choice([end for end in self.ends if end < first]),
                first + self.draw.randrange(count),
            ]
            if member and self.draw.random() < 0.5:
                words = [SAME, first + self.draw.randrange(member)]
            self.program += [OP_MEMBER, SPAN, limit, self.draw.choice((-1, 0)), count - 1 - member, *words, NOTHING, 0]
            self.loops.append((self.num_values, limit))
            self.makes(SPAN)

    def layers(self) -> None:
        count = self.draw.randint(1, 4)
        words = [LAST, self.value(), self.num_values, NOTHING, 0]
        self.program += [OP_MEMBER, SPAN, count, -1, -count, *[SPAN] * count, *words]
        self.loops.append((self.num_values, count))
        self.makes(SPAN)

    def results(self) -> None:
        """Say what is a result, and what states become."""
        made = [one for one in self.sequences if one[3]]
        for base, stride, count, _ in self.draw.sample(made, min(len(made), self.draw.randint(0, 2))):
            is_back = self.draw.random() < 0.3
            last = base + (count - 1) * stride
            self.program += [OP_RESULT, last if is_back else base, -stride if is_back else stride, count]
            if self.draw.random() < 0.1:
                self.program += [OP_RESULT, base, stride, count]
        for loop in dict.fromkeys(self.emitted or self.loops[:1]):
            self.program += [OP_RESULT_STEPS, *loop]
        self.program += [OP_RESULT, self.num_values - 1, 1, 1]
        if self.loops and self.draw.random() < 0.5:
            self.program += [OP_RESULT_LAST, self.loops[-1][0]]
        for state in self.states:
            kept = self.draw.choice(made)[:3] if made and self.draw.random() < 0.5 else (self.value(), 0, 0)
            self.program += [OP_KEEP, state, *kept]
