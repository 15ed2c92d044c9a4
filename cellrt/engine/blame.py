"""The client's error after a cell refused a number: the request brought the number, or another cell computed it.

A cell sees rows of many requests, and says what went wrong in its own words. After such a failure the request's graph
is looked at; a request that does not fail costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from cellrt.core.state.record_layout import CARRY, LAST, inputs_of, record_at
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, LOOP, ROW_MASK, Tables
from cellrt.definition.cell import Cell
from cellrt.definition.lookup import read_refused
from cellrt.errors import CellError, CellrtError, RequestError
from cellrt.graph.given import are_given
from cellrt.worker.arenas import Arenas
from cellrt.worker.cell_type import CellType

BEYOND_LIMITS = "a number of an integer input is outside what the cell indexes with it"
"""The text of a device's error, which cannot name the input."""


def explained(
    error: CellError,
    whose: object,
    cell_type: CellType,
    program: bytes,
    tables: Tables,
    subgraph: int,
    host: Arenas,
) -> CellrtError:
    """Return the client's error: RequestError if the cell refused a number of the request itself, else CellError.

    Args:
        error, cell_type: the cell's error, and its type.
        whose: the session or model, for the error.
        program: the program of the request's graph.
        tables, subgraph: the processor's tables, in which the failed task is not complete yet, and the row's subgraph.
        host: the rows that came with requests.
    """
    refused, inputs, token = _refused(cell_type.cell, str(error))
    told: CellrtError = CellError(f"{whose}: {error}")
    if refused:
        ports = list(zip(tables.types["num_inputs"].tolist(), tables.types["num_outputs"].tolist()))
        indices = [index for index, name in enumerate(cell_type.cell.inputs) if name in inputs]
        is_first = bool(indices) and _is_first(tables, subgraph, host, cell_type.input_kinds, indices[0], token)
        if indices and are_given(program, ports, cell_type.id, indices, is_first):
            told = RequestError(f"{whose}: cell {cell_type.cell.name!r}, {refused}")
    told.__cause__ = error if error.__cause__ is None else error.__cause__
    return told


def _refused(cell: Cell, said: str) -> tuple[str, Collection[str], int | None]:
    """Return an error's words about a number that the cell was given, the inputs that it may be of, and the number.

    They are empty if the error is about something else. The number is None if the error does not name it.
    """
    if (refused := read_refused(said)) is not None:
        return str(refused), (refused.input,), refused.token
    if BEYOND_LIMITS in said:
        numbers = [name for name, spec in cell.inputs.items() if not (spec.dtype.is_floating_point or spec.has_nodes)]
        return BEYOND_LIMITS, numbers, None
    return "", (), None


def _is_first(tables: Tables, subgraph: int, host: Arenas, kinds: Sequence[int], index: int, token: int | None) -> bool:
    """Return whether a loop failed by an input of its first step, such as the rows of a prompt.

    If these are several rows, they are one task. A single one runs with the steps after it: there it failed by a number
    that the request brought, as the number shows.
    """
    row = tables.subgraphs[subgraph]
    if row["what"] != LOOP:
        return False
    record = record_at(tables.links, int(row["record"]))
    if record.lead > 0 or record.done > 0:
        return bool(record.done <= record.lead)
    read = inputs_of(tables, row)[index]
    if token is None or read.mode not in (CARRY, LAST):
        return False
    handle = int(tables.values["row"][read.at])
    if handle >> LOCATION_SHIFT != HOST:
        return False
    return token in host.get_bits(kinds[index], np.array([handle & ROW_MASK], np.int32))
