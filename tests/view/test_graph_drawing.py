"""The picture of a cell graph: its structure in the SVG, and what the layout promises for any graph."""

from __future__ import annotations

import builtins
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.view.cell_graph import CellGraph
from cellrt.view.graph_drawing import save_graph
from cellrt.view.graph_layout import heights, layers

SVG = "{http://www.w3.org/2000/svg}"


def chain(length: int) -> nx.DiGraph:
    graph = nx.DiGraph()
    for step in range(length):
        graph.add_node(step, cell="lstm", subgraph=0, step=step)
        if step:
            graph.add_edge(step - 1, step, output=("h", "c"), input=("h", "c"))
    return graph


def tree(num_leaves: int) -> nx.DiGraph:
    """A balanced binary tree; here every leaf is a subgraph, and the inner nodes are one more."""
    graph = nx.DiGraph()
    level = []
    for leaf in range(num_leaves):
        graph.add_node(leaf, cell="tree_leaf", subgraph=leaf, label=f"word {leaf}")
        level.append(leaf)
    while len(level) > 1:
        parents = []
        for left, right in zip(level[::2], level[1::2], strict=True):
            parent = len(graph)
            graph.add_node(parent, cell="tree_node", subgraph=num_leaves)
            graph.add_edge(left, parent, output="h", input="left")
            graph.add_edge(right, parent, output="h", input="right")
            parents.append(parent)
        level = parents
    return graph


def encoder_decoder(length: int) -> nx.DiGraph:
    """As many encoder as decoder steps; every decoder step looks at all encoder steps."""
    graph = nx.DiGraph()
    for step in range(length):
        graph.add_node(("encoder", step), cell="encoder", subgraph=0)
        if step:
            graph.add_edge(("encoder", step - 1), ("encoder", step), output="h", input="h")
    for step in range(length):
        graph.add_node(("decoder", step), cell="decoder", subgraph=1)
        for other in range(length):
            graph.add_edge(("encoder", other), ("decoder", step), output="h", input="memory")
        if step:
            graph.add_edge(("decoder", step - 1), ("decoder", step), output="h", input="h")
    return graph


GRAPHS = {
    "one": chain(1),
    "chain of 24": chain(24),
    "tree of 16": tree(16),
    "encoder-decoder of 40": encoder_decoder(20),
    "chain of 300": chain(300),
    "tree of 128": tree(128),
}


def groups(path: Path) -> dict[str, ElementTree.Element]:
    """The named groups of an SVG."""
    return {g.get("id", ""): g for g in ElementTree.parse(path).iter(f"{SVG}g")}


def names(found: dict[str, ElementTree.Element], kind: str) -> set[str]:
    return {name.removeprefix(f"{kind}-") for name in found if name.startswith(f"{kind}-")}


def num_outlines(group: ElementTree.Element) -> int:
    """How many closed outlines the paths of a group have."""
    return sum(len(re.findall("z", path.get("d", ""))) for path in group.iter(f"{SVG}path"))


@pytest.mark.parametrize("name", GRAPHS)
def test_picture_shows_every_node_edge_and_subgraph(name: str, tmp_path: Path) -> None:
    graph, path = GRAPHS[name], tmp_path / "graph.svg"
    save_graph(graph, path)
    found = groups(path)
    assert names(found, "node") == {str(node) for node in graph}
    assert names(found, "edge") == {f"{u}-{v}" for u, v in graph.edges}
    members: dict[str, int] = {}
    for _, subgraph in graph.nodes(data="subgraph"):
        members[str(subgraph)] = members.get(str(subgraph), 0) + 1
    assert {k: num_outlines(found[f"subgraph-{k}"]) for k in names(found, "subgraph")} == members
    if len(graph) <= 120:
        assert names(found, "label") == names(found, "node")
        assert names(found, "number") == set(members)
    else:
        assert not names(found, "label") and not names(found, "number")


def test_legend_has_a_patch_a_cell_type(tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    save_graph(tree(4), path)
    found = groups(path)
    colours = {re.findall("fill: (#[0-9a-f]+)", ElementTree.tostring(found[f"node-{n}"], "unicode"))[0] for n in (0, 6)}
    assert len(colours) == 2, "a leaf and the root differ"
    legend = ElementTree.tostring(found["legend_1"], "unicode")
    assert all(colour in legend for colour in colours)


def test_subgraph_label_and_edge_names_are_optional(tmp_path: Path) -> None:
    graph = nx.DiGraph()
    graph.add_node("$a$", cell="$cell_1")
    graph.add_node("<b>", cell="_cell 2", label="$\\frac$ and far too long to fit")
    graph.add_edge("$a$", "<b>")
    path = tmp_path / "plain.svg"
    save_graph(graph, path)
    assert names(groups(path), "node") == {"$a$", "<b>"}
    assert not names(groups(path), "subgraph")


def test_marks_show_what_reads_the_request_and_what_gives_a_result(tmp_path: Path) -> None:
    graph, path = chain(5), tmp_path / "graph.svg"
    graph.nodes[0]["inputs"], graph.nodes[1]["inputs"], graph.nodes[4]["results"] = ["x"], [], ["h", "c"]
    save_graph(graph, path)
    found = groups(path)
    assert names(found, "input") == {"0"} and names(found, "result") == {"4"}
    assert "below a box: it reads the request, above a box: it gives a result" in path.read_text()


def test_a_note_explains_arrows_between_other_names(tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    for graph, is_explained in ((tree(4), True), (chain(4), False)):
        save_graph(graph, path)
        assert ("output h is read as input x" in path.read_text()) == is_explained


def test_picture_as_png(tmp_path: Path) -> None:
    path = tmp_path / "graph.PNG"
    save_graph(chain(3), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@st.composite
def acyclic_graphs(draw: st.DrawFn) -> nx.DiGraph:
    size = draw(st.integers(1, 14))
    graph = nx.DiGraph()
    for node in range(size):
        graph.add_node(node, cell=draw(st.sampled_from("ab")))
    pairs = [(u, v) for u in range(size) for v in range(u + 1, size)]
    graph.add_edges_from(draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else [])
    return graph


@settings(deadline=None)
@given(acyclic_graphs())
def test_layout_goes_forward_and_keeps_nodes_apart(graph: nx.DiGraph) -> None:
    layer = layers(graph)
    assert all(layer[u] < layer[v] for u, v in graph.edges)
    assert all(layer[node] >= 0 for node in graph)
    assert max(layer.values()) == nx.dag_longest_path_length(graph, weight=None, default_weight=1)
    height = heights(graph, layer)
    for u in graph:
        for v in graph:
            if u != v and layer[u] == layer[v]:
                assert abs(height[u] - height[v]) >= 1 - 1e-6


def test_a_chain_lies_straight_and_a_tree_has_no_crossings() -> None:
    graph = chain(30)
    assert set(heights(graph, layers(graph)).values()) == {heights(graph, layers(graph))[0]}
    graph = tree(16)
    height = heights(graph, layers(graph))
    assert [height[leaf] for leaf in range(16)] == sorted(height[leaf] for leaf in range(16))
    for node in range(16, 31):
        left, right = graph.predecessors(node)
        assert height[node] == pytest.approx((height[left] + height[right]) / 2)


def test_an_input_stands_just_before_the_node_that_needs_it() -> None:
    graph = chain(5)
    graph.add_node("word", cell="embedding")
    graph.add_edge("word", 4)
    assert layers(graph)["word"] == 3


def test_picture_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without nodes"):
        save_graph(nx.DiGraph(), tmp_path / "graph.svg")
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png, not '\.pdf'"):
        save_graph(chain(2), tmp_path / "graph.pdf")
    graph = chain(2)
    graph.add_edge(1, 0)
    with pytest.raises(ValueError, match="cycles"):
        save_graph(graph, tmp_path / "graph.svg")
    graph = chain(2)
    graph.add_node("bare")
    with pytest.raises(ValueError, match="node 'bare' has no attribute 'cell'"):
        save_graph(graph, tmp_path / "graph.svg")
    assert list(tmp_path.iterdir()) == []


def test_picture_without_matplotlib_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *args, **kwargs)

    class Chain(CellGraph):
        num_nodes = 2

        def __init__(self) -> None:
            """Has no template."""

        def to_networkx(self) -> nx.DiGraph:
            return chain(self.num_nodes)

    Chain().save(tmp_path / "graph.svg")
    monkeypatch.delitem(sys.modules, "cellrt.view.graph_drawing")
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        Chain().save(tmp_path / "graph.svg")
