"""Rows as types: a class with annotated fields describes memory, for NumPy, Numba, type checkers and readers.

A row of a table, or a run of words in an array of integers (a record in ``links``), is read and written by field::

    class Edge(Row):
        steps: i4  # steps that must be there
        subgraph: i4

    edge_at = row_view(Edge)
    edge_at(links, at).steps += 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_type_hints, overload

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable
from numba.np.arrayobj import make_array
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

i4 = Annotated[int, np.int32]
i8 = Annotated[int, np.int64]
i2 = Annotated[int, np.int16]
u1 = Annotated[int, np.uint8]
u2 = Annotated[int, np.uint16]
f4 = Annotated[float, np.float32]
f8 = Annotated[float, np.float64]
WORD_BYTES = 4
CACHE_LINE = 64  # bytes

Matrix = NDArray[Any]
"""An array of two dimensions."""


class Row:
    """The base of all rows.

    It has no instances: a row is a view of memory, whose fields Python may read by name, too.
    """

    if TYPE_CHECKING:

        def __getitem__(self, field: str) -> Any: ...

        def __setitem__(self, field: str, value: Any) -> None: ...


R = TypeVar("R", bound=Row)
V = TypeVar("V")


class Rows(np.ndarray[Any, Any], Generic[V]):
    """The type of arrays, for checkers only: its elements are rows or numbers, where NumPy has ``Any``."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, at: int | tuple[int, int]) -> V: ...

        @overload
        def __getitem__(self, at: slice) -> Rows[V]: ...

        @overload
        def __getitem__(self, at: str) -> NDArray[Any]: ...

        @overload
        def __getitem__(self, at: Any) -> Any: ...

        def __getitem__(self, at: Any) -> Any: ...

        def __iter__(self) -> Iterator[V]: ...  # type: ignore[override]


def dtype_of(row: type[Row]) -> np.dtype[np.void]:
    """Return the dtype of a row's fields, in their order, each at an address that its size divides."""
    hints = get_type_hints(row, include_extras=True)
    dtype = np.dtype([(name, *hint.__metadata__) for name, hint in hints.items()], align=True)
    return _by_name(dtype) if numba.config.DISABLE_JIT else dtype


def _by_name(dtype: np.dtype[np.void]) -> np.dtype[np.void]:
    """Return a dtype whose scalars have the fields as properties, which take a fifth of the time of ``np.record``'s."""
    fields = {name: _field(name) for name in dtype.names or ()}
    return np.dtype((type("ReadByName", (np.void,), fields), dtype))


def _field(name: str) -> property:
    def write(row: Row, value: Any) -> None:
        row[name] = value

    return property(itemgetter(name), write)


def num_words(row: type[Row]) -> int:
    """Return the int32 words of a row."""
    return dtype_of(row).itemsize // WORD_BYTES


def row_view(row: type[R]) -> Callable[[Rows[int] | NDArray[np.int32], int], R]:
    """Return a function from an int32 array and an index to the row that begins there, for compiled code and without.

    It is a view: what is written to its fields is in the array. No index is tested.
    """
    view, dtype = from_dtype(dtype_of(row)), _by_name(dtype_of(row))

    def row_at(ints: Rows[int] | NDArray[np.int32], at: int) -> R:
        made: R = np.ndarray(1, dtype, ints, WORD_BYTES * int(at))[0]
        return made

    @type_callable(row_at)
    def type_of(context: Any) -> Any:
        def type_row(ints: Any, at: Any) -> Any:
            is_ints = isinstance(ints, types.Array) and ints.dtype == types.int32 and ints.ndim == 1
            return view if is_ints and isinstance(at, types.Integer) else None

        return type_row

    @lower_builtin(row_at, types.Array, types.Integer)
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ints = make_array(signature.args[0])(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], signature.args[1], types.intp)
        return builder.bitcast(cgutils.gep_inbounds(builder, ints.data, at), context.get_value_type(view))

    return row_at


def new_table(size: int, dtype: np.dtype[np.void]) -> Rows[Any]:
    """Return ``size`` zeroed rows from the start of a cache line on."""
    memory: Any = np.zeros(size * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    made: Rows[Any] = memory[start : start + size * dtype.itemsize].view(dtype)
    return made
