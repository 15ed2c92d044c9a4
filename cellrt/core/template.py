"""From a program to the template of a cell graph: its rows for the tables, compiled once for all programs that differ
in their lengths alone (``sized_template.py``).

All in one compiled call, because a request of a graph not seen before (most trees) waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from cellrt.core import page_list
from cellrt.core.jit import OpenTemplate, allocating, compiled, making
from cellrt.core.lay_out import cut, find_edges, make_subgraphs, write_nodes
from cellrt.core.lay_out_records import is_carried, most_refs, write_records
from cellrt.core.memory import copy_bytes
from cellrt.core.program import PAGED, inputs_at, next_input, read_only, read_program
from cellrt.core.record_layout import TAP_WORDS, output_at, output_position, record_at, tap_at
from cellrt.core.tables import BORROWED, CHAIN, CHAIN_NEXT, EXTERNAL, MAX_READERS, NODE, SUBGRAPH, VALUE
from cellrt.core.uses import find_uses, value_after
from cellrt.errors import RequestTooLargeError

ARRAYS = {
    "nodes": (NODE, 1),
    "values": (VALUE, 1),
    "links": (np.dtype(np.int32), 1),
    "subgraphs": (SUBGRAPH, 1),
    "externals": (np.dtype(np.int32), 3),
    "lists": (np.dtype(np.int32), 2),
    "states": (np.dtype(np.int32), 4),
    "needs": (np.dtype(np.int32), 2),
    "pages": (np.dtype(np.int32), 4),
}
"""The arrays of a template: dtype and columns."""
NUM_ARRAYS = len(ARRAYS)
ALL_KINDS = -1
PATCHES, MEMORY = 3 * NUM_ARRAYS, 3 * NUM_ARRAYS + 3
"""Where those of what depends on lengths, and of the memory, are behind address, rows and columns of each array."""
NUM_EXTERNALS, NUM_RESULTS, NUM_PLACES, NUM_STEPS, MOST_REFS, FITS = (MEMORY + 3 + k for k in range(6))
"""Where the numbers of a template lie behind these."""

ITEM_BYTES = np.array([dtype.itemsize for dtype, _ in ARRAYS.values()])


class Compiled(NamedTuple):
    """A program as it was compiled: the memory of its arrays, and where they are with its numbers."""

    memory: NDArray[np.uint8]
    words: NDArray[np.int64]


def open_memory(memory: NDArray[np.uint8], words: NDArray[np.int64], patches: NDArray[np.int32]) -> OpenTemplate:
    """The arrays in the memory of a template; each begins with a whole word."""
    arrays, at = [], 0
    for k, (dtype, columns) in enumerate(ARRAYS.values()):
        size = int(words[3 * k + 1]) * columns * dtype.itemsize
        array = memory[at : at + size].view(dtype)
        if numba.config.DISABLE_JIT and array.dtype.names:
            array = array.view(np.recarray)
        arrays.append(array.reshape(-1, columns) if columns > 1 else array)
        at += -(-size // 8) * 8
    return OpenTemplate._make((*arrays, patches, memory.view(np.int32)))


@compiled
def _count_needs(draft, types, ports, uses, nodes, values, links, subgraphs, states, needs):
    """Counts the rows of each kind that can be live at once, whatever the order of execution.

    State handed from step to step of a chain or loop takes two rows (the old and the new) however long the chain;
    every other output that has a reader takes one. A session's state may lie here or at the host.
    """
    num_host = draft.results.size
    for k in range(uses.externals.shape[0]):
        num_host += 1 if uses.externals[k, 1] >= 0 else 0
    for k in range(uses.num_lists[0]):
        needs[uses.lists[k, 0], 1 if k < num_host else 0] += uses.lists[k, 1]
    for k in range(values.size):
        if values[k].bits & EXTERNAL and not values[k].bits & BORROWED and values[k].readers > 0:
            needs[values[k].kind, 1] += 1
    for k in range(states.shape[0]):
        needs[values[states[k, 0]].kind, 0] += 1
        needs[values[states[k, 0]].kind, 1] += 1
    for k in range(subgraphs.size):
        if subgraphs[k].record >= 0:
            _count_record(types[subgraphs[k].cell_type], ports, values, links, subgraphs[k], needs)
    in_chain = False
    for k in range(nodes.size):
        cell_type = types[subgraphs[nodes[k].subgraph].cell_type]
        chained = nodes[k].bits & CHAIN_NEXT != 0
        for output in range(cell_type.num_outputs):
            value = values[nodes[k].first_value + output]
            carried = chained and is_carried(ports, cell_type, output)
            if carried and not in_chain:
                needs[value.kind, 0] += 2
            if value.readers > (1 if carried else 0):
                needs[value.kind, 0] += 1
        in_chain = chained


@compiled
def _count_record(cell_type, ports, values, links, subgraph, needs):
    """Counts what a chain or loop holds beside its sequences."""
    record, ahead = record_at(links, subgraph.record), 0 if subgraph.what == CHAIN else cell_type.ahead
    for output in range(cell_type.num_outputs):
        if output_at(links, output_position(subgraph.record, cell_type, output)).is_state:
            needs[ports[cell_type.first_port + cell_type.num_inputs + output].kind, 0] += 2 + ahead
    for k in range(record.num_taps):
        value = values[tap_at(links, record.taps + TAP_WORDS * k).value]
        if value.readers > 0 and not value.bits & BORROWED:
            needs[value.kind, 0] += 1


@making
def _list_states(draft, program, uses, group):
    """Of each state: the value before the request and after it; or of one that is kept step by step, instead of the
    latter, the subgraph and the output."""
    states = np.empty((draft.states.size, 4), np.int32)
    for k in range(draft.states.size):
        at = draft.states[k]
        states[k, 0], states[k, 1] = uses.rows[program[at + 1]], uses.rows[value_after(program, at)]
        states[k, 2] = states[k, 3] = -1
        if uses.kept_unit >= 0:
            states[k, 2] = group[uses.kept_unit]
            states[k, 3] = program[at + 2] - draft.unit_values[uses.kept_unit]
    return states


@making
def _list_pages(draft, program, types, ports):
    """Of each growing state: kind, rows of a page, rows that the request appends at most, and which of its session's
    states it is, or -1."""
    pages, kept = np.empty((draft.pages.size, 4), np.int32), draft.states.size
    for k in range(draft.pages.size):
        at = draft.pages[k]
        pages[k, 0], pages[k, 1], pages[k, 2], pages[k, 3] = program[at + 1], program[at + 2], 0, -1
        if program[at + 3]:
            pages[k, 3] = kept
            kept += 1
    for unit in range(draft.unit_at.size):
        cell_type, at = types[draft.unit_types[unit]], inputs_at(program, draft.unit_at[unit])
        for port in range(cell_type.num_inputs):
            if program[at] == PAGED and ports[cell_type.first_port + port].appends:
                pages[program[at + 1], 2] += draft.unit_lengths[unit]
            at = next_input(program, at)
    return pages


@making
def _lay_out(program, types, ports, num_kinds):
    """The arrays of a Template in order, and its numbers before FITS; -1 steps if a value has too many readers."""
    draft = read_program(program, types)
    uses, fits = find_uses(draft, program, types, ports)
    edges = find_edges(draft, program, types, ports)
    group, num_groups, is_loose = cut(draft, types, edges)
    subgraphs = make_subgraphs(draft, group, num_groups, is_loose)
    nodes, node_links, most = write_nodes(draft, program, types, ports, uses, edges, group, subgraphs)
    records = write_records(draft, program, types, ports, uses, edges, group, subgraphs, node_links.size)
    links = np.concatenate((node_links, records))
    states = _list_states(draft, program, uses, group)
    needs = np.zeros((num_kinds, 2), np.int32)
    _count_needs(draft, types, ports, uses, nodes, uses.values, links, subgraphs, states, needs)
    lists = uses.lists[: uses.num_lists[0]].copy()
    num_steps = 0
    for unit in range(draft.unit_at.size):
        num_steps += max(1, draft.unit_lengths[unit])
    num_results = 0
    for k in range(draft.results.size):
        num_results += lists[k, 1]
    most = max(most, most_refs(types, subgraphs, links))
    numbers = (uses.externals[:, 0].sum(), num_results, lists[:, 1].sum(), num_steps if fits else -1, most)
    pages = _list_pages(draft, program, types, ports)
    return (nodes, uses.values, links, subgraphs, uses.externals, lists, states, needs, pages), numbers


@compiled
def has_room(nodes, values, links, subgraphs, lists, states, needs, pages, num_places, most, limits, kind_rows):
    """Whether an empty engine has room: ``limits`` of nodes, values, links, subgraphs, inputs of a node and places."""
    num_links = links.size + lists.size + states.size + needs.size + page_list.WORDS * pages.shape[0]
    if nodes.size > limits[0] or values.size > limits[1] or num_links > limits[2] or subgraphs.size > limits[3]:
        return False
    for kind in range(needs.shape[0]):
        if needs[kind, 0] > kind_rows[kind, 0] or needs[kind, 1] > kind_rows[kind, 1]:
            return False
        if pages_wanted(pages, kind) > kind_rows[kind, 0]:
            return False
    return most <= limits[4] and num_places + pages_wanted(pages, ALL_KINDS) <= limits[5]


@allocating
def pages_wanted(pages, kind):
    """Pages of a kind, or of all, that a request without a session may come to."""
    count = 0
    for k in range(pages.shape[0]):
        is_meant = pages[k, 0] == kind or kind == ALL_KINDS
        count += (pages[k, 2] + pages[k, 1] - 1) // pages[k, 1] if is_meant else 0
    return count


@making
def _pack_part(array, columns, item_bytes, memory, words, k, at):
    """Copies one array into memory at ``at`` and says where; returns where the next begins."""
    size = array.shape[0] * columns * item_bytes
    if size > 0:
        copy_bytes(memory.ctypes.data + at, array.ctypes.data, size)
    words[3 * k], words[3 * k + 1], words[3 * k + 2] = memory.ctypes.data + at, array.shape[0], columns
    return at + (size + 7) // 8 * 8


@allocating
def compile_rows(program, types, ports, num_kinds, limits, kind_rows, item_bytes):
    """A template's memory and words, as ``Template`` takes them. One block: each array more costs a microsecond."""
    arrays, numbers = _lay_out(program, types, ports, num_kinds)
    nodes, values, links, subgraphs, externals, lists, states, needs, pages = arrays
    total = nodes.size * item_bytes[0] + values.size * item_bytes[1] + subgraphs.size * item_bytes[3]
    total += 4 * (links.size + externals.size + lists.size + states.size + needs.size + pages.size)
    memory = np.zeros((total + 8 * NUM_ARRAYS + 7) // 8 * 8, np.uint8)
    words = np.zeros(FITS + 1, np.int64)
    at = _pack_part(nodes, 1, item_bytes[0], memory, words, 0, 0)
    at = _pack_part(values, 1, item_bytes[1], memory, words, 1, at)
    at = _pack_part(links, 1, 4, memory, words, 2, at)
    at = _pack_part(subgraphs, 1, item_bytes[3], memory, words, 3, at)
    at = _pack_part(externals, 3, 4, memory, words, 4, at)
    at = _pack_part(lists, 2, 4, memory, words, 5, at)
    at = _pack_part(states, 4, 4, memory, words, 6, at)
    at = _pack_part(needs, 2, 4, memory, words, 7, at)
    _pack_part(pages, 4, 4, memory, words, 8, at)
    words[PATCHES + 2], words[MEMORY], words[MEMORY + 1], words[MEMORY + 2] = 2, memory.ctypes.data, memory.size // 4, 1
    for k in range(5):
        words[NUM_EXTERNALS + k] = numbers[k]
    words[FITS] = has_room(
        nodes, values, links, subgraphs, lists, states, needs, pages, numbers[2], numbers[4], limits, kind_rows
    )
    return memory, words


def _compile_plainly(program, types, ports, num_kinds, limits, kind_rows, item_bytes):
    """As ``compile_rows``, where nothing is compiled and so nothing has an address."""
    arrays, numbers = _lay_out(program, types, ports, num_kinds)
    nodes, values, links, subgraphs, _, lists, states, needs, pages = arrays
    words = [word for array in arrays for word in (0, *array.shape, 1)[:3]]
    room = nodes, values, links, subgraphs, lists, states, needs, pages, numbers[2], numbers[4], limits, kind_rows
    parts = [array.tobytes().ljust(-(-array.nbytes // 8) * 8, b"\0") for array in arrays]
    memory = np.frombuffer(b"".join(parts), np.uint8).copy()
    words += [0, 0, 2, 0, memory.size // 4, 1, *numbers, has_room(*room)]
    return memory, np.array(words, np.int64)


def compile_program(
    program: NDArray[np.int32],
    types: NDArray[np.void],
    ports: NDArray[np.void],
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> Compiled:
    """Reads a program, cuts it into subgraphs and lays it out as rows for the tables.

    Args:
        program: words of ``program.py``.
        types, ports: of the tables.
        limits: most nodes, values, links and subgraphs of a request, inputs of a node, and places of a request.
        kind_rows: ``[kinds, 2]`` rows of each kind at a worker and at the host.

    Raises RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    function = _compile_plainly if numba.config.DISABLE_JIT else compile_rows
    return made_of(*function(read_only(program), types, ports, len(kind_rows), limits, kind_rows, ITEM_BYTES))


def made_of(memory: NDArray[np.uint8], words: NDArray[np.int64]) -> Compiled:
    """What ``compile_rows`` gave. Raises RequestTooLargeError if one value has more than MAX_READERS readers."""
    made = Compiled(memory, words)
    if made.words[NUM_STEPS] < 0:
        raise RequestTooLargeError(f"an output has more than {MAX_READERS} readers in one graph")
    return made
