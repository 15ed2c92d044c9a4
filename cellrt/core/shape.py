"""From a draft to the tables of one cell graph: finds the edges, cuts the graph into subgraphs, lays out the rows.

All in one compiled call, because a request of a shape not seen before (most trees) waits for it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import OpenShape, allocating, make_rows
from cellrt.core.memory import copy_bytes
from cellrt.core.partition import partition
from cellrt.core.program import draft_program, value_after
from cellrt.core.tables import (
    CARRIED,
    CHAIN_NEXT,
    CROSSING,
    EXTERNAL,
    HELD,
    KEPT,
    LOOP,
    MAX_READERS,
    NODE,
    SUBGRAPH,
    VALUE,
)
from cellrt.errors import RequestTooLargeError

ARRAYS = {
    "nodes": NODE,
    "values": VALUE,
    "links": np.dtype(np.int32),
    "subgraphs": SUBGRAPH,
    "externals": np.dtype(np.int32),
    "results": np.dtype(np.int32),
    "states": np.dtype(np.int32),
    "needs": np.dtype(np.int32),
    "node_types": np.dtype(np.int32),
}
NUM_STEPS, MOST_REFS, FITS = (3 * len(ARRAYS) + k for k in range(3))
"""Where the numbers of a shape lie behind its arrays' addresses and sizes."""


class Shape:
    """A compiled cell graph: rows for the tables, with ids relative to the request. Immutable, shared by requests.

    Attributes:
        at: the address of its arrays, for compiled code.
        num_results, num_externals: result rows; values that come with the request.
        num_states: rows that it keeps in a session.
        num_steps: nodes, a loop counted as its step limit.
        most_refs: most inputs of a node, a ragged one counted as its rows.
        fits: whether an empty engine has room for it.
        arrays: the rows by name; made when they are asked for.
    """

    def __init__(self, memory: NDArray[np.uint8], words: NDArray[np.int64]) -> None:
        self._memory, self._words = memory, words
        self.num_externals, self.num_results, self.num_states, self.num_steps, self.most_refs, self.fits = (
            int(words[3 * 4 + 1]),
            int(words[3 * 5 + 1]),
            int(words[3 * 6 + 1]) // 2,
            int(words[NUM_STEPS]),
            int(words[MOST_REFS]),
            bool(words[FITS]),
        )
        self.at: Any = self.arrays if numba.config.DISABLE_JIT else words

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return self._memory.nbytes + self._words.nbytes

    @cached_property
    def arrays(self) -> OpenShape:
        """The rows; ``node_types`` apart."""
        return OpenShape(*(self._array(k) for k in range(len(ARRAYS) - 1)))

    @property
    def node_types(self) -> NDArray[np.int32]:
        """The cell type of each node."""
        types: NDArray[np.int32] = self._array(len(ARRAYS) - 1)
        return types

    def _array(self, k: int) -> NDArray[Any]:
        """An array of the shape: a part of its memory, where each begins with a whole word."""
        counts, columns = self._words[: 3 * len(ARRAYS)].reshape(-1, 3)[:, 1:].T
        sizes = counts * columns * _ITEM_BYTES
        first = int((-(-sizes[:k] // 8) * 8).sum())
        array = self._memory[first : first + int(sizes[k])].view(list(ARRAYS.values())[k])
        return array.reshape(-1, int(columns[k])) if list(ARRAYS)[k] == "needs" else array


_ITEM_BYTES = np.array([dtype.itemsize for dtype in ARRAYS.values()])


@allocating
def _edges(draft, types, ports):
    """Finds each node's distinct producers and counts the readers of each value.

    Returns (starts [node + 1], producers): the producers of node n are ``producers[starts[n]:starts[n + 1]]``.
    Starts is empty if a value has more than MAX_READERS readers.
    """
    num_nodes = draft.node_types.size
    starts = np.zeros(num_nodes + 1, np.int32)
    producers = np.empty(draft.refs.size, np.int32)
    seen = np.full(num_nodes, -1, np.int32)
    end = 0
    for node in range(num_nodes):
        at = draft.ref_starts[node]
        first_port = types[draft.node_types[node]].first_port
        for port in range(types[draft.node_types[node]].num_inputs):
            count = 1
            if ports[first_port + port].ragged:
                count = draft.refs[at]
                at += 1
            for k in range(count):
                value = draft.refs[at + k]
                if draft.values[value].readers == MAX_READERS:
                    return starts[:0], producers
                draft.values[value].readers += 1
                producer = draft.producers[value]
                if producer >= 0 and seen[producer] != node:
                    seen[producer] = node
                    producers[end] = producer
                    end += 1
            at += count
        starts[node + 1] = end
    return starts, producers[:end]


@allocating
def _follows(draft, types, ports, node, before):
    """Whether ``node`` reads exactly the carried state of ``before``, which has the same cell type."""
    at = draft.ref_starts[node]
    first_port = types[draft.node_types[node]].first_port
    num_outputs = types[draft.node_types[node]].num_outputs
    carries = False
    for port in range(types[draft.node_types[node]].num_inputs):
        carry, count = ports[first_port + port].carry, 1
        if ports[first_port + port].ragged:
            count = draft.refs[at]
            at += 1
        for k in range(count):
            output = draft.refs[at + k] - draft.node_values[before]
            if carry >= 0:
                if output != carry:
                    return False
                carries = True
            elif 0 <= output < num_outputs:
                return False
        at += count
    return carries


@allocating
def _write_nodes(draft, types, ports, starts, producers, order, group, nodes, links, subgraphs):
    """Fills nodes, links and subgraphs with nodes renumbered by ``order`` (new -> old)."""
    num_nodes = order.size
    new = np.empty(num_nodes, np.int32)
    num_consumers = np.zeros(num_nodes, np.int32)
    for k in range(num_nodes):
        new[order[k]] = k
    for k in range(producers.size):
        num_consumers[producers[k]] += 1
    at = 0
    for k in range(num_nodes):
        old = order[k]
        node, subgraph = nodes[k], subgraphs[group[old]]
        node.subgraph, node.next_ready = group[old], -1
        node.first_value, node.first_link = draft.node_values[old], at
        node.num_refs = draft.ref_starts[old + 1] - draft.ref_starts[old]
        for output in range(types[draft.node_types[old]].num_outputs):
            if draft.values[draft.node_values[old] + output].bits & KEPT:
                node.bits |= HELD
        _write_refs(draft, types[draft.node_types[old]], ports, old, links, at)
        at += node.num_refs + num_consumers[old]
        subgraph.cell_type = draft.node_types[old]
        subgraph.nodes_left += 1
        if draft.loop_limits[old] > 0:
            node.bits |= LOOP
            subgraph.loop_limit, subgraph.loop_stop = draft.loop_limits[old], draft.loop_stops[old]
        elif k > 0 and group[order[k - 1]] == group[old] and _follows(draft, types, ports, old, order[k - 1]):
            nodes[k - 1].bits |= CHAIN_NEXT
    for k in range(num_nodes):
        old = order[k]
        for j in range(starts[old], starts[old + 1]):
            producer = nodes[new[producers[j]]]
            links[producer.first_link + producer.num_refs + producer.num_consumers] = k - new[producers[j]]
            producer.num_consumers += 1
            if producer.subgraph == nodes[k].subgraph:
                nodes[k].pending += 1
            else:
                subgraphs[nodes[k].subgraph].waiting += 1
                producer.bits |= CROSSING
    for k in range(num_nodes):
        if nodes[k].pending == 0:
            _append_ready(nodes, subgraphs[nodes[k].subgraph], k)


@allocating
def _write_refs(draft, cell_type, ports, node, links, at):
    """Writes the values a node reads relative to its own first value, so that no request has to move them."""
    from_ref = draft.ref_starts[node]
    for port in range(cell_type.num_inputs):
        count = 1
        if ports[cell_type.first_port + port].ragged:
            count = draft.refs[from_ref]
            links[at] = count
            at, from_ref = at + 1, from_ref + 1
        for k in range(count):
            links[at + k] = draft.refs[from_ref + k] - draft.node_values[node]
        at, from_ref = at + count, from_ref + count


@allocating
def _append_ready(nodes, subgraph, node):
    if subgraph.ready_tail >= 0:
        nodes[subgraph.ready_tail].next_ready = node
    else:
        subgraph.ready_head = node
    subgraph.ready_tail = node
    subgraph.num_ready += 1


@allocating
def _count_needs(draft, nodes, values, types, ports, subgraphs, needs):
    """Counts the rows of each kind that can be live at once, whatever the order of execution.

    State handed from step to step of a chain or loop takes two rows (the old and the new) however long the chain;
    every other output that has a reader takes one. A session's state may lie here or at the host.
    """
    for value in range(values.size):
        if values[value].bits & EXTERNAL and values[value].readers > 0:
            needs[values[value].kind, 1] += 1
    for result in range(draft.results.size):
        needs[draft.results[result], 1] += 1
    for state in range(len(draft.states)):
        needs[values[draft.states[state, 0]].kind] += 1
    in_chain = False
    for k in range(nodes.size):
        cell_type = types[subgraphs[nodes[k].subgraph].cell_type]
        is_loop = nodes[k].bits & LOOP != 0
        chained = nodes[k].bits & CHAIN_NEXT != 0
        for output in range(cell_type.num_outputs):
            value = values[nodes[k].first_value + output]
            carried = chained and _is_carried(ports, cell_type, output)
            if is_loop:
                needs[value.kind, 0] += 2 if value.readers > 0 or value.bits & CARRIED else 0
                continue
            if carried and not in_chain:
                needs[value.kind, 0] += 2
            if value.readers > (1 if carried else 0):
                needs[value.kind, 0] += 1
        in_chain = chained


@allocating
def _is_carried(ports, cell_type, output):
    for port in range(cell_type.num_inputs):
        if ports[cell_type.first_port + port].carry == output:
            return True
    return False


@allocating
def _lay_out(program, types, ports, num_kinds):
    """The arrays of a Shape in order, and its numbers of steps and of most refs.

    ``num_steps`` is -1 if one value has more than MAX_READERS readers.
    """
    draft = draft_program(program, types, ports)
    starts, producers = _edges(draft, types, ports)
    num_nodes = draft.node_types.size
    # A loop is a subgraph of its own: give each a type that no other node has.
    kinds_of_node = draft.node_types.copy()
    num_steps = num_nodes
    if starts.size == 0:
        num_steps = -1
        starts = np.zeros(num_nodes + 1, np.int32)
    for node in range(num_nodes):
        if draft.loop_limits[node] > 0:
            kinds_of_node[node] = types.size + node
            num_steps += draft.loop_limits[node] - 1
    group, num_groups = partition(kinds_of_node, starts, producers)
    order = np.argsort(group, kind="mergesort").astype(np.int32)
    nodes, subgraphs = make_rows(num_nodes, NODE), make_rows(num_groups, SUBGRAPH)
    for k in range(num_groups):
        subgraph = subgraphs[k]
        subgraph.ready_head, subgraph.ready_tail, subgraph.loop_stop = -1, -1, -1
        subgraph.previous, subgraph.next = -1, -1
    links = np.zeros(draft.refs.size + producers.size, np.int32)
    needs = np.zeros((num_kinds, 2), np.int32)
    if num_steps >= 0:
        _write_nodes(draft, types, ports, starts, producers, order, group, nodes, links, subgraphs)
        _count_needs(draft, nodes, draft.values, types, ports, subgraphs, needs)
    externals = np.empty(draft.values.size, np.int32)
    count = 0
    for k in range(draft.values.size):
        if draft.values[k].bits & EXTERNAL:
            externals[count] = k
            count += 1
    externals = externals[:count].copy()
    states = np.empty(2 * len(draft.states), np.int32)
    for k in range(len(draft.states)):
        states[2 * k], states[2 * k + 1] = draft.states[k, 0], value_after(draft.states[k])
    node_types = np.empty(num_nodes, np.int32)
    most_refs = 0
    for k in range(num_nodes):
        node_types[k] = draft.node_types[order[k]]
        most_refs = max(most_refs, draft.ref_starts[k + 1] - draft.ref_starts[k])
    arrays = (nodes, draft.values, links, subgraphs, externals, draft.results, states, needs, node_types)
    return arrays, num_steps, most_refs


@allocating
def _fits(arrays, most_refs, limits, kind_rows):
    """Whether an empty engine has room: ``limits`` of nodes, values, links, subgraphs and inputs of a node."""
    nodes, values, links, subgraphs, _, results, states, needs, _ = arrays
    num_links = links.size + 2 * results.size + 2 * states.size + 2 * needs.shape[0]
    if nodes.size > limits[0] or values.size > limits[1] or num_links > limits[2] or subgraphs.size > limits[3]:
        return False
    for kind in range(needs.shape[0]):
        if needs[kind, 0] > kind_rows[kind, 0] or needs[kind, 1] > kind_rows[kind, 1]:
            return False
    return most_refs <= limits[4]


@allocating
def _pack_part(array, columns, item_bytes, memory, words, k, at):
    """Copies one array into memory at ``at`` and says where; returns where the next begins."""
    size = array.shape[0] * columns * item_bytes
    if size > 0:
        copy_bytes(memory.ctypes.data + at, array.ctypes.data, size)
    words[3 * k], words[3 * k + 1], words[3 * k + 2] = memory.ctypes.data + at, array.shape[0], columns
    return at + (size + 7) // 8 * 8


@allocating
def _compile(program, types, ports, num_kinds, limits, kind_rows, item_bytes):
    """A shape's memory and words, as ``Shape`` takes them. One block: each array more costs Python a microsecond."""
    arrays, num_steps, most_refs = _lay_out(program, types, ports, num_kinds)
    nodes, values, links, subgraphs, externals, results, states, needs, node_types = arrays
    total = nodes.size * item_bytes[0] + values.size * item_bytes[1] + subgraphs.size * item_bytes[3]
    total += 4 * (links.size + externals.size + results.size + states.size + needs.size + node_types.size)
    memory, words = np.zeros(total + 8 * 9, np.uint8), np.zeros(3 * 9 + 3, np.int64)
    at = _pack_part(nodes, 1, item_bytes[0], memory, words, 0, 0)
    at = _pack_part(values, 1, item_bytes[1], memory, words, 1, at)
    at = _pack_part(links, 1, 4, memory, words, 2, at)
    at = _pack_part(subgraphs, 1, item_bytes[3], memory, words, 3, at)
    at = _pack_part(externals, 1, 4, memory, words, 4, at)
    at = _pack_part(results, 1, 4, memory, words, 5, at)
    at = _pack_part(states, 1, 4, memory, words, 6, at)
    at = _pack_part(needs, needs.shape[1], 4, memory, words, 7, at)
    _pack_part(node_types, 1, 4, memory, words, 8, at)
    words[3 * 9], words[3 * 9 + 1] = num_steps, most_refs
    words[3 * 9 + 2] = _fits(arrays, most_refs, limits, kind_rows)
    return memory, words


def _compile_plainly(program, types, ports, num_kinds, limits, kind_rows, item_bytes):
    """As ``_compile``, where nothing is compiled and so nothing has an address."""
    arrays, num_steps, most_refs = _lay_out(program, types, ports, num_kinds)
    words = [word for array in arrays for word in (0, *array.shape, 1)[:3]]
    words += [num_steps, most_refs, _fits(arrays, most_refs, limits, kind_rows)]
    parts = [array.tobytes().ljust(-(-array.nbytes // 8) * 8, b"\0") for array in arrays]
    return np.frombuffer(b"".join(parts), np.uint8), np.array(words, np.int64)


def compile_shape(
    program: NDArray[np.int32],
    types: NDArray[np.void],
    ports: NDArray[np.void],
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> Shape:
    """Expands a program, cuts it into subgraphs and lays it out as rows for the tables.

    Args:
        program: words of ``program.py``.
        types, ports: of the tables.
        limits: most nodes, values, links and subgraphs of a request, and inputs of a node.
        kind_rows: ``[kinds, 2]`` rows of each kind at a worker and at the host.

    Raises RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    function = _compile_plainly if numba.config.DISABLE_JIT else _compile
    shape = Shape(*function(program, types, ports, len(kind_rows), limits, kind_rows, _ITEM_BYTES))
    if shape.num_steps < 0:
        raise RequestTooLargeError(f"an output has more than {MAX_READERS} readers in one graph")
    return shape
