"""A picture of one cell graph: cells as boxes from left to right, coloured by cell type, subgraphs as halos.

Drawing needs matplotlib, which the extra ``plot`` brings.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import cycle
from pathlib import Path

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import BoxStyle, FancyArrowPatch, Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke

from cellrt.view.graph_layout import heights, layers
from cellrt.view.paper import CELL_COLOURS, DOTS_PER_INCH, INK, PICTURES, known_suffix, shorten, write

SUBGRAPH_COLOURS = ("#cfe3f5", "#fde0c2", "#d5ecd0", "#ecd9ea", "#f9d3d3", "#d6efec", "#faf0c3", "#e6dad3")
SUBGRAPH_INKS = ("#2f6690", "#b35c00", "#2f7a2a", "#7d4a72", "#b0272c", "#2f7f79", "#8f7400", "#6b4a38")
LABELLED_NODES = 120  # graphs of more nodes are drawn small and without labels
LABELLED_EDGES = 40
LONGEST_LABEL = 12  # characters
SMALL, NODE_TEXT = 5.5, 6.5  # points


def save_graph(graph: nx.DiGraph, path: str | Path) -> None:
    """Draw a cell graph into an SVG or PNG file; the suffix of ``path`` says which.

    Each node needs ``cell``, the name of its cell type. It may have ``subgraph``, an integer: nodes of one
    subgraph lie in one halo with that number. The text in a node is its ``label``, else its ``step``, else the
    node itself. It may have ``inputs``, names of what it reads of the request, and ``results``, of what goes to
    the client: a mark below its box, and above. Edges may have ``output`` and ``input``, a name or several: what
    flows and where it goes in.
    Nodes stand left to right by the longest path that leads to them; a node with nothing to wait for
    stands just before the first that needs it. A long narrow graph is broken into lines like text. In an
    SVG, the groups ``node-<node>``, ``label-<node>``, ``input-<node>``, ``result-<node>``, ``edge-<node>-<node>`` and
    ``subgraph-<number>`` hold the shapes.

    Raises:
        ValueError: the graph is empty or has a cycle, a node has no ``cell``, or the suffix is unknown.
    """
    suffix = known_suffix(path, PICTURES)
    if not graph:
        raise ValueError("cannot draw a cell graph without nodes")
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError(f"a cell graph has no cycles, but this one has {nx.find_cycle(graph)}")
    for node, cell in graph.nodes(data="cell"):
        if cell is None:
            raise ValueError(f"node {node!r} has no attribute 'cell', the name of its cell type")
    GraphDrawing(graph).figure().savefig(path, format=suffix[1:], dpi=DOTS_PER_INCH)


def _names(value: object) -> list[str]:
    """Return an edge's ``output`` or ``input``: none, one name, or several."""
    if value is None:
        return []
    if isinstance(value, (list, tuple, set, frozenset)):
        return [str(name) for name in value]
    return [str(value)]


def _edge_text(data: dict[str, object]) -> str:
    """Return the label of an edge: ``h`` where output and input share the name, else ``h→x``."""
    outputs, inputs = _names(data.get("output")), _names(data.get("input"))
    if outputs == inputs or not inputs:
        return ", ".join(outputs)
    return f"{', '.join(outputs)}→{', '.join(inputs)}"


class GraphDrawing:
    """The picture of one graph. All lengths and places are inches on paper, y upward."""

    line_width = 15.0  # a longer graph is broken into lines

    def __init__(self, graph: nx.DiGraph) -> None:
        self.graph = graph
        cells = sorted({str(cell) for _, cell in graph.nodes(data="cell")})
        self.colours = dict(zip(cells, cycle(CELL_COLOURS), strict=False))
        self.members: dict[int, list[Hashable]] = {}
        for node, subgraph in graph.nodes(data="subgraph"):
            if subgraph is not None:
                self.members.setdefault(subgraph, []).append(node)

        self.is_dense = graph.number_of_edges() > 3 * len(graph)
        has_labels = len(graph) <= LABELLED_NODES
        self.labels = {node: self.node_text(node) for node in graph} if has_labels else {}
        self.edge_labels: dict[tuple[Hashable, Hashable], str] = {}
        if graph.number_of_edges() <= LABELLED_EDGES:
            self.edge_labels = {
                (u, v): shorten(_edge_text(data), LONGEST_LABEL) for u, v, data in graph.edges(data=True)
            }
        longest = max(map(len, self.labels.values()), default=0)
        longest_edge = max(map(len, self.edge_labels.values()), default=0)
        self.box_width = max(0.3, 0.07 * longest + 0.14) if has_labels else 0.16
        self.box_height = 0.24 if has_labels else 0.14
        self.halo = 0.07 if has_labels else 0.03
        self.row = 0.46 if has_labels else 0.22
        self.gap = max(0.3, 0.058 * longest_edge + 0.22) if has_labels else 0.14
        self.notes = self.list_notes()
        self.place_nodes()

    def list_notes(self) -> list[str]:
        """Return the notes below the picture: counts, and the meaning of its marks."""
        counts = f"nodes: {len(self.graph)}, edges: {self.graph.number_of_edges()}"
        if self.members:
            counts += f", subgraphs (halos): {len(self.members)}"
        notes = [counts]
        places = {"inputs": "below a box: it reads the request", "results": "above a box: it gives a result"}
        marks = [text for kind, text in places.items() if any(names for _, names in self.graph.nodes(data=kind))]
        if marks:
            notes.append(f"▴ {', '.join(marks)}")
        if any("→" in text for text in self.edge_labels.values()):
            notes.append("h→x on an arrow: output h is read as input x")
        return notes

    def node_text(self, node: Hashable) -> str:
        """Return the text in a node's box."""
        data = self.graph.nodes[node]
        return shorten(str(data.get("label", data.get("step", node))), LONGEST_LABEL)

    def place_nodes(self) -> None:
        """Find each node's line and centre, and the size of the picture."""
        self.layer = layers(self.graph)
        height = heights(self.graph, self.layer)
        num_layers = max(self.layer.values()) + 1
        tallest = (max(height.values()) - min(height.values())) * self.row
        self.gap = max(self.gap, min(0.5 * tallest, self.line_width) / num_layers - self.box_width)
        pitch = self.box_width + self.gap
        num_lines = -(-num_layers // max(1, int(self.line_width / pitch)))
        per_line = -(-num_layers // num_lines)
        self.line = {node: layer // per_line for node, layer in self.layer.items()}
        self.margin = 0.2 + (self.turn if num_lines > 1 else 0)
        self.centre = {
            node: (self.margin + self.box_width / 2 + (layer % per_line) * pitch, -height[node] * self.row)
            for node, layer in self.layer.items()
        }
        self.stack_lines(num_lines)
        self.width = max(4.2, 2 * self.margin + per_line * pitch - self.gap)

    def stack_lines(self, num_lines: int) -> None:
        """Move the lines below each other, and below the legend, with room for nodes and edges."""
        self.middle = [0.0] * num_lines
        self.above = [0.0] * num_lines  # where the space between a line and the one before it lies
        edges = [(u, v) for u, v in self.graph.edges if self.line[u] == self.line[v]]
        jumps = any(self.line[u] != self.line[v] and not self.is_turning(u, v) for u, v in self.graph.edges)
        space = 1.1 if jumps else 0.4
        self.longest_span = max((self.span(u, v) for u, v in edges), default=1)
        below = -0.15 - 0.18 * -(-len(self.colours) // 4)
        for line in range(num_lines):
            nodes = [node for node in self.graph if self.line[node] == line]
            ys = [self.centre[node][1] for node in nodes]
            self.middle[line] = (min(ys) + max(ys)) / 2
            peaks = [self.peak(u, v)[1] for u, v in edges if self.line[u] == line]
            high, low = max(ys + peaks) + 0.3, min(ys + peaks) - 0.25
            self.above[line] = below - space / 2
            shift = below - high - (space if line else 0)
            for node in nodes:
                self.centre[node] = (self.centre[node][0], self.centre[node][1] + shift)
            self.middle[line] += shift
            below = low + shift
        self.height = -below + 0.2 + 0.12 * (len(self.notes) - 1)

    def figure(self) -> Figure:
        """Return the whole picture: legend, halos, edges, nodes, and notes."""
        figure = Figure(figsize=(self.width, self.height), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, self.width)
        axes.set_ylim(-self.height, 0)
        handles = [Patch(facecolor=colour, label=cell) for cell, colour in self.colours.items()]
        legend = figure.legend(handles=handles, ncols=4, loc="upper left", fontsize=7, frameon=False, borderaxespad=0.3)
        for text in legend.get_texts():
            text.set_parse_math(False)
        for line, note in enumerate(reversed(self.notes)):
            write(axes, 0.1, -self.height + 0.1 + 0.12 * line, note, ha="left", fontsize=SMALL)
        for rank, (subgraph, nodes) in enumerate(sorted(self.members.items())):
            self.draw_subgraph(axes, subgraph, nodes, rank % len(SUBGRAPH_COLOURS))
        self.draw_edges(axes)
        self.draw_nodes(axes)
        return figure

    def draw_subgraph(self, axes: Axes, subgraph: int, nodes: list[Hashable], colour: int) -> None:
        """Draw a halo round a subgraph's nodes and along the edges between them, and its number."""
        for u, v in self.graph.subgraph(nodes).edges:
            style = {"edgecolor": SUBGRAPH_COLOURS[colour], "linewidth": 72 * 0.6 * self.box_height}
            axes.add_patch(PathPatch(self.curve(u, v), fill=False, capstyle="round", zorder=0, **style))
        outlines = [self.box(node, self.halo) for node in nodes]
        style = {"facecolor": SUBGRAPH_COLOURS[colour], "linewidth": 0, "gid": f"subgraph-{subgraph}"}
        axes.add_patch(PathPatch(Outline.make_compound_path(*outlines), zorder=0.5, **style))
        if self.labels:
            x, y = self.centre[min(nodes, key=lambda node: (self.line[node], *self.centre[node]))]
            x, y = x - self.box_width / 2 - 0.04, y + self.box_height / 2 + self.halo
            style = {
                "fontweight": "bold",
                "fontsize": SMALL,
                "color": SUBGRAPH_INKS[colour],
                "gid": f"number-{subgraph}",
            }
            write(axes, x, y, str(subgraph), ha="left", zorder=4, **style)

    def draw_edges(self, axes: Axes) -> None:
        """Arrows, fainter and without heads where they are many, and the names on them where they are few."""
        for u, v in self.graph.edges:
            curve = self.curve(u, v)
            axes.add_patch(
                FancyArrowPatch(
                    path=curve,
                    arrowstyle="-" if self.is_dense else "-|>",
                    mutation_scale=6 if self.labels else 4,
                    linewidth=0.4 if self.is_dense else 0.8,
                    alpha=0.45 if self.is_dense else 0.9,
                    color=INK,
                    fill=True,
                    gid=f"edge-{u}-{v}",
                    zorder=1,
                )
            )
            text = self.edge_labels.get((u, v))
            if text and self.line[u] == self.line[v]:
                x, y = self.peak(u, v)
                glow = withStroke(linewidth=1.5, foreground="white", alpha=0.8)
                write(axes, x, y + 0.015, text, va="bottom", fontsize=SMALL, zorder=3, path_effects=[glow])

    def draw_nodes(self, axes: Axes) -> None:
        """Boxes coloured by cell type, with their texts and the marks of what they read and give."""
        for node, cell in self.graph.nodes(data="cell"):
            colour = self.colours[str(cell)]
            axes.add_patch(PathPatch(self.box(node), fc=colour, lw=0, gid=f"node-{node}", zorder=2))
            if self.labels:
                style = {"va": "center_baseline", "fontsize": NODE_TEXT, "color": "white", "gid": f"label-{node}"}
                x, y = self.centre[node]
                write(axes, x, y, self.labels[node], zorder=3, **style)
            for kind, side in (("inputs", -1), ("results", 1)):
                if self.graph.nodes[node].get(kind):
                    x, y = self.centre[node]
                    y += side * (self.box_height / 2 + 0.03)
                    axes.plot(x, y, "^", ms=2.5, mew=0, color=INK, gid=f"{kind[:-1]}-{node}", zorder=4)

    def box(self, node: Hashable, padding: float = 0.0) -> Outline:
        """Return the rounded outline of a node, wider by ``padding`` on each side."""
        x, y = self.centre[node]
        width, height = self.box_width + 2 * padding, self.box_height + 2 * padding
        round_box = BoxStyle.Round(pad=0.0, rounding_size=min(0.08, height / 3))
        return round_box(x - width / 2, y - height / 2, width, height, 1.0)

    def curve(self, u: Hashable, v: Hashable) -> Outline:
        """Return the way of an edge, around what lies between."""
        (x0, y0), (x1, y1) = self.centre[u], self.centre[v]
        if self.line[u] == self.line[v]:
            return Outline(self.control_points(u, v), [1, 4, 4, 4])
        if not self.is_turning(u, v):
            y0, y1 = y0 - self.box_height / 2, y1 + self.box_height / 2
            return Outline([(x0, y0), (x0, y0 - 0.3), (x1, y1 + 0.3), (x1, y1)], [1, 4, 4, 4])
        x0, x1 = x0 + self.box_width / 2, x1 - self.box_width / 2
        turn, between = self.turn, self.above[self.line[v]]
        points = [
            (x0, y0),
            (x0 + turn, y0),
            (x0 + turn, between),
            (x0, between),
            (x1, between),
            (x1 - turn, between),
            (x1 - turn, y1),
            (x1, y1),
        ]
        return Outline(points, [1, 4, 4, 4, 2, 4, 4, 4])

    def control_points(self, u: Hashable, v: Hashable) -> list[tuple[float, float]]:
        """Return the cubic curve of an edge within a line: the more layers it skips, the further it swings out."""
        (x0, y0), (x1, y1) = self.centre[u], self.centre[v]
        x0, x1 = x0 + self.box_width / 2, x1 - self.box_width / 2
        bow = min(0.22, 1.6 / self.longest_span) * (self.span(u, v) - 1)
        if (y0 + y1) / 2 < self.middle[self.line[u]] - 1e-6:
            bow = -bow
        reach = (0.3 if bow else 0.5) * (x1 - x0)
        return [(x0, y0), (x0 + reach, y0 + bow), (x1 - reach, y1 + bow), (x1, y1)]

    def peak(self, u: Hashable, v: Hashable) -> tuple[float, float]:
        """Return the middle of an edge within a line."""
        x, y = np.average(self.control_points(u, v), axis=0, weights=(1, 3, 3, 1))
        return float(x), float(y)

    @property
    def turn(self) -> float:
        """The distance by which an edge to the next line leaves its line sideways."""
        return min(0.8 * self.gap, 0.3)

    def is_turning(self, u: Hashable, v: Hashable) -> bool:
        """Return whether an edge to another line goes round like the end of a line of text, being a short one."""
        return self.span(u, v) <= (1 if self.is_dense else 3)

    def span(self, u: Hashable, v: Hashable) -> int:
        """Return how many layers an edge goes forward."""
        return self.layer[v] - self.layer[u]
