"""A request's cell graph, to look at: as networkx, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import networkx as nx

from cellrt.core.shape import Shape
from cellrt.core.tables import STARTS
from cellrt.definition.cell import Cell
from cellrt.view.paper import NEEDS_MATPLOTLIB

MAX_DRAWN_NODES = 2_000


class CellGraph:
    """A compiled cell graph. ``num_subgraphs`` counts what the scheduler is handed."""

    def __init__(self, shape: Shape, cells: Mapping[int, Cell]) -> None:
        self._shape, self._cells = shape, cells

    def __repr__(self) -> str:
        return f"CellGraph({self.num_nodes} nodes, {self.num_subgraphs} subgraphs)"

    @property
    def num_nodes(self) -> int:
        """Cell invocations; a loop is one node."""
        return int(self._shape.arrays.nodes.size)

    @property
    def num_subgraphs(self) -> int:
        """Subgraphs that the graph is cut into."""
        return int(self._shape.arrays.subgraphs.size)

    def to_networkx(self) -> nx.DiGraph:
        """Nodes have ``cell``, ``subgraph``, ``label``, and names of what comes from the request and what goes to its
        client, ``inputs`` and ``results``; edges have lists of names, ``output`` and ``input``."""
        shape, graph = self._shape, nx.DiGraph()
        externals = set(shape.arrays.externals.tolist())
        producer: dict[int, tuple[int, str]] = {}
        # A state of a new session is what it begins with.
        rows = shape.arrays.values["row"].tolist()
        starts = {value: STARTS - row for value, row in enumerate(rows) if row <= STARTS}
        is_result = (shape.arrays.values["result"] >= 0).tolist()
        for node, type_id in enumerate(shape.node_types.tolist()):
            cell, first_value = self._cells[type_id], int(shape.arrays.nodes["first_value"][node])
            producer.update({value: (node, output) for value, output in enumerate(cell.outputs, first_value)})
            results = [output for value, output in enumerate(cell.outputs, first_value) if is_result[value]]
            subgraph = int(shape.arrays.nodes["subgraph"][node])
            limit = int(shape.arrays.subgraphs["loop_limit"][subgraph])
            label = f"loop up to {limit}" if limit else str(node)
            graph.add_node(node, cell=cell.name, subgraph=subgraph, label=label, inputs=[], results=results)
        for node, type_id in enumerate(shape.node_types.tolist()):
            at, first_value = int(shape.arrays.nodes["first_link"][node]), int(shape.arrays.nodes["first_value"][node])
            for name, spec in self._cells[type_id].inputs.items():
                count = int(shape.arrays.links[at]) if spec.ragged else 1
                at += int(spec.ragged)
                for relative in shape.arrays.links[at : at + count].tolist():
                    value = first_value + relative
                    value = starts.get(value, value)
                    if value in externals and name not in graph.nodes[node]["inputs"]:
                        graph.nodes[node]["inputs"].append(name)
                    if value in producer:
                        before, output = producer[value]
                        if not graph.has_edge(before, node):
                            graph.add_edge(before, node, output=[], input=[])
                        graph.edges[before, node]["output"].append(output)
                        graph.edges[before, node]["input"].append(name)
                at += count
        return graph

    def save(self, path: str | Path) -> None:
        """Draws the graph (svg or png by suffix), coloured by cell type and subgraph. Needs ``cellrt[plot]``.

        Raises ValueError for more than MAX_DRAWN_NODES nodes, which nobody could read.
        """
        if self.num_nodes > MAX_DRAWN_NODES:
            raise ValueError(f"the graph has {self.num_nodes} nodes; at most {MAX_DRAWN_NODES} can be drawn")
        try:
            from cellrt.view.graph_drawing import save_graph
        except ImportError as error:
            raise ImportError(NEEDS_MATPLOTLIB) from error
        save_graph(self.to_networkx(), Path(path))
