"""Graphs of nodes alone have a short way to their templates, which makes what the long one does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.state.tables import MAX_READERS
from cellrt.core.templates.node_graphs import HAS_SETS, NO_NODES, compile_nodes
from cellrt.core.templates.node_sets import FOR_EACH_SOURCE, PICK, written_out
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_CONSTANT,
    OP_DAG,
    OP_EXTERNAL,
    OP_NODE,
    OP_RESULT,
    OP_RESULTS,
    OP_TREE,
    STEP,
    read_only,
)
from cellrt.core.templates.program_operations import operations, rename_types
from cellrt.core.templates.sized_template import KnownTemplates
from cellrt.errors import RequestTooLargeError
from tests.core.lengthy import ADD, MANY, NUM_PORTS, ROWS, TWO, processor_of_all
from tests.core.test_sized_template import assert_is_what_compiles, compiled, room_of

PROCESSOR = processor_of_all()
TABLES = PROCESSOR.tables


def made_of_nodes(program: NDArray[np.int32]) -> NDArray[np.int64]:
    """What the short way makes of a program."""
    words: NDArray[np.int64] = compile_nodes(read_only(program), TABLES.types, TABLES.ports, *room_of(PROCESSOR))
    return words


class Nodes:
    """Draws a program of nodes, trees and dags, whose inputs read any values before them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.program = draw, list[int]()
        self.num_values = 0
        self.made: list[int] = []
        """Values that may be results."""

    def drawn(self, num_operations: int) -> NDArray[np.int32]:
        """The words of a program with so many sources, nodes, trees and dags."""
        self.source()
        for _ in range(num_operations):
            self.draw.choice((self.source, self.node, self.node, self.node, self.tree, self.dag))()
        self.node()
        for _ in range(self.draw.randint(1, 3)):
            if self.draw.random() < 0.3:
                values = self.draw.sample(self.made, self.draw.randint(0, min(5, len(self.made))))
                self.program += [OP_RESULTS, len(values), *values]
            elif self.draw.random() < 0.5:
                self.program += [OP_RESULT, self.draw.choice(self.made), 1, 1]
            else:
                first, last = sorted((self.draw.choice(self.made), self.made[-1]))
                stride = max(1, last - first)
                if all(value in self.made for value in (first, first + stride)):
                    self.program += [OP_RESULT, first, stride, 2]
        self.program += [OP_RESULT, self.made[-1], 1, 1]
        return np.array(self.program, np.int32)

    def value(self) -> int:
        return self.draw.randrange(self.num_values)

    def source(self) -> None:
        if self.draw.random() < 0.3:
            self.program += [OP_CONSTANT, ROWS, self.draw.randint(0, 5)]
            self.num_values += 1
        else:
            count = self.draw.choice((1, 1, 2, 5))
            self.program += [OP_EXTERNAL, ROWS, count]
            self.num_values += count

    def note(self, count: int) -> None:
        self.made += range(self.num_values, self.num_values + count)
        self.num_values += count

    def node(self) -> None:
        cell = self.draw.choice((ADD, TWO, MANY))
        self.program += [OP_NODE, cell]
        for port in range(NUM_PORTS[cell][0]):
            if cell == MANY and port == 0:
                listed = [self.value() for _ in range(self.draw.randint(0, 4))]
                self.program += [LIST, len(listed), *listed]
            elif self.made and self.draw.random() < 0.7:
                self.program += [FIXED, self.made[-self.draw.randint(1, min(4, len(self.made)))]]
            else:
                self.program += [FIXED, self.value()]
        self.note(NUM_PORTS[cell][1])

    def given(self, count: int, picked: list[int], more: int = 0) -> list[int]:
        """An input that so many nodes are given."""
        kind = self.draw.choice((FIXED, STEP, PICK))
        if kind == STEP and count <= self.num_values:
            stride = self.draw.choice((1, (self.num_values - 1) // max(1, count - 1) if count > 1 else 1))
            return [more + STEP, self.draw.randint(0, self.num_values - 1 - stride * max(0, count - 1)), stride]
        if kind == PICK:
            picked += [self.value() for _ in range(count)]
            return [more + PICK, len(picked) - count, 0]
        return [more + FIXED, self.value(), 0]

    def tree(self) -> None:
        size, is_binary = self.draw.randint(1, 12), self.draw.random() < 0.4
        size += int(is_binary and size % 2 == 0)
        parents = random_parents(self.draw, size, is_binary)
        leaves, picked = size - len({*parents} - {-1}), list[int]()
        leaf, inner = self.draw.choice((ADD, TWO)), ADD if is_binary else MANY
        self.program += [OP_TREE, leaf, inner, size, leaves]
        read = [word for _ in range(NUM_PORTS[leaf][0]) for word in self.given(leaves, picked)]
        if is_binary:
            read += [CARRY, 0, 0, CARRY, 1, 0]
        else:
            read += [LIST, 0, 0, *self.given(size - leaves, picked)]
        self.program += [len(picked), *read, *picked, *parents]
        self.note(leaves * NUM_PORTS[leaf][1] + (size - leaves) * NUM_PORTS[inner][1])

    def dag(self) -> None:
        size, picked = self.draw.randint(1, 8), list[int]()
        read = [[self.draw.randrange(k) for _ in range(self.draw.randint(0, 3))] if k else [] for k in range(size)]
        offsets, sources = np.cumsum([0, *map(len, read)]).tolist(), [each for its in read for each in its]
        listed = [LIST, self.draw.randint(0, 1), 0]
        if sources and self.draw.random() < 0.2:
            listed = self.given(len(sources), picked, FOR_EACH_SOURCE)
        words = [*listed, *self.given(size, picked)]
        self.program += [OP_DAG, MANY, size, len(sources), len(picked), *words, *picked, *offsets, *sources]
        self.note(size * NUM_PORTS[MANY][1])


def random_parents(draw: random.Random, size: int, is_binary: bool) -> list[int]:
    """The parents of a tree, numbered at random; each inner node of a binary one has two children."""
    numbers, parents = draw.sample(range(size), size), [-1] * size
    free = [numbers[0]]
    for k in range(1, size, 2 if is_binary else 1):
        if is_binary:
            parent = free.pop(draw.randrange(len(free)))
            parents[numbers[k]] = parents[numbers[k + 1]] = parent
            free += numbers[k : k + 2]
        else:
            parents[numbers[k]] = numbers[draw.randrange(k)]
    return parents


programs = given(draw=st.randoms(use_true_random=False), num_operations=st.integers(0, 8))


def plain(program: NDArray[np.int32]) -> NDArray[np.int32]:
    """A program with its trees and dags written out."""
    return np.array(written_out(read_only(program), TABLES.types, 0))


@programs
def test_the_short_way_makes_what_the_long_one_does(draw: random.Random, num_operations: int) -> None:
    program = Nodes(draw).drawn(num_operations)
    assert_is_what_compiles(compiled(program, KnownTemplates(), PROCESSOR), plain(program), PROCESSOR)


@programs
def test_a_graph_that_was_said_by_arrays_is_read_as_its_nodes(draw: random.Random, num_operations: int) -> None:
    program = Nodes(draw).drawn(num_operations)
    assert list(operations(program.tobytes(), NUM_PORTS)) == list(operations(plain(program).tobytes(), NUM_PORTS))


@programs
def test_types_are_renamed_where_they_are_said_by_arrays(draw: random.Random, num_operations: int) -> None:
    program, others = Nodes(draw).drawn(num_operations), [2, 0, 1, 3, 4, 5]
    inputs = [count for count, _ in NUM_PORTS]
    renamed = rename_types(program, inputs, others)
    back = [others.index(number) for number in range(len(others))]
    assert rename_types(renamed, [inputs[number] for number in back], back).tolist() == program.tolist()
    swapped = [NUM_PORTS[number] for number in back]
    read, expected = operations(renamed.tobytes(), swapped), operations(program.tobytes(), NUM_PORTS)
    for one, other in zip(read, expected, strict=True):
        assert one.cell_type == (others[other.cell_type] if other.is_unit else -1) and one.inputs == other.inputs


def binary_tree(leaves: int) -> list[int]:
    """A tree of ``leaves`` that leans to the right, each inner node above a leaf and the next; its root is node 0."""
    parents = [-1]
    for k in range(leaves - 1):
        parents += [2 * k, 2 * k]
    return parents


def tree_program(leaves: int) -> NDArray[np.int32]:
    """A tree whose leaves read a row of the request each."""
    parents = binary_tree(leaves)
    words = [OP_EXTERNAL, ROWS, leaves, OP_TREE, ADD, ADD, len(parents), leaves, 0]
    words += [STEP, 0, 1, FIXED, 0, 0, CARRY, 0, 0, CARRY, 1, 0, *parents]
    return np.array([*words, OP_RESULT, leaves + len(parents) - 1, 1, 1], np.int32)


def test_a_tree_takes_the_short_way_and_is_a_word_a_node():
    sizes = [tree_program(leaves).size for leaves in (5, 6)]
    assert sizes[1] - sizes[0] == 2
    assert made_of_nodes(tree_program(5)).size > HAS_SETS


def test_a_tree_beside_a_chain_is_written_out_for_the_long_way():
    chain = [OP_EXTERNAL, ROWS, 4, OP_CHAIN, ADD, 4, STEP, 0, 1, CARRY, 0]
    made = 8
    tree = [OP_TREE, ADD, ADD, 3, 2, 0, STEP, made - 2, 1, FIXED, 0, 0, CARRY, 0, 0, CARRY, 1, 0, 2, 2, -1]
    program = np.array([*chain, *tree, OP_RESULT, made + 2, 1, 1], np.int32)
    assert made_of_nodes(program).size == HAS_SETS
    assert_is_what_compiles(compiled(program, KnownTemplates(), PROCESSOR), plain(program), PROCESSOR)


def test_what_has_steps_or_a_tensor_that_nobody_reads_goes_the_long_way():
    chain = [OP_EXTERNAL, ROWS, 3, OP_CHAIN, ADD, 3, STEP, 0, 1, CARRY, 0, OP_RESULT, 5, 1, 1]
    unread = [OP_EXTERNAL, ROWS, 1, OP_EXTERNAL, ROWS, 3, OP_NODE, ADD, FIXED, 0, FIXED, 0, OP_RESULT, 4, 1, 1]
    for words in (chain, unread):
        program = np.array(words, np.int32)
        assert made_of_nodes(program).size == NO_NODES
        assert_is_what_compiles(compiled(program, KnownTemplates(), PROCESSOR), program, PROCESSOR)


@pytest.mark.parametrize("count", [MAX_READERS, MAX_READERS + 1])
def test_a_value_has_as_many_readers_as_can_be_counted(count: int):
    words = [OP_EXTERNAL, ROWS, 1, OP_EXTERNAL, ROWS, 1]
    for listed in (count // 2, count - count // 2):
        words += [OP_NODE, MANY, LIST, listed, *[0] * listed, FIXED, 1]
    program = np.array([*words, OP_RESULT, 2, 1, 1], np.int32)
    if count <= MAX_READERS:
        assert compiled(program, KnownTemplates(), PROCESSOR).arrays.values["readers"].tolist() == [
            count,
            2,
            0,
            0,
            0,
            0,
        ]
        return
    with pytest.raises(RequestTooLargeError, match="readers in one graph"):
        compiled(program, KnownTemplates(), PROCESSOR)
