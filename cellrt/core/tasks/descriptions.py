"""The descriptions of inputs and outputs in a task's buffer: where the rows of each are listed, and their number."""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.core.state.rows import take_row
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MIXED, NO_ROW, NUM_PERMANENT, PENDING, ROW_MASK, Tables
from cellrt.native.jit import compiled, inlined


@compiled
def describe_input(t: Tables, base: int, port: int, rows_at: int, end: int, offsets_at: int) -> None:
    """Find the location of the rows of one input; if all are at one, turn handles into row numbers."""
    lowest, highest = 1 << 30, -1
    for k in range(rows_at, end):
        if t.ints[k] >= NUM_PERMANENT:
            lowest, highest = min(lowest, t.ints[k]), max(highest, t.ints[k])
    source = -2
    if highest >= 0:
        source = highest >> LOCATION_SHIFT if highest >> LOCATION_SHIFT == lowest >> LOCATION_SHIFT else MIXED
    if source != MIXED:
        for k in range(rows_at, end):
            t.ints[k] &= ROW_MASK
    to = base + layout.HEADER + port * layout.INPUT
    t.ints[to + layout.IN_SOURCE] = source
    t.ints[to + layout.IN_COUNT] = end - rows_at
    t.ints[to + layout.IN_ROWS] = rows_at - base
    t.ints[to + layout.IN_OFFSETS] = offsets_at - base


@inlined
def description_at(base: int, num_inputs: int, output: int) -> int:
    """Return the position of a task's description of an output."""
    return base + layout.HEADER + layout.INPUT * num_inputs + layout.OUTPUT * output


@compiled
def begin_output(t: Tables, base: int, to: int, end: int, stores: int, results: int) -> int:
    """Make room from ``end`` on for this many stored rows and results of an output; return the new end.

    None of them is written yet.
    """
    ints = t.ints
    ints[to + layout.OUT_STORES] = ints[to + layout.OUT_RESULTS] = ints[to + layout.OUT_RESULT_STEPS] = 0
    ints[to + layout.OUT_STORE_POSITIONS], ints[to + layout.OUT_STORE_ROWS] = end - base, end + stores - base
    end += 2 * stores
    ints[to + layout.OUT_RESULT_POSITIONS], ints[to + layout.OUT_RESULT_ROWS] = end - base, end + results - base
    return end + 2 * results


@inlined
def add_store(t: Tables, base: int, to: int, position: int, handle: int) -> None:
    """Add a row to those that an output is stored to."""
    ints = t.ints
    lists = base + ints[to + layout.OUT_STORE_POSITIONS], base + ints[to + layout.OUT_STORE_ROWS]
    ints[to + layout.OUT_STORES] = put_store(t, *lists, ints[to + layout.OUT_STORES], position, handle)


@inlined
def add_result(t: Tables, base: int, to: int, position: int, place: int, kind: int, is_streamed: int) -> None:
    """Add a result to those of an output."""
    ints, what = t.ints, (position, place, kind, is_streamed)
    lists = base + ints[to + layout.OUT_RESULT_POSITIONS], base + ints[to + layout.OUT_RESULT_ROWS]
    ints[to + layout.OUT_RESULTS] = put_result(t, *lists, ints[to + layout.OUT_RESULTS], *what)


@inlined
def put_store(t: Tables, positions_at: int, rows_at: int, count: int, position: int, handle: int) -> int:
    """Write a row that an output is stored to after the first ``count``; return the new count."""
    t.ints[positions_at + count], t.ints[rows_at + count] = position, handle & ROW_MASK
    return count + 1


@inlined
def put_result(
    t: Tables, positions_at: int, rows_at: int, count: int, position: int, place: int, kind: int, is_streamed: int
) -> int:
    """Write a result of an output after the first ``count``; return the new count.

    Its row is taken now, unless an earlier step of a loop, whose last step counts, has taken it.
    """
    handle = t.places[place] if t.places[place] > PENDING else PENDING - t.places[place]
    if handle == NO_ROW:
        handle = take_row(t, HOST, kind)
        t.places[place] = PENDING - handle if is_streamed else handle
    t.ints[positions_at + count], t.ints[rows_at + count] = position, handle
    return count + 1
