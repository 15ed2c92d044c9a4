"""Tables and templates as arguments of compiled functions. Each is one array of addresses (``jit.RowsPointer``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from cellrt.core.state import tables
from cellrt.core.state.tables import Node, Subgraph, Tables, Value
from cellrt.native.jit import WORDS, RowsPointer, compiled, opener
from cellrt.native.memory import bytes_at, words_at
from cellrt.native.row_types import Rows


class OpenTemplate(NamedTuple):
    """The parts of a ``Template`` that admission reads."""

    nodes: Rows[Node]
    values: Rows[Value]
    links: Rows[int]
    subgraphs: Rows[Subgraph]
    externals: Rows[int]
    lists: Rows[int]
    states: Rows[int]
    needs: Rows[int]
    pages: Rows[int]
    patches: Rows[int]
    memory: Rows[int]


def _same(rows: Any) -> Any:
    return rows


_INT = np.dtype(np.int32)
_TEMPLATE: dict[str, np.dtype[Any]] = dict(
    nodes=tables.NODE,
    values=tables.VALUE,
    links=_INT,
    subgraphs=tables.SUBGRAPH,
    externals=_INT,
    lists=_INT,
    states=_INT,
    needs=_INT,
    pages=_INT,
    patches=_INT,
    memory=_INT,
)
_tables_pointer = RowsPointer(
    "Tables",
    {field: tables.TABLES[field].dtype for field in Tables._fields},
    tables.MATRICES,
    tuple(name for name, table in tables.TABLES.items() if table.sized),
)
MATRICES = ("externals", "lists", "states", "needs", "pages", "patches")
"""The arrays of a template that are matrices."""
_template_pointer = RowsPointer("Template", {field: _TEMPLATE[field] for field in OpenTemplate._fields}, MATRICES)
open_tables: Callable[[Any], Tables] = _same if numba.config.DISABLE_JIT else opener(_tables_pointer)
open_template: Callable[[Any], OpenTemplate] = _same if numba.config.DISABLE_JIT else opener(_template_pointer)


NUM_TEMPLATE_WORDS = WORDS * len(_TEMPLATE)


@compiled
def _open_template_at(address: int) -> OpenTemplate:
    return open_template(words_at(address, 1, NUM_TEMPLATE_WORDS)[0])


def _read_template_at(address: int) -> OpenTemplate:
    words, arrays = words_at(address, 1, NUM_TEMPLATE_WORDS)[0].tolist(), list[Any]()
    for k, field in enumerate(OpenTemplate._fields):
        at, rows, columns = words[WORDS * k : WORDS * k + WORDS]
        dtype, is_matrix = _TEMPLATE[field], field in MATRICES
        array = bytes_at(at, rows * dtype.itemsize * (columns if is_matrix else 1)).view(dtype)
        arrays.append(array.reshape(rows, columns) if is_matrix else array)
    return OpenTemplate._make(arrays)


template_at: Callable[[int], OpenTemplate] = _read_template_at if numba.config.DISABLE_JIT else _open_template_at
"""Return the template whose words are at an address."""


def address_of(rows: Tables | OpenTemplate) -> Any:
    """Return the argument of an ``entry`` for tables or a template, which must stay where it is while that is used."""
    if numba.config.DISABLE_JIT:
        return rows
    return np.array([(table.ctypes.data, *table.shape, 1)[:WORDS] for table in rows], np.int64).reshape(-1)
