"""Attention over pages on a CPU as one compiled call: what ``cellrt.kernels.paged_attention`` computes, without Python.

As in FlashAttention (Dao et al. 2022), a tile of query rows goes over the keys block by block and keeps the highest
score and the sums so far. A block of keys is turned, and one of values lined up, in scratch memory that stays in the
first-level cache; nothing of them is copied elsewhere, and the pages may lie anywhere. One tile alone, as of a step of
one row, takes its values from the pages where it can. The query heads that share a head of the keys are rows of one
tile.

Blocks begin at multiples of ``BLOCK_KEYS`` of the position, whatever the query, and a row's own operations are the same
in every tile. So a row's bits depend on its query, its position and the keys that it sees alone: not on other rows of
the batch, nor on how a prompt was cut in chunks, nor on the pages. They do depend on the width of the machine's
registers.
"""

from __future__ import annotations

import numpy as np

from cellrt.cells._attention_tile import (
    BLOCK_KEYS,
    TILE_ROWS,
    add_values,
    multiply_scores,
    read_row,
    scale_rows,
    soften,
    sum_lanes,
    turn_rows,
    write_row,
)
from cellrt.definition.compiled_form import (
    DONE,
    TaskFunction,
    array_at,
    nogil_part,
    read_float,
    read_int,
    read_words,
    start_of,
)
from cellrt.products.packed import fetch, touch
from cellrt.products.vectors import FLOAT32, LANES

TILE_QUERIES = 96
"""Rows of a tile, a row for each head: the scores and sums of this many stay in the second-level cache."""
LEAST_PAGE = 8
"""Slots of a page from which on one tile takes its values from there; for less at once it takes longer than to line
them up."""
LOG2_E = 1.4426950408889634


@nogil_part
def attend(constants, task):  # type: ignore[no-untyped-def]
    """Attention of a task's rows; both arguments are addresses of int64 words.

    ``constants``: ``heads, kv_heads, head_dim, kind, causal, window, scale, bias, reach``; ``kind`` of all rows as in
    ``vectors.py``, ``scale`` as the bits of a float64, ``bias`` an address or 0.
    ``task``: ``nodes, offsets, positions, query, out, key, value, keys, values, page_size, page_stride, tables,
    table_width, lengths, starts``: addresses but for the sizes; ``page_stride`` in numbers; ``starts`` may be 0, and
    here ``key`` and ``value``, which ``append`` reads. Shapes and types are as in ``cellrt.kernels.paged_attention``.
    """
    heads, kv_heads, head_dim = read_words(constants, 3)
    nodes, offsets_at = read_words(task, 2)
    offsets = array_at(offsets_at, nodes + 1, np.int32)
    group = heads // kv_heads
    room = _new_room(max(TILE_QUERIES, group), head_dim)
    tile = max(1, TILE_QUERIES // group)
    for node in range(nodes):
        for first in range(offsets[node], offsets[node + 1], tile):
            last = min(first + tile, offsets[node + 1])
            _attend_tile(constants, task, node, first, last, room)


@nogil_part
def _new_room(queries, head_dim):  # type: ignore[no-untyped-def]
    """Return scratch memory of this many queries; one for all tiles, as most are small, and memory is soon what takes
    time.

    What lies behind ``head_dim`` in ``lined`` stays zero.
    """
    width = (head_dim + LANES - 1) // LANES * LANES
    numbers, sums = np.empty((queries, head_dim), np.float32), np.empty((queries, width), np.float32)
    totals, highest = np.empty((queries, LANES), np.float32), np.empty(queries, np.float32)
    limits, places = np.empty((queries, 2), np.int64), np.empty((2, 2, BLOCK_KEYS), np.int64)
    turned, lined = np.empty((head_dim, BLOCK_KEYS), np.float32), np.empty((BLOCK_KEYS, width), np.float32)
    lined[:, head_dim:] = 0
    return numbers, sums, totals, highest, limits, places, turned, lined, np.empty((TILE_ROWS, BLOCK_KEYS), np.float32)


@nogil_part
def _attend_tile(constants, task, node, first, last, room):  # type: ignore[no-untyped-def]
    """Attention of some rows of a node.

    With few rows all heads go over the keys together, so that memory is read in its order; with many each head by
    itself, so that their sums stay near.
    """
    heads, kv_heads = read_words(constants, 2)
    queries = (last - first) * (heads // kv_heads)
    together = min(kv_heads, max(1, TILE_QUERIES // queries))
    for head in range(0, kv_heads, together):
        _attend_heads(constants, task, node, first, last, head, min(together, kv_heads - head), room)


@nogil_part
def _attend_heads(constants, task, node, first, last, first_head, num_heads, room):  # type: ignore[no-untyped-def]
    """Attention of some rows of a node, with some heads of the keys. Its queries are in the order of their heads."""
    heads, kv_heads, head_dim, kind, causal, window, _, bias, reach = read_words(constants, 9)
    nodes, _, positions_at, query, out, _, _, _, _, page_size, _, _, _, lengths, starts = read_words(task, 15)
    group, count = heads // kv_heads, last - first
    positions = array_at(positions_at + 4 * first, count, np.int32)
    length = array_at(lengths, nodes, np.int32)[node]
    queries, head_bytes = count * group, _bytes(kind) * head_dim
    numbers, sums, totals, highest, limits, both_places, turned, lined, scores = room
    width = sums.shape[1]
    takes_values = queries <= TILE_ROWS and kind == FLOAT32 and width == head_dim and page_size >= LEAST_PAGE
    _find_limits(positions, group, length, causal, window, limits)
    limits, places, ahead = limits[:queries], both_places[0], both_places[1]
    sums[: num_heads * queries], totals[: num_heads * queries] = 0, 0
    highest[: num_heads * queries] = -np.inf
    factor = np.float32(array_at(constants + 8 * 6, 1, np.float64)[0] * LOG2_E)
    for head in range(num_heads):
        for row in range(count):
            start = query + head_bytes * ((first + row) * heads + (first_head + head) * group)
            read_row(kind, start, start_of(numbers[head * queries + row * group :]), group * head_dim, factor)
    begin, end = limits[:, 0].min() // BLOCK_KEYS * BLOCK_KEYS, limits[:, 1].max()
    if begin < end:
        _find_places(constants, task, node, begin, length - begin, ahead)
    for block in range(begin, end, BLOCK_KEYS):
        keys = min(BLOCK_KEYS, length - block)
        places, ahead = ahead, places
        if block + BLOCK_KEYS < end:
            _find_places(constants, task, node, block + BLOCK_KEYS, length - block - BLOCK_KEYS, ahead)
        if num_heads > 1:
            _touch_block(places, keys, first_head * head_bytes, num_heads * head_bytes)
        for head in range(num_heads):
            offset = (first_head + head) * head_bytes
            if num_heads == 1 and block + BLOCK_KEYS < end:
                _fetch_block(ahead, offset, head_bytes)
            _turn_keys(kind, head_dim, keys, places, offset, turned)
            if not takes_values:
                _line_up_values(kind, head_dim, keys, places, offset, lined)
            for row in range(0, queries, TILE_ROWS):
                rows, begun = min(TILE_ROWS, queries - row), head * queries + row
                if not _is_seen(limits[row : row + rows], block):
                    continue
                query_rows = start_of(numbers[begun:])
                multiply_scores(rows, query_rows, head_dim, start_of(turned), keys, start_of(scores))
                if bias != 0:
                    _add_bias(scores[:rows], positions, bias, reach, (first_head + head) * group, group, row, block)
                own = sums[begun : begun + rows]
                _soften_tile(scores, limits[row : row + rows], block, highest[begun:], totals[begun:], own)
                if takes_values:
                    slot = block if starts == 0 else block + read_int(starts, node)
                    _add_from_pages(scores, places[1], offset, kv_heads * head_dim, keys, slot, page_size, own)
                else:
                    add_values(rows, start_of(scores), start_of(lined), width, keys, start_of(own), width)
    for head in range(num_heads):
        for row in range(queries):
            at = head * queries + row
            total = sum_lanes(start_of(totals[at:]))
            target = (first + row // group) * heads + (first_head + head) * group + row % group
            part = np.float32(0) if total == 0 else np.float32(1) / total
            write_row(kind, start_of(sums[at:]), out + head_bytes * target, head_dim, part)


@nogil_part
def _find_limits(positions, group, length, causal, window, limits):  # type: ignore[no-untyped-def]
    """Write the first key that each query of a tile sees, and the one behind its last: ``[queries, 2]``."""
    for row in range(positions.size):
        low, high = 0, length
        if causal:
            high = min(high, positions[row] + 1)
        if window > 0:
            low, high = max(low, positions[row] - window + 1), min(high, positions[row] + window)
        limits[row * group : (row + 1) * group, 0] = min(low, high)
        limits[row * group : (row + 1) * group, 1] = high


@nogil_part
def _is_seen(limits, block):  # type: ignore[no-untyped-def]
    """Return whether any query of a tile sees a key of a block."""
    for row in range(limits.shape[0]):
        if limits[row, 0] < block + BLOCK_KEYS and limits[row, 1] > max(block, limits[row, 0]):
            return True
    return False


@nogil_part
def _find_places(constants, task, node, first, count, places):  # type: ignore[no-untyped-def]
    """Write to ``places`` ``[2, keys]`` where the heads of ``count`` keys and values lie; repeat the last in the
    rest.
    """
    _, kv_heads, head_dim, kind = read_words(constants, 4)
    nodes, _, _, _, _, _, _, keys, values, page_size, page_stride, tables, table_width, _, starts = read_words(task, 15)
    table = array_at(tables + 4 * node * table_width, table_width, np.int32)
    at = first
    if starts != 0:
        at += array_at(starts, nodes, np.int32)[node]
    step, size = _bytes(kind) * kv_heads * head_dim, _bytes(kind) * page_stride
    page, slot, key, place = at // page_size, at % page_size, 0, 0
    count = min(count, places.shape[1])
    while key < count:
        place = table[page] * size + slot * step
        for _ in range(min(page_size - slot, count - key)):
            places[0, key], places[1, key] = keys + place, values + place
            key, place = key + 1, place + step
        page, slot = page + 1, 0
    for rest in range(count, places.shape[1]):
        places[0, rest], places[1, rest] = places[0, count - 1], places[1, count - 1]


@nogil_part
def _bytes(kind):  # type: ignore[no-untyped-def]
    return 4 if kind == FLOAT32 else 2


@nogil_part
def _fetch_block(places, offset, size):  # type: ignore[no-untyped-def]
    """Ask for a head of a block, which is turned and lined up after the one before is done."""
    for key in range(BLOCK_KEYS):
        fetch(places[0, key] + offset, size)
        fetch(places[1, key] + offset, size)


@nogil_part
def _touch_block(places, keys, offset, size):  # type: ignore[no-untyped-def]
    """Read some heads of a block in the order of memory, which then comes at its full pace; head by head, with gaps
    between, it does not, nor does what is asked for ahead. With few rows memory is what takes time."""
    for half in range(2):
        for key in range(keys):
            touch(places[half, key] + offset, size)


@nogil_part
def _turn_keys(kind, head_dim, keys, places, offset, turned):  # type: ignore[no-untyped-def]
    """Write a head of a block's keys, in float32, as columns; ``offset`` is where the head begins."""
    for key in range(0, keys, LANES):
        turn_rows(kind, start_of(places[0, key:]), offset, head_dim, start_of(turned[0, key:]))


@nogil_part
def _line_up_values(kind, head_dim, keys, places, offset, lined):  # type: ignore[no-untyped-def]
    """Write a head of a block's values, in float32, as rows."""
    for key in range(keys):
        read_row(kind, places[1, key] + offset, start_of(lined[key:]), head_dim, np.float32(1))


@nogil_part
def _soften_tile(scores, limits, block, highest, totals, sums):  # type: ignore[no-untyped-def]
    """Make a tile's scores weights, and scale what its rows have summed so far to their new highest scores."""
    for row in range(limits.shape[0]):
        low, high = limits[row, 0] - block, limits[row, 1] - block
        at, total = start_of(highest[row:]), start_of(totals[row:])
        shrink = soften(start_of(scores[row:]), low, high, at, total)
        if shrink != 1:
            scale_rows(start_of(sums[row:]), sums.shape[1], shrink)


@nogil_part
def _add_from_pages(weights, places, offset, stride, keys, slot, page_size, sums):  # type: ignore[no-untyped-def]
    """``add_values`` of a block's float32 values where they lie, ``stride`` numbers apart in a page; the first is in
    ``slot``, counted from the first page on."""
    rows, width = sums.shape
    key = 0
    while key < keys:
        count = min(page_size - (slot + key) % page_size, keys - key)
        at = places[key] + offset
        add_values(rows, start_of(weights[0, key:]), at, stride, count, start_of(sums), width)
        key += count


@nogil_part
def _add_bias(scores, positions, bias, reach, head, group, row, block):  # type: ignore[no-untyped-def]
    """Add to scores the bias of the distances from their queries to their keys."""
    for one in range(scores.shape[0]):
        table = bias + 4 * (2 * reach + 1) * (head + (row + one) % group)
        position = positions[(row + one) // group]
        for key in range(BLOCK_KEYS):
            distance = min(max(block + key - position, -reach), reach)
            scores[one, key] += read_float(table, reach + distance) * np.float32(LOG2_E)


@nogil_part
def append(constants, task):  # type: ignore[no-untyped-def]
    """Write ``key`` and ``value``, a row for each position, to their slots; arguments are as for ``attend``."""
    _, kv_heads, head_dim, kind = read_words(constants, 4)
    nodes, offsets_at, positions_at, _, _, key, value = read_words(task, 7)
    offsets = array_at(offsets_at, nodes + 1, np.int32)
    positions = array_at(positions_at, offsets[nodes], np.int32)
    size = _bytes(kind) * kv_heads * head_dim
    place = np.empty((2, 1), np.int64)
    for node in range(nodes):
        for row in range(offsets[node], offsets[node + 1]):
            _find_places(constants, task, node, positions[row], 1, place)
            _copy_halves(place[0, 0], key + row * size, size // 2)
            _copy_halves(place[1, 0], value + row * size, size // 2)


@nogil_part
def _copy_halves(target, source, count):  # type: ignore[no-untyped-def]
    """Copy memory of any kind, in pieces of two bytes. What assigns a slice is compiled with words for wrong shapes."""
    to, given = array_at(target, count, np.int16), array_at(source, count, np.int16)
    for at in range(count):
        to[at] = given[at]


@TaskFunction
def attend_task(constants, task):  # type: ignore[no-untyped-def]
    """``attend`` as a C function."""
    attend(constants, task)
    return DONE


@TaskFunction
def append_task(constants, task):  # type: ignore[no-untyped-def]
    """``append`` as a C function."""
    append(constants, task)
    return DONE
