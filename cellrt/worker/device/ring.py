"""Pinned host memory with a mirror on the device, given out in order and taken back in order.

What a task uploads (or downloads) is one block of both: the same bytes at the same place. A block belongs to its
task until the task is done, so nothing in flight is ever rewritten. On the device the ring looks like one more
arena: ``rows`` views it as rows of any kind, so a gather (or scatter) names its rows by number at a fixed address.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.spec import RowSpec
from cellrt.worker.device.device import Device

ALIGNMENT = 16


class Block(NamedTuple):
    """A piece of a ring: bytes ``first`` to ``end``, in which each of several arrays ``starts`` at a multiple of its
    row's bytes."""

    starts: list[int]
    first: int
    end: int


class Ring:
    """Blocks of one size of memory. One thread takes and gives back; the device reads or writes in between."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.host = device.pinned(num_bytes)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.array: NDArray[np.uint8] = self.host.numpy()
        self._blocks: deque[Block] = deque()
        self._views: dict[RowSpec, torch.Tensor] = {}

    def rows(self, spec: RowSpec) -> torch.Tensor:
        """The mirror as rows ``[num_bytes // row bytes, *shape]``."""
        view = self._views.get(spec)
        if view is None:
            count = self.num_bytes // spec.num_bytes
            flat = self.device[: count * spec.num_bytes].view(spec.dtype)
            view = self._views[spec] = flat.view(count, *spec.shape)
        return view

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a block."""
        return not self._blocks

    def take(self, pieces: Sequence[tuple[int, int]]) -> Block | None:
        """Takes a block for arrays of (bytes, bytes of a row); None if there is no room until older blocks are back."""
        if not self._blocks:
            return self._take_at(pieces, 0, self.num_bytes)
        oldest, newest = self._blocks[0], self._blocks[-1]
        if newest.first < oldest.first:  # gone round
            return self._take_at(pieces, newest.end, oldest.first)
        return self._take_at(pieces, newest.end, self.num_bytes) or self._take_at(pieces, 0, oldest.first)

    def give_back(self) -> None:
        """Takes back the oldest block."""
        self._blocks.popleft()

    def take_last_back(self) -> None:
        """Takes back the newest block, which was not used."""
        self._blocks.pop()

    def _take_at(self, pieces: Sequence[tuple[int, int]], first: int, limit: int) -> Block | None:
        block = block_from(pieces, first)
        if block.end > limit:
            return None
        self._blocks.append(block)
        return block


def block_from(pieces: Sequence[tuple[int, int]], first: int) -> Block:
    """The block of arrays of (bytes, bytes of a row) that lie as near behind ``first`` as their alignment lets them."""
    first = at = -(-first // ALIGNMENT) * ALIGNMENT
    starts = []
    for num_bytes, row_bytes in pieces:
        unit = math.lcm(row_bytes, ALIGNMENT)
        at = -(-at // unit) * unit
        starts.append(at)
        at += num_bytes
    return Block(starts, first, max(at, first + ALIGNMENT))
