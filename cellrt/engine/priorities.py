"""Default priorities of cells, from the order in which a model's example uses them."""

from __future__ import annotations

from collections.abc import Mapping

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
    makers: dict[int, set[int]] = {type_id: set() for type_id in cells}
    for before, after in CellGraph(program, cells).type_edges():
        makers[after].add(before)
    sources = {type_id: _sources_of(type_id, makers) for type_id in cells}
    depth: dict[frozenset[int], int] = {}
    for found in sorted(set(sources.values()), key=len):  # types on a cycle have the same sources, those behind it more
        depth[found] = max((depth[sources[other]] + 1 for other in found if sources[other] != found), default=0)
    return {type_id: depth[found] for type_id, found in sources.items()}


def _sources_of(type_id: int, makers: Mapping[int, set[int]]) -> frozenset[int]:
    """Return the types from which edges lead to a type, over any number of others, and itself."""
    found, left = {type_id}, [type_id]
    while left:
        new = makers[left.pop()] - found
        found |= new
        left += new
    return frozenset(found)
