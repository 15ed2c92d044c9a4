"""The words of a run that goes step by step, in compiled code: a block of words for each step.

The words that ``words.py`` writes for all positions of a run are spread over the blocks of its steps, each padded to
the
next size that a step may have. A block begins with the place of the next one, in words of the ring, and with the spans
of its state and of its rows, for forms that read these (``SpannedRows``): both from its first row on, as many as it
has.
Before the first block are its place, and the place of the second.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.native.jit import compiled
from cellrt.native.memory import read_int, read_word, start_of, write_word

LINKS, SPANS_AT, HEAD = 2, 1, 5
"""The words before the first block; in a block, the first of its spans, and all before its arrays."""

# An array of a block: where its numbers are by position; where those of the first step are, of state, which later has
# those of the step before; with what it is padded, and that number or where it is; of the ring's rows of results where
# these rows are named, and the fields with the places of their positions and how many they are.
BY_POSITION, OF_FIRST, PAD, PAD_WITH, NAMES, SHOWN, NUM_SHOWN, PART = range(8)
PAD_NUMBER, PAD_WORD = -3, -4
"""Kinds of padding beside REPEAT (``words.py``)."""


@compiled
def class_of(sizes, rows, last):  # type: ignore[no-untyped-def]
    """Return the index of the size that rows are padded to, if it is not after ``last``.

    ``last`` is that of the step before, which had no fewer rows, or the last of all sizes.
    """
    k = last
    while k > 0 and sizes[k - 1] >= rows:
        k -= 1
    return k


@compiled
def count_words(buffer, parts, sizes):  # type: ignore[no-untyped-def]
    """Return the number of words of a run."""
    count, at, k = LINKS, buffer[layout.H_BATCH_SIZES], sizes.size - 1
    for step in range(buffer[layout.H_STEPS]):
        k = class_of(sizes, buffer[at + step], k)
        count += HEAD + parts.shape[0] * sizes[k]
    return count


@compiled
def _name_results(buffer, words, part):  # type: ignore[no-untyped-def]
    """Give each position a row of the ring: its own, or the one that is never read."""
    at, names, unused = part[BY_POSITION], part[NAMES], read_word(words, part[PAD_WITH])
    task, source = start_of(buffer), buffer[part[SHOWN]]
    count, positions = buffer[part[NUM_SHOWN]], buffer[layout.H_POSITIONS]
    if count < positions:
        for j in range(positions):
            write_word(words, at + j, unused)
    for j in range(count):
        write_word(words, at + read_int(task, source + j), read_word(words, names + j))


@compiled
def _copy_part(words, part, first, to, size, padded):  # type: ignore[no-untyped-def]
    """Copy one array of one block to an address."""
    for j in range(size):
        write_word(to, j, read_word(words, first + j))
    if part[PAD] == PAD_NUMBER:
        number = part[PAD_WITH]
    elif part[PAD] == PAD_WORD:
        number = read_word(words, part[PAD_WITH])
    else:
        number = read_word(words, first + size - 1)
    for j in range(size, padded):
        write_word(to, j, number)


@compiled
def spread_words(buffer, words, parts, sizes, ring, at):  # type: ignore[no-untyped-def]
    """Write the blocks of a run from its words by position, at word ``at`` of a ring's memory."""
    for k in range(parts.shape[0]):
        if parts[k, NAMES] >= 0:
            _name_results(buffer, words, parts[k])
    link, sizes_at, size_class = at, buffer[layout.H_BATCH_SIZES], sizes.size - 1
    at, before, start = at + LINKS, 0, 0
    write_word(ring, link, at)
    for step in range(buffer[layout.H_STEPS]):
        size = buffer[sizes_at + step]
        size_class = class_of(sizes, size, size_class)
        padded = sizes[size_class]
        following = at + HEAD + parts.shape[0] * padded
        write_word(ring, at, following)
        for span_at in (at + SPANS_AT, at + SPANS_AT + 2):
            write_word(ring, span_at, 0)
            write_word(ring, span_at + 1, size)
        if step == 0:
            write_word(ring, link + 1, following)
        for k in range(parts.shape[0]):
            first = parts[k, BY_POSITION] + start
            if parts[k, OF_FIRST] >= 0:
                first = parts[k, OF_FIRST] if step == 0 else parts[k, BY_POSITION] + before
            _copy_part(words, parts[k], first, ring + 8 * (at + HEAD + k * padded), size, padded)
        at, before, start = following, start, start + size
