"""Arenas in shared memory: the engine's process and those of its workers see the same rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from cellrt.core.state.tables import NUM_PERMANENT
from cellrt.definition.spec import RowSpec
from cellrt.worker.apart.pool import Segment, SharedPool, mapped
from cellrt.worker.arenas import Arenas


class PlacedArena(NamedTuple):
    """The arena of one row kind in a pool."""

    spec: RowSpec
    num_rows: int
    segment: Segment


class SharedArenas(Arenas):
    """The arenas of one location in the engine's process, with the methods of ``Arenas``."""

    def __init__(self, pool: SharedPool) -> None:
        super().__init__()
        self._pool = pool
        self._allocated: dict[int, PlacedArena] = {}
        """Memory that was allocated and not added yet, by address."""
        self.placed: list[PlacedArena] = []
        """The arenas, by kind."""

    def allocate(self, spec: RowSpec, num_rows: int) -> torch.Tensor:
        """Allocate memory in the pool (see ``Arenas.allocate``)."""
        rows = NUM_PERMANENT + num_rows
        size = rows * math.prod(spec.shape) * spec.dtype.itemsize
        arena = PlacedArena(spec, rows, self._pool.allocate(size))
        memory = arena_memory(self._pool.fd, arena)
        self._allocated[memory.data_ptr()] = arena
        return memory

    def add(self, spec: RowSpec, memory: torch.Tensor) -> None:
        """Add allocated memory as the next kind's (see ``Arenas.add``)."""
        super().add(spec, memory)
        self.placed.append(self._allocated.pop(memory.data_ptr()))


class MappedArenas(Arenas):
    """The same arenas in a worker's process.

    Args:
        fd: the descriptor of the engine's pool.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def adopt(self, placed: list[PlacedArena]) -> None:
        """Map the arenas of new kinds; ``placed`` has all kinds."""
        for arena in placed[len(self) :]:
            self.add(arena.spec, arena_memory(self._fd, arena))


def arena_memory(fd: int, arena: PlacedArena) -> torch.Tensor:
    """Return the rows of an arena ``[rows, *shape]``."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(mapped(fd, arena.segment), dtype=arena.spec.dtype)
    return flat.view(arena.num_rows, *arena.spec.shape)
