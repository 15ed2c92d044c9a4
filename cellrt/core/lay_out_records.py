"""From a draft to the records of its chains and loops (``record_layout.py``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core import record_layout as record
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
from cellrt.core.tables import CHAIN, LOOP, MEMBER
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
        end += record.num_words(cell_type.num_inputs, cell_type.num_outputs)
        subgraph = subgraphs[group[unit]]
        subgraph.record = first_link + at
        links[at + record.LENGTH] = draft.unit_lengths[unit]
        links[at + record.KEEPS] = int(unit == uses.kept_unit)
        is_loop, is_member = not is_chain(draft, program, unit), program[draft.unit_at[unit]] == OP_MEMBER
        links[at + record.STOP] = program[draft.unit_at[unit] + 3] if is_loop else record.IS_CHAIN
        links[at + record.VALUES] = uses.rows[draft.unit_values[unit]]
        end = _write_inputs(draft, program, types, ports, uses, group, unit, links, at, end, first_link)
        _write_starts(draft, program, types, ports, appended, unit, links, at)
        _write_outputs(draft, program, types, ports, uses, unit, links, at)
        subgraph.what = MEMBER if is_member else LOOP if is_loop else CHAIN
        if is_member:
            if not is_behind_member(draft, program, unit):
                body, end = end, _write_body(draft, program, group, unit, links, end)
            links[at + record.LENGTH], links[at + record.BODY] = 1, first_link + body
        elif is_loop:
            links[at + record.BODY] = record.NO_BODY
        if is_loop:
            links[at + record.MORE_ROWS] = first_link + end
            end += cell_type.num_outputs * cell_type.ahead
        else:
            end = _write_taps(draft, types, uses, unit, links, at, end, first_link)
        end = _write_edges(edges, readers, group, unit, links, at, end, first_link)
    return links[:end].copy()


@compiled
def most_refs(types, subgraphs, links):
    """The most inputs of a step of a chain or loop, a ragged one counted as its rows."""
    most = 0
    for k in range(subgraphs.size):
        at = subgraphs[k].record
        count = types[subgraphs[k].cell_type].num_inputs if at >= 0 else 0
        for to in range(at + record.HEADER, at + record.HEADER + record.INPUT * count, record.INPUT):
            if links[to + record.MODE] in (record.MANY, record.ALL):
                count += links[to + record.START]
            elif links[to + record.MODE] == record.EMITTED:
                loop = subgraphs[links[to + record.SOURCE]].record
                body = links[loop + record.BODY]
                alone = links[loop + record.LENGTH] - links[loop + record.LEAD]
                count += alone if body == record.NO_BODY else links[body + record.LIMIT]
        most = max(most, count)
    return most


@compiled
def _most_words(draft, program, types, uses, edges):
    """No fewer words than the records have."""
    count = 6 * (program.size + edges.starts[draft.unit_at.size]) + record.TAP * uses.values.size
    for unit in range(draft.unit_at.size):
        cell_type = types[draft.unit_types[unit]]
        if draft.unit_lengths[unit] > 0:
            count += record.num_words(cell_type.num_inputs, cell_type.num_outputs)
            count += cell_type.num_outputs * cell_type.ahead
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
    word = inputs_at(program, draft.unit_at[unit])
    for port in range(cell_type.num_inputs):
        mode, to = program[word], at + record.HEADER + record.INPUT * port
        links[to + record.SOURCE] = -1
        if mode == PAGED:
            links[to + record.MODE], links[to + record.AT] = record.PAGED, program[word + 1]
        elif mode == NOTHING:
            links[to + record.MODE] = record.NOTHING
        elif mode == EMITTED:
            links[to + record.MODE] = record.EMITTED
            links[to + record.AT] = uses.values[uses.rows[program[word + 1]]].result
            links[to + record.SOURCE] = group[draft.makers[program[word + 1]]]
        elif mode in (SAME, LAST):
            maker = draft.makers[program[word + (1 if mode == SAME else 2)]]
            output = program[word + (1 if mode == SAME else 2)] - draft.unit_values[maker]
            links[to + record.MODE] = record.SAME if mode == SAME else record.LAST
            links[to + record.AT] = output if mode == SAME else uses.rows[program[word + 1]]
            links[to + record.STRIDE], links[to + record.DIRECTION] = output, 1
            links[to + record.SOURCE] = group[maker]
        elif mode in (FIXED, CARRY, NEXT):
            links[to + record.MODE] = record.WHOLE if mode == FIXED else record.CARRY
            links[to + record.AT] = uses.rows[program[word + 1]]
            links[to + record.SOURCE] = program[word + 2] if mode == NEXT else ports[cell_type.first_port + port].carry
        elif mode in (LIST, EACH):
            count = program[word + 1]
            links[to + record.MODE] = record.MANY if mode == LIST else record.EACH
            links[to + record.AT], links[to + record.START] = first_link + end, count
            for k in range(count):
                links[end + k] = uses.rows[program[word + 2 + k]]
            end += count
        else:
            base, stride = program[word + 1], program[word + 2]
            count = draft.unit_lengths[unit] if mode == STEP else program[word + 3]
            if is_inside(draft, program, types, base, stride, count):
                _write_sequence(draft, types, uses, group, links, to, mode, base, stride, count)
                if mode == LEADS:
                    links[to + record.MODE], links[to + record.SOURCE] = record.LEADS, program[word + 4]
                    links[at + record.LEAD] = links[at + record.UNSEEN] = count - 1
            else:
                links[to + record.MODE] = record.EACH if mode == STEP else record.MANY
                links[to + record.AT], links[to + record.START] = first_link + end, count
                for k in range(count):
                    links[end + k] = uses.rows[base + k * stride]
                end += count
        is_led = links[to + record.MODE] == record.SAME
        is_led = is_led or (links[to + record.MODE] == record.STEP and links[to + record.SOURCE] >= 0)
        links[at + record.NUM_SOURCES] += int(is_led)
        word = next_input(program, word)
    return end


@compiled
def _write_sequence(draft, types, uses, group, links, to, mode, base, stride, count):
    """Writes an input that reads a sequence: step by step, or ``count`` steps of it at every step."""
    sequence, start = place_of(draft, types, uses.first_sequences, base)
    maker = draft.makers[base]
    step = stride if maker < 0 else stride // types[draft.unit_types[maker]].num_outputs
    links[to + record.AT] = uses.places[sequence] + start
    links[to + record.STRIDE] = step
    if mode == STEP:
        links[to + record.MODE], links[to + record.START] = record.STEP, start
        links[to + record.DIRECTION] = step
        if maker >= 0:
            links[to + record.SOURCE] = group[maker]
    else:
        links[to + record.MODE], links[to + record.START] = record.ALL, count


@compiled
def _write_starts(draft, program, types, ports, appended, unit, links, at):
    """Says of each growing state how many rows are appended before a unit, -1 after a loop; counts those of its own."""
    cell_type, word = types[draft.unit_types[unit]], inputs_at(program, draft.unit_at[unit])
    for port in range(cell_type.num_inputs):
        if program[word] == PAGED:
            state = program[word + 1]
            links[at + record.HEADER + record.INPUT * port + record.START] = appended[state]
            if ports[cell_type.first_port + port].appends:
                appended[state] = appended[state] + draft.unit_lengths[unit] if is_chain(draft, program, unit) else -1
        word = next_input(program, word)


@compiled
def _write_outputs(draft, program, types, ports, uses, unit, links, at):
    cell_type, first = types[draft.unit_types[unit]], uses.first_sequences[unit]
    value = uses.rows[draft.unit_values[unit]]
    is_loop = first < 0
    for output in range(cell_type.num_outputs):
        to = at + record.HEADER + record.INPUT * cell_type.num_inputs + record.OUTPUT * output
        links[to + record.SEQUENCE] = -1 if is_loop else uses.places[first + output]
        links[to + record.RESULT] = -1 if is_loop else uses.results[first + output]
        links[to + record.RESULT_STRIDE] = 0 if is_loop else uses.result_strides[first + output]
        is_state = _goes_on(draft, program, types, ports, unit, output)
        is_state = is_state and (is_loop or draft.unit_lengths[unit] > 1 or unit == uses.kept_unit)
        links[to + record.IS_STATE] = int(is_state or (is_loop and uses.values[value + output].readers > 0))


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
    links[end + record.NUM_TYPES] = num_types
    links[end + record.LIMIT], links[end + record.STOPPER] = draft.unit_lengths[first], -1
    links[end + record.MEMBERS] = links[end + record.LEFT] = links[end + record.TO_SEND] = count
    for k in range(count):
        links[end + record.MEMBERS + 1 + k] = group[first + k]
        if program[draft.unit_at[first + k] + 3] >= 0:
            links[end + record.STOPPER] = group[first + k]
    for k in range(num_types):
        links[end + record.MEMBERS + 1 + count + k] = program[at + 5 + k]
    return end + record.MEMBERS + 1 + count + num_types


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
    num_outputs = types[draft.unit_types[unit]].num_outputs
    links[at + record.TAPS] = first_link + end
    for k in range(draft.unit_lengths[unit] * num_outputs):
        row = uses.rows[draft.unit_values[unit] + k]
        if row >= 0:
            links[end], links[end + 1], links[end + 2] = k // num_outputs, k % num_outputs, row
            if uses.values[row].readers > 0:
                uses.values[row].readers += 1
            links[at + record.NUM_TAPS] += 1
            end += record.TAP
    links[at + record.TAP_STEP] = draft.unit_lengths[unit]
    if links[at + record.NUM_TAPS] > 0:
        links[at + record.TAP_STEP] = links[links[at + record.TAPS] - first_link]
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
    first = end
    k = readers.heads[unit]
    while k >= 0:
        if edges.steps[k] > 0:
            to = end
            while to > first and links[to - record.EDGE] > edges.steps[k]:
                links[to], links[to + 1] = links[to - record.EDGE], links[to - record.EDGE + 1]
                to -= record.EDGE
            links[to], links[to + 1] = edges.steps[k], group[readers.units[k]]
            end += record.EDGE
        k = readers.following[k]
    links[at + record.EDGES], links[at + record.NUM_EDGES] = first_link + first, (end - first) // record.EDGE
    first = end
    k = readers.heads[unit]
    while k >= 0:
        if edges.follows[k]:
            links[end] = group[readers.units[k]]
            end += 1
        k = readers.following[k]
    links[at + record.FOLLOWERS], links[at + record.NUM_FOLLOWERS] = first_link + first, end - first
    return end
