"""Contiguous blocks of table rows: a buddy allocator that gives back the tail it does not need.

Five regions (nodes, values, links, subgraphs, places) share one int32 array. A region is cut into granules of
``GRANULE`` rows; free blocks are powers of two of granules, in doubly linked lists by size. An allocation takes the
next larger power of two and returns the rest at once, so a block wastes less than one granule. All operations cost
O(log size). (Knuth, The Art of Computer Programming, vol. 1, section 2.5, buddy system.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import GRANULE, num_granules
from cellrt.native.jit import entry
from cellrt.native.row_types import Rows

NUM_ORDERS = 26
NODES, VALUES, LINKS, SUBGRAPHS, PLACES = 0, 1, 2, 3, 4
NUM_REGIONS = 5
HEADER = 2 + NUM_ORDERS  # first granule index of the region's arrays, number of granules, list heads


def make_blocks(capacities: tuple[int, int, int, int, int]) -> Rows[int]:
    """Return the array for five regions of at least these numbers of rows, all free."""
    granules = [num_granules(capacity) for capacity in capacities]
    blocks: Any = np.full(NUM_REGIONS * HEADER + 3 * sum(granules), -1, np.int32)
    first = NUM_REGIONS * HEADER
    for region, count in enumerate(granules):
        blocks[region * HEADER] = first
        blocks[region * HEADER + 1] = count
        first += 3 * count
    for region, count in enumerate(granules):
        _release(blocks, region, 0, count)
    made: Rows[int] = blocks
    return made


@entry
def _push(blocks: Rows[int], region: int, granule: int, order: int) -> None:
    head_at = region * HEADER + 2 + order
    base = int(blocks[region * HEADER]) + 3 * granule
    head = int(blocks[head_at])
    blocks[base] = order
    blocks[base + 1] = -1
    blocks[base + 2] = head
    if head >= 0:
        blocks[blocks[region * HEADER] + 3 * head + 1] = granule
    blocks[head_at] = granule


@entry
def _remove(blocks: Rows[int], region: int, granule: int) -> None:
    first = int(blocks[region * HEADER])
    base = first + 3 * granule
    order, previous, following = int(blocks[base]), int(blocks[base + 1]), int(blocks[base + 2])
    if previous >= 0:
        blocks[first + 3 * previous + 2] = following
    else:
        blocks[region * HEADER + 2 + order] = following
    if following >= 0:
        blocks[first + 3 * following + 1] = previous
    blocks[base] = -1


@entry
def _release_one(blocks: Rows[int], region: int, granule: int, order: int) -> None:
    """Free one aligned block and join it with its free buddies."""
    first, count = int(blocks[region * HEADER]), int(blocks[region * HEADER + 1])
    while order + 1 < NUM_ORDERS:
        buddy = granule ^ (1 << order)
        if buddy + (1 << order) > count or blocks[first + 3 * buddy] != order:
            break
        _remove(blocks, region, buddy)
        granule = min(granule, buddy)
        order += 1
    _push(blocks, region, granule, order)


@entry
def _release(blocks: Rows[int], region: int, granule: int, count: int) -> None:
    """Free any run of granules as aligned powers of two."""
    end = granule + count
    while granule < end:
        order = 0
        while (
            order + 1 < NUM_ORDERS and granule & ((1 << (order + 1)) - 1) == 0 and granule + (1 << (order + 1)) <= end
        ):
            order += 1
        _release_one(blocks, region, granule, order)
        granule += 1 << order


@entry
def allocate_block(blocks: Rows[int], region: int, size: int) -> int:
    """Return the first of ``size`` contiguous free rows of the region, or -1 if there is no such block."""
    if size == 0:
        return 0
    wanted = (size + GRANULE - 1) // GRANULE
    order = 0
    while (1 << order) < wanted:
        order += 1
    found = order
    while found < NUM_ORDERS and blocks[region * HEADER + 2 + found] < 0:
        found += 1
    if found >= NUM_ORDERS:
        return -1
    granule = int(blocks[region * HEADER + 2 + found])
    _remove(blocks, region, granule)
    if (1 << found) > wanted:
        _release(blocks, region, granule + wanted, (1 << found) - wanted)
    return granule * GRANULE


@entry
def free_block(blocks: Rows[int], region: int, first: int, size: int) -> None:
    """Free a block that ``allocate_block`` returned for the same size."""
    if size > 0:
        _release(blocks, region, first // GRANULE, (size + GRANULE - 1) // GRANULE)


def num_free_rows(blocks: NDArray[np.int32], region: int, enough: int | None = None) -> int:
    """Return the number of free rows of the region, or ``enough`` or a few more if there are as many.

    They are counted by walking the region's free lists, the largest blocks first.
    """
    first, total = int(blocks[region * HEADER]), 0
    for order in reversed(range(NUM_ORDERS)):
        granule = int(blocks[region * HEADER + 2 + order])
        while granule >= 0 and (enough is None or total < enough):
            total += GRANULE << order
            granule = int(blocks[first + 3 * granule + 2])
    return total


def num_rows(blocks: NDArray[np.int32], region: int) -> int:
    """Return the number of rows of the region, free or not."""
    return int(blocks[region * HEADER + 1]) * GRANULE
