"""From a draft to the records of its chains and loops (``record_layout.py``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core import record_layout as layout
from cellrt.core.jit import compiled, making
from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NOTHING,
    OP_MEMBER,
    PAGED,
    SAME,
    STEP,
    inputs_at,
    is_behind_member,
    last_member,
    next_input,
)
from cellrt.core.record_layout import (
    BODY_WORDS,
    EDGE_WORDS,
    NO_BODY,
    NO_STOP,
    TAP_WORDS,
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
from cellrt.core.tables import CHAIN, GRAPH, LOOP, MEMBER
from cellrt.core.uses import is_chain, is_inside, place_of


@making
def write_records(draft, program, types, ports, uses, edges, group, subgraphs, first_link):
    """Returns the links of all records, which begin at link ``first_link``."""
    links, readers = np.zeros(_most_words(draft, program, types, uses, edges), np.int32), _find_readers(edges)
    appended = np.zeros(draft.pages.size, np.int32)
    end = body = 0
    for unit in range(draft.unit_at.size):
        if draft.unit_lengths[unit] == 0:
            continue
        cell_type = types[draft.unit_types[unit]]
        at = end
        end += record_words(cell_type)
        subgraph, record = subgraphs[group[unit]], record_at(links, at)
        subgraph.record = first_link + at
        record.end, record.body = draft.unit_lengths[unit], NO_BODY
        record.keeps = int(unit == uses.kept_unit)
        is_loop, is_member = not is_chain(draft, program, unit), program[draft.unit_at[unit]] == OP_MEMBER
        record.stop = program[draft.unit_at[unit] + 3] if is_loop else NO_STOP
        record.first_value = uses.rows[draft.unit_values[unit]]
        end = _write_inputs(draft, program, types, ports, uses, group, unit, links, at, end, first_link)
        _write_starts(draft, program, types, ports, appended, unit, links, at)
        _write_outputs(draft, program, types, ports, uses, unit, links, at)
        subgraph.what = MEMBER if is_member else LOOP if is_loop else CHAIN
        if is_member:
            if not is_behind_member(draft, program, unit):
                body, end = end, _write_body(draft, program, group, unit, links, end)
            record.end, record.body = 1, first_link + body
        if not is_loop:
            end = _write_taps(draft, types, uses, unit, links, at, end, first_link)
        end = _write_edges(edges, readers, group, unit, links, at, end, first_link)
    return links[:end].copy()


@compiled
def most_refs(types, subgraphs, links):
    """The most inputs of a step of a chain or loop, a ragged one counted as its rows."""
    most = 0
    for k in range(subgraphs.size):
        subgraph = subgraphs[k]
        num_inputs = types[subgraph.cell_type].num_inputs if subgraph.what != GRAPH else 0
        count = num_inputs
        for port in range(num_inputs):
            read = input_at(links, input_position(subgraph.record, port))
            if read.mode == layout.MANY or read.mode == layout.ALL:
                count += read.start
            elif read.mode == layout.EMITTED:
                loop = record_at(links, subgraphs[read.source].record)
                count += loop.end - loop.lead if loop.body == NO_BODY else body_at(links, loop.body).limit
        most = max(most, count)
    return most


@compiled
def _most_words(draft, program, types, uses, edges):
    """No fewer words than the records have."""
    count = 6 * (program.size + edges.starts[draft.unit_at.size]) + TAP_WORDS * uses.values.size
    for unit in range(draft.unit_at.size):
        cell_type = types[draft.unit_types[unit]]
        if draft.unit_lengths[unit] > 0:
            count += record_words(cell_type) + BODY_WORDS
            count += _listed(draft, program, types, unit)
    return count


@compiled
def _listed(draft, program, types, unit):
    """Values that the inputs of a chain or loop name one by one."""
    at, count = inputs_at(program, draft.unit_at[unit]), 0
    for _ in range(types[draft.unit_types[unit]].num_inputs):
        mode = program[at]
        if mode in (LIST, EACH):
            count += program[at + 1]
        elif mode not in (FIXED, CARRY, NEXT, PAGED, NOTHING, EMITTED, SAME, LAST):
            count += draft.unit_lengths[unit] if mode == STEP else program[at + 3]
        at = next_input(program, at)
    return count


@compiled
def _write_inputs(draft, program, types, ports, uses, group, unit, links, at, end, first_link):
    """Writes the inputs of a record at ``at``, and their lists from ``end`` on; returns the new end."""
    cell_type = types[draft.unit_types[unit]]
    word, record = inputs_at(program, draft.unit_at[unit]), record_at(links, at)
    for port in range(cell_type.num_inputs):
        mode, read = program[word], input_at(links, input_position(at, port))
        read.source = -1
        if mode == PAGED:
            read.mode, read.at = layout.PAGED, program[word + 1]
        elif mode == NOTHING:
            read.mode = layout.NOTHING
        elif mode == EMITTED:
            read.mode = layout.EMITTED
            read.at = uses.values[uses.rows[program[word + 1]]].result
            read.source = group[draft.makers[program[word + 1]]]
        elif mode in (SAME, LAST):
            maker = draft.makers[program[word + (1 if mode == SAME else 2)]]
            output = program[word + (1 if mode == SAME else 2)] - draft.unit_values[maker]
            read.mode = layout.SAME if mode == SAME else layout.LAST
            read.at = output if mode == SAME else uses.rows[program[word + 1]]
            read.stride, read.direction = output, 1
            read.source = group[maker]
        elif mode in (FIXED, CARRY, NEXT):
            read.mode = layout.WHOLE if mode == FIXED else layout.CARRY
            read.at = uses.rows[program[word + 1]]
            read.source = program[word + 2] if mode == NEXT else ports[cell_type.first_port + port].carry
        elif mode in (LIST, EACH):
            count = program[word + 1]
            read.mode = layout.MANY if mode == LIST else layout.EACH
            read.at, read.start = first_link + end, count
            for k in range(count):
                links[end + k] = uses.rows[program[word + 2 + k]]
            end += count
        else:
            base, stride = program[word + 1], program[word + 2]
            count = draft.unit_lengths[unit] if mode == STEP else program[word + 3]
            if is_inside(draft, program, types, base, stride, count):
                _write_sequence(draft, types, uses, group, read, mode, base, stride, count)
                if mode == LEADS:
                    read.mode, read.source = layout.LEADS, program[word + 4]
                    record.lead = record.unseen = count - 1
            else:
                read.mode = layout.EACH if mode == STEP else layout.MANY
                read.at, read.start = first_link + end, count
                for k in range(count):
                    links[end + k] = uses.rows[base + k * stride]
                end += count
        record.num_sources += int(read.mode == layout.SAME or (read.mode == layout.STEP and read.source >= 0))
        word = next_input(program, word)
    return end


@compiled
def _write_sequence(draft, types, uses, group, read, mode, base, stride, count):
    """Writes an input that reads a sequence: step by step, or ``count`` steps of it at every step."""
    sequence, start = place_of(draft, types, uses.first_sequences, base)
    maker = draft.makers[base]
    step = stride if maker < 0 else stride // types[draft.unit_types[maker]].num_outputs
    read.at, read.stride = uses.places[sequence] + start, step
    if mode == STEP:
        read.mode, read.start, read.direction = layout.STEP, start, step
        if maker >= 0:
            read.source = group[maker]
    else:
        read.mode, read.start = layout.ALL, count


@compiled
def _write_starts(draft, program, types, ports, appended, unit, links, at):
    """Says of each growing state how many rows are appended before a unit, -1 after a loop; counts those of its own."""
    cell_type, word = types[draft.unit_types[unit]], inputs_at(program, draft.unit_at[unit])
    for port in range(cell_type.num_inputs):
        if program[word] == PAGED:
            state = program[word + 1]
            input_at(links, input_position(at, port)).start = appended[state]
            if ports[cell_type.first_port + port].appends:
                appended[state] = appended[state] + draft.unit_lengths[unit] if is_chain(draft, program, unit) else -1
        word = next_input(program, word)


@compiled
def _write_outputs(draft, program, types, ports, uses, unit, links, at):
    cell_type, first = types[draft.unit_types[unit]], uses.first_sequences[unit]
    value = uses.rows[draft.unit_values[unit]]
    is_loop = first < 0
    for k in range(cell_type.num_outputs):
        output = output_at(links, output_position(at, cell_type, k))
        output.sequence = -1 if is_loop else uses.places[first + k]
        output.result = -1 if is_loop else uses.results[first + k]
        output.result_stride = 0 if is_loop else uses.result_strides[first + k]
        is_state = _goes_on(draft, program, types, ports, unit, k)
        is_state = is_state and (is_loop or draft.unit_lengths[unit] > 1 or unit == uses.kept_unit)
        output.is_state = int(is_state or (is_loop and uses.values[value + k].readers > 0))


@compiled
def _goes_on(draft, program, types, ports, unit, output):
    """Whether the next step of a chain or loop reads an output; or, of a member of a body, any member."""
    if program[draft.unit_at[unit]] == OP_MEMBER:
        return _is_read_inside(draft, program, types, unit, draft.unit_values[unit] + output)
    cell_type, word = types[draft.unit_types[unit]], inputs_at(program, draft.unit_at[unit])
    for port in range(cell_type.num_inputs):
        if program[word] == CARRY and ports[cell_type.first_port + port].carry == output:
            return True
        if program[word] == NEXT and program[word + 2] == output:
            return True
        if program[word] == LEADS and program[word + 4] == output:
            return True
        word = next_input(program, word)
    return False


@compiled
def _is_read_inside(draft, program, types, unit, value):
    """Whether a member of a unit's body reads a value."""
    other, is_more = last_member(draft, program, unit), True
    while is_more:
        word = inputs_at(program, draft.unit_at[other])
        for _ in range(types[draft.unit_types[other]].num_inputs):
            is_same, is_last = program[word] == SAME, program[word] == LAST
            if (is_same and program[word + 1] == value) or (is_last and program[word + 2] == value):
                return True
            word = next_input(program, word)
        other, is_more = other - 1, is_behind_member(draft, program, other)
    return False


@compiled
def _write_body(draft, program, group, first, links, end):
    """Writes what is common to the body whose first member is unit ``first``; returns the new end."""
    at = draft.unit_at[first]
    count, num_types = max(0, program[at + 4]) + 1, max(0, -program[at + 4])
    body, members = body_at(links, end), end + BODY_WORDS
    body.limit, body.stopper, body.num_types = draft.unit_lengths[first], -1, num_types
    body.num_members = body.left = body.to_send = count
    for k in range(count):
        links[members + k] = group[first + k]
        if program[draft.unit_at[first + k] + 3] >= 0:
            body.stopper = group[first + k]
    for k in range(num_types):
        links[members + count + k] = program[at + 5 + k]
    return members + count + num_types


@compiled
def is_carried(ports, cell_type, output):
    """Whether an input is carried from an output."""
    for port in range(cell_type.num_inputs):
        if ports[cell_type.first_port + port].carry == output:
            return True
    return False


@compiled
def _write_taps(draft, types, uses, unit, links, at, end, first_link):
    """Lists the outputs of steps that are values; the chain holds those that are read until it is over."""
    num_outputs, record = types[draft.unit_types[unit]].num_outputs, record_at(links, at)
    record.taps, record.tap_step = first_link + end, draft.unit_lengths[unit]
    for k in range(draft.unit_lengths[unit] * num_outputs):
        row = uses.rows[draft.unit_values[unit] + k]
        if row >= 0:
            tap = tap_at(links, end)
            tap.step, tap.output, tap.value = k // num_outputs, k % num_outputs, row
            if uses.values[row].readers > 0:
                uses.values[row].readers += 1
            record.num_taps += 1
            end += TAP_WORDS
    if record.num_taps > 0:
        record.tap_step = tap_at(links, record.taps - first_link).step
    return end


class Readers(NamedTuple):
    """The edges of ``Edges`` from the other end: those of a unit are ``heads[unit]``, then ``following`` each other."""

    heads: NDArray[np.int32]
    following: NDArray[np.int32]  # of each edge
    units: NDArray[np.int32]  # of each edge: who reads


@making
def _find_readers(edges):
    """The readers of each unit, in order."""
    num_units, count = edges.starts.size - 1, edges.starts[edges.starts.size - 1]
    readers = Readers(np.full(num_units, -1, np.int32), np.empty(count, np.int32), np.empty(count, np.int32))
    for unit in range(num_units - 1, -1, -1):
        for k in range(edges.starts[unit], edges.starts[unit + 1]):
            readers.units[k] = unit
            readers.following[k] = readers.heads[edges.producers[k]]
            readers.heads[edges.producers[k]] = k
    return readers


@compiled
def _write_edges(edges, readers, group, unit, links, at, end, first_link):
    """Lists who waits for a chain or loop, by the steps that must be there, and who follows it."""
    record, first = record_at(links, at), end
    k = readers.heads[unit]
    while k >= 0:
        if edges.steps[k] > 0:
            to = end
            while to > first and edge_at(links, to - EDGE_WORDS).steps > edges.steps[k]:
                links[to], links[to + 1] = links[to - EDGE_WORDS], links[to - EDGE_WORDS + 1]
                to -= EDGE_WORDS
            edge = edge_at(links, to)
            edge.steps, edge.subgraph = edges.steps[k], group[readers.units[k]]
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
