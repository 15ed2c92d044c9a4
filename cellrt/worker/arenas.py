"""Arenas: the memory of node outputs, one tensor for each kind of row at each location."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.copying import (
    LARGE_BYTES,
    get_rows,
    get_rows_nogil,
    get_rows_of,
    get_rows_of_nogil,
    move_rows,
    move_rows_nogil,
    put_columns,
)
from cellrt.core.state.tables import LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK
from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.definition.spec import RowSpec

LEAST_HUGE_BYTES = 4 << 20
"""The least bytes of an arena for which huge pages are asked for, as NumPy does for its arrays."""


class Arenas:
    """The arenas of one location: ``self[kind]`` is ``[NUM_PERMANENT + rows, *shape]``.

    Rows below NUM_PERMANENT are zeros and constants. Only the processor knows which of the others are in use.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._tensors: list[torch.Tensor] = []
        self._specs: list[RowSpec] = []
        self._bytes: list[NDArray[np.uint8]] = []
        self._memory: list[memoryview] = []
        """The bytes of CPU arenas, flat."""
        self._rows: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        """The NumPy dtype and shape of a row of each kind."""
        self._without_numpy: set[int] = set()
        """Kinds whose dtype NumPy lacks."""

    def __getitem__(self, kind: int) -> torch.Tensor:
        return self._tensors[kind]

    def put(self, kind: int, rows: NDArray[np.int32], values: NDArray[Any]) -> None:
        """Copy values ``[n, *shape]`` (see ``as_bits``) to these rows of a CPU arena; negative rows are skipped."""
        self.put_columns(kind, rows[None], 0, len(rows), values)

    def put_columns(self, kind: int, rows: NDArray[np.int32], first: int, count: int, values: NDArray[Any]) -> None:
        """Copy values ``[n * count, *shape]`` (see ``as_bits``) to rows of a CPU arena.

        The rows are named by ``count`` columns of ``rows`` ``[n, columns]``, from column ``first`` on; negative rows
        are skipped. There may be more values.
        """
        put_columns(self._bytes[kind], rows, first, count, np.frombuffer(np.ascontiguousarray(values), np.uint8))

    def get(self, kind: int, rows: NDArray[np.int32]) -> torch.Tensor:
        """Return a new tensor ``[n, *shape]`` of these rows of a CPU arena."""
        arena = self._bytes[kind]
        values = np.empty((len(rows), arena.shape[1]), np.uint8)
        (get_rows if values.size < LARGE_BYTES else get_rows_nogil)(arena, rows, values)
        return self.as_tensor(kind, values)

    def get_bits(self, kind: int, rows: NDArray[np.int32]) -> NDArray[Any]:
        """Return a new array ``[n, *shape]`` of these rows of a CPU arena (see ``as_bits``)."""
        values = self.empty_bits(kind, len(rows))
        (get_rows if values.size < LARGE_BYTES else get_rows_nogil)(self._bytes[kind], rows, values)
        return self._shaped(kind, values)

    def get_bytes(self, kind: int, rows: NDArray[np.int32]) -> memoryview:
        """Return a copy of the bytes of these rows of a CPU arena, one after the other."""
        values = self.empty_bits(kind, len(rows))
        (get_rows if values.size < LARGE_BYTES else get_rows_nogil)(self._bytes[kind], rows, values)
        return values.reshape(-1).data

    def bytes_of(self, kind: int) -> NDArray[np.uint8]:
        """Return a CPU arena as bytes: ``[rows, bytes of a row]``."""
        return self._bytes[kind]

    def get_into(
        self, kind: int, handles: NDArray[np.int32], location: int, own: int, values: NDArray[np.uint8]
    ) -> None:
        """Copy the rows of those handles that name this arena's ``location``; permanent rows are read at ``own``."""
        copy = get_rows_of if values.size < LARGE_BYTES else get_rows_of_nogil
        copy(self._bytes[kind], handles, location, own, values)

    def empty_bits(self, kind: int, count: int) -> NDArray[np.uint8]:
        """Return uninitialized bytes for rows: ``[count, bytes of a row]``."""
        return np.empty((count, self._bytes[kind].shape[1]), np.uint8)

    def as_tensor(self, kind: int, values: NDArray[np.uint8]) -> torch.Tensor:
        """Return rows given as bytes as a tensor ``[n, *shape]`` that shares their memory."""
        tensor = torch.from_numpy(self._shaped(kind, values))
        return tensor.view(self._specs[kind].dtype) if kind in self._without_numpy else tensor

    def _shaped(self, kind: int, values: NDArray[np.uint8]) -> NDArray[Any]:
        dtype, shape = self._rows[kind]
        shaped = values.view(dtype)
        return shaped if len(shape) == 1 else shaped.reshape(len(values), *shape)

    def move(self, kind: int, rows: NDArray[np.int32], values: NDArray[Any], positions: NDArray[np.int32]) -> None:
        """Copy ``values[positions]`` (see ``as_bits``) to these rows of a CPU arena."""
        arena = self._bytes[kind]
        given = np.ascontiguousarray(values)
        given = (given if given.ndim == 2 else given.reshape(len(given), -1)).view(np.uint8)
        copy = move_rows if len(rows) * arena.shape[1] < LARGE_BYTES else move_rows_nogil
        copy(arena, rows, given, positions)

    def __len__(self) -> int:
        return len(self._tensors)

    def allocate(self, spec: RowSpec, num_rows: int) -> torch.Tensor:
        """Return memory for ``num_rows`` rows of a new kind, to be given to ``add``; from any thread."""
        with torch.inference_mode(False):  # the caller may be in it: other threads could not write to the rows then
            shape = NUM_PERMANENT + num_rows, *spec.shape
            if self.device.type == "cpu":
                return _untouched_zeros(shape, spec.dtype)
            memory = torch.empty(shape, dtype=spec.dtype, device=self.device)
        memory[:NUM_PERMANENT] = 0
        return memory

    def add(self, spec: RowSpec, memory: torch.Tensor) -> None:
        """Make memory of ``allocate`` the arena of the next kind, for good."""
        self._tensors.append(memory)
        self._specs.append(spec)
        if spec.dtype not in NUMPY_DTYPES:
            self._without_numpy.add(len(self._rows))
        self._rows.append((NUMPY_DTYPES.get(spec.dtype, np.dtype(np.int16)), spec.shape))
        if self.device.type == "cpu":
            self._bytes.append(memory.view(len(memory), -1).view(torch.uint8).numpy())
            self._memory.append(self._bytes[-1].reshape(-1).data)

    def settle(self) -> None:
        """Wait until this thread's copies are done, if they are asynchronous."""

    def set_constant(self, kind: int, row: int, value: torch.Tensor) -> None:
        """Write a constant to its permanent row."""
        self._tensors[kind][row] = value.to(self.device)


def copy_page(arenas: list[Arenas], kind: int, source: int, target: int) -> None:
    """Copy one row of a kind between arenas, given by location; both by their handles. It is done when this returns.

    No unfinished task may write to the row that is copied, or use the other one.
    """
    given, made = arenas[source >> LOCATION_SHIFT], arenas[target >> LOCATION_SHIFT]
    made[kind][target & ROW_MASK] = given[kind][source & ROW_MASK]
    given.settle()
    made.settle()


def rows_for(spec: RowSpec, num_bytes: int, most: int) -> int:
    """Return the number of rows of a kind that fit in ``num_bytes``, at least 64 and at most ``most``."""
    return max(64, min(most, num_bytes // max(1, spec.num_bytes)))


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written: the first rows of a kind may be pages of megabytes.

    They are mapped for themselves: what an allocator has left of others' memory it would clear, and so take, whole.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= LEAST_HUGE_BYTES:
        with suppress(OSError, AttributeError):  # this system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8, size)).view(dtype).reshape(shape)
