"""Any directed acyclic graph, as ``networkx`` has it: the door for programs, circuits, molecules and documents.

    functions = dag("functions", cells={"node": child_sum}, outputs=["h"])

A request is a ``networkx.DiGraph`` or ``MultiDiGraph``. A node has an attribute ``cell``, one of the model's names. It
may have one for each input of that cell that no edge feeds: a row, a number, or for a ragged input a list of rows. An
input that is called ``cell`` itself is fed by edges, or begins with zeros. An edge has an attribute ``feeds``, which
says by name what flows along it, ``{input of its end: output of its start}``. Without one it feeds every input of its
end that has the name of an output of its start.

An input that is not ragged is fed once. A ragged one takes what all its edges bring, in the order in which they were
added, with those from one node together. With no edge and no attribute it is empty. Carried inputs that get nothing are
zeros.

The graph's attribute ``results`` is a list of nodes, in any number and order. Without it the results are those of the
nodes that feed no other, in the order in which they were added.

Nodes are written in one piece (``graph.dag``) if they are of one cell, just its ragged inputs have the names of
outputs, no edge has ``feeds``, and all nodes have the same attributes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cellrt import Cell, DefinitionError, Graph, Node, Output, RequestError, RequestTooLargeError, RowSpec, Unfolder

if TYPE_CHECKING:
    import networkx as nx  # where a graph is, it is there; else it is hundreds of modules for nothing


def dag(
    name: str, *, cells: Mapping[str, Cell], outputs: Sequence[str] | None = None, example: nx.DiGraph | None = None
) -> Unfolder:
    """Return a model over graphs of these cells; see the module for what a request looks like.

    Its results are, by name, outputs of the chosen nodes one below the other: ``[chosen nodes, *shape]``.

    Args:
        name: the model's name.
        cells: by the names that requests use.
        outputs: which outputs are results; default: those that the chosen nodes of a request have in common.
        example: a request, so that the engine can see which cells come late and put them first; default: a node of the
            first cell.

    Raise DefinitionError if there is no cell, or an output that no cell has.
    """
    if not cells:
        raise DefinitionError(f"dag {name!r}: expected at least one cell")
    for output in outputs or ():
        if not any(output in cell.outputs for cell in cells.values()):
            raise DefinitionError(f"dag {name!r}: no cell has the output {output!r}")

    def function(graph: Graph, request: Any) -> object:
        nodes = _check(request)
        order = _in_order(request)
        write = _write_as_one if _are_alike(cells, request) else _write_by_node
        return _results(write(graph, cells, request, order, set(nodes)), nodes, outputs)

    return Unfolder(name, function, _example(cells) if example is None else example, tuple(cells.values()))


def _check(request: Any) -> list[Hashable]:
    """Return the nodes whose results are asked for. Raise RequestError for what is not a graph with such nodes."""
    import networkx as nx

    if not isinstance(request, nx.DiGraph) or not len(request):
        raise RequestError(f"expected a networkx.DiGraph with at least one node, got {_describe(request)}")
    nodes = request.graph.get("results")
    if nodes is None:
        return [node for node, degree in request.out_degree() if not degree]
    if not isinstance(nodes, list | tuple) or not nodes:
        raise RequestError(f"expected a list of nodes as the graph's attribute results, got {nodes!r:.80}")
    for node in nodes:
        if node not in request:
            raise RequestError(f"results: there is no node {node!r} in the graph")
    return list(nodes)


def _describe(request: object) -> str:
    import networkx as nx

    return "an empty graph" if isinstance(request, nx.DiGraph) else type(request).__name__


def _in_order(request: nx.DiGraph) -> list[Hashable]:
    """Return the nodes, each after those that feed it."""
    import networkx as nx

    try:
        return list(nx.topological_sort(request))
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(repr(edge[0]) for edge in nx.find_cycle(request))
        raise RequestError(f"expected a graph without cycles, found {cycle} and back") from None


def _are_alike(cells: Mapping[str, Cell], request: nx.DiGraph) -> bool:
    """Return whether the nodes are of one cell and given the same inputs, rows as they should be, and the edges feed
    all those of other nodes. What is wrong with a node is told where it is written by itself.
    """
    attributes = request.nodes.values()
    first = next(iter(attributes))
    cell = cells.get(first.get("cell")) if isinstance(first.get("cell"), str) else None
    return (
        cell is not None
        and all(cell.inputs[name].ragged == (name in cell.outputs) for name in cell.inputs)
        and not any(name in cell.outputs for name in first)
        and all(each.keys() == first.keys() and each["cell"] == first["cell"] for each in attributes)
        and all(
            name in cell.inputs and type(value) is type(first[name]) and _is_row(value, cell.inputs[name])
            for each in attributes
            for name, value in each.items()
            if name != "cell"
        )
        and (not request.number_of_edges() or any(spec.ragged for spec in cell.inputs.values()))
        and not any("feeds" in edge for *_, edge in request.edges(data=True))
    )


def _is_row(value: object, spec: RowSpec) -> bool:
    """Return whether a value is one row of a spec, and no list of many."""
    if isinstance(value, torch.Tensor):
        return bool(value.shape == spec.shape and value.dtype == spec.dtype)
    if isinstance(value, list | tuple):
        return len(spec.shape) == 1 and len(value) == spec.shape[0] and all(_is_number(each, spec) for each in value)
    return not spec.shape and _is_number(value, spec)


def _is_number(value: object, spec: RowSpec) -> bool:
    if spec.dtype.is_floating_point:
        return type(value) in (int, float)
    return type(value) is int and spec.dtype is not torch.bool


def _write_as_one(
    graph: Graph,
    cells: Mapping[str, Cell],
    request: nx.DiGraph,
    order: Sequence[Hashable],
    chosen: Collection[Hashable],
) -> dict[Hashable, dict[str, Output]]:
    """Write nodes that are alike, in a third of the time; return the outputs of those that are chosen."""
    places = {node: place for place, node in enumerate(order)}
    sources: list[int] = []
    offsets = [0]
    for node in order:
        for start, edges in request.pred[node].items():
            sources += [places[start]] * (len(edges) if request.is_multigraph() else 1)
        offsets.append(len(sources))
    attributes = [request.nodes[node] for node in order]
    cell = cells[attributes[0]["cell"]]
    given = {name: [each[name] for each in attributes] for name in attributes[0] if name != "cell"}
    try:
        dag = graph.dag(cell, offsets, sources, given)
    except RequestTooLargeError:
        raise
    except RequestError as error:
        place = re.search(r"\[(\d+)\]': ", str(error))  # which row it was
        raise type(error)(f"node {order[int(place[1]) if place else 0]!r}: {error}") from error
    steps = {name: getattr(dag, name) for name in cell.outputs}
    return {node: {name: steps[name][places[node]] for name in steps} for node in chosen}


def _write_by_node(
    graph: Graph,
    cells: Mapping[str, Cell],
    request: nx.DiGraph,
    order: Sequence[Hashable],
    chosen: Collection[Hashable],
) -> dict[Hashable, dict[str, Output]]:
    """Write any nodes; return the outputs of those that are chosen."""
    made: dict[Hashable, Node] = {}
    for node in order:
        try:
            cell = _cell_of(cells, request.nodes[node])
            made[node] = graph.call(cell, **_inputs(cell, node, request, made))
        except RequestError as error:
            raise type(error)(f"node {node!r}: {error}") from error
    return {node: {name: getattr(made[node], name) for name in made[node]._cell.outputs} for node in chosen}


def _cell_of(cells: Mapping[str, Cell], attributes: Mapping[str, Any]) -> Cell:
    name = attributes.get("cell")
    if not isinstance(name, str) or name not in cells:
        raise RequestError(f"expected an attribute cell, one of {list(cells)}, got {name!r}")
    return cells[name]


def _inputs(cell: Cell, node: Hashable, request: nx.DiGraph, made: Mapping[Hashable, Node]) -> dict[str, Any]:
    """Return the inputs of a node from its attributes and edges."""
    inputs = {name: value for name, value in request.nodes[node].items() if name != "cell"}
    fed: dict[str, Any] = {}
    for start, edges in request.pred[node].items():
        source = made[start]
        outputs = source._cell.outputs
        for attributes in edges.values() if request.is_multigraph() else (edges,):
            feeds = attributes.get("feeds")
            if feeds is None:
                feeds = {name: name for name in cell.inputs if name in outputs and name not in inputs}
            if not feeds or not isinstance(feeds, dict):
                raise RequestError(
                    f"the edge from {start!r}: expected feeds={{input: output}}, or one of its cell's outputs "
                    f"({', '.join(outputs)}) with the name of an input ({', '.join(cell.inputs)}), got {feeds!r:.80}"
                )
            for name, output in feeds.items():
                if name not in cell.inputs or output not in outputs:
                    raise RequestError(
                        f"the edge from {start!r} feeds input {name!r} with output {output!r}: inputs are "
                        f"{list(cell.inputs)}, outputs {list(outputs)}"
                    )
                _feed(cell, fed, name, getattr(source, output))
    for name in fed:
        if name in inputs:
            raise RequestError(f"input {name!r} is both fed by an edge and an attribute")
    empty: dict[str, Any] = {name: [] for name, spec in cell.inputs.items() if spec.ragged}
    return {**empty, **inputs, **fed}


def _feed(cell: Cell, fed: dict[str, Any], name: str, output: Output) -> None:
    """Add what an edge brings to an input."""
    if cell.inputs[name].ragged:
        fed.setdefault(name, []).append(output)
    elif name in fed:
        raise RequestError(f"input {name!r} is not ragged and fed by two edges")
    else:
        fed[name] = output


def _results(
    chosen: Mapping[Hashable, Mapping[str, Output]], nodes: Sequence[Hashable], outputs: Sequence[str] | None
) -> dict[str, list[Output]]:
    """Return the outputs of the chosen nodes, one below the other."""
    first, *others = (chosen[node] for node in dict.fromkeys(nodes))
    common = [key for key in first if all(key in other and other[key].spec == first[key].spec for other in others)]
    names = common if outputs is None else list(outputs)
    if not names or not set(names) <= set(common):
        wanted = "an output" if outputs is None else f"the outputs {names}"
        raise RequestError(f"expected {wanted} in common of the result's {len(chosen)} nodes, got {common}")
    return {name: [chosen[node][name] for node in nodes] for name in names}


def _example(cells: Mapping[str, Cell]) -> nx.DiGraph:
    """Return a node of the first cell, with zeros as inputs; those that are carried have them anyway."""
    name, cell = next(iter(cells.items()))
    fixed = {key: spec for key, spec in cell.inputs.items() if not spec.ragged and key not in cell.carry}
    if "cell" in fixed:
        raise DefinitionError(f"cell {cell.name!r}, input 'cell': an attribute of that name says which cell a node is")
    zeros = {key: torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for key, spec in fixed.items()}
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_node(name, cell=name, **zeros)
    return graph
