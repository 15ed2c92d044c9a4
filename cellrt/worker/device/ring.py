"""Pinned host memory with a mirror on the device, allocated and released in order.

A task's upload (or download) is one block of both: the same bytes at the same place. A block belongs to its
task until the task is done, so nothing in flight is ever rewritten. On the device the ring looks like one more
arena: ``rows`` views it as rows of any kind, so a gather (or scatter) names its rows by number at a fixed address.

The blocks are kept in integers, as compiled code takes and releases most of them (``launch.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.spec import RowSpec
from cellrt.worker.device import launch
from cellrt.worker.device.device import Device
from cellrt.worker.device.launch import ALIGNMENT, MOST_BLOCKS, NUM_BLOCKS, OLDEST

Ints = NDArray[np.int64]


class Block(NamedTuple):
    """A block of a ring: bytes ``first`` to ``end``, with the start of each of several arrays.

    Each of ``starts`` is a multiple of the bytes of the array's rows.
    """

    starts: list[int]
    first: int
    end: int


class Ring:
    """A ring of blocks. One thread takes and releases them; the device reads or writes in between.

    Attributes:
        state: in the layout of ``launch.py``.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.host = device.pinned(num_bytes)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.array: NDArray[np.uint8] = self.host.numpy()
        self.state = np.zeros(launch.BLOCKS + 2 * MOST_BLOCKS, np.int64)
        self.state[: launch.OLDEST] = num_bytes, self.host.data_ptr(), self.device.data_ptr()
        self._views: dict[RowSpec, torch.Tensor] = {}

    def rows(self, spec: RowSpec) -> torch.Tensor:
        """Return the mirror as rows ``[num_bytes // row bytes, *shape]``."""
        view = self._views.get(spec)
        if view is None:
            count = self.num_bytes // spec.num_bytes
            flat = self.device[: count * spec.num_bytes].view(spec.dtype)
            view = self._views[spec] = flat.view(count, *spec.shape)
        return view

    @property
    def is_empty(self) -> bool:
        """True if no block is taken."""
        return not self.state[NUM_BLOCKS]

    def take(self, pieces: Sequence[tuple[int, int]]) -> Block | None:
        """Take a block for arrays of (bytes, bytes of a row); None if there is no room until older
        blocks are released.
        """
        slots = np.empty(launch.STARTS + len(pieces), np.int64)
        if not launch.take_block(self.state, pieces_of(pieces), slots, 0):
            return None
        return block_at(slots, 0, len(pieces))

    def give_back(self) -> None:
        """Release the oldest block."""
        self.state[OLDEST] = (self.state[OLDEST] + 1) % MOST_BLOCKS
        self.state[NUM_BLOCKS] -= 1


def pieces_of(pieces: Sequence[tuple[int, int]]) -> Ints:
    """Return arrays of (bytes, bytes of a row) in the form that compiled code takes."""
    made = [(num_bytes, math.lcm(row_bytes, ALIGNMENT)) for num_bytes, row_bytes in pieces]
    return np.array(made, np.int64).reshape(-1, 2)


def bytes_for(pieces: Ints) -> int:
    """Return the bytes in which a block of these pieces fits from the start."""
    return int((pieces[:, 0] + pieces[:, 1]).sum()) + ALIGNMENT


def block_at(slots: Ints, at: int, num_pieces: int) -> Block:
    """Return a block that compiled code wrote."""
    first, end, *starts = slots[at : at + launch.STARTS + num_pieces].tolist()
    return Block(starts, first, end)
