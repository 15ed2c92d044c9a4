"""How the core's functions are compiled, and how they get at the tables.

``compiled`` is for functions that only compiled code calls: no Python wrapper, which for this many tables is most
of the code, and no reference counts (an atomic instruction or two for every table touched). So these create no
array. ``entry`` is for the few that Python calls, ``short_entry`` for those too short to be worth handing over
the interpreter lock. They take the tables' addresses in one array of integers, as unpacking the tables
themselves costs several microseconds a call. Without compilation (NUMBA_DISABLE_JIT) they take the tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype

from cellrt.core import tables
from cellrt.core.tables import Tables

compiled = njit(
    cache=True, nogil=True, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
entry = njit(cache=True, nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)
short_entry = njit(cache=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)

_INT = np.dtype(np.int32)
_WORDS = 3  # address, rows and columns of each table


class OpenShape(NamedTuple):
    """The part of a ``Shape`` that admission reads."""

    nodes: Any
    values: Any
    links: Any
    subgraphs: Any
    externals: Any
    results: Any
    needs: Any


def _opener(rows: NamedTuple, matrices: tuple[str, ...]) -> Any:
    """A compiled function from addresses to the named tuple of tables there, which then own nothing."""
    dtypes = rows._asdict().items()
    arrays = [types.Array(from_dtype(dtype), 2 if name in matrices else 1, "C") for name, dtype in dtypes]
    opened = types.NamedTuple(arrays, type(rows))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = make_array(signature.args[0])(context, builder, arguments[0])

        def word(number: int, k: int) -> Any:
            at = context.get_constant(types.intp, _WORDS * number + k)
            return builder.load(cgutils.gep_inbounds(builder, words.data, at))

        values = []
        for number, array in enumerate(arrays):
            table = make_array(array)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(array.dtype))
            itemsize = context.get_constant(types.intp, size)
            shape = [word(number, 1 + k) for k in range(array.ndim)]
            strides = [builder.mul(shape[1], itemsize), itemsize] if array.ndim == 2 else [itemsize]
            data = builder.inttoptr(word(number, 0), table.data.type)
            populate_array(table, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
            values.append(table._getvalue())
        return context.make_tuple(builder, opened, values)

    @intrinsic
    def open_at(typing_context: Any, at: Any) -> Any:
        return opened(at), generate

    return open_at


def _same(rows: Any) -> Any:
    return rows


_TABLES = Tables(
    settings=tables.SETTINGS,
    types=tables.TYPE,
    ports=tables.PORT,
    requests=tables.REQUEST,
    subgraphs=tables.SUBGRAPH,
    nodes=tables.NODE,
    values=tables.VALUE,
    links=_INT,
    tasks=tables.TASK,
    ints=_INT,
    blocks=_INT,
    arenas=tables.ARENA,
    free_rows=_INT,
    kinds=tables.KIND,
    lanes=tables.LANE,
    ready=_INT,
    step_ns=np.dtype(np.float32),
    events=tables.EVENT,
)
_SHAPE = OpenShape(
    nodes=tables.NODE,
    values=tables.VALUE,
    links=_INT,
    subgraphs=tables.SUBGRAPH,
    externals=_INT,
    results=_INT,
    needs=_INT,
)
open_tables = _same if numba.config.DISABLE_JIT else _opener(_TABLES, ("ready", "step_ns"))
open_shape = _same if numba.config.DISABLE_JIT else _opener(_SHAPE, ("needs",))


def address_of(rows: Tables | OpenShape) -> Any:
    """What an ``entry`` takes for tables or a shape, which must outlive it and stay where they are."""
    if numba.config.DISABLE_JIT:
        return rows
    return np.array([(table.ctypes.data, *table.shape, 1)[:_WORDS] for table in rows], np.int64).reshape(-1)
