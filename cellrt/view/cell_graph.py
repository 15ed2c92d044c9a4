"""A request's cell graph, to look at: as networkx, as a picture."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import numpy as np

from cellrt.core.partition import partition
from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NOTHING,
    NUM_WORDS,
    NUM_WORDS_BEFORE_INPUTS,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    PAGED,
    RANGE,
    STEP,
    WORDS_OF_INPUT,
)
from cellrt.definition.cell import Cell
from cellrt.view.paper import NEEDS_MATPLOTLIB

MAX_DRAWN_NODES = 2_000


class Unit(NamedTuple):
    """A node, chain, loop or member of one, of a program.

    ``limit``: most steps of a loop, else 0; ``left``: how many units of the same body follow. ``is_one``: it is a
    subgraph of its own. ``inputs`` has for each (name, mode, numbers) as ``program.py`` says; of a growing state also,
    behind its number, the first output of the step that appended to it last.
    """

    cell: Cell
    cell_type: int
    first_value: int
    steps: int
    limit: int
    left: int
    is_one: bool
    inputs: list[tuple[str, int, list[int]]]

    def reads(self, step: int) -> Iterator[tuple[str, int]]:
        """(input, value) of all that a step reads."""
        for name, mode, numbers in self.inputs:
            if mode == NOTHING:
                continue
            if mode == PAGED:
                before = self.first_value + (step - 1) * len(self.cell.outputs)
                if step > 0 and self.cell.inputs[name].appends:
                    yield name, before
                else:
                    yield from ((name, value) for value in numbers[1:])
            elif mode in (NEXT, EMITTED, LAST):
                yield name, numbers[0]
            elif mode == CARRY and step > 0:
                before = self.first_value + (step - 1) * len(self.cell.outputs)
                yield name, before + self.cell.places[self.cell.carry[name]]
            elif mode == STEP:
                yield name, numbers[0] + step * numbers[1]
            elif mode == EACH:
                yield name, numbers[step]
            elif mode in (RANGE, LEADS):
                yield from ((name, numbers[0] + k * numbers[1]) for k in range(numbers[2]))
            else:
                yield from ((name, value) for value in numbers)


class _Reader:
    """Reads a program's words."""

    def __init__(self, program: bytes, cells: Mapping[int, Cell]) -> None:
        self._words, self._cells = array("i", program), cells
        self.units: list[Unit] = []
        self.externals: set[int] = set()
        self.results: set[int] = set()
        self.starts: dict[int, int] = {}
        """Of a state, the value that it begins with."""
        self._appended: dict[int, int] = {}
        self.num_values = at = 0
        while at < len(self._words):
            at = self._read_other(at) if self._words[at] in NUM_WORDS else self._read_unit(at)

    def _read_other(self, at: int) -> int:
        op, first, *numbers = self._words[at : at + NUM_WORDS[self._words[at]]]
        made = {OP_EXTERNAL: numbers[0] if numbers else 0, OP_CONSTANT: 1, OP_STATE: 1}.get(op, 0)
        if op == OP_EXTERNAL:
            self.externals |= set(range(self.num_values, self.num_values + made))
        elif op == OP_STATE and numbers[0] >= 0:
            self.starts[self.num_values] = numbers[0]
        elif op == OP_RESULT:
            self.results |= {first + k * numbers[0] for k in range(numbers[1])}
        elif op in (OP_RESULT_STEPS, OP_RESULT_LAST):
            self.results.add(first)
        self.num_values += made
        return at + NUM_WORDS[op]

    def _read_unit(self, at: int) -> int:
        op, cell_type = self._words[at : at + 2]
        cell = self._cells[cell_type]
        steps = self._words[at + 2] if op == OP_CHAIN else 1
        limit = self._words[at + 2] if op in (OP_LOOP, OP_MEMBER) else 0
        left = self._words[at + 4] if op == OP_MEMBER else 0
        at, left = at + NUM_WORDS_BEFORE_INPUTS[op] + max(0, -left), max(0, left)
        inputs: list[tuple[str, int, list[int]]] = []
        for name in cell.inputs:
            mode = self._words[at]
            is_listed = mode in (LIST, EACH)
            first = at + 2 if is_listed else at + 1
            count = self._words[at + 1] if is_listed else WORDS_OF_INPUT.get(mode, 2) - 1
            inputs.append((name, mode, list(self._words[first : first + count])))
            at = first + count
        for name, mode, numbers in inputs:
            if mode == PAGED:
                numbers += [self._appended[numbers[0]]] if numbers[0] in self._appended else []
                if cell.inputs[name].appends:
                    self._appended[numbers[0]] = self.num_values + (steps - 1) * len(cell.outputs)
        is_one = op != OP_NODE or any(mode in (RANGE, PAGED, NOTHING, EMITTED) for _, mode, _ in inputs)
        self.units.append(Unit(cell, cell_type, self.num_values, steps, limit, left, is_one, inputs))
        self.num_values += steps * len(cell.outputs)
        return at


class CellGraph:
    """The cell graph of a recorded program. ``num_subgraphs`` counts what the scheduler is handed.

    Args:
        program: the words of ``core/program.py``.
        cells: by type.
    """

    def __init__(self, program: bytes, cells: Mapping[int, Cell]) -> None:
        self._read = _Reader(program, cells)

    def __repr__(self) -> str:
        return f"CellGraph({self.num_nodes} nodes, {self.num_subgraphs} subgraphs)"

    @property
    def num_nodes(self) -> int:
        """Cell invocations; a loop is one node."""
        return sum(unit.steps for unit in self._read.units)

    @property
    def num_subgraphs(self) -> int:
        """Subgraphs that the graph is cut into; a chain or loop is one."""
        return self._cut[1]

    @cached_property
    def _makers(self) -> dict[int, tuple[int, int]]:
        """The (unit, step) that makes each value."""
        return {
            unit.first_value + k: (number, k // len(unit.cell.outputs))
            for number, unit in enumerate(self._read.units)
            for k in range(unit.steps * len(unit.cell.outputs))
        }

    @cached_property
    def _cut(self) -> tuple[list[int], int]:
        """The subgraph of each unit, and how many there are."""
        starts, producers, units = [0], [], self._read.units
        for number, unit in enumerate(units):
            read = {value for step in range(unit.steps) for _, value in unit.reads(step)}
            makers = {self._makers[self._read.starts.get(value, value)][0] for value in read if self._is_made(value)}
            if number and units[number - 1].left:  # members of one body follow each other, and end with the last
                makers.add(number - 1)
            makers = {maker + (units[maker].left if maker + units[maker].left < number else 0) for maker in makers}
            producers += sorted(makers - {number})
            starts.append(len(producers))
        types = [(1 << 16) + k if unit.is_one else unit.cell_type for k, unit in enumerate(units)]
        group, count, _ = partition(
            np.array(types, np.int32), np.array(starts, np.int32), np.array(producers, np.int32)
        )
        return group.tolist(), int(count)

    def _is_made(self, value: int) -> bool:
        return self._read.starts.get(value, value) in self._makers

    def to_networkx(self) -> nx.DiGraph:
        """Nodes have ``cell``, ``cell_type``, ``subgraph``, ``label``, and names of what comes from the request and
        what goes to its client, ``inputs`` and ``results``; edges have lists of names, ``output`` and ``input``."""
        graph, first = nx.DiGraph(), 0
        numbers: dict[tuple[int, int], int] = {}
        for number, unit in enumerate(self._read.units):
            names = list(unit.cell.outputs)
            for step in range(unit.steps):
                numbers[number, step] = first + step
                made = unit.first_value + step * len(names)
                graph.add_node(
                    first + step,
                    cell=unit.cell.name,
                    cell_type=unit.cell_type,
                    subgraph=self._cut[0][number],
                    label=f"loop up to {unit.limit}" if unit.limit else str(first + step),
                    inputs=[],
                    results=[name for k, name in enumerate(names) if made + k in self._read.results],
                )
                for name, read in unit.reads(step):
                    self._add_input(graph, numbers, first + step, name, self._read.starts.get(read, read))
            first += unit.steps
        return graph

    def _add_input(
        self, graph: nx.DiGraph, numbers: Mapping[tuple[int, int], int], node: int, name: str, value: int
    ) -> None:
        """Adds what a node reads: an edge, or a name among its inputs."""
        if value in self._read.externals and name not in graph.nodes[node]["inputs"]:
            graph.nodes[node]["inputs"].append(name)
        if value not in self._makers:
            return
        unit, step = self._makers[value]
        before, cell = numbers[unit, step], self._read.units[unit].cell
        if not graph.has_edge(before, node):
            graph.add_edge(before, node, output=[], input=[])
        graph.edges[before, node]["output"].append(
            list(cell.outputs)[(value - self._read.units[unit].first_value) % len(cell.outputs)]
        )
        graph.edges[before, node]["input"].append(name)

    def save(self, path: str | Path) -> None:
        """Draws the graph (svg or png by suffix), coloured by cell type and subgraph. Needs matplotlib.

        Raises ValueError for more than MAX_DRAWN_NODES nodes, which nobody could read.
        """
        if self.num_nodes > MAX_DRAWN_NODES:
            raise ValueError(f"the graph has {self.num_nodes} nodes; at most {MAX_DRAWN_NODES} can be drawn")
        try:
            from cellrt.view.graph_drawing import save_graph
        except ImportError as error:
            raise ImportError(NEEDS_MATPLOTLIB) from error
        save_graph(self.to_networkx(), Path(path))
