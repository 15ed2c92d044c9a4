"""A whole task of a cell with spans or pages on a CPU in one compiled call, as ``run_task.py`` does for other cells.

The kernel takes tensors, each as a few words with its address and its shape: first those of the inputs in their order,
then those that all inputs share (offsets, the node of each row, whether the row is read), then the outputs.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.definition.task_memory import (
    ALIGNMENT,
    AT,
    DONE,
    FIRST_ARENA,
    FIRST_TENSOR,
    FLAG,
    RECORD,
    REFUSED,
    ROW_BYTES,
    SIZES,
    STRIDES,
    TENSOR,
    aligned,
    are_finite,
    gather,
    put,
)
from cellrt.native.jit import compiled, entry
from cellrt.native.memory import bytes_at, call, copy_bytes, ints_at, read_word, start_of, write_word
from cellrt.native.row_types import Matrix, Rows
from cellrt.worker.cpu.run_loop import stop_output
from cellrt.worker.cpu.run_task import note_stops
from cellrt.worker.span_rows import fill_pages, fill_spans, most_pages_of

# The kinds of inputs, in place of the FLAG of ``task_memory.py``.
ROWS, RAGGED, PAGES, APPENDED_PAGES, SPAN = range(5)


@compiled
def _scratch_bytes(buffer: Rows[int], ports: Matrix, num_inputs: int, num_words: int, rows: int) -> int:
    spans = buffer[layout.H_NUM_SPANS]
    size = 8 * num_words + 4 * (spans + 1 + 2 * rows) + rows + 5 * ALIGNMENT
    for k in range(ports.shape[0]):
        count = rows
        if k < num_inputs and ports[k, FLAG] <= RAGGED:
            count = buffer[ports[k, RECORD] + layout.IN_COUNT] + 1
            size += 8 * (rows + 1) + ALIGNMENT
        elif k < num_inputs:
            number = (ports[k, RECORD] - layout.HEADER) // layout.INPUT
            width = most_pages_of(buffer, number) if ports[k, FLAG] != SPAN else 0
            size += 4 * (spans * (width + 1) + rows) + 3 * ALIGNMENT
            continue
        size += aligned(count * ports[k, ROW_BYTES]) + ALIGNMENT
    return size + 2 * ALIGNMENT


@compiled
def _place(task: int, number: int, at: int, count: int) -> int:
    """Write the address of a tensor and its first size; return the address of its words."""
    tensor = task + 8 * (FIRST_TENSOR + TENSOR * number)
    write_word(tensor, AT, at)
    write_word(tensor, SIZES, count)
    return tensor


@compiled
def _fill_up(at: int, count: int, rows: int, size: int) -> None:
    """Repeat the first of ``count`` rows up to ``rows`` of them."""
    for row in range(count, rows):
        copy_bytes(at + row * size, at, size)


@compiled
def _gather_rows(buffer: Rows[int], port: Rows[int], own: int, task: int, number: int, rows: int, at: int) -> int:
    """Gather the rows of an input, ``rows`` of them if it has one for each row of the task.

    Return the address after them.
    """
    count, size = buffer[port[RECORD] + layout.IN_COUNT], port[ROW_BYTES]
    place, wanted = gather(buffer, port, own, at), count
    if port[FLAG] == ROWS and rows > count:
        if place != at:
            copy_bytes(at, place, count * size)
        _fill_up(at, count, rows, size)
        place, wanted = at, rows
    _place(task, number, place, wanted)
    at = aligned(at + wanted * size)
    if port[FLAG] == RAGGED:
        offsets = buffer[port[RECORD] + layout.IN_OFFSETS]
        many = buffer[port[RECORD] + layout.IN_ROWS] - offsets
        for k in range(many):
            write_word(at, k, buffer[offsets + k])
        _place(task, number + 1, at, many)
        at = aligned(at + 8 * many)
    return at


@compiled
def _lay_out_pages(
    buffer: Rows[int], port: Rows[int], own: int, task: int, number: int, count: int, rows: int, at: int
) -> int:
    """Write tables, lengths and positions of a growing state, whose pages are not copied.

    Return the address after them.
    """
    spans, input = buffer[layout.H_NUM_SPANS], (port[RECORD] - layout.HEADER) // layout.INPUT
    width = most_pages_of(buffer, input)
    lengths = aligned(at + 4 * spans * width)
    positions = aligned(lengths + 4 * spans)
    appends = port[FLAG] == APPENDED_PAGES
    made = ints_at(positions, 1, rows)[0]
    if not appends:
        made[:] = 0
    fill_pages(buffer, input, ints_at(at, spans, width), ints_at(lengths, 1, spans)[0], made, appends)
    _fill_up(positions, count, rows, 4)
    write_word(task + 8 * (FIRST_TENSOR + TENSOR * number), AT, port[FIRST_ARENA + own])
    tables = _place(task, number + 1, at, spans)
    write_word(tables, SIZES + 1, width)
    write_word(tables, STRIDES, width)
    _place(task, number + 2, lengths, spans)
    _place(task, number + 3, positions, rows)
    return aligned(positions + 4 * rows)


@entry
def run_span_task(
    buffer: Rows[int],
    ports: Matrix,
    num_inputs: int,
    own: int,
    host: int,
    kernel: int,
    constants: int,
    words: Rows[int],
    least_rows: int,
    scratch: Rows[int],
) -> int:
    """Run the task in ``buffer`` with the kernel at an address; ``own`` is the worker's location.

    ``words`` are the kernel's words that are the same in each task. A task of fewer than ``least_rows`` rows gets one
    more row, which belongs to no node. Return as ``run_task``.
    """
    count = buffer[layout.H_ROWS]
    rows = count + 1 if count < least_rows else count
    wanted = _scratch_bytes(buffer, ports, num_inputs, words.size, rows)
    if scratch.size < wanted:
        return wanted
    stop = stop_output(buffer, ports, num_inputs)
    if stop >= 0 and ports[stop, ROW_BYTES] != 1:
        return REFUSED
    # Copy the kernel's words, then write what all inputs share: offsets, nodes, steps, and whether a row is read.
    spans, task = buffer[layout.H_NUM_SPANS], aligned(scratch.ctypes.data)
    copy_bytes(task, words.ctypes.data, 8 * words.size)
    offsets = aligned(task + 8 * words.size)
    nodes = aligned(offsets + 4 * (spans + 1))
    steps, is_read = nodes + 4 * rows, aligned(nodes + 8 * rows)
    copy_bytes(offsets, start_of(buffer) + 4 * buffer[layout.H_SPANS], 4 * (spans + 1))
    shared = ints_at(nodes, 2, rows)
    fill_spans(buffer, num_inputs, ports.shape[0] - num_inputs, shared[0], shared[1], bytes_at(is_read, rows))
    _fill_up(nodes, count, rows, 4)
    _fill_up(steps, count, rows, 4)
    _fill_up(is_read, count, rows, 1)
    # Gather or point to the inputs, each at one or several tensors of the kernel.
    at, number = aligned(is_read + rows), 0
    for k in range(num_inputs):
        if ports[k, FLAG] == SPAN:
            _place(task, number, steps, rows)
            number += 1
        elif ports[k, FLAG] <= RAGGED:
            at = _gather_rows(buffer, ports[k], own, task, number, rows, at)
            number += 1 + ports[k, FLAG]
        else:
            at = _lay_out_pages(buffer, ports[k], own, task, number, count, rows, at)
            number += 4
    _place(task, number, offsets, spans + 1)
    _place(task, number + 1, nodes, rows)
    _place(task, number + 2, is_read, rows)
    number += 3 - num_inputs  # of an output, its number among the ports is added
    for k in range(num_inputs, ports.shape[0]):
        _place(task, number + k, at, rows)
        at = aligned(at + rows * ports[k, ROW_BYTES])
    # Nothing is stored unless the kernel took the task and its outputs are finite.
    if call(kernel, constants, task) != 0:
        return REFUSED
    for k in range(num_inputs, ports.shape[0]):
        values = _where(task, number + k)
        if ports[k, FLAG] and not are_finite(values, count * ports[k, ROW_BYTES] // 4):
            return REFUSED
    for k in range(num_inputs, ports.shape[0]):
        values = _where(task, number + k)
        put(buffer, ports[k], own, host, values, values)
    if stop >= 0:
        note_stops(buffer, _where(task, number + stop))
    return DONE


@compiled
def _where(task: int, number: int) -> int:
    """Return the address of a tensor's values."""
    return int(read_word(task + 8 * (FIRST_TENSOR + TENSOR * number), AT))
