"""Graphs from networkx: every node is computed from what its edges bring, whatever the order they were added in."""

from unittest.mock import patch

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cellrt
from cellrt.cells import BinaryTreeLSTMCell, ChildSumTreeLSTMCell
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders import dag
from tests.effort import examples
from tests.engine.helpers import assert_same, small_engine

SIZE = 4
STATE = cellrt.ragged(SIZE)


class Affine(torch.nn.Module):
    """A leaf with outputs of the same names as the Tree-LSTMs."""

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": value[:, None] + torch.arange(4.0), "c": value[:, None] * torch.ones(4)}


torch.manual_seed(0)
BINARY_MODULE, SUM_MODULE = BinaryTreeLSTMCell(None, SIZE), ChildSumTreeLSTMCell(2, SIZE)
NUMBER = cellrt.cell(Affine(), {"value": ()}, name="number")
BINARY = cellrt.cell(BINARY_MODULE, dict.fromkeys(("h_left", "c_left", "h_right", "c_right"), (SIZE,)), name="binary")
SUM = cellrt.cell(SUM_MODULE, {"x": (2,), "h": STATE, "c": STATE}, name="sum")
CELLS = {"number": NUMBER, "binary": BINARY, "sum": SUM}
LEFT, RIGHT = {"h_left": "h", "c_left": "c"}, {"h_right": "h", "c_right": "c"}


def two_numbers() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_node("root", cell="binary")
    graph.add_node("a", cell="number", value=2.0)
    graph.add_node("b", cell="number", value=torch.tensor(3.0))
    graph.add_edge("b", "root", feeds=RIGHT)
    graph.add_edge("a", "root", feeds=LEFT)
    return graph


def run(graph: object, **options: object) -> dict[str, torch.Tensor]:
    return run_one_by_one(dag("m", cells=CELLS, **options), graph)


def number(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = Affine()(torch.tensor([value]))
    return outputs["h"], outputs["c"]


@torch.no_grad()
def test_edges_say_which_output_feeds_which_input() -> None:
    (h_a, c_a), (h_b, c_b) = number(2.0), number(3.0)
    expected = BINARY_MODULE(h_left=h_a, c_left=c_a, h_right=h_b, c_right=c_b)
    assert_same(run(two_numbers()), {"h": expected.h, "c": expected.c})
    crossed = two_numbers()
    crossed.edges["a", "root"]["feeds"] = {"h_left": "c", "c_left": "h"}
    expected = BINARY_MODULE(h_left=c_a, c_left=h_a, h_right=h_b, c_right=c_b)
    assert_same(run(crossed, outputs=["h"]), {"h": expected.h})


@torch.no_grad()
def test_a_ragged_input_takes_all_its_edges_and_a_node_may_be_read_often() -> None:
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([(k, {"cell": "number", "value": float(k)}) for k in range(3)])
    graph.add_node("top", cell="sum", x=[0.5, -1.0])
    graph.add_edges_from([(2, "top"), (0, "top"), (2, "top")])
    states = [number(float(k)) for k in (2, 0, 2)]
    h, c = (cellrt.RaggedRows(torch.cat(values), torch.tensor([0, 3])) for values in zip(*states, strict=True))
    expected = SUM_MODULE(torch.tensor([[0.5, -1.0]]), h, c)
    graph.graph["results"] = ["top"]
    assert_same(run(graph), {"h": expected.h, "c": expected.c})


def test_results_are_of_the_nodes_asked_for_or_else_of_those_that_feed_no_other() -> None:
    graph = two_numbers()
    graph.add_node("alone", cell="sum", x=torch.zeros(2))
    graph.add_edge("a", "last")
    graph.add_node("last", cell="sum", x=torch.ones(2))
    by_default = run(graph)["h"]
    graph.graph["results"] = ["b", "last", "root", "alone", "last"]
    asked = run(graph)["h"]
    assert asked[0].tolist() == [3.0, 4.0, 5.0, 6.0]
    torch.testing.assert_close(by_default, asked[[2, 3, 1]])  # root, alone, last: in the order they were added


def random_graph(size: int, seed: int) -> nx.MultiDiGraph:
    """Numbers below, Tree-LSTMs above them, with edges between any two levels, added in any order."""
    generator = torch.Generator().manual_seed(seed)

    def choose(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    nodes: list[tuple[int, dict[str, object]]] = []
    edges: list[tuple[int, int, dict[str, object]]] = []
    for node in range(size):
        kind = ("number", "binary", "sum")[choose(3)] if node else "number"
        row = torch.randn(2, generator=generator)
        nodes.append((node, {"cell": kind, **({"number": {"value": row[0]}, "sum": {"x": row}}.get(kind, {}))}))
        if kind == "binary":
            edges += [(choose(node), node, {"feeds": feeds}) for feeds in (LEFT, RIGHT)]
        elif kind == "sum":
            edges += [(choose(node), node, {}) for _ in range(choose(5))]
    graph = nx.MultiDiGraph()
    for order, add in ((nodes, graph.add_nodes_from), (edges, graph.add_edges_from)):
        add([order[k] for k in torch.randperm(len(order), generator=generator).tolist()])
    return graph


@settings(deadline=None, max_examples=examples(10))
@given(seed=st.integers(0, 10_000))
def test_random_graphs_served_together_are_as_each_alone(seed: int) -> None:
    model = dag("m", cells=CELLS)
    graphs = [random_graph(1 + (seed + 7 * k) % 23, seed + k) for k in range(5)]
    with small_engine() as engine:
        engine.register(model)
        futures = [engine.submit("m", graph) for graph in graphs]
        for graph, future in zip(graphs, futures, strict=True):
            assert_same(future.result(timeout=30), run_one_by_one(model, graph))


def alike(size: int, seed: int, **feeds: object) -> nx.MultiDiGraph:
    """Nodes of one cell, with edges from any to any later one, added in any order."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.randperm(size, generator=generator).tolist()
    graph = nx.MultiDiGraph() if seed % 2 else nx.DiGraph()
    for name in torch.randperm(size, generator=generator).tolist():
        graph.add_node(name, cell="sum", x=torch.randn(2, generator=generator).tolist())
    for _ in range(2 * size if size > 1 else 0):
        start, end = sorted(torch.randperm(size, generator=generator)[:2].tolist())
        graph.add_edge(names[start], names[end], **feeds)
    graph.graph["results"] = names[::2]
    return graph


@given(size=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_nodes_that_are_alike_are_written_as_one_and_are_as_each_by_itself(size: int, seed: int) -> None:
    as_one, by_node = alike(size, seed), alike(size, seed, feeds={"h": "h", "c": "c"})
    assert_same(run(as_one), run(by_node))
    with patch.object(cellrt.Graph, "call", side_effect=AssertionError("written by itself")):
        run(as_one)


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], "a", None])
def test_a_wrong_attribute_names_its_node_also_of_nodes_that_are_alike(value: object) -> None:
    graph = alike(6, 2)
    for node in list(graph):
        changed = graph.copy()
        changed.nodes[node]["x"] = value
        with pytest.raises(RequestError, match=rf"node {node}: cell 'sum', .*'x.*': expected"):
            run(changed)
    del graph.nodes[3]["x"]
    with pytest.raises(RequestError, match=r"node 3: cell 'sum', .*'x': missing"):
        run(graph)


def changed(change: str) -> object:
    """The graph of two numbers after a mistake."""
    graph = two_numbers()
    exec(change, {"graph": graph, "nx": nx})
    return graph


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("graph.clear()", "at least one node, got an empty graph"),
        ("graph.add_edge('root', 'a')", "without cycles, found .* and back"),
        (
            "graph.add_node('x')",
            r"node 'x': expected an attribute cell, one of \['number', 'binary', 'sum'\], got None",
        ),
        ("graph.add_node('x', cell='sun')", "node 'x': expected an attribute cell.*got 'sun'"),
        ("graph.nodes['a']['valu'] = 1.0", "node 'a': .*'valu'.*unknown; the cell has inputs"),
        ("del graph.nodes['a']['value']", "node 'a': .*'value'.*missing"),
        ("graph.nodes['a']['value'] = [1.0, 2.0]", "node 'a': .*'value'"),
        ("graph.remove_edge('b', 'root')", "node 'root': .*'h_right'.*missing"),
        ("graph.edges['b', 'root'].clear()", "node 'root': the edge from 'b': expected feeds={input: output}"),
        ("graph.edges['b', 'root']['feeds'] = 'h'", "the edge from 'b': expected feeds=.*got 'h'"),
        (
            "graph.edges['b', 'root']['feeds'] = {'left': 'h'}",
            "from 'b' feeds input 'left' with output 'h': inputs are",
        ),
        ("graph.edges['b', 'root']['feeds'] = {'h_right': 'x'}", "from 'b' feeds input 'h_right' with output 'x'"),
        ("graph.edges['b', 'root']['feeds'] = {'h_left': 'h'}", "input 'h_left' is not ragged and fed by two edges"),
        ("graph.nodes['root']['h_left'] = [0.0] * 4", "input 'h_left' is both fed by an edge and an attribute"),
        ("graph.graph['results'] = []", "expected a list of nodes as the graph's attribute results"),
        ("graph.graph['results'] = ['z']", "results: there is no node 'z'"),
    ],
)
def test_a_mistake_is_named(change: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(changed(change))


def test_what_is_no_directed_graph_is_refused() -> None:
    for request in ({"a": []}, nx.path_graph(2)):
        with pytest.raises(RequestError, match="expected a networkx.DiGraph"):
            run(request)


@pytest.mark.parametrize(("cells", "outputs"), [({}, None), (CELLS, ["z"])])
def test_no_cell_with_an_output_is_refused(cells: dict[str, cellrt.Cell], outputs: list[str] | None) -> None:
    with pytest.raises(DefinitionError, match="dag 'm'"):
        dag("m", cells=cells, outputs=outputs)


def test_cells_of_other_outputs_may_be_below_the_results() -> None:
    halves = cellrt.cell(torch.nn.Linear(SIZE, 2), {"h": (SIZE,)}, name="halves")
    graph = two_numbers()
    graph.add_node("top", cell="halves")
    graph.add_edge("root", "top")
    model = dag("m", cells={**CELLS, "halves": halves})
    expected = halves.run(run(two_numbers())["h"])[0]
    assert_same(run_one_by_one(model, graph), {"output": expected})
    graph.graph["results"] = ["top", "root"]
    with pytest.raises(RequestError, match=r"an output in common of the result's 2 nodes, got \[\]"):
        run_one_by_one(model, graph)


def test_an_input_that_is_called_cell_is_fed_by_edges() -> None:
    def count(x: torch.Tensor, cell: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x, "cell": cell + 1}

    model = dag("counts", cells={"count": cellrt.cell(count, {"x": (), "cell": ()})}, outputs=["cell"])
    graph = nx.path_graph(3, create_using=nx.DiGraph)
    for node in graph:
        graph.nodes[node].update(cell="count", x=0.0)
    assert run_one_by_one(model, graph)["cell"].tolist() == [3.0]
    with pytest.raises(DefinitionError, match="input 'cell': an attribute of that name says which cell a node is"):
        dag("no", cells={"no": cellrt.cell(lambda cell: {"other": cell}, {"cell": ()}, name="no")})


def chain_of(values: list[object], name: str = "n") -> nx.DiGraph:
    made = nx.DiGraph()
    for place, value in enumerate(values):
        made.add_node(f"N{place}", cell=name, x=value)
    nx.add_path(made, [f"N{place}" for place in range(len(values))])
    return made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0, 3.0], r"node 'N0': .*expected float32\[3\], got float32\[\]"),  # and not one row for all
        ([torch.ones(3), torch.ones(2)], r"node 'N1': .*expected float32\[3\], got float32\[2\]"),
        ([torch.ones(3), torch.ones(3, dtype=torch.int64)], r"node 'N1': .*expected float32\[3\]"),
    ],
)
def test_rows_of_nodes_that_are_alike_are_each_what_they_should_be(values, message):
    made = cellrt.cell(lambda x, h: {"h": x + 0 * h.offsets[1:, None]}, {"x": 3, "h": cellrt.ragged(3)})
    model = dag("sums", cells={"n": made})
    with pytest.raises(RequestError, match=message):
        run_one_by_one(model, chain_of(values))


def test_an_edge_into_a_cell_that_reads_nothing_is_told_of_its_reader():
    model = dag("rows", cells={"n": cellrt.cell(lambda x: {"h": x}, {"x": 3})})
    with pytest.raises(RequestError, match="node 'N1': the edge from 'N0'"):
        run_one_by_one(model, chain_of([torch.ones(3)] * 3))
