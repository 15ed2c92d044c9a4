"""The host's part of a task on a device, in compiled code: memory in the rings, words, copies of rows, and the launch.

A captured task is launched by the driver's functions, by their addresses; then its results are read. There is one call
from Python for a task, and none back. Uploads go on their own stream, to one of two copies of the words that the
captured graph of that side reads; so they do not wait for the task before. The count that ends a task is in its graph,
or, where results are copied after it, in a graph of its own.
"""

from __future__ import annotations

import numpy as np
from numba import config, typeof
from numpy.typing import NDArray

from cellrt.core.state import task_layout as layout
from cellrt.native.jit import compiled, entry, short_entry
from cellrt.native.memory import WORD_BYTES, call_status, copy_bytes, read_int, read_word, start_of, write_word
from cellrt.worker.device.signature import HAD_STOPPED, STOPS
from cellrt.worker.device.step_words import class_of, count_words, spread_words
from cellrt.worker.device.words import write_words

# Uploads and downloads, one row an arena: its address on the host, bytes of a row, fields (``words.py``) with the place
# of the rows in the buffer and how many they are; the words that name them in the ring; and for int64 inputs the
# limits, if there are. Where ROWS_AT is none the rows come from elsewhere, and NUM_ROWS is how many they are.
ARENA, ROW_BYTES, ROWS_AT, NUM_ROWS, WORDS_AT, NUM_PADDED, FIRST, END = range(8)
TRANSFER = 8
# Results of loops that go ahead have instead of limits fields with the place of their positions in the buffer, and with
# whether these are by step: of a step that a row did not take nothing is shown.
POSITIONS_AT, BY_STEP = FIRST, END

# A plan's arrays (``plans.py``).
NUMBERS, OPERATIONS, UPLOADS, DOWNLOADS, UP_PIECES, DOWN_PIECES, PARTS, SIZES = range(8)
NUM_WORDS, ANSWERS_AT, NUM_ANSWERS, BAD_AT, NUM_BAD, WORDS = range(6)
"""A plan's numbers.

BAD_AT: the first of a task's answers that are flags of faults. NUM_BAD: the field with their number, or -1. WORDS: of a
run that goes step by step, the address of the words that its blocks are made of, else 0.
"""

# A ring: its bytes, where they are on the host and on the device, which block is the oldest and how many there are;
# then first byte and end of each. Pieces of a block: bytes, and what their start is a multiple of.
RING_BYTES, HOST_AT, DEVICE_AT, OLDEST, NUM_BLOCKS, BLOCKS = range(6)
MOST_BLOCKS = 64
ALIGNMENT = 16

# A device: functions of its driver, streams, two events, and the graphs that end a task on the stream of downloads and
# on that which computes.
TO_DEVICE, TO_HOST, LAUNCH, RECORD, WAIT, COMPUTE, UP, DOWN, UPLOADED, COMPUTED, END_GRAPH, END_COMPUTE = range(12)
# One of two sides of a capture: its words, its graph, and an event when it has run.
SIDE_WORDS, SIDE_GRAPH, SIDE_DONE = range(3)
# Captured steps: their words, and a graph for each size of a step, or 0.
STEP_WORDS, STEP_GRAPHS = range(2)

# The slots of a task: whether a number was outside its limits, then the block of the ring up and that of the ring down:
# first byte, end, and the start of each piece.
IS_OUTSIDE, UP_BLOCK = range(2)
STARTS = 2
NO_ROOM, NOT_CAPTURED = -1, -2


@compiled
def _place(pieces, first, slots, at):  # type: ignore[no-untyped-def]
    """Write the place of a block of these pieces after ``first``, as near as their alignment
    lets them; return its end.
    """
    first = (first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    end = first
    for k in range(pieces.shape[0]):
        unit = pieces[k, 1]
        end = (end + unit - 1) // unit * unit
        slots[at + STARTS + k] = end
        end += pieces[k, 0]
    slots[at], slots[at + 1] = first, max(end, first + ALIGNMENT)
    return slots[at + 1]


@compiled
def _take(ring, pieces, slots, at):  # type: ignore[no-untyped-def]
    """Take a block of a ring; return whether there was room."""
    count, limit = ring[NUM_BLOCKS], ring[RING_BYTES]
    if count == MOST_BLOCKS:
        return False
    has_room = False
    if count == 0:
        has_room = _place(pieces, 0, slots, at) <= limit
    else:
        oldest = BLOCKS + 2 * ring[OLDEST]
        newest = BLOCKS + 2 * ((ring[OLDEST] + count - 1) % MOST_BLOCKS)
        if ring[newest] < ring[oldest]:  # gone round
            has_room = _place(pieces, ring[newest + 1], slots, at) <= ring[oldest]
        else:
            has_room = (
                _place(pieces, ring[newest + 1], slots, at) <= limit or _place(pieces, 0, slots, at) <= ring[oldest]
            )
    if has_room:
        block = BLOCKS + 2 * ((ring[OLDEST] + count) % MOST_BLOCKS)
        ring[block], ring[block + 1] = slots[at], slots[at + 1]
        ring[NUM_BLOCKS] = count + 1
    return has_room


@short_entry
def take_block(ring, pieces, slots, at):  # type: ignore[no-untyped-def]
    """Take a block of a ring, for Python; return whether there was room."""
    return _take(ring, pieces, slots, at)


@compiled
def _give_back(ring):  # type: ignore[no-untyped-def]
    ring[OLDEST] = (ring[OLDEST] + 1) % MOST_BLOCKS
    ring[NUM_BLOCKS] -= 1


@compiled
def _bring_within(address, count, first, end):  # type: ignore[no-untyped-def]
    """Clamp int64 numbers at an address to limits; return whether one was outside."""
    is_outside = False
    for k in range(count):
        number = read_word(address, k)
        if number < first or number >= end:
            is_outside = True
            write_word(address, k, min(max(number, first), end - 1))
    return is_outside


@compiled
def _gather_rows(to, arena, task, source, count, size):  # type: ignore[no-untyped-def]
    """Copy the host's rows of this many bytes, whose numbers are in the task's buffer, to an address."""
    if size == WORD_BYTES:
        for j in range(count):
            write_word(to, j, read_word(arena, read_int(task, source + j)))
    else:
        for j in range(count):
            copy_bytes(to + j * size, arena + read_int(task, source + j) * size, size)


@compiled
def _scatter_rows(arena, given, task, source, count, size):  # type: ignore[no-untyped-def]
    """Copy rows of this many bytes from an address to the host's rows, whose numbers are in the task's buffer."""
    if size == WORD_BYTES:
        for j in range(count):
            write_word(arena, read_int(task, source + j), read_word(given, j))
    else:
        for j in range(count):
            copy_bytes(arena + read_int(task, source + j) * size, given + j * size, size)


@compiled
def _name_rows(words, at, first, count, padded):  # type: ignore[no-untyped-def]
    """Write consecutive row numbers, padded with the last of them."""
    for j in range(count):
        write_word(words, at + j, first + j)
    for j in range(count, padded):
        write_word(words, at + j, first + count - 1)


@compiled
def _prepare(buffer, plan, up, down, slots):  # type: ignore[no-untyped-def]
    """Take blocks of both rings, write the words and copy the rows to upload; return False if there is no room."""
    numbers, operations, uploads, downloads, up_pieces, down_pieces, parts, sizes = plan
    down_block = UP_BLOCK + STARTS + up_pieces.shape[0]
    # Compute the sizes of the uploads that depend on the task, and of its words.
    for k in range(uploads.shape[0]):
        if uploads[k, ROWS_AT] >= 0:
            up_pieces[1 + k, 0] = buffer[uploads[k, NUM_ROWS]] * uploads[k, ROW_BYTES]
    if numbers[WORDS]:
        up_pieces[0, 0] = WORD_BYTES * count_words(buffer, parts, sizes)
    # Take a block of each ring, or none.
    if not _take(up, up_pieces, slots, UP_BLOCK):
        return False
    if not _take(down, down_pieces, slots, down_block):
        up[NUM_BLOCKS] -= 1
        return False
    # Write the words: those of a run to memory of its plan, others to the block that is uploaded.
    starts, words = UP_BLOCK + STARTS, numbers[WORDS]
    if words == 0:
        words = up[HOST_AT] + slots[starts]
    write_words(words, buffer, operations)
    slots[IS_OUTSIDE] = 0
    # Gather the rows to upload, and name their places in the ring in the words.
    for k in range(uploads.shape[0]):
        size, count, start = uploads[k, ROW_BYTES], uploads[k, NUM_ROWS], slots[starts + 1 + k]
        to = up[HOST_AT] + start
        if uploads[k, ROWS_AT] >= 0:
            count = buffer[count]
            _gather_rows(to, uploads[k, ARENA], start_of(buffer), buffer[uploads[k, ROWS_AT]], count, size)
        _name_rows(words, uploads[k, WORDS_AT], start // size, count, uploads[k, NUM_PADDED])
        if uploads[k, FIRST] < uploads[k, END]:
            slots[IS_OUTSIDE] |= _bring_within(to, count * size // 8, uploads[k, FIRST], uploads[k, END])
    # Name the places in the other ring for results and answers.
    for k in range(downloads.shape[0]):
        first, padded = slots[down_block + STARTS + k] // downloads[k, ROW_BYTES], downloads[k, NUM_PADDED]
        _name_rows(words, downloads[k, WORDS_AT], first, padded, padded)
    first = slots[down_block + STARTS + downloads.shape[0]] // 4
    _name_rows(words, numbers[ANSWERS_AT], first, numbers[NUM_ANSWERS], numbers[NUM_ANSWERS])
    # A run's words are blocks: write a block for each step.
    if numbers[WORDS]:
        spread_words(buffer, words, parts, sizes, up[HOST_AT], slots[starts] // WORD_BYTES)
    return True


def _prepare_task(buffer, plan, up, down, slots):  # type: ignore[no-untyped-def]
    """Prepare a task, for Python, like ``_prepare``."""
    return _prepare(buffer, plan, up, down, slots)


def _launch_task(buffer, plan, up, down, slots, device, side):  # type: ignore[no-untyped-def]
    """Prepare a captured task and launch it. Return 0, NO_ROOM, or the number of the driver's error."""
    if not _prepare(buffer, plan, up, down, slots):
        return NO_ROOM
    return (
        _upload(plan, up, slots, device, side)
        or call_status(device[LAUNCH], (side[SIDE_GRAPH], device[COMPUTE]))
        or call_status(device[RECORD], (side[SIDE_DONE], device[COMPUTE]))
        or _bring_back(plan, down, slots, device, side[SIDE_DONE])
    )


def _launch_run(buffer, plan, up, down, slots, device, first, later):  # type: ignore[no-untyped-def]
    """Prepare a run and launch its steps, from the captures of first and of later steps.

    Return what ``_launch_task`` does, or NOT_CAPTURED.
    """
    sizes, num_steps, sizes_at = plan[SIZES], buffer[layout.H_STEPS], buffer[layout.H_BATCH_SIZES]
    size = largest = sizes.size - 1
    for step in range(num_steps):
        captured = first if step == 0 else later
        size = class_of(sizes, buffer[sizes_at + step], size)
        if captured[STEP_GRAPHS + size] == 0:
            return NOT_CAPTURED
    if not _prepare(buffer, plan, up, down, slots):
        return NO_ROOM
    code, size = _upload_run(up, slots, device, first, later), largest
    for step in range(num_steps):
        captured = first if step == 0 else later
        size = class_of(sizes, buffer[sizes_at + step], size)
        code = code or call_status(device[LAUNCH], (captured[STEP_GRAPHS + size], device[COMPUTE]))
    if plan[DOWNLOADS].shape[0] == 0 and plan[NUMBERS][NUM_ANSWERS] == 0:
        return code or call_status(device[LAUNCH], (device[END_COMPUTE], device[COMPUTE]))
    return (
        code
        or call_status(device[RECORD], (device[COMPUTED], device[COMPUTE]))
        or _bring_back(plan, down, slots, device, device[COMPUTED])
    )


@compiled
def _upload_run(up, slots, device, first, later):  # type: ignore[no-untyped-def]
    """Upload all blocks and rows of a run to the ring, and then the places of the first blocks.

    After all earlier computation the first step's words get the place of the first block, and those of the later steps,
    if
    they are others, that of the second.
    """
    begin, links, none = slots[UP_BLOCK], slots[UP_BLOCK + STARTS], np.int32(0)
    to, source = up[DEVICE_AT] + begin, up[HOST_AT] + begin
    link = up[HOST_AT] + links
    code = (
        call_status(device[TO_DEVICE], (to, source, slots[UP_BLOCK + 1] - begin, device[UP]))
        or call_status(device[RECORD], (device[UPLOADED], device[UP]))
        or call_status(device[WAIT], (device[COMPUTE], device[UPLOADED], none))
        or call_status(device[TO_DEVICE], (first[STEP_WORDS], link, WORD_BYTES, device[COMPUTE]))
    )
    if later[STEP_WORDS] != first[STEP_WORDS]:
        arguments = later[STEP_WORDS], link + WORD_BYTES, WORD_BYTES, device[COMPUTE]
        code = code or call_status(device[TO_DEVICE], arguments)
    return code


@compiled
def _upload(plan, up, slots, device, side):  # type: ignore[no-untyped-def]
    """Upload the words and rows of a task.

    The words of this side are free once its graph has run; the rows' block is free since its last task is done.
    """
    words, none = slots[UP_BLOCK + STARTS], np.int32(0)
    code = call_status(device[WAIT], (device[UP], side[SIDE_DONE], none)) or call_status(
        device[TO_DEVICE], (side[SIDE_WORDS], up[HOST_AT] + words, 8 * plan[NUMBERS][NUM_WORDS], device[UP])
    )
    if code == 0 and plan[UPLOADS].shape[0] > 0:
        first, end = slots[UP_BLOCK + STARTS + 1], slots[UP_BLOCK + 1]
        code = call_status(device[TO_DEVICE], (up[DEVICE_AT] + first, up[HOST_AT] + first, end - first, device[UP]))
    return (
        code
        or call_status(device[RECORD], (device[UPLOADED], device[UP]))
        or call_status(device[WAIT], (device[COMPUTE], device[UPLOADED], none))
    )


@compiled
def _bring_back(plan, down, slots, device, done):  # type: ignore[no-untyped-def]
    """Copy results after the work that made them, and end the task there; without results its
    own graph has ended it.
    """
    if plan[DOWNLOADS].shape[0] == 0 and plan[NUMBERS][NUM_ANSWERS] == 0:
        return np.int32(0)
    block, none = UP_BLOCK + STARTS + plan[UP_PIECES].shape[0], np.int32(0)
    first, end = slots[block], slots[block + 1]
    return (
        call_status(device[WAIT], (device[DOWN], done, none))
        or call_status(device[TO_HOST], (down[HOST_AT] + first, down[DEVICE_AT] + first, end - first, device[DOWN]))
        or call_status(device[LAUNCH], (device[END_GRAPH], device[DOWN]))
    )


@compiled
def _is_shown(buffer, download, j):  # type: ignore[no-untyped-def]
    """Return whether result ``j`` is of a step that its row took; only then does its host row belong to the task."""
    position = buffer[buffer[download[POSITIONS_AT]] + j]
    rows, steps, done_at = buffer[layout.H_ROWS], buffer[layout.H_STEPS], buffer[layout.H_DONE_STEPS]
    if buffer[download[BY_STEP]] != 0:
        if position < rows * steps:
            return position % steps < abs(buffer[done_at + position // steps])
        position -= rows * steps
    return position >= rows or buffer[done_at + position] != 0


def _take_in_task(buffer, plan, up, down, slots):  # type: ignore[no-untyped-def]
    """Read the answers and results of a task, and release its blocks, the oldest of both rings.

    Return whether an answer has a fault.
    """
    numbers, downloads, up_pieces = plan[NUMBERS], plan[DOWNLOADS], plan[UP_PIECES]
    block = UP_BLOCK + STARTS + up_pieces.shape[0]
    answers = down[HOST_AT] + slots[block + STARTS + downloads.shape[0]]
    rows, done_at, lengths_at = buffer[layout.H_ROWS], buffer[layout.H_DONE_STEPS], buffer[layout.H_LENGTHS]
    if buffer[layout.H_IS_LOOP] != 0:
        for row in range(rows):
            buffer[done_at + row] = read_int(answers, row)
    elif numbers[BAD_AT] > 0:
        for row in range(rows):
            length, said = buffer[lengths_at + row], read_int(answers, row)
            buffer[done_at + row] = 0 if said == HAD_STOPPED else -length if said == STOPS else length
    for k in range(downloads.shape[0]):
        size, given = downloads[k, ROW_BYTES], down[HOST_AT] + slots[block + STARTS + k]
        source, count = buffer[downloads[k, ROWS_AT]], buffer[downloads[k, NUM_ROWS]]
        if downloads[k, POSITIONS_AT] == 0:
            _scatter_rows(downloads[k, ARENA], given, start_of(buffer), source, count, size)
            continue
        for j in range(count):
            if _is_shown(buffer, downloads[k], j):
                _scatter_rows(downloads[k, ARENA], given + j * size, start_of(buffer), source + j, 1, size)
    is_bad = False
    if numbers[NUM_BAD] >= 0:
        for k in range(numbers[BAD_AT], numbers[BAD_AT] + buffer[numbers[NUM_BAD]]):
            is_bad |= read_int(answers, k) != 0
    _give_back(up)
    _give_back(down)
    return is_bad


prepare, prepare_nogil = short_entry(_prepare_task), entry(_prepare_task)
launch, launch_nogil = short_entry(_launch_task), entry(_launch_task)
launch_run, launch_run_nogil = short_entry(_launch_run), entry(_launch_run)
take_in, take_in_nogil = short_entry(_take_in_task), entry(_take_in_task)


def compile_all(buffer: NDArray[np.int32]) -> None:
    """Compile all functions for buffers like this one, or load them, so that no task waits for a compilation."""
    numbers, table = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    plan = (numbers, table, table, table, table, table, table, numbers)
    prepared = tuple(map(typeof, (buffer, plan, numbers, numbers, numbers)))
    launched = tuple(map(typeof, (buffer, plan, *[numbers] * 5)))
    launched_run = tuple(map(typeof, (buffer, plan, *[numbers] * 6)))
    for function, kinds in (
        (take_block, tuple(map(typeof, (numbers, table, numbers, 0)))),
        *((function, prepared) for function in (prepare, prepare_nogil, take_in, take_in_nogil)),
        *((function, launched) for function in (launch, launch_nogil)),
        *((function, launched_run) for function in (launch_run, launch_run_nogil)),
    ):
        if not config.DISABLE_JIT:
            function.compile(kinds)
