"""Arenas of a device: those of a location, and behind each kind's rows some that the scheduler does not know."""

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
"""Every step of 512 rows and 24 steps for two states of one kind, and what goes from step to step."""


class DeviceArenas(Arenas):
    """``self[kind]`` has ``num_scratch[kind]`` rows more at its end.

    State that only the next step of a task reads lies there, and the very last row takes what nobody reads.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_scratch: list[int] = []
        self._num_rows: list[int] = []

    def allocate(self, spec: RowSpec, num_rows: int) -> torch.Tensor:
        """See ``Arenas``; the memory has scratch rows, too."""
        memory = super().allocate(spec, num_rows + _num_scratch(spec))
        self.settle()
        return memory

    def add(self, spec: RowSpec, memory: torch.Tensor) -> None:
        """See ``Arenas``."""
        super().add(spec, memory)
        self.num_scratch.append(_num_scratch(spec))
        self._num_rows.append(len(memory))

    def settle(self) -> None:
        """See ``Arenas``: waits for this thread's stream, which the worker's does not know."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def set_constant(self, kind: int, row: int, value: torch.Tensor) -> None:
        """Writes a constant to its permanent row; it is there when this returns."""
        super().set_constant(kind, row, value)
        self.settle()

    def get_bits(self, kind: int, rows: NDArray[np.int32]) -> NDArray[Any]:
        """See ``Arenas``. Waits for the copy: for rows whose tasks are done, and not in the middle of things."""
        if self.device.type == "cpu":
            return super().get_bits(kind, rows)
        wanted = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        return as_bits(self[kind].index_select(0, wanted).cpu())

    def trash_row(self, kind: int) -> int:
        """The row, or page, that nobody reads."""
        return self._num_rows[kind] - 1

    def scratch_rows(self, kind: int) -> tuple[int, int]:
        """The first scratch row and how many there are, the trash row apart."""
        return self._num_rows[kind] - self.num_scratch[kind], self.num_scratch[kind] - 1


def _num_scratch(spec: RowSpec) -> int:
    if spec.page_size:
        return 1  # no step of a task has pages of its own
    return max(1, min(MAX_SCRATCH_ROWS, SCRATCH_BYTES // max(1, spec.num_bytes)))
