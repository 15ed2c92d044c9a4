"""The block allocator against a model that knows nothing of buddies: a set of granules that are free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.core.state import buddy_allocator
from cellrt.core.state.buddy_allocator import allocate_block, free_block, make_blocks, num_free_rows, num_rows
from cellrt.core.state.tables import GRANULE

SIZES = st.one_of(st.integers(0, 3 * GRANULE), st.integers(0, 40 * GRANULE))
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=120)


def granules(size: int) -> int:
    return -(-size // GRANULE)


def has_aligned_run(free: set[int], wanted: int, count: int) -> bool:
    """Whether some free run of the next power of two starts at a multiple of its length; none is wanted for no rows."""
    if wanted == 0:
        return True
    length = 1 << (wanted - 1).bit_length()
    starts = range(0, count - length + 1, length)
    return any(all(granule in free for granule in range(start, start + length)) for start in starts)


@given(steps=STEPS, capacity=st.integers(1, 64 * GRANULE), region=st.integers(0, buddy_allocator.NUM_REGIONS - 1))
def test_blocks_never_overlap_and_come_back_whole(steps, capacity, region):
    state = make_blocks((capacity,) * buddy_allocator.NUM_REGIONS)
    untouched, count = state.copy(), num_rows(state, region) // GRANULE
    free = set(range(count))
    held: list[tuple[int, int]] = []
    for is_free, size, which in steps:
        if is_free and held:
            first, size = held.pop(which % len(held))
            free_block(state, region, first, size)
            free |= set(range(first // GRANULE, first // GRANULE + granules(size)))
        elif not is_free:
            first = allocate_block(state, region, size)
            assert (first >= 0) == has_aligned_run(free, granules(size), count)
            if first >= 0:
                taken = set(range(first // GRANULE, first // GRANULE + granules(size)))
                assert first % GRANULE == 0 and taken <= free
                free -= taken
                held.append((first, size))
        assert num_free_rows(state, region) == len(free) * GRANULE
        half = len(free) * GRANULE // 2
        assert num_free_rows(state, region, half) >= half
        others = [other for other in range(buddy_allocator.NUM_REGIONS) if other != region]
        assert all(num_free_rows(state, other) == num_rows(state, other) for other in others)
    for first, size in held:
        free_block(state, region, first, size)
    heads = region * buddy_allocator.HEADER + 2
    is_empty = [state[heads + order] < 0 for order in range(buddy_allocator.NUM_ORDERS)]
    assert is_empty == [untouched[heads + order] < 0 for order in range(buddy_allocator.NUM_ORDERS)]
    assert num_free_rows(state, region) == num_rows(state, region)


@pytest.mark.parametrize("capacity", [1, GRANULE, 3 * GRANULE, 1000, 4096])
def test_a_block_wastes_less_than_a_granule(capacity):
    state = make_blocks((capacity, 1, 1, 1, 1))
    count = 0
    while allocate_block(state, buddy_allocator.NODES, 1) >= 0:
        count += 1
    assert count == granules(capacity)
    assert allocate_block(state, buddy_allocator.VALUES, 1) == 0
