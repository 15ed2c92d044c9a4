"""The ring never gives out memory that somebody still has."""

from __future__ import annotations

import random

import pytest
import torch

from cellrt.definition.spec import RowSpec
from cellrt.worker.device.dry import DryDevice
from cellrt.worker.device.ring import Ring
from cellrt.worker.device.shape import next_size


@pytest.fixture
def device():
    device = DryDevice()
    yield device
    device.close()


@pytest.mark.parametrize("seed", range(20))
def test_blocks_never_overlap_and_all_memory_is_used_again(device, seed):
    draw, ring, held, wraps = random.Random(seed), Ring(device, 4096), [], 0
    for _ in range(500):
        pieces = [(draw.randint(0, 9) * size, size) for size in draw.choices([4, 8, 12, 64], k=draw.randint(1, 4))]
        block = ring.take(pieces)
        assert block is not None or held
        if block is not None:
            starts, first, end = block
            assert 0 <= first < end <= 4096
            for (num_bytes, row_bytes), start in zip(pieces, starts):
                assert start % row_bytes == 0 and first <= start and start + num_bytes <= end
            assert all(end <= other[0] or first >= other[1] for other in held)
            wraps += bool(held) and first < held[-1][0]
            held.append((first, end))
        if held and (block is None or draw.random() < 0.5):
            ring.give_back()
            held.pop(0)
    assert wraps > 3


def test_what_does_not_fit_waits_for_the_oldest_block(device):
    ring = Ring(device, 1024)
    first, second = ring.take([(512, 16)]), ring.take([(400, 16)])
    assert first[1:] == (0, 512) and second is not None
    assert ring.take([(300, 16)]) is None
    ring.give_back()
    assert ring.take([(300, 16)]).first == 0


def test_the_mirror_is_seen_as_rows_of_any_kind(device):
    ring = Ring(device, 4096)
    at = ring.take([(24, 8), (36, 12)]).starts[1]
    ring.device[at : at + 36].copy_(torch.arange(9, dtype=torch.float32).view(torch.uint8))
    rows = ring.rows(RowSpec((3,)))
    assert rows[at // 12 : at // 12 + 3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_counts_are_padded_to_few_sizes_by_at_most_a_half():
    sizes = {next_size(count) for count in range(1, 513)}
    assert len(sizes) <= 18
    assert all(count <= next_size(count) <= max(count + 1, 1.5 * count) for count in range(1, 513))
