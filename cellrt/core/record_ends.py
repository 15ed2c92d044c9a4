"""The end of chains and loops: what they held goes back, when they are over and when their request is."""

from __future__ import annotations

from cellrt.core import record_layout as record
from cellrt.core.jit import compiled
from cellrt.core.records import count_done, kind_of, output_at
from cellrt.core.rows import give_row
from cellrt.core.tables import BORROWED, CHAIN, NO_ROW, NUM_PERMANENT, PENDING


@compiled
def release_edges(t, subgraph):
    """Counts off all who wait for a loop that is over."""
    links, at = t.links, subgraph.record
    for k in range(links[at + record.NUM_EDGES]):
        count_done(t, links[links[at + record.EDGES] + record.EDGE * k + 1], False)


@compiled
def end_record(t, subgraph):
    """Gives back what a chain or loop that is over, with nothing in flight, held."""
    end_inputs(t, subgraph)
    end_outputs(t, subgraph)


@compiled
def end_inputs(t, subgraph):
    """Gives back the values that a chain or loop read, once nothing of it is in flight."""
    links, at, cell_type = t.links, subgraph.record, t.types[subgraph.cell_type]
    for port in range(cell_type.num_inputs):
        to = at + record.HEADER + record.INPUT * port
        mode = links[to + record.MODE]
        if mode == record.WHOLE or mode == record.CARRY or mode == record.LAST:
            read_late(t, t.values[links[to + record.AT]])
        elif mode == record.MANY or mode == record.EACH:
            for k in range(links[to + record.START]):
                read_late(t, t.values[links[links[to + record.AT] + k]])


@compiled
def end_outputs(t, subgraph):
    """Gives back the state of a chain or loop that is over, as far as nobody is to read it."""
    links, at, cell_type = t.links, subgraph.record, t.types[subgraph.cell_type]
    is_loop = subgraph.what != CHAIN
    for output in range(cell_type.num_outputs):
        to = output_at(t, subgraph, output)
        if not links[to + record.IS_STATE]:
            continue
        if is_loop and t.values[links[at + record.VALUES] + output].readers > 0:
            t.values[links[at + record.VALUES] + output].row = _take_out(t, to)
        for word in (record.FIRST_ROW, record.SECOND_ROW):
            is_kept = links[at + record.KEEPS] and links[to + word] == links[to + record.ROW]
            if links[to + word] > 0 and not is_kept:
                give_row(t, links[to + word], kind_of(t, subgraph, output))
                links[to + word] = 0
    for k in range(links[at + record.NUM_TAPS]):
        value = t.values[links[links[at + record.TAPS] + record.TAP * k + 2]]
        if value.readers > 0:
            is_kept = False
            if links[at + record.KEEPS]:
                output = links[links[at + record.TAPS] + record.TAP * k + 1]
                is_kept = value.row == links[output_at(t, subgraph, output) + record.ROW]
            if not is_kept:
                read_late(t, value)


@compiled
def _take_out(t, to):
    """The row of a state, which is no longer the record's."""
    links = t.links
    for word in (record.FIRST_ROW, record.SECOND_ROW, record.LATE_ROW):
        if links[to + word] == links[to + record.ROW]:
            links[to + word] = 0
    return links[to + record.ROW]


@compiled
def read_late(t, value):
    """Counts a read that was put off; gives the row back if it was the last."""
    if value.row >= NUM_PERMANENT and not value.bits & BORROWED:
        value.readers -= 1
        if value.readers == 0:
            give_row(t, value.row, value.kind)
            value.row = NO_ROW


@compiled
def give_records(t, request):
    """Gives back the state that the chains and loops of an ended request still hold."""
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        subgraph = t.subgraphs[k]
        if subgraph.record < 0:
            continue
        for output in range(t.types[subgraph.cell_type].num_outputs):
            to = output_at(t, subgraph, output)
            for word in (record.FIRST_ROW, record.SECOND_ROW, record.LATE_ROW):
                if t.links[to + word] > 0:
                    give_row(t, t.links[to + word], kind_of(t, subgraph, output))
            ahead = 0 if subgraph.what == CHAIN else t.types[subgraph.cell_type].ahead
            more = t.links[subgraph.record + record.MORE_ROWS] + ahead * output
            for word in range(more, more + ahead):
                if t.links[word] > 0:
                    give_row(t, t.links[word], kind_of(t, subgraph, output))


@compiled
def give_places(t, request):
    """Gives back the rows of an ended request's results and sequences."""
    place = request.first_place
    for k in range(request.num_lists):
        kind, count = t.links[request.lists + 2 * k], t.links[request.lists + 2 * k + 1]
        for at in range(place, place + count):
            row = t.places[at] if t.places[at] > PENDING else PENDING - t.places[at]
            if row >= NUM_PERMANENT:
                give_row(t, row, kind)
        place += count
