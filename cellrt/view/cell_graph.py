"""A request's cell graph, to look at: as networkx, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cellrt.core.templates.partition import partition
from cellrt.core.templates.program import (
    CARRY,
    EMITTED,
    LEADS,
    NOTHING,
    OP_EXTERNAL,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    PAGED,
    RANGE,
    SAME,
)
from cellrt.core.templates.program_operations import Input, Operation, operations
from cellrt.definition.cell import Cell
from cellrt.view.paper import NEEDS_MATPLOTLIB

if TYPE_CHECKING:
    import networkx as nx

MAX_DRAWN_NODES = 2_000


class Unit(NamedTuple):
    """A node, chain, loop or member of one, of a program.

    ``limit``: most steps of a loop, else 0; ``left``: how many units of the same body follow. ``is_one``: it is a
    subgraph of its own. ``inputs`` has each by its name; of a growing state also the first output of the step that
    appended to it last, or -1.
    """

    cell: Cell
    cell_type: int
    first_value: int
    steps: int
    limit: int
    left: int
    is_one: bool
    inputs: list[tuple[str, Input, int]]

    def reads(self, step: int) -> Iterator[tuple[str, int]]:
        """(input, value) of all that a step reads."""
        before = self.first_value + (step - 1) * len(self.cell.outputs)
        for name, source, appended in self.inputs:
            values = source.named() if source.mode == LEADS else source.named_at(step)
            if source.mode == PAGED:
                last = before if step > 0 and self.cell.inputs[name].appends else appended
                values = [last] if last >= 0 else []
            elif source.mode == CARRY and step > 0:
                values = [before + self.cell.output_index[self.cell.carry[name]]]
            elif source.mode in (EMITTED, SAME):
                values = [source.value]
            yield from ((name, value) for value in values)


class _Reader:
    """Reads a program."""

    def __init__(self, program: bytes, cells: Mapping[int, Cell]) -> None:
        self._cells = cells
        self.units: list[Unit] = []
        self.externals: set[int] = set()
        self.results: set[int] = set()
        self.starts: dict[int, int] = {}
        """The value that each state begins with."""
        self._appended: dict[int, int] = {}
        ports = {number: (len(cell.inputs), len(cell.outputs)) for number, cell in cells.items()}
        for operation in operations(program, ports):
            if operation.is_unit:
                self._note_unit(operation)
            elif operation.op == OP_EXTERNAL:
                self.externals.update(range(operation.value, operation.value + operation.length))
            elif operation.start >= 0:
                self.starts[operation.value] = operation.start
            elif operation.op == OP_RESULT:
                self.results.update(operation.first + k * operation.stride for k in range(operation.length))
            elif operation.op in (OP_RESULT_STEPS, OP_RESULT_LAST):
                self.results.add(operation.first)

    def _note_unit(self, unit: Operation) -> None:
        cell, steps = self._cells[unit.cell_type], unit.num_steps
        inputs = [
            (name, source, self._appended.get(source.state, -1)) for name, source in zip(cell.inputs, unit.inputs)
        ]
        for name, source, _ in inputs:
            if source.mode == PAGED and cell.inputs[name].appends:
                self._appended[source.state] = unit.value + (steps - 1) * len(cell.outputs)
        limit = unit.length if unit.op in (OP_LOOP, OP_MEMBER) else 0
        whole = RANGE, PAGED, NOTHING, EMITTED
        is_one = unit.op != OP_NODE or any(source.mode in whole for source in unit.inputs)
        left = max(0, unit.left)
        self.units.append(Unit(cell, unit.cell_type, unit.value, steps, limit, left, is_one, inputs))


class CellGraph:
    """The cell graph of a recorded program. ``num_subgraphs`` counts what the scheduler is handed.

    Args:
        program: the words of ``core/templates/program.py``.
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

    def type_edges(self) -> set[tuple[int, int]]:
        """Return the cell types of which the second reads what the first makes."""
        return {
            (self._read.units[self._makers[self._read.starts.get(value, value)][0]].cell_type, unit.cell_type)
            for unit in self._read.units
            for step in range(unit.steps)
            for _, value in unit.reads(step)
            if self._is_made(value)
        }

    def to_networkx(self) -> nx.DiGraph:
        """Return the graph for networkx.

        Nodes have ``cell``, ``cell_type``, ``subgraph``, ``label``, and two lists of names: ``inputs`` that come from
        the request, and ``results`` that go to the client. Edges have lists of names, ``output`` and ``input``.
        """
        import networkx as nx  # an engine starts without these hundreds of modules

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
        """Add what a node reads: an edge, or a name among its inputs."""
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
        """Draw the graph (svg or png by suffix), coloured by cell type and subgraph. Needs matplotlib.

        Raise ValueError for more than MAX_DRAWN_NODES nodes, which nobody could read.
        """
        if self.num_nodes > MAX_DRAWN_NODES:
            raise ValueError(f"the graph has {self.num_nodes} nodes; at most {MAX_DRAWN_NODES} can be drawn")
        try:
            from cellrt.view.graph_drawing import save_graph
        except ImportError as error:
            raise ImportError(NEEDS_MATPLOTLIB) from error
        save_graph(self.to_networkx(), Path(path))
