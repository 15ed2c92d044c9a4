"""From a draft to the records of its chains and loops (``record_layout.py``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core import record_layout as record
from cellrt.core.jit import compiled, making
from cellrt.core.lay_out import Edges
from cellrt.core.program import (
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
from cellrt.core.sums import position_of, sum_in, sum_of, word_of
from cellrt.core.tables import CHAIN, LOOP, MEMBER
from cellrt.core.uses import Ints, Rows, Uses, place_of


@making
def write_records(draft: Draft, uses: Uses, edges: Edges, group: Ints, subgraphs: Rows, first_link: int) -> Ints:
    """Return the links of all records, which begin at link ``first_link``."""
    links, readers = np.zeros(_most_words(draft, uses, edges), np.int32), _find_readers(edges)
    appended = np.zeros(draft.pages.size, np.int64)
    end = body = 0
    for unit in range(draft.units.size):
        if draft.lengths[unit] == 0:
            continue
        cell_type = draft.types[draft.units[unit].cell_type]
        at = end
        end += record.num_words(cell_type.num_inputs, cell_type.num_outputs)
        subgraph = subgraphs[group[unit]]
        subgraph.record = first_link + at
        links[at + record.LENGTH] = word_of(draft.sums, draft.lengths[unit])
        links[at + record.KEEPS] = int(unit == uses.kept_unit)
        is_loop, is_member = not is_chain(draft, unit), draft.units[unit].op == OP_MEMBER
        links[at + record.STOP] = draft.units[unit].stop if is_loop else record.IS_CHAIN
        links[at + record.VALUES] = uses.rows[draft.units[unit].value]
        end = _write_inputs(draft, uses, group, unit, links, at, end, first_link)
        _write_starts(draft, appended, unit, links, at)
        _write_outputs(draft, uses, unit, links, at)
        subgraph.what = MEMBER if is_member else LOOP if is_loop else CHAIN
        if is_member:
            if not is_behind_member(draft, unit):
                body, end = end, _write_body(draft, group, unit, links, end)
            links[at + record.LENGTH], links[at + record.BODY] = 1, first_link + body
        elif is_loop:
            links[at + record.BODY] = record.NO_BODY
        if is_loop:
            links[at + record.MORE_ROWS] = first_link + end
            end += cell_type.num_outputs * cell_type.ahead
        else:
            end = _write_taps(draft, uses, unit, links, at, end, first_link)
        end = _write_edges(draft, edges, readers, group, unit, links, at, end, first_link)
    return links[:end].copy()


@compiled
def most_refs(types: Rows, subgraphs: Rows, links: Ints) -> int:
    """Return the most inputs of a step of a chain or loop, a ragged one counted as its rows."""
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
def _most_words(draft: Draft, uses: Uses, edges: Edges) -> int:
    """Return no fewer words than the records have."""
    count = (record.EDGE + 1) * edges.starts[draft.units.size] + record.TAP * uses.values.size + draft.layers.size
    for unit in range(draft.units.size):
        operation, cell_type = draft.units[unit], draft.types[draft.units[unit].cell_type]
        if draft.lengths[unit] > 0:
            count += record.num_words(cell_type.num_inputs, cell_type.num_outputs) + record.MEMBERS + 2
            count += cell_type.num_outputs * cell_type.ahead
            for k in range(operation.input, operation.input + cell_type.num_inputs):
                count += 0 if draft.inputs[k].is_whole else num_named(draft.inputs[k])
    return int(count)


@compiled
def _write_inputs(
    draft: Draft, uses: Uses, group: Ints, unit: int, links: Ints, at: int, end: int, first_link: int
) -> int:
    """Write the inputs of a record at ``at``, and their lists from ``end`` on; return the new end."""
    cell_type = draft.types[draft.units[unit].cell_type]
    for port in range(cell_type.num_inputs):
        given, to = draft.inputs[draft.units[unit].input + port], at + record.HEADER + record.INPUT * port
        mode = given.mode
        links[to + record.SOURCE] = -1
        if mode == PAGED:
            links[to + record.MODE], links[to + record.AT] = record.PAGED, given.state
        elif mode == NOTHING:
            links[to + record.MODE] = record.NOTHING
        elif mode == EMITTED:
            links[to + record.MODE] = record.EMITTED
            links[to + record.AT] = uses.values[uses.rows[given.value]].result
            links[to + record.SOURCE] = group[draft.makers[given.value]]
        elif mode in (SAME, LAST):
            maker = draft.makers[given.value]
            output = given.value - draft.units[maker].value
            links[to + record.MODE] = record.SAME if mode == SAME else record.LAST
            links[to + record.AT] = output if mode == SAME else uses.rows[given.first]
            links[to + record.STRIDE], links[to + record.DIRECTION] = output, 1
            links[to + record.SOURCE] = group[maker]
        elif mode in (FIXED, CARRY, NEXT):
            links[to + record.MODE] = record.WHOLE if mode == FIXED else record.CARRY
            links[to + record.AT] = uses.rows[given.first]
            links[to + record.SOURCE] = given.output if mode == NEXT else draft.ports[cell_type.first_port + port].carry
        elif given.is_whole:
            _write_sequence(draft, uses, group, links, to, given)
            if mode == LEADS:
                links[to + record.MODE], links[to + record.SOURCE] = record.LEADS, given.output
                links[at + record.LEAD] = links[at + record.UNSEEN] = word_of(draft.sums, sum_of(given.count) - 1)
        else:
            links[to + record.MODE] = record.EACH if mode in (EACH, STEP) else record.MANY
            links[to + record.AT], links[to + record.START] = first_link + end, num_named(given)
            for k in range(num_named(given)):
                links[end + k] = uses.rows[named(draft, given, k)]
            end += num_named(given)
        is_led = links[to + record.MODE] == record.SAME
        is_led = is_led or (links[to + record.MODE] == record.STEP and links[to + record.SOURCE] >= 0)
        links[at + record.NUM_SOURCES] += int(is_led)
    return end


@compiled
def _write_sequence(draft: Draft, uses: Uses, group: Ints, links: Ints, to: int, given: InputRow) -> None:
    """Write an input that reads a sequence: step by step, or some steps of it at every step."""
    sequence, start = place_of(draft, uses.first_sequences, given.first)
    maker = draft.makers[given.first]
    step = given.stride if maker < 0 else given.stride // draft.types[draft.units[maker].cell_type].num_outputs
    links[to + record.AT] = word_of(draft.sums, uses.places[sequence] + start)
    links[to + record.STRIDE] = step
    if given.mode == STEP:
        links[to + record.MODE], links[to + record.START] = record.STEP, word_of(draft.sums, start)
        links[to + record.DIRECTION] = step
        if maker >= 0:
            links[to + record.SOURCE] = group[maker]
    else:
        links[to + record.MODE], links[to + record.START] = record.ALL, word_of(draft.sums, sum_of(given.count))


@compiled
def _write_starts(draft: Draft, appended: NDArray[np.int64], unit: int, links: Ints, at: int) -> None:
    """Say of each growing state how many rows are appended before a unit, -1 after a loop; count those of its own."""
    cell_type = draft.types[draft.units[unit].cell_type]
    for port in range(cell_type.num_inputs):
        state = draft.inputs[draft.units[unit].input + port].state
        if state >= 0:
            before = appended[state]
            links[at + record.HEADER + record.INPUT * port + record.START] = word_of(draft.sums, before)
            if draft.ports[cell_type.first_port + port].appends:
                appended[state] = before + draft.lengths[unit] if is_chain(draft, unit) else -1


@compiled
def _write_outputs(draft: Draft, uses: Uses, unit: int, links: Ints, at: int) -> None:
    cell_type, first = draft.types[draft.units[unit].cell_type], uses.first_sequences[unit]
    value = uses.rows[draft.units[unit].value]
    is_loop = first < 0
    for output in range(cell_type.num_outputs):
        to = at + record.HEADER + record.INPUT * cell_type.num_inputs + record.OUTPUT * output
        links[to + record.SEQUENCE] = -1 if is_loop else word_of(draft.sums, uses.places[first + output])
        links[to + record.RESULT] = -1 if is_loop else word_of(draft.sums, uses.results[first + output])
        links[to + record.RESULT_STRIDE] = 0 if is_loop else uses.result_strides[first + output]
        is_state = _goes_on(draft, unit, output)
        is_state = is_state and (is_loop or draft.lengths[unit] > 1 or unit == uses.kept_unit)
        links[to + record.IS_STATE] = int(is_state or (is_loop and uses.values[value + output].readers > 0))


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
    """Write what is common to the body whose first member is unit ``first``; return the new end."""
    operation = draft.units[first]
    count, num_types = max(0, operation.left) + 1, max(0, -operation.left)
    links[end + record.NUM_TYPES] = num_types
    links[end + record.LIMIT], links[end + record.STOPPER] = word_of(draft.sums, draft.lengths[first]), -1
    links[end + record.MEMBERS] = links[end + record.LEFT] = links[end + record.TO_SEND] = count
    for k in range(count):
        links[end + record.MEMBERS + 1 + k] = group[first + k]
        if draft.units[first + k].stop >= 0:
            links[end + record.STOPPER] = group[first + k]
    for k in range(num_types):
        links[end + record.MEMBERS + 1 + count + k] = draft.layers[operation.layer + k]
    return int(end + record.MEMBERS + 1 + count + num_types)


@compiled
def is_carried(ports: Rows, cell_type: Any, output: int) -> bool:
    """Return whether an input is carried from an output."""
    for port in range(cell_type.num_inputs):
        if ports[cell_type.first_port + port].carry == output:
            return True
    return False


@compiled
def _write_taps(draft: Draft, uses: Uses, unit: int, links: Ints, at: int, end: int, first_link: int) -> int:
    """List the outputs of steps that are values; the chain holds those that are read until it is over."""
    operation, num_outputs = draft.units[unit], draft.types[draft.units[unit].cell_type].num_outputs
    links[at + record.TAPS] = first_link + end
    for k in range(num_steps(draft, unit) * num_outputs):
        row = uses.rows[operation.value + k]
        if row >= 0:
            step = word_of(draft.sums, position_of(operation.length, k // num_outputs))
            links[end], links[end + 1], links[end + 2] = step, k % num_outputs, row
            if uses.values[row].readers > 0:
                uses.values[row].readers += 1
            links[at + record.NUM_TAPS] += 1
            end += record.TAP
    links[at + record.TAP_STEP] = word_of(draft.sums, draft.lengths[unit])
    if links[at + record.NUM_TAPS] > 0:
        links[at + record.TAP_STEP] = links[links[at + record.TAPS] - first_link]
    return end


class Readers(NamedTuple):
    """The edges of ``Edges`` from the other end: those of a unit are ``heads[unit]``, then ``following`` each other."""

    heads: NDArray[np.int32]
    following: NDArray[np.int32]  # of each edge
    units: NDArray[np.int32]  # of each edge: who reads


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
    """List who waits for a chain or loop, by the steps that must be there, and who follows it."""
    first = end
    k = readers.heads[unit]
    while k >= 0:
        if edges.steps[k] > 0:
            to = end
            while to > first and sum_in(draft.sums, links[to - record.EDGE]) > edges.steps[k]:
                links[to], links[to + 1] = links[to - record.EDGE], links[to - record.EDGE + 1]
                to -= record.EDGE
            links[to], links[to + 1] = word_of(draft.sums, edges.steps[k]), group[readers.units[k]]
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
