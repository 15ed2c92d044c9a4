"""The end of chains and loops: the rows that they held are given back, when they end and when their request does."""

from __future__ import annotations

from cellrt.core.running.records import count_done, kind_of
from cellrt.core.state.record_layout import (
    CARRY,
    EACH,
    LAST,
    MANY,
    ROWS_AT,
    WHOLE,
    input_of,
    nth_edge,
    nth_tap,
    output_of,
    output_position,
    record_of,
)
from cellrt.core.state.rows import give_row
from cellrt.core.state.tables import BORROWED, CHAIN, NO_ROW, NUM_PERMANENT, PENDING, Request, Subgraph, Tables, Value
from cellrt.native.jit import compiled


@compiled
def release_edges(t: Tables, subgraph: Subgraph) -> None:
    """Count off every edge that waits for a loop that has ended."""
    record = record_of(t, subgraph)
    for k in range(record.num_edges):
        count_done(t, nth_edge(t, record, k).subgraph, False)


@compiled
def end_record(t: Tables, subgraph: Subgraph) -> None:
    """Give back the rows that an ended chain or loop held, with nothing of it in flight."""
    end_inputs(t, subgraph)
    end_outputs(t, subgraph)


@compiled
def end_inputs(t: Tables, subgraph: Subgraph) -> None:
    """Give back the values that a chain or loop read, once nothing of it is in flight."""
    for port in range(t.types[subgraph.cell_type].num_inputs):
        read = input_of(t, subgraph, port)
        if read.mode == WHOLE or read.mode == CARRY or read.mode == LAST:
            read_late(t, t.values[read.at])
        elif read.mode == MANY or read.mode == EACH:
            for k in range(read.start):
                read_late(t, t.values[t.links[read.at + k]])


@compiled
def end_outputs(t: Tables, subgraph: Subgraph) -> None:
    """Give back the state of an ended chain or loop, except for rows that are still to be read."""
    record = record_of(t, subgraph)
    for k in range(t.types[subgraph.cell_type].num_outputs):
        output = output_of(t, subgraph, k)
        if not output.is_state:
            continue
        if subgraph.what != CHAIN and t.values[record.first_value + k].readers > 0:
            t.values[record.first_value + k].row = output.row
            take_out_row(t, subgraph, k)
        if output.first_row > 0 and not (record.keeps and output.first_row == output.row):
            give_row(t, output.first_row, kind_of(t, subgraph, k))
            output.first_row = 0
        if output.second_row > 0 and not (record.keeps and output.second_row == output.row):
            give_row(t, output.second_row, kind_of(t, subgraph, k))
            output.second_row = 0
    for k in range(record.num_taps):
        tap = nth_tap(t, record, k)
        value = t.values[tap.value]
        if value.readers > 0:
            is_kept = record.keeps and value.row == output_of(t, subgraph, tap.output).row
            if not is_kept:
                read_late(t, value)


@compiled
def take_out_row(t: Tables, subgraph: Subgraph, number: int) -> bool:
    """Take the row of a state away from the record; return whether it was the record's."""
    cell_type, output, was = t.types[subgraph.cell_type], output_of(t, subgraph, number), False
    if output.late_row == output.row:
        output.late_row, was = 0, True
    first = output_position(subgraph.record, cell_type, number) + ROWS_AT
    for at in range(first, first + 2 + cell_type.ahead):
        if t.links[at] == output.row:
            t.links[at], was = 0, True
    return was


@compiled
def read_late(t: Tables, value: Value) -> None:
    """Count off a read that was put off; give the row back if it was the last."""
    if value.row >= NUM_PERMANENT and not value.bits & BORROWED:
        value.readers -= 1
        if value.readers == 0:
            give_row(t, value.row, value.kind)
            value.row = NO_ROW


@compiled
def give_records(t: Tables, request: Request) -> None:
    """Give back the state that the chains and loops of an ended request still hold."""
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        subgraph = t.subgraphs[k]
        if subgraph.record < 0:
            continue
        cell_type = t.types[subgraph.cell_type]
        for number in range(cell_type.num_outputs):
            output, kind = output_of(t, subgraph, number), kind_of(t, subgraph, number)
            if output.late_row > 0:
                give_row(t, output.late_row, kind)
            first = output_position(subgraph.record, cell_type, number) + ROWS_AT
            for at in range(first, first + 2 + cell_type.ahead):
                if t.links[at] > 0:
                    give_row(t, t.links[at], kind)


@compiled
def give_places(t: Tables, request: Request) -> None:
    """Give back the rows of an ended request's results and sequences."""
    place = request.first_place
    for k in range(request.num_lists):
        kind, count = t.links[request.lists + 2 * k], t.links[request.lists + 2 * k + 1]
        for at in range(place, place + count):
            row = t.places[at] if t.places[at] > PENDING else PENDING - t.places[at]
            if row >= NUM_PERMANENT:
                give_row(t, row, kind)
        place += count
