"""The spans and pages of a task, unpacked row by row for its cell, in compiled code, as many small tasks need it.

The arrays are the caller's; ``buffer`` is a task's (``task_layout.py``). Written by ``span_arrays.py``.
"""

from __future__ import annotations

from typing import Any

from cellrt.core.state import task_layout as layout
from cellrt.native.jit import compiled, short_entry
from cellrt.native.memory import read_int, start_of
from cellrt.native.row_types import Rows


@compiled
def fill_spans(
    buffer: Rows[int], num_inputs: int, num_outputs: int, nodes: Rows[int], steps: Rows[int], is_read: Rows[Any]
) -> None:
    """Write the arrays of ``unpack_spans``."""
    task, spans_at, count = start_of(buffer), buffer[layout.H_SPANS], buffer[layout.H_NUM_SPANS]
    for span in range(count):
        first, step = read_int(task, spans_at + span), read_int(task, spans_at + count + 1 + span)
        for row in range(first, read_int(task, spans_at + span + 1)):
            nodes[row], steps[row], is_read[row] = span, step + row - first, False
    for output in range(num_outputs):
        to = layout.HEADER + layout.INPUT * num_inputs + layout.OUTPUT * output
        positions = read_int(task, to + layout.OUT_STORE_POSITIONS)
        for k in range(read_int(task, to + layout.OUT_STORES)):
            is_read[read_int(task, positions + k)] = True
        positions = read_int(task, to + layout.OUT_RESULT_POSITIONS)
        for k in range(read_int(task, to + layout.OUT_RESULTS)):
            is_read[read_int(task, positions + k)] = True


@short_entry
def unpack_spans(
    buffer: Rows[int], num_inputs: int, num_outputs: int, nodes: Rows[int], steps: Rows[int], is_read: Rows[bool]
) -> None:
    """Write the span of each row, its step, and whether an output of it is read: ``[rows]`` each."""
    fill_spans(buffer, num_inputs, num_outputs, nodes, steps, is_read)


@compiled
def most_pages_of(buffer: Rows[int], number: int) -> int:
    """Return the number of ``most_pages``."""
    task, at, most = start_of(buffer), buffer[layout.HEADER + layout.INPUT * number + layout.IN_OFFSETS], 1
    for span in range(buffer[layout.H_NUM_SPANS]):
        most = max(most, read_int(task, at + span + 1) - read_int(task, at + span))
    return most


@short_entry
def most_pages(buffer: Rows[int], number: int) -> int:
    """Return the most pages that one span has of input ``number``, at least 1."""
    return most_pages_of(buffer, number)


@short_entry
def unpack_pages(buffer: Rows[int], number: int, tables: Rows[int], lengths: Rows[int], positions: Rows[int]) -> None:
    """Write the page tables of input ``number``.

    ``tables``: the pages of each span ``[spans, most]``, filled up with 0. ``lengths``: its rows with those that the
    task
    appends ``[spans]``. ``positions``: the row that each row of the task appends ``[rows]``, or ``[0]`` for none.
    """
    fill_pages(buffer, number, tables, lengths, positions, positions.size > 0)


@compiled
def fill_pages(
    buffer: Rows[int], number: int, tables: Rows[int], lengths: Rows[int], positions: Rows[int], appends: bool
) -> None:
    """Write the arrays of ``unpack_pages``; there may be room for more spans and rows than the task has."""
    to = layout.HEADER + layout.INPUT * number
    at, pages_at = buffer[to + layout.IN_OFFSETS], buffer[to + layout.IN_ROWS]
    task, spans_at, count = start_of(buffer), buffer[layout.H_SPANS], buffer[layout.H_NUM_SPANS]
    for span in range(count):
        first, end = read_int(task, at + span), read_int(task, at + span + 1)
        for k in range(end - first):
            tables[span, k] = read_int(task, pages_at + first + k)
        for k in range(end - first, tables.shape[1]):
            tables[span, k] = 0
        lengths[span] = read_int(task, at + count + 1 + span)
        if appends:
            start, row = read_int(task, at + 2 * count + 1 + span), read_int(task, spans_at + span)
            for k in range(row, read_int(task, spans_at + span + 1)):
                positions[k] = start + k - row
