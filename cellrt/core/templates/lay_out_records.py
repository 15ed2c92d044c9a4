"""The layout of a draft's chains and loops as records (``record_layout.py``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state import record_layout as layout
from cellrt.core.state.record_layout import (
    BODY_WORDS,
    EDGE_WORDS,
    NO_BODY,
    NO_STOP,
    TAP_WORDS,
    Input,
    body_at,
    edge_at,
    input_at,
    input_position,
    output_at,
    output_position,
    record_at,
    record_words,
    tap_at,
)
from cellrt.core.state.tables import CHAIN, GRAPH, LOOP, CellType, PortInfo, Subgraph
from cellrt.core.templates.lay_out import Edges
from cellrt.core.templates.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    NEXT,
    NOTHING,
    OP_MEMBER,
    PAGED,
    SAME,
    STEP,
    Draft,
    InputRow,
    is_behind_member,
    is_chain,
    last_member,
    named,
    num_named,
    num_steps,
)
from cellrt.core.templates.sums import position_of, sum_in, sum_of, word_of
from cellrt.core.templates.uses import Ints, Uses, place_of
from cellrt.native.jit import compiled, making
from cellrt.native.row_types import Rows


@making
def write_records(
    draft: Draft, uses: Uses, edges: Edges, group: Ints, subgraphs: Rows[Subgraph], first_link: int
) -> Ints:
    """Return the links of all records, which begin at link ``first_link``."""
    links, readers = np.zeros(_most_words(draft, uses, edges), np.int32), _find_readers(edges)
    appended = np.zeros(draft.pages.size, np.int64)
    end = body = 0
    for unit in range(draft.units.size):
        if draft.lengths[unit] == 0:
            continue
        cell_type = draft.types[draft.units[unit].cell_type]
        # Write the fixed part of the record.
        at = end
        end += record_words(cell_type)
        subgraph, record = subgraphs[group[unit]], record_at(links, at)
        subgraph.record = first_link + at
        record.end, record.body = word_of(draft.sums, draft.lengths[unit]), NO_BODY
        record.keeps = int(unit == uses.kept_unit)
        is_loop = not is_chain(draft, unit)
        record.stop = draft.units[unit].stop if is_loop else NO_STOP
        record.first_value = uses.rows[draft.units[unit].value]
        end = _write_inputs(draft, uses, group, unit, links, at, end, first_link)
        _write_starts(draft, appended, unit, links, at)
        _write_outputs(draft, uses, unit, links, at)
        subgraph.what = LOOP if is_loop else CHAIN
        # Members of a body share one body, which comes after the record of the first.
        if is_loop:
            if not is_behind_member(draft, unit):
                body, end = end, _write_body(draft, group, unit, links, end)
            record.body = first_link + body
            if not body_at(links, body).runs:
                record.end = 1
        else:
            end = _write_taps(draft, uses, unit, links, at, end, first_link)
        end = _write_edges(draft, edges, readers, group, unit, links, at, end, first_link)
    return links[:end].copy()


@compiled
def most_refs(types: Rows[CellType], subgraphs: Rows[Subgraph], links: Ints) -> int:
    """Return the most inputs of a step of a chain or loop, a ragged one counted as its rows."""
    most = 0
    for k in range(subgraphs.size):
        subgraph = subgraphs[k]
        num_inputs = types[subgraph.cell_type].num_inputs if subgraph.what != GRAPH else 0
        count = num_inputs
        for port in range(num_inputs):
            read = input_at(links, input_position(subgraph.record, port))
            if read.mode in (layout.MANY, layout.ALL):
                count += read.start
            elif read.mode == layout.EMITTED:
                loop = record_at(links, subgraphs[read.source].record)
                count += body_at(links, loop.body).limit - loop.lead
        most = max(most, count)
    return most


@compiled
def _most_words(draft: Draft, uses: Uses, edges: Edges) -> int:
    """Return no fewer words than the records have."""
    count = (EDGE_WORDS + 1) * edges.starts[draft.units.size] + TAP_WORDS * uses.values.size + draft.layers.size
    for unit in range(draft.units.size):
        operation, cell_type = draft.units[unit], draft.types[draft.units[unit].cell_type]
        if draft.lengths[unit] > 0:
            count += record_words(cell_type) + BODY_WORDS + 1
            for k in range(operation.input, operation.input + cell_type.num_inputs):
                count += 0 if draft.inputs[k].is_whole else num_named(draft.inputs[k])
    return int(count)


@compiled
def _write_inputs(
    draft: Draft, uses: Uses, group: Ints, unit: int, links: Ints, at: int, end: int, first_link: int
) -> int:
    """Write the inputs of a record at ``at``, and their lists from ``end`` on; return the new end."""
    cell_type, record = draft.types[draft.units[unit].cell_type], record_at(links, at)
    for port in range(cell_type.num_inputs):
        given, read = draft.inputs[draft.units[unit].input + port], input_at(links, input_position(at, port))
        mode = given.mode
        read.source = -1
        # Translate the mode of the program to that of the record, with the places or values that it needs.
        if mode == PAGED:
            read.mode, read.at = layout.PAGED, given.state
        elif mode == NOTHING:
            read.mode = layout.NOTHING
        elif mode == EMITTED:
            read.mode = layout.EMITTED
            read.at = uses.values[uses.rows[given.value]].result
            read.source = group[draft.makers[given.value]]
        elif mode in (SAME, LAST):
            maker = draft.makers[given.value]
            output = given.value - draft.units[maker].value
            read.mode = layout.SAME if mode == SAME else layout.LAST
            read.at = output if mode == SAME else uses.rows[given.first]
            read.stride, read.direction = output, 1
            read.source = group[maker]
        elif mode in (FIXED, CARRY, NEXT):
            read.mode = layout.WHOLE if mode == FIXED else layout.CARRY
            read.at = uses.rows[given.first]
            read.source = given.output if mode == NEXT else draft.ports[cell_type.first_port + port].carry
        elif given.is_whole:
            _write_sequence(draft, uses, group, read, given)
            if mode == LEADS:
                read.mode, read.source = layout.LEADS, given.output
                record.lead = record.unseen = word_of(draft.sums, sum_of(given.count) - 1)
        else:
            read.mode = layout.EACH if mode in (EACH, STEP) else layout.MANY
            read.at, read.start = first_link + end, num_named(given)
            for k in range(num_named(given)):
                links[end + k] = uses.rows[named(draft, given, k)]
            end += num_named(given)
        record.num_sources += int(read.mode == layout.SAME or (read.mode == layout.STEP and read.source >= 0))
    return end


@compiled
def _write_sequence(draft: Draft, uses: Uses, group: Ints, read: Input, given: InputRow) -> None:
    """Write an input that reads a sequence: step by step, or some steps of it at every step."""
    sequence, start = place_of(draft, uses.first_sequences, given.first)
    maker = draft.makers[given.first]
    step = given.stride if maker < 0 else given.stride // draft.types[draft.units[maker].cell_type].num_outputs
    read.at, read.stride = word_of(draft.sums, uses.places[sequence] + start), step
    if given.mode == STEP:
        read.mode, read.start, read.direction = layout.STEP, word_of(draft.sums, start), step
        if maker >= 0:
            read.source = group[maker]
    else:
        read.mode, read.start = layout.ALL, word_of(draft.sums, sum_of(given.count))


@compiled
def _write_starts(draft: Draft, appended: NDArray[np.int64], unit: int, links: Ints, at: int) -> None:
    """Write how many rows are appended to each growing state before a unit; count those of the unit.

    After a loop the number is -1.
    """
    cell_type = draft.types[draft.units[unit].cell_type]
    for port in range(cell_type.num_inputs):
        state = draft.inputs[draft.units[unit].input + port].state
        if state >= 0:
            before = appended[state]
            input_at(links, input_position(at, port)).start = word_of(draft.sums, before)
            if draft.ports[cell_type.first_port + port].appends:
                appended[state] = before + draft.lengths[unit] if is_chain(draft, unit) else -1


@compiled
def _write_outputs(draft: Draft, uses: Uses, unit: int, links: Ints, at: int) -> None:
    cell_type, first = draft.types[draft.units[unit].cell_type], uses.first_sequences[unit]
    value = uses.rows[draft.units[unit].value]
    is_loop = first < 0
    for k in range(cell_type.num_outputs):
        output = output_at(links, output_position(at, cell_type, k))
        output.sequence = -1 if is_loop else word_of(draft.sums, uses.places[first + k])
        output.result = -1 if is_loop else word_of(draft.sums, uses.results[first + k])
        output.result_stride = 0 if is_loop else uses.result_strides[first + k]
        is_state = _goes_on(draft, unit, k)
        is_state = is_state and (is_loop or draft.lengths[unit] > 1 or unit == uses.kept_unit)
        output.is_state = int(is_state or (is_loop and uses.values[value + k].readers > 0))


@compiled
def _goes_on(draft: Draft, unit: int, output: int) -> bool:
    """Return whether the next step of a chain or loop reads an output; or, of a member of a body, any member."""
    operation = draft.units[unit]
    if operation.op == OP_MEMBER:
        return bool(_is_read_inside(draft, unit, operation.value + output))
    cell_type = draft.types[operation.cell_type]
    for port in range(cell_type.num_inputs):
        given = draft.inputs[operation.input + port]
        if given.mode == CARRY and draft.ports[cell_type.first_port + port].carry == output:
            return True
        if given.mode in (NEXT, LEADS) and given.output == output:
            return True
    return False


@compiled
def _is_read_inside(draft: Draft, unit: int, value: int) -> bool:
    """Return whether a member of a unit's body reads a value."""
    other, is_more = last_member(draft, unit), True
    while is_more:
        first = draft.units[other].input
        for k in range(first, first + draft.types[draft.units[other].cell_type].num_inputs):
            if draft.inputs[k].mode in (SAME, LAST) and draft.inputs[k].value == value:
                return True
        other, is_more = other - 1, is_behind_member(draft, other)
    return False


@compiled
def _write_body(draft: Draft, group: Ints, first: int, links: Ints, end: int) -> int:
    """Write what the members of the body whose first member is unit ``first`` share; return the new end."""
    operation = draft.units[first]
    left = operation.left if operation.op == OP_MEMBER else 0
    count, num_types = max(0, left) + 1, max(0, -left)
    body, members = body_at(links, end), end + BODY_WORDS
    body.runs = int(operation.op != OP_MEMBER)
    body.limit, body.stopper, body.num_types = word_of(draft.sums, draft.lengths[first]), -1, num_types
    body.num_members = body.left = body.to_send = count
    for k in range(count):
        links[members + k] = group[first + k]
        if draft.units[first + k].stop >= 0 or body.runs:
            body.stopper = group[first + k]
    for k in range(num_types):
        links[members + count + k] = draft.layers[operation.layer + k]
    return int(members + count + num_types)


@compiled
def is_carried(ports: Rows[PortInfo], cell_type: CellType, output: int) -> bool:
    """Return whether an input is carried from an output."""
    for port in range(cell_type.num_inputs):
        if ports[cell_type.first_port + port].carry == output:
            return True
    return False


@compiled
def _write_taps(draft: Draft, uses: Uses, unit: int, links: Ints, at: int, end: int, first_link: int) -> int:
    """List the outputs of steps that are values; the chain holds those that are read until it ends."""
    operation, num_outputs = draft.units[unit], draft.types[draft.units[unit].cell_type].num_outputs
    record = record_at(links, at)
    record.taps, record.tap_step = first_link + end, word_of(draft.sums, draft.lengths[unit])
    for k in range(num_steps(draft, unit) * num_outputs):
        row = uses.rows[operation.value + k]
        if row >= 0:
            tap = tap_at(links, end)
            tap.step = word_of(draft.sums, position_of(operation.length, k // num_outputs))
            tap.output, tap.value = k % num_outputs, row
            if uses.values[row].readers > 0:
                uses.values[row].readers += 1
            record.num_taps += 1
            end += TAP_WORDS
    if record.num_taps > 0:
        record.tap_step = tap_at(links, record.taps - first_link).step
    return end


class Readers(NamedTuple):
    """The edges of ``Edges`` by producer: the first edge of a unit is ``heads[unit]``, then they are ``following``."""

    heads: NDArray[np.int32]
    following: NDArray[np.int32]  # of each edge
    units: NDArray[np.int32]  # of each edge: the reader


@making
def _find_readers(edges: Edges) -> Readers:
    """Return the readers of each unit, in order."""
    num_units, count = edges.starts.size - 1, edges.starts[edges.starts.size - 1]
    readers = Readers(np.full(num_units, -1, np.int32), np.empty(count, np.int32), np.empty(count, np.int32))
    for unit in range(num_units - 1, -1, -1):
        for k in range(edges.starts[unit], edges.starts[unit + 1]):
            readers.units[k] = unit
            readers.following[k] = readers.heads[edges.producers[k]]
            readers.heads[edges.producers[k]] = k
    return readers


@compiled
def _write_edges(
    draft: Draft,
    edges: Edges,
    readers: Readers,
    group: Ints,
    unit: int,
    links: Ints,
    at: int,
    end: int,
    first_link: int,
) -> int:
    """List the subgraphs that wait for a chain or loop, by the steps that they need, and those that follow it."""
    record, first = record_at(links, at), end
    k = readers.heads[unit]
    while k >= 0:
        if edges.steps[k] > 0:
            to = end
            while to > first and sum_in(draft.sums, edge_at(links, to - EDGE_WORDS).steps) > edges.steps[k]:
                links[to], links[to + 1] = links[to - EDGE_WORDS], links[to - EDGE_WORDS + 1]
                to -= EDGE_WORDS
            edge = edge_at(links, to)
            edge.steps, edge.subgraph = word_of(draft.sums, edges.steps[k]), group[readers.units[k]]
            end += EDGE_WORDS
        k = readers.following[k]
    record.edges, record.num_edges = first_link + first, (end - first) // EDGE_WORDS
    first = end
    k = readers.heads[unit]
    while k >= 0:
        if edges.follows[k]:
            links[end] = group[readers.units[k]]
            end += 1
        k = readers.following[k]
    record.followers, record.num_followers = first_link + first, end - first
    return end
