"""The layout of a cell graph: layers from left to right, and heights within each. Draws nothing."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import networkx as nx


def layers(graph: nx.DiGraph) -> dict[Hashable, int]:
    """Node to layer: the longest path that leads to it, or later where that shortens its edges.

    A node with no more inputs than outputs moves right until it stands just before a node that needs it.
    """
    layer = {node: index for index, found in enumerate(nx.topological_generations(graph)) for node in found}
    for node in sorted(layer, key=lambda node: -layer[node]):
        if 0 < graph.out_degree(node) >= graph.in_degree(node):
            layer[node] = min(layer[successor] for successor in graph.successors(node)) - 1
    return layer


def heights(graph: nx.DiGraph, layer: dict[Hashable, int], sweeps: int = 25) -> dict[Hashable, float]:
    """Node to its height in its layer, at least 1 apart, each near its neighbours in the layers beside it.

    Starts with the nodes that have no inputs one below the other, in the order of a depth-first search from the
    outputs. Trees and chains keep that order in each layer, as it has no crossings. A sweep to the right pulls each
    node to the mean height of its inputs, one to the left to that of its outputs. Edges between nodes of one cell type
    count more, and their nodes give way less, so that chains come out straight.
    """
    columns: list[list[Hashable]] = [[] for _ in range(max(layer.values()) + 1)]
    height: dict[Hashable, float] = {}
    is_forest = True
    for place, node in enumerate(nx.dfs_postorder_nodes(graph.reverse(copy=False))):
        inputs = list(graph.predecessors(node))
        height[node] = sum(height[other] for other in inputs) / len(inputs) if inputs else float(place)
        columns[layer[node]].append(node)
        is_forest &= graph.out_degree(node) <= 1
    strong = {edge for edge in graph.edges if graph.nodes[edge[0]]["cell"] == graph.nodes[edge[1]]["cell"]}

    def pull(node: Hashable, edges: Collection[tuple[Hashable, Hashable]]) -> tuple[float, float, float]:
        weights = {edge: 16.0 if edge in strong else 1.0 for edge in edges}
        total = sum(weights.values())
        if not total:
            return height[node], height[node], 0.1
        wish = sum(weight * height[u if v == node else v] for (u, v), weight in weights.items()) / total
        return wish, height[node], total

    for sweep in range(sweeps):
        is_rightward = sweep % 2 == 0
        for column in columns if is_rightward else reversed(columns):
            pulls = {n: pull(n, graph.in_edges(n) if is_rightward else graph.out_edges(n)) for n in column}
            if not is_forest:
                column.sort(key=lambda node: pulls[node][:2])
            places = apart([pulls[node][0] for node in column], [pulls[node][2] for node in column])
            height.update(zip(column, places, strict=True))
    return height


def apart(wishes: list[float], weights: list[float]) -> list[float]:
    """Return places at least 1 apart in the order of the wishes, nearest to them in weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # of touching places: start less the index, weight, how many
    for index, (wish, weight) in enumerate(zip(wishes, weights, strict=True)):
        start, size = wish - index, 1
        while blocks and blocks[-1][0] >= start:
            other, other_weight, count = blocks.pop()
            start = (start * weight + other * other_weight) / (weight + other_weight)
            weight, size = weight + other_weight, size + count
        blocks.append((start, weight, size))
    starts = [start for start, _, size in blocks for _ in range(size)]
    return [start + index for index, start in enumerate(starts)]
