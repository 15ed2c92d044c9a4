"""The compilation of a program to the template of a cell graph: its rows for the tables.

A template is compiled once for all programs that differ in their lengths alone (``sized_template.py``). It is one
compiled call, because a request of a graph not seen before (most trees) waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state import page_list
from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.record_layout import TAP_WORDS, output_at, output_position, record_at, tap_at
from cellrt.core.state.tables import (
    BORROWED,
    CHAIN,
    CHAIN_NEXT,
    EXTERNAL,
    MAX_READERS,
    NODE,
    SUBGRAPH,
    VALUE,
    CellType,
    Node,
    PortInfo,
    Subgraph,
    Value,
)
from cellrt.core.templates.lay_out import cut, find_edges, make_subgraphs, write_nodes
from cellrt.core.templates.lay_out_records import is_carried, most_refs, write_records
from cellrt.core.templates.lengths import shorten, with_sums
from cellrt.core.templates.program import Draft, read_only, read_program
from cellrt.core.templates.sums import Sum, has_sums, split, take_out, words_of
from cellrt.core.templates.uses import Ints, Uses, find_uses, value_after
from cellrt.errors import RequestTooLargeError
from cellrt.native.jit import allocating, compiled, making
from cellrt.native.memory import copy_bytes
from cellrt.native.row_types import Rows

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
"""The positions of the patches and of the memory in the words, after address, rows and columns of each array."""
NUM_EXTERNALS, NUM_RESULTS, NUM_PLACES, NUM_STEPS, MOST_REFS, FITS, OWN_ADDRESS = (MEMORY + 3 + k for k in range(7))
"""The positions of a template's numbers after these; MOST_REFS and FITS are of one without lengths alone. Then the
address of the words themselves."""
NUM_WORDS = OWN_ADDRESS + 1
"""Words in front of the memory."""

COLUMNS = np.array([columns for _, columns in ARRAYS.values()])
ROW_BYTES = np.array([dtype.itemsize * columns for dtype, columns in ARRAYS.values()])


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
        words: where its arrays are, and its numbers; behind them the memory of the arrays.
        patches: ``[patches, 2 + lengths]``, of each word of the memory that depends on lengths where it is, its
            constant, and what it is multiplied with of each length.
        numbers: ``[numbers, 1 + lengths]``: of each from NUM_EXTERNALS to NUM_STEPS the constant, and the same.
    """

    words: NDArray[np.int64]
    patches: NDArray[np.int32]
    numbers: NDArray[np.int64]


def open_words(words: NDArray[np.int64], patches: NDArray[np.int32]) -> OpenTemplate:
    """Return the arrays in the memory of a template; each begins with a whole word."""
    arrays, memory, at = [], words[NUM_WORDS:].view(np.uint8), 0
    for k, (dtype, columns) in enumerate(ARRAYS.values()):
        size = int(words[3 * k + 1]) * columns * dtype.itemsize
        array = memory[at : at + size].view(dtype)
        arrays.append(array.reshape(-1, columns) if columns > 1 else array)
        at += -(-size // 8) * 8
    return OpenTemplate._make((*arrays, patches, memory.view(np.int32)))


@compiled
def _count_needs(
    draft: Draft,
    uses: Uses,
    nodes: Rows[Node],
    links: Ints,
    subgraphs: Rows[Subgraph],
    states: Ints,
    needs: NDArray[np.int64],
) -> None:
    """Count the rows of each kind that can be live at once, whatever the order of execution.

    State handed from step to step of a chain or loop takes two rows (the old and the new) however long the chain;
    every other output that has a reader takes one. A session's state may lie here or at the host.
    """
    # Results and the request's tensors lie at the host, other sequences at a worker.
    num_host, values = draft.results.size, uses.values
    for k in range(uses.externals.shape[0]):
        num_host += 1 if uses.externals[k, 1] >= 0 else 0
    for k in range(uses.lists.shape[0]):
        needs[uses.lists[k, 0], 1 if k < num_host else 0] += uses.lists[k, 1]
    for k in range(values.size):
        if values[k].bits & EXTERNAL and not values[k].bits & BORROWED and values[k].readers > 0:
            needs[values[k].kind, 1] += 1
    # A session's state may be at either.
    for k in range(states.shape[0]):
        needs[values[states[k, 0]].kind, 0] += 1
        needs[values[states[k, 0]].kind, 1] += 1
    # Count what chains and loops hold, and then the outputs of nodes.
    for k in range(subgraphs.size):
        if subgraphs[k].record >= 0:
            _count_record(draft.types[subgraphs[k].cell_type], draft.ports, values, links, subgraphs[k], needs)
    count_needs_of_nodes(draft.types, draft.ports, nodes, values, subgraphs, needs)


@compiled
def count_needs_of_nodes(
    types: Rows[CellType],
    ports: Rows[PortInfo],
    nodes: Rows[Node],
    values: Rows[Value],
    subgraphs: Rows[Subgraph],
    needs: NDArray[np.int64],
) -> None:
    """Count what the outputs of nodes take."""
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
def _count_record(
    cell_type: CellType,
    ports: Rows[PortInfo],
    values: Rows[Value],
    links: Ints,
    subgraph: Subgraph,
    needs: NDArray[np.int64],
) -> None:
    """Count the rows that a chain or loop holds beside its sequences."""
    record, ahead = record_at(links, subgraph.record), 0 if subgraph.what == CHAIN else cell_type.ahead
    for output in range(cell_type.num_outputs):
        if output_at(links, output_position(subgraph.record, cell_type, output)).is_state:
            needs[ports[cell_type.first_port + cell_type.num_inputs + output].kind, 0] += 2 + ahead
    for k in range(record.num_taps):
        value = values[tap_at(links, record.taps + TAP_WORDS * k).value]
        if value.readers > 0 and not value.bits & BORROWED:
            needs[value.kind, 0] += 1


@making
def _list_states(draft: Draft, uses: Uses, group: Ints) -> Ints:
    """Return for each state the value before the request and the value after it.

    If a state is kept step by step, its subgraph and output replace the latter.
    """
    states = np.empty((draft.keeps.size, 4), np.int32)
    for k in range(draft.keeps.size):
        keep = draft.keeps[k]
        states[k, 0], states[k, 1] = uses.rows[keep.state], uses.rows[value_after(keep)]
        states[k, 2] = states[k, 3] = -1
        if uses.kept_unit >= 0:
            states[k, 2] = group[uses.kept_unit]
            states[k, 3] = keep.first - draft.units[uses.kept_unit].value
    return states


@making
def _list_pages(draft: Draft) -> NDArray[np.int64]:
    """Return for each growing state: kind, rows of a page, most rows to append, and state of the session or -1."""
    pages, kept = np.empty((draft.pages.size, 4), np.int64), draft.keeps.size
    for k in range(draft.pages.size):
        pages[k, 0], pages[k, 1], pages[k, 2], pages[k, 3] = draft.pages[k].kind, draft.pages[k].page_size, 0, -1
        if draft.pages[k].keeps:
            pages[k, 3] = kept
            kept += 1
    for unit in range(draft.units.size if pages.size else 0):
        cell_type = draft.types[draft.units[unit].cell_type]
        for port in range(cell_type.num_inputs):
            state = draft.inputs[draft.units[unit].input + port].state
            if state >= 0 and draft.ports[cell_type.first_port + port].appends:
                pages[state, 2] += draft.lengths[unit]
    return pages


Arrays: TypeAlias = tuple[Rows[Any], Rows[Any], Ints, Rows[Any], Ints, Ints, Ints, Ints, Ints]
"""The arrays of a template, in order."""


@making
def _lay_out(draft: Draft, num_kinds: int) -> tuple[Arrays, tuple[Sum, Sum, Sum, Sum, int]]:
    """Return the arrays of a Template in order, in which ``word_of`` stands for sums, and its numbers before FITS.

    The steps are -1 if a value has too many readers.
    """
    uses, fits = find_uses(draft)
    edges = find_edges(draft)
    group, num_groups, is_loose = cut(draft, edges)
    subgraphs = make_subgraphs(draft, group, num_groups, is_loose)
    nodes, node_links, most = write_nodes(draft, uses, edges, group, subgraphs)
    records = write_records(draft, uses, edges, group, subgraphs, node_links.size)
    links = np.concatenate((node_links, records))
    states = _list_states(draft, uses, group)
    needs = np.zeros((num_kinds, 2), np.int64)
    _count_needs(draft, uses, nodes, links, subgraphs, states, needs)
    num_steps = 0
    for unit in range(draft.units.size):
        num_steps += max(1, draft.lengths[unit])
    num_results = uses.lists[: draft.results.size, 1].sum()
    if draft.sums.size == 0:
        most = max(most, most_refs(draft.types, subgraphs, links))
    numbers = uses.externals[:, 0].sum(), num_results, uses.lists[:, 1].sum(), num_steps if fits else -1, most
    externals, lists = words_of(draft.sums, uses.externals), words_of(draft.sums, uses.lists)
    needed, pages = words_of(draft.sums, needs), words_of(draft.sums, _list_pages(draft))
    return (nodes, uses.values, links, subgraphs, externals, lists, states, needed, pages), numbers


@compiled
def has_room(
    nodes: Rows[Node],
    values: Rows[Value],
    links: Ints,
    subgraphs: Rows[Subgraph],
    lists: Ints,
    states: Ints,
    needs: Ints,
    pages: Ints,
    num_places: int,
    most: int,
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> bool:
    """Return whether an empty engine has room.

    ``limits`` are of nodes, values, links, subgraphs, inputs of a node and places.
    """
    num_links = links.size + lists.size + states.size + needs.size + page_list.WORDS * pages.shape[0]
    if nodes.size > limits[0] or values.size > limits[1] or num_links > limits[2] or subgraphs.size > limits[3]:
        return False
    for kind in range(needs.shape[0]):
        if needs[kind, 0] > kind_rows[kind, 0] or needs[kind, 1] > kind_rows[kind, 1]:
            return False
        if pages_wanted(pages, kind) > kind_rows[kind, 0]:
            return False
    return bool(most <= limits[4] and num_places + pages_wanted(pages, ALL_KINDS) <= limits[5])


@compiled
def pages_wanted(pages: Ints, kind: int) -> int:
    """Return the pages of a kind, or of all, that a request without a session may need."""
    count = 0
    for k in range(pages.shape[0]):
        is_meant = pages[k, 0] == kind or kind == ALL_KINDS
        count += (pages[k, 2] + pages[k, 1] - 1) // pages[k, 1] if is_meant else 0
    return count


@making
def make_room(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the words of a template and, behind them, room for its arrays, of this many rows each. One block: each
    array more costs a microsecond."""
    size = NUM_WORDS
    for k in range(NUM_ARRAYS):
        size += (sizes[k] * ROW_BYTES[k] + 7) // 8
    words = np.zeros(size, np.int64)
    at = words[OWN_ADDRESS] = words.ctypes.data
    at += 8 * NUM_WORDS
    words[PATCHES + 2], words[MEMORY], words[MEMORY + 1], words[MEMORY + 2] = 2, at, 2 * (size - NUM_WORDS), 1
    for k in range(NUM_ARRAYS):
        words[3 * k], words[3 * k + 1], words[3 * k + 2] = at, sizes[k], COLUMNS[k]
        at += (sizes[k] * ROW_BYTES[k] + 7) // 8 * 8
    return words


@making
def _copy_part(array: Any, words: NDArray[np.int64], k: int) -> None:
    """Copy an array to its room."""
    if array.shape[0] > 0:
        copy_bytes(words[3 * k], array.ctypes.data, array.shape[0] * ROW_BYTES[k])


@making
def pack(arrays: Arrays) -> NDArray[np.int64]:
    """Return the words of a template with these arrays, and their memory."""
    nodes, values, links, subgraphs, externals, lists, states, needs, pages = arrays
    sizes = np.array(
        (
            nodes.size,
            values.size,
            links.size,
            subgraphs.size,
            externals.shape[0],
            lists.shape[0],
            states.shape[0],
            needs.shape[0],
            pages.shape[0],
        )
    )
    words: NDArray[np.int64] = make_room(sizes)
    _copy_part(nodes, words, 0)
    _copy_part(values, words, 1)
    _copy_part(links, words, 2)
    _copy_part(subgraphs, words, 3)
    _copy_part(externals, words, 4)
    _copy_part(lists, words, 5)
    _copy_part(states, words, 6)
    _copy_part(needs, words, 7)
    _copy_part(pages, words, 8)
    return words


@making
def compile_draft(
    draft: Draft, num_kinds: int, limits: NDArray[np.int64], kind_rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a template's words and memory, as ``Template`` takes them; in place of what depends on lengths are
    sums."""
    arrays, numbers = _lay_out(draft, num_kinds)
    nodes, values, links, subgraphs, _, lists, states, needs, pages = arrays
    words: NDArray[np.int64] = pack(arrays)
    for k in range(5):
        words[NUM_EXTERNALS + k] = numbers[k]
    if draft.sums.size == 0:
        words[FITS] = has_room(
            nodes, values, links, subgraphs, lists, states, needs, pages, numbers[2], numbers[4], limits, kind_rows
        )
    return words


@allocating
def compile_rows(
    program: Ints,
    types: Rows[CellType],
    ports: Rows[PortInfo],
    num_kinds: int,
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
    is_sized: bool,
) -> tuple[NDArray[np.int64], Ints, NDArray[np.int64]]:
    """Return what ``Compiled`` has, of a program with its lengths or, if it ``is_sized``, without; no patches and no
    numbers if more depends on these than sums."""
    draft, num_lengths = read_program(program, types, ports), 0
    if is_sized:
        num_lengths = shorten(draft).size
        draft = with_sums(draft)
    words = compile_draft(draft, num_kinds, limits, kind_rows)
    if not has_sums(draft.sums):
        return words, np.zeros((0, 2), np.int32), np.zeros((0, 1), np.int64)
    numbers = np.zeros((NUM_STEPS + 1 - NUM_EXTERNALS, 1 + num_lengths), np.int64)
    for k in range(numbers.shape[0]):
        if num_lengths > 0:
            split(words[NUM_EXTERNALS + k], numbers[k])
        else:
            numbers[k, 0] = words[NUM_EXTERNALS + k]
    return words, take_out(draft.sums, words[NUM_WORDS:].view(np.int32), num_lengths), numbers


def compile_program(
    program: NDArray[np.int32],
    types: Rows[CellType],
    ports: Rows[PortInfo],
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
    is_sized: bool = False,
) -> Compiled:
    """Read a program, cut it into subgraphs and lay it out as rows for the tables.

    Args:
        program: words of ``program.py``.
        types, ports: those of the tables.
        limits: most nodes, values, links and subgraphs of a request, inputs of a node, and places of a request.
        kind_rows: ``[kinds, 2]`` rows of each kind at a worker and at the host.
        is_sized: compile it without its lengths, which it must have. There are no numbers if not all words are sums.

    Raise RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    made = Compiled(*compile_rows(read_only(program), types, ports, len(kind_rows), limits, kind_rows, is_sized))
    if made.words[NUM_STEPS] < 0:
        refuse_readers()
    return made


def refuse_readers() -> NoReturn:
    """Raise RequestTooLargeError of a graph in which one value has too many readers."""
    raise RequestTooLargeError(f"an output has more than {MAX_READERS} readers in one graph")
