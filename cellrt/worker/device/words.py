"""Writing of a task's numbers from its buffer into the words that its device reads, in compiled code.

A plan (``plans.py``) serves all tasks of one shape, so it holds no position and no count of one task: it names
*fields*, which are places of the buffer's header and records (``core/state/task_layout.py``) with these numbers.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.native.jit import compiled
from cellrt.native.memory import WORD_BYTES, bytes_at, ints_at, read_int, read_word, start_of, write_word
from cellrt.worker.span_rows import fill_pages, fill_spans

# Operations that write words, one row each. FROM is a field with the place of the numbers in the buffer, COUNT a
# field with how many there are.
KIND, AT, FROM, WITH, COUNT, PADDED, EXTRA = range(7)
COPY, OFFSETS, FILL, RANGE, TURNS, STORE, SHOW, LOOK_UP, SHIFT, SPANS, NODES, PAGES = range(12)
"""The kinds of operations.

COPY: the numbers; after them, up to PADDED, EXTRA or (REPEAT) the last of them.
OFFSETS: the numbers up to the place in the field WITH; after them the number in COUNT. With EXTRA each of those after
    them is greater than the one before by the difference of the last two numbers, and the last of all is EXTRA.
FILL: EXTRA.
RANGE: EXTRA and the numbers that follow it, COUNT in all; after them -1.
TURNS: of COUNT steps, whose rows are the numbers, EXTRA and the numbers that follow it for the first, the third and so
    on, for the others the same plus WITH; after them -1.
STORE: at each position FROM a number at the place in the field WITH.
SHOW: at each position FROM one of the numbers from WITH on.
LOOK_UP: the words from WITH on at the positions FROM; after them EXTRA.
SHIFT: the numbers; those from rows times steps on are greater by steps times the number of padding rows, where EXTRA
    is the number of rows with padding; after them zeros. With EXTRA -1 the numbers.
SPANS: of PADDED steps, of which COUNT have as many rows as the numbers say and the others none, where each begins and
    how many rows it has; before them 0 and the rows of the first.
NODES: of a cell with FROM inputs and WITH outputs, and of EXTRA nodes with PADDED rows: where each node's rows begin,
    each row's node and its step, int32, and bytes with whether it is read. Padding nodes have a row each, the last of
    them all padding rows.
PAGES: of input FROM, for as many nodes and rows, the pages of each node, WITH of them, its number of rows, and for each
    row the one that it appends, int32. COUNT is the page of padding nodes, 0 where nothing is appended.
"""
REPEAT = -2
INT_BYTES, INTS_A_WORD = 4, 2


@compiled
def _fill(words, first, end, number):  # type: ignore[no-untyped-def]
    for j in range(first, end):
        write_word(words, j, number)


@compiled
def _copy(words, at, task, source, count):  # type: ignore[no-untyped-def]
    for j in range(count):
        write_word(words, at + j, read_int(task, source + j))


@compiled
def _write_offsets(words, at, task, source, num_offsets, count, operation):  # type: ignore[no-untyped-def]
    end, last = at + operation[PADDED], operation[EXTRA]
    _copy(words, at, task, source, num_offsets)
    if last == 0:
        _fill(words, at + num_offsets, end, count)
        return
    of_last = count - read_int(task, source + num_offsets - 2)
    for j in range(num_offsets, operation[PADDED]):
        count += of_last
        write_word(words, at + j, count)
    write_word(words, end - 1, last)


@compiled
def _take_turns(words, at, task, source, steps, first, other):  # type: ignore[no-untyped-def]
    """Write the numbers of TURNS; return how many words were written."""
    start = 0
    for step in range(steps):
        size, number = read_int(task, source + step), first + step % 2 * other
        for j in range(size):
            write_word(words, at + start + j, number + j)
        start += size
    return start


@compiled
def _write_spans(words, at, task, source, steps, padded):  # type: ignore[no-untyped-def]
    first, size = 0, read_int(task, source)
    write_word(words, at, 0)
    write_word(words, at + 1, size)
    for j in range(padded):
        size = read_int(task, source + j) if j < steps else 0
        write_word(words, at + 2 * j + 2, first)
        write_word(words, at + 2 * j + 3, size)
        first += size


@compiled
def _shift(words, at, task, source, count, padded_rows):  # type: ignore[no-untyped-def]
    steps, rows = read_int(task, layout.H_STEPS), read_int(task, layout.H_ROWS)
    limit, more = rows * steps, max(0, padded_rows - rows) * steps
    for j in range(count):
        position = read_int(task, source + j)
        write_word(words, at + j, position if position < limit else position + more)


@compiled
def _write_at_positions(words, task, operation, source, count):  # type: ignore[no-untyped-def]
    """Write the words of STORE, SHOW and LOOK_UP."""
    kind, at, given = operation[KIND], operation[AT], operation[WITH]
    if kind == STORE:
        given = read_int(task, given)
        for j in range(count):
            write_word(words, at + read_int(task, source + j), read_int(task, given + j))
    elif kind == SHOW:
        for j in range(count):
            write_word(words, at + read_int(task, source + j), given + j)
    else:
        for j in range(count):
            write_word(words, at + j, read_word(words, given + read_int(task, source + j)))
        _fill(words, at + count, at + operation[PADDED], operation[EXTRA])


@compiled
def _write_nodes(words, buffer, operation):  # type: ignore[no-untyped-def]
    at, rows, nodes = words + WORD_BYTES * operation[AT], operation[PADDED], operation[EXTRA]
    numbers = -(-(nodes + 1 + 2 * rows) // INTS_A_WORD)
    offsets = ints_at(at, 1, nodes + 1)[0]
    of_rows = ints_at(at + INT_BYTES * (nodes + 1), 1, rows)[0]
    steps = ints_at(at + INT_BYTES * (nodes + 1 + rows), 1, rows)[0]
    is_read = bytes_at(at + WORD_BYTES * numbers, rows)
    fill_spans(buffer, operation[FROM], operation[WITH], of_rows, steps, is_read)
    count, first_row = buffer[layout.H_NUM_SPANS], buffer[layout.H_ROWS]
    task, first = start_of(buffer), buffer[layout.H_SPANS]
    for k in range(count + 1):
        offsets[k] = read_int(task, first + k)
    for node in range(count, nodes):
        offsets[node + 1] = rows if node == nodes - 1 else first_row + node - count + 1
    for row in range(first_row, rows):
        of_rows[row], steps[row], is_read[row] = min(count + row - first_row, nodes - 1), 0, 0


@compiled
def _write_pages(words, buffer, operation):  # type: ignore[no-untyped-def]
    at, rows, nodes = words + WORD_BYTES * operation[AT], operation[PADDED], operation[EXTRA]
    width, unused, count = operation[WITH], operation[COUNT], buffer[layout.H_NUM_SPANS]
    tables = ints_at(at, nodes, width)
    lengths = ints_at(at + INT_BYTES * nodes * width, 1, nodes)[0]
    positions = ints_at(at + INT_BYTES * nodes * (width + 1), 1, rows)[0]
    for row in range(rows):
        positions[row] = 0
    for node in range(count, nodes):
        lengths[node] = 1
        for k in range(width):
            tables[node, k] = unused
    fill_pages(buffer, operation[FROM], tables, lengths, positions, unused > 0)


@compiled
def write_words(words, buffer, operations):  # type: ignore[no-untyped-def]
    """Write a task's words at an address: the operations in order."""
    task = start_of(buffer)
    for k in range(operations.shape[0]):
        operation = operations[k]
        kind, at, extra = operation[KIND], operation[AT], operation[EXTRA]
        end = at + operation[PADDED]
        # These operations read no array of the task.
        if kind == FILL:
            _fill(words, at, end, extra)
            continue
        if kind == NODES:
            _write_nodes(words, buffer, operation)
            continue
        if kind == PAGES:
            _write_pages(words, buffer, operation)
            continue
        # The others read ``count`` words of the task, and pad them.
        source, count = buffer[operation[FROM]], buffer[operation[COUNT]]
        if kind == COPY:
            _copy(words, at, task, source, count)
            if extra == REPEAT and end > at + count:
                extra = read_word(words, at + count - 1)
            _fill(words, at + count, end, extra)
        elif kind == OFFSETS:
            _write_offsets(words, at, task, source, buffer[operation[WITH]] - source, count, operation)
        elif kind == RANGE:
            for j in range(count):
                write_word(words, at + j, extra + j)
            _fill(words, at + count, end, -1)
        elif kind == TURNS:
            written = _take_turns(words, at, task, source, count, extra, operation[WITH])
            _fill(words, at + written, end, -1)
        elif kind == SPANS:
            _write_spans(words, at, task, source, count, operation[PADDED])
        elif kind == SHIFT:
            _shift(words, at, task, source, count, extra)
            _fill(words, at + count, end, 0)
        else:
            _write_at_positions(words, task, operation, source, count)
