"""A request's cell graph, to look at: as networkx, as a picture."""

from __future__ import annotations

from pathlib import Path

import networkx as nx

from cellrt.core.processor import Processor
from cellrt.core.shape import Shape

MAX_DRAWN_NODES = 2_000


class CellGraph:
    """A compiled cell graph. ``num_subgraphs`` counts what the scheduler is handed."""

    def __init__(self, shape: Shape, cell_names: list[str], processor: Processor) -> None:
        self._shape, self._cell_names = shape, cell_names
        self._types, self._ports = processor.tables.types, processor.tables.ports

    @property
    def num_nodes(self) -> int:
        """Cell invocations; a loop is one node."""
        return int(self._shape.arrays.nodes.size)

    @property
    def num_subgraphs(self) -> int:
        """Subgraphs that the graph is cut into."""
        return int(self._shape.arrays.subgraphs.size)

    def to_networkx(self) -> nx.DiGraph:
        """Nodes have ``cell``, ``subgraph`` and ``label``; edges lists ``output`` and ``input`` of port numbers."""
        shape, graph = self._shape, nx.DiGraph()
        producer: dict[int, tuple[int, int]] = {}
        for node, type_id in enumerate(shape.node_types.tolist()):
            row = shape.arrays.nodes[node]
            for output in range(int(self._types["num_outputs"][type_id])):
                producer[int(row["first_value"]) + output] = (node, output)
            limit = int(shape.arrays.subgraphs["loop_limit"][int(row["subgraph"])])
            label = f"loop up to {limit}" if limit else str(node)
            graph.add_node(node, cell=self._cell_names[type_id], subgraph=int(row["subgraph"]), label=label)
        for node, type_id in enumerate(shape.node_types.tolist()):
            at, first_value = int(shape.arrays.nodes["first_link"][node]), int(shape.arrays.nodes["first_value"][node])
            first_port = int(self._types["first_port"][type_id])
            for port in range(int(self._types["num_inputs"][type_id])):
                ragged = bool(self._ports["ragged"][first_port + port])
                count = int(shape.arrays.links[at]) if ragged else 1
                at += int(ragged)
                for relative in shape.arrays.links[at : at + count].tolist():
                    if first_value + relative in producer:
                        before, output = producer[first_value + relative]
                        if not graph.has_edge(before, node):
                            graph.add_edge(before, node, output=[], input=[])
                        graph.edges[before, node]["output"].append(output)
                        graph.edges[before, node]["input"].append(port)
                at += count
        return graph

    def save(self, path: str | Path) -> None:
        """Draws the graph (svg or png by suffix), coloured by cell type and subgraph. Needs ``cellrt[plot]``.

        Raises ValueError for more than MAX_DRAWN_NODES nodes, which nobody could read.
        """
        if self.num_nodes > MAX_DRAWN_NODES:
            raise ValueError(f"the graph has {self.num_nodes} nodes; at most {MAX_DRAWN_NODES} can be drawn")
        from cellrt.picture import save_graph

        save_graph(self.to_networkx(), Path(path))
