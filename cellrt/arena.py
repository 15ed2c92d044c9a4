"""Arenas: the memory of node outputs, one tensor per kind of row at each location."""

from __future__ import annotations

import torch

from cellrt.core.tables import NUM_PERMANENT
from cellrt.spec import RowSpec


class Arenas:
    """The arenas of one location: ``self[kind]`` is ``[NUM_PERMANENT + rows, *shape]``.

    Rows below NUM_PERMANENT are zeros and constants. Which of the others are in use is the processor's knowledge alone.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._tensors: list[torch.Tensor] = []

    def __getitem__(self, kind: int) -> torch.Tensor:
        return self._tensors[kind]

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, spec: RowSpec, num_rows: int) -> None:
        """Allocates the arena of the next kind, once and for all."""
        tensor = torch.empty((NUM_PERMANENT + num_rows, *spec.shape), dtype=spec.dtype, device=self.device)
        tensor[:NUM_PERMANENT] = 0
        self._tensors.append(tensor)

    def set_constant(self, kind: int, row: int, value: torch.Tensor) -> None:
        """Writes a constant to its permanent row."""
        self._tensors[kind][row] = value.to(self.device)


def rows_for(spec: RowSpec, num_bytes: int, most: int) -> int:
    """How many rows of a kind fit in ``num_bytes``, at most ``most``."""
    return max(64, min(most, num_bytes // max(1, spec.num_bytes)))
