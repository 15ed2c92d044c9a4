"""Pinned host memory with a mirror on the device, given out in order and taken back in order.

What a task uploads (or downloads) is one block of both: the same bytes at the same place. A block belongs to its
task until the task is done, so nothing in flight is ever rewritten. On the device the ring looks like one more
arena: ``rows`` views it as rows of any kind, so a gather (or scatter) names its rows by number at a fixed address.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.spec import RowSpec
from cellrt.worker.device.device import Device

ALIGNMENT = 16


class Ring:
    """Blocks of one size of memory. One thread takes and gives back; the device reads or writes in between."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.host = device.pinned(num_bytes)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.array: NDArray[np.uint8] = self.host.numpy()
        self._blocks: deque[tuple[int, int]] = deque()
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

    def take(self, pieces: Sequence[tuple[int, int]]) -> list[int] | None:
        """Takes a block of pieces (bytes, bytes of a row); None if there is no room until older blocks are back.

        Returns where each piece begins, a multiple of its row's bytes, and where the block begins and ends.
        """
        if not self._blocks:
            return self._place(pieces, 0, self.num_bytes)
        oldest, newest_end = self._blocks[0][0], self._blocks[-1][1]
        if self._blocks[-1][0] < oldest:  # gone round
            return self._place(pieces, newest_end, oldest)
        return self._place(pieces, newest_end, self.num_bytes) or self._place(pieces, 0, oldest)

    def give_back(self) -> None:
        """Takes back the oldest block."""
        self._blocks.popleft()

    def take_last_back(self) -> None:
        """Takes back the newest block, which was not used."""
        self._blocks.pop()

    def _place(self, pieces: Sequence[tuple[int, int]], start: int, limit: int) -> list[int] | None:
        places = place(pieces, start)
        if places[-1] > limit:
            return None
        self._blocks.append((places[-2], places[-1]))
        return places


def place(pieces: Sequence[tuple[int, int]], start: int) -> list[int]:
    """Where pieces (bytes, bytes of a row) lie from ``start`` on; then the start and the end of the whole."""
    start = at = -(-start // ALIGNMENT) * ALIGNMENT
    places = []
    for num_bytes, row_bytes in pieces:
        unit = math.lcm(row_bytes, ALIGNMENT)
        at = -(-at // unit) * unit
        places.append(at)
        at += num_bytes
    return [*places, start, max(at, start + ALIGNMENT)]
