"""Default priorities of cells, from the order in which a model's example uses them."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from cellrt.definition.cell import Cell
from cellrt.view.cell_graph import CellGraph


def default_priorities(program: bytes, cells: Mapping[int, Cell]) -> dict[int, int]:
    """Return a priority for each cell type from an example's graph: cell types later in the graph come first.

    (BatchMaker section 2.4.3: decoder before encoder, internal before leaf.) Types on a cycle share a depth; those that
    the example does not use have 0.

    Args:
        program: the recorded program of the example.
        cells: the cells of the model, by type id.
    """
    nodes = CellGraph(program, cells).to_networkx()
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(cells)
    types = nodes.nodes(data="cell_type")
    graph.add_edges_from((types[before], types[after]) for before, after in nodes.edges)
    groups = nx.condensation(graph)
    depth: dict[int, int] = {}
    for group in nx.topological_sort(groups):
        depth[group] = max((depth[before] + 1 for before in groups.predecessors(group)), default=0)
    return {type_id: depth[group] for type_id, group in groups.graph["mapping"].items()}
