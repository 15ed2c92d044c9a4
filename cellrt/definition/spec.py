"""Specs of the rows of an input or output: shape, dtype and kind."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

from cellrt.definition.bits import DTYPES
from cellrt.definition.spans import PagedRows, Spans
from cellrt.errors import DefinitionError
from cellrt.numbers import as_integer

MAX_PAGE_SIZE = 4096
"""Rows of a page."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class RowSpec(NamedTuple):
    """One row: its shape without the row dimension, and its dtype.

    A ragged input takes any number of other nodes' outputs of this row shape per node; the cell sees ``RaggedRows``.
    With a ``page_size`` it is a state that grows by rows of this shape. A page has that many rows, in dimension
    ``page_dim``. The cell sees ``PagedRows``, and adds one row for each of its own if it ``appends``. With a ``span``
    ("partial" or "whole") nobody gives it; the cell sees ``Spans``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    ragged: bool = False
    page_size: int = 0
    appends: bool = False
    page_dim: int = 0
    span: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    @property
    def has_nodes(self) -> bool:
        """True if the input tells a cell which rows are of one node, as pages and spans do."""
        return bool(self.page_size or self.span)

    @property
    def stored(self) -> RowSpec:
        """The spec of the rows that an arena stores for such an input: rows of a ragged one, whole pages of a growing
        one.
        """
        if self.page_size:
            shape = (*self.shape[: self.page_dim], self.page_size, *self.shape[self.page_dim :])
            return RowSpec(shape, self.dtype, page_size=self.page_size, page_dim=self.page_dim)
        return RowSpec(self.shape, self.dtype) if self.ragged else self

    def __repr__(self) -> str:
        return f"RowSpec({self})"

    def __str__(self) -> str:
        row = f"{_name(self.dtype)}{list(self.shape)}"
        if self.span:
            return f"{self.span} span"
        if self.page_size:
            place = f" (dimension {self.page_dim})" if self.page_dim else ""
            return f"{'growing ' if self.appends else ''}pages of {self.page_size}{place} {row}"
        return f"{'ragged ' if self.ragged else ''}{row}"


class RaggedRows(NamedTuple):
    """A ragged input as the cell sees it.

    Attributes:
        values: ``[total, *shape]``, the rows of all nodes one after the other.
        offsets: ``[rows + 1]`` int64; node r has ``values[offsets[r]:offsets[r + 1]]``, which may be empty.
    """

    values: torch.Tensor
    offsets: torch.Tensor


CellInput = torch.Tensor | RaggedRows | PagedRows | Spans
"""An input of a cell: ``[rows, *shape]``, ragged, a state that grows, or which rows are of one node."""


def copy_input(value: CellInput) -> CellInput:
    """Return a copy of an input in memory of its own."""
    if isinstance(value, PagedRows | Spans):
        return value.copied()
    return RaggedRows(value.values.clone(), value.offsets.clone()) if isinstance(value, RaggedRows) else value.clone()


def plain(value: CellInput) -> torch.Tensor | RaggedRows:
    """Return an input of a cell without pages and spans. Raise TypeError if it is one of these."""
    if isinstance(value, PagedRows | Spans):
        raise TypeError("expected rows, got pages or spans")
    return value


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> RowSpec:
    """Return an input of one row of this shape per node: ``rows(256)``, or ``rows(dtype=torch.int64)`` for an
    integer.
    """
    return RowSpec(_extents("rows", shape), dtype)


def ragged(*shape: int, dtype: torch.dtype = torch.float32) -> RowSpec:
    """Return an input of any number of rows of this shape per node."""
    return RowSpec(_extents("ragged", shape), dtype, ragged=True)


def pages(*shape: int, dtype: torch.dtype = torch.float32, page_size: int = 16, page_dim: int = 0) -> RowSpec:
    """Return an input that is a growing state of rows of this shape, which another cell appends to: see ``grows``."""
    return RowSpec(_extents("pages", shape), dtype, page_size=page_size, page_dim=page_dim)


def grows(*shape: int, dtype: torch.dtype = torch.float32, page_size: int = 16, page_dim: int = 0) -> RowSpec:
    """Return a state that grows by one row of this shape for each row of the cell, which appends it: the keys and
    values of a decoder, say. The runtime keeps it in pages of ``page_size`` rows; the cell sees ``PagedRows``.

    ``page_dim``: where the rows of a page are among its dimensions. With rows ``(layers, 2, heads, size)`` and 2 a page
    is ``[layers, 2, page_size, heads, size]``, so that what one layer reads of it lies together.
    """
    return RowSpec(_extents("grows", shape), dtype, page_size=page_size, appends=True, page_dim=page_dim)


def _extents(kind: str, shape: tuple[object, ...]) -> tuple[int, ...]:
    """Return the extents of a row, as they were given to a function of that name."""
    extents = [as_integer(extent) for extent in shape]
    for extent, number in zip(shape, extents):
        if number is None or number < 1:
            hint = f"; a dtype goes by its name: dtype={extent}" if isinstance(extent, torch.dtype) else ""
            raise DefinitionError(f"{kind}: expected extents of a row as integers of at least 1, got {extent!r}{hint}")
    return tuple(number for number in extents if number is not None)


def span(*, whole: bool = False) -> RowSpec:
    """Return an input that tells the cell which rows of its batch are of one node (``Spans``); callers give nothing for
    it.

    ``whole``: all steps of a chain come in one task, as an encoder needs them, whose rows read rows after them. Else as
    many come at a time as there is room for, in order.
    """
    return RowSpec((), torch.bool, span="whole" if whole else "partial")


token = RowSpec((), torch.int64)
"""The spec of a token: one int64 number a row, as in ``cellrt.cell(module, {"token": cellrt.token})``."""


def as_spec(name: str, value: object) -> RowSpec:
    """Turn what a user wrote for an input (a spec, or a shape for float32 rows: ``(256,)`` or ``256``) into a spec.

    Raise DefinitionError naming the input.
    """
    spec = None
    if isinstance(value, RowSpec):
        spec = value
    elif isinstance(value, tuple | list):
        spec = RowSpec(tuple([extent if (number := as_integer(extent)) is None else number for extent in value]))
    elif (number := as_integer(value)) is not None:
        spec = RowSpec((number,))
    if spec is None or any(type(extent) is not int for extent in spec.shape) or type(spec.ragged) is not bool:
        hint = f"; a dtype goes as cellrt.rows(..., dtype={value})" if isinstance(value, torch.dtype) else ""
        raise DefinitionError(
            f"input {name!r}: expected a shape such as (256,) or cellrt.rows(256), got {value!r}{hint}"
        )
    if not isinstance(spec.dtype, torch.dtype):
        raise DefinitionError(f"input {name!r}: expected a torch dtype, got {spec.dtype!r}")
    check_dtype(f"input {name!r}", spec.dtype)
    if any(extent < 1 for extent in spec.shape):
        raise DefinitionError(f"input {name!r}: expected extents of at least 1, got {spec.shape}")
    if type(spec.page_size) is not int or not 0 <= spec.page_size <= MAX_PAGE_SIZE:
        raise DefinitionError(f"input {name!r}: expected a page_size from 1 to {MAX_PAGE_SIZE}, got {spec.page_size!r}")
    if type(spec.page_dim) is not int or not 0 <= spec.page_dim <= len(spec.shape):
        raise DefinitionError(f"input {name!r}: expected a page_dim from 0 to {len(spec.shape)}, got {spec.page_dim!r}")
    return spec._replace(shape=tuple(spec.shape))


DTYPE_NAMES = MappingProxyType({_name(dtype): dtype for dtype in DTYPES})
"""The dtypes that rows may have, by their names in files and messages."""


def check_dtype(where: str, dtype: torch.dtype) -> None:
    """Raise DefinitionError if rows cannot have this dtype; ``where`` says whose it is."""
    if dtype not in DTYPES:
        hint = "; give a complex row as one of floats (torch.view_as_real)" if dtype.is_complex else ""
        raise DefinitionError(f"{where}: expected rows of {', '.join(DTYPE_NAMES)}, got {_name(dtype)}{hint}")


def conversion(wanted: torch.dtype, given: torch.dtype) -> str:
    """Return how to convert floats of one dtype to another, as the end of an error; empty for other dtypes."""
    if wanted == given or not (wanted.is_floating_point and given.is_floating_point):
        return ""
    return "; use .float()" if wanted == torch.float32 else f"; use .to({wanted})"


def describe(value: torch.Tensor) -> str:
    """Return a tensor's dtype and shape, for errors."""
    return f"{_name(value.dtype)}{list(value.shape)}"
