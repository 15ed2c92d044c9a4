"""The cut into subgraphs, judged by networkx: one cell type, connected or loose, and no cycle between subgraphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.core.state.tables import MAX_TYPES
from cellrt.core.templates.partition import partition
from cellrt.core.templates.program import CARRY, FIXED, OP_CHAIN, OP_RESULT
from tests.core.graphs import compile_small, leaves


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Cell types of nodes in topological order, and the distinct earlier nodes that each reads."""
    types = draw(st.lists(st.integers(0, 2), min_size=1, max_size=24))
    nodes = range(len(types))
    return types, [draw(st.lists(st.integers(0, k - 1), max_size=3, unique=True)) if k else [] for k in nodes]


def cut(types: list[int], producers: list[list[int]]) -> tuple[list[int], int, list[bool]]:
    starts = np.cumsum([0, *map(len, producers)]).astype(np.int32)
    flat = np.array([node for nodes in producers for node in nodes], np.int32)
    group, num_groups, is_loose = partition(np.array(types, np.int32), starts, flat)
    return group.tolist(), int(num_groups), is_loose.astype(bool).tolist()


def whole_of(types: list[int], producers: list[list[int]]) -> nx.DiGraph:
    whole = nx.DiGraph()
    whole.add_nodes_from(range(len(types)))
    whole.add_edges_from((before, node) for node, nodes in enumerate(producers) for before in nodes)
    return whole


@given(graphs())
def test_subgraphs_are_connected_of_one_type_and_acyclic(graph):
    types, producers = graph
    group, num_groups, is_loose = cut(types, producers)
    whole = whole_of(types, producers)
    members = [[node for node in whole if group[node] == k] for k in range(num_groups)]
    assert sorted(node for nodes in members for node in nodes) == list(whole)
    for nodes, may_fall_apart in zip(members, is_loose):
        assert len({types[node] for node in nodes}) == 1
        assert may_fall_apart or nx.is_weakly_connected(whole.subgraph(nodes))
    between = {(group[before], group[node]) for before, node in whole.edges if group[before] != group[node]}
    assert nx.is_directed_acyclic_graph(nx.DiGraph(between))
    assert all(before < node for before, node in between), "numbers follow the order of the subgraphs"


@given(graphs())
def test_the_loose_ones_have_all_of_a_type_that_read_no_node_and_have_no_neighbour_of_it(graph):
    types, producers = graph
    group, _, is_loose = cut(types, producers)
    whole = whole_of(types, producers)
    alone = {
        node
        for node in whole
        if not producers[node]
        and not any(
            types[reader] == types[node] and all(types[other] == types[node] for other in nx.ancestors(whole, reader))
            for reader in whole.successors(node)
        )
    }
    assert {node for node in whole if is_loose[group[node]]} == alone
    assert len({group[node] for node in alone}) == len({types[node] for node in alone})


@given(st.integers(1, 24), st.randoms(use_true_random=False))
def test_one_type_is_cut_only_where_it_falls_apart(count, draw):
    producers = [sorted(draw.sample(range(k), draw.randint(0, min(k, 2)))) for k in range(count)]
    _, num_groups, _ = cut([0] * count, producers)
    parts = list(nx.weakly_connected_components(whole_of([0] * count, producers)))
    assert num_groups == sum(len(part) > 1 for part in parts) + any(len(part) == 1 for part in parts)


def test_leaves_are_one_subgraph_and_what_reads_them_is_another():
    group, num_groups, is_loose = cut([0, 0, 1, 0, 1], [[], [], [0, 1], [], [2, 3]])
    assert (group, num_groups, is_loose) == ([0, 0, 1, 0, 1], 2, [True, False])


def test_two_of_a_type_with_another_between_them_are_cut():
    group, num_groups, _ = cut([0, 1, 0], [[], [0], [0, 1]])
    assert (group, num_groups) == ([0, 1, 2], 3)


def test_a_chain_with_a_reader_of_every_state_is_two_subgraphs():
    types = [0, 0, 0, 1, 1, 1]
    group, num_groups, _ = cut(types, [[], [0], [1], [2], [1, 3], [0, 4]])
    assert (group, num_groups) == ([0, 0, 0, 1, 1, 1], 2)


@pytest.mark.parametrize("count", [3, MAX_TYPES - 1, MAX_TYPES])
def test_a_chain_is_a_subgraph_of_its_own_however_many_nodes_come_before_it(count):
    program = [*leaves(1, count)[:-4].tolist(), OP_CHAIN, 0, 2, FIXED, 0, CARRY, count]
    template = compile_small(np.array([*program, OP_RESULT, count + 2, 1, 1], np.int32))
    subgraphs = template.arrays.subgraphs
    assert np.flatnonzero(subgraphs["record"] >= 0).tolist() == [1]
    assert (subgraphs["nodes_left"].tolist(), subgraphs["is_loose"].tolist()) == ([count, 1], [1, 0])
