"""Arenas of a device: those of a location, with scratch rows of each kind that the scheduler does not manage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.bits import as_bits
from cellrt.definition.spec import RowSpec
from cellrt.worker.arenas import Arenas

SCRATCH_BYTES = 128 << 20
MAX_SCRATCH_ROWS = 32_768
"""The most scratch rows: enough for every step of 512 rows and 24 steps for two states of one kind."""


class DeviceArenas(Arenas):
    """The arenas of a device: ``self[kind]`` has ``num_scratch[kind]`` more rows at its end.

    They hold state that only the next step of a task reads; the very last row is the trash row, which is never read.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_scratch: list[int] = []
        self._num_rows: list[int] = []

    def allocate(self, spec: RowSpec, num_rows: int) -> torch.Tensor:
        """Return memory for the rows of a new kind and its scratch rows (see ``Arenas``)."""
        memory = super().allocate(spec, num_rows + _num_scratch(spec))
        self.settle()
        return memory

    def add(self, spec: RowSpec, memory: torch.Tensor) -> None:
        """Make memory of ``allocate`` the arena of the next kind (see ``Arenas``)."""
        super().add(spec, memory)
        self.num_scratch.append(_num_scratch(spec))
        self._num_rows.append(len(memory))

    def settle(self) -> None:
        """Wait for this thread's stream, which the worker's stream is not ordered with (see ``Arenas``)."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def set_constant(self, kind: int, row: int, value: torch.Tensor) -> None:
        """Write a constant to its permanent row; it is there when this returns."""
        super().set_constant(kind, row, value)
        self.settle()

    def get_bits(self, kind: int, rows: NDArray[np.int32]) -> NDArray[Any]:
        """Return the bits of rows (see ``Arenas``).

        It waits for the copy: call it rarely, for rows whose tasks are done.
        """
        if self.device.type == "cpu":
            return super().get_bits(kind, rows)
        wanted = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        return as_bits(self[kind].index_select(0, wanted).cpu())

    def trash_row(self, kind: int) -> int:
        """Return the trash row, or page, of a kind, which is never read."""
        return self._num_rows[kind] - 1

    def scratch_rows(self, kind: int) -> tuple[int, int]:
        """Return the first scratch row and the number of scratch rows, without the trash row."""
        return self._num_rows[kind] - self.num_scratch[kind], self.num_scratch[kind] - 1


def _num_scratch(spec: RowSpec) -> int:
    if spec.page_size:
        return 1  # no step of a task has pages of its own
    return max(1, min(MAX_SCRATCH_ROWS, SCRATCH_BYTES // max(1, spec.num_bytes)))
