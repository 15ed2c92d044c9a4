"""What the rows of an input or output look like."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

from cellrt.definition.bits import DTYPES
from cellrt.errors import DefinitionError


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class RowSpec(NamedTuple):
    """One row: its shape without the row dimension, and its dtype.

    A ragged input takes any number of other nodes' outputs of this row shape per node; the cell sees ``RaggedRows``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    ragged: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def __str__(self) -> str:
        return f"{'ragged ' if self.ragged else ''}{_name(self.dtype)}{list(self.shape)}"


class RaggedRows(NamedTuple):
    """A ragged input as the cell sees it.

    Attributes:
        values: ``[total, *shape]``, the rows of all nodes one after the other.
        offsets: ``[rows + 1]`` int64; node r has ``values[offsets[r]:offsets[r + 1]]``, which may be empty.
    """

    values: torch.Tensor
    offsets: torch.Tensor


CellInput = torch.Tensor | RaggedRows
"""An input of a cell, ``[rows, *shape]`` or ragged."""


def copy_input(value: CellInput) -> CellInput:
    """A copy of an input in memory of its own."""
    return RaggedRows(value.values.clone(), value.offsets.clone()) if isinstance(value, RaggedRows) else value.clone()


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> RowSpec:
    """An input of one row of this shape per node: ``rows(256)``, or ``rows(dtype=torch.int64)`` for an integer."""
    return RowSpec(tuple(shape), dtype)


def ragged(*shape: int, dtype: torch.dtype = torch.float32) -> RowSpec:
    """An input of any number of rows of this shape per node."""
    return RowSpec(tuple(shape), dtype, ragged=True)


token = RowSpec((), torch.int64)
"""The spec of a token: one int64 number a row, as in ``cellrt.cell(module, {"token": cellrt.token})``."""


def as_spec(name: str, value: object) -> RowSpec:
    """Turns what a user wrote for an input (a spec, or a shape for float32 rows: ``(256,)`` or ``256``) into a spec.

    Raises DefinitionError naming the input.
    """
    spec = None
    if isinstance(value, RowSpec):
        spec = value
    elif isinstance(value, tuple | list):
        spec = RowSpec(tuple(value))
    elif type(value) is int:
        spec = RowSpec((value,))
    if spec is None or any(type(extent) is not int for extent in spec.shape) or type(spec.ragged) is not bool:
        raise DefinitionError(f"input {name!r}: expected a shape such as (256,) or cellrt.rows(256), got {value!r}")
    if not isinstance(spec.dtype, torch.dtype):
        raise DefinitionError(f"input {name!r}: expected a torch dtype, got {spec.dtype!r}")
    check_dtype(f"input {name!r}", spec.dtype)
    if any(extent < 1 for extent in spec.shape):
        raise DefinitionError(f"input {name!r}: expected extents of at least 1, got {spec.shape}")
    return RowSpec(tuple(spec.shape), spec.dtype, spec.ragged)


DTYPE_NAMES = MappingProxyType({_name(dtype): dtype for dtype in DTYPES})
"""The dtypes that rows may have, by their names in files and messages."""


def check_dtype(where: str, dtype: torch.dtype) -> None:
    """Raises DefinitionError if rows cannot have this dtype; ``where`` says whose it is."""
    if dtype not in DTYPES:
        hint = "; give a complex row as one of floats (torch.view_as_real)" if dtype.is_complex else ""
        raise DefinitionError(f"{where}: expected rows of {', '.join(DTYPE_NAMES)}, got {_name(dtype)}{hint}")


def describe(value: torch.Tensor) -> str:
    """A tensor's dtype and shape, for errors."""
    return f"{_name(value.dtype)}{list(value.shape)}"
