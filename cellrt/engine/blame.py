"""Whose fault it is that a cell refused a number: of the request that brought it, or of what computed it.

A cell sees rows of many requests, and says what went wrong in its own words. After such a failure the request's graph
is looked at; a request that does not fail costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from cellrt.core.record_layout import DONE, LEAD
from cellrt.core.tables import LOOP, Tables
from cellrt.definition.cell import Cell
from cellrt.definition.lookup import read_refused
from cellrt.errors import CellError, CellrtError, RequestError
from cellrt.graph.given import are_given
from cellrt.worker.cell_type import CellType

BEYOND_LIMITS = "a number of an integer input is outside what the cell indexes with it"
"""What a device says that cannot name the input."""


def explained(
    error: CellError, whose: object, cell_type: CellType, program: bytes, tables: Tables, subgraph: int
) -> CellrtError:
    """The error that the client is told: RequestError if the cell refused what the request itself gave, else CellError.

    Args:
        error, cell_type: what the cell said, and whose cell it is.
        whose: the session or model, for the error.
        program: of the request's graph.
        tables, subgraph: of the processor, where the task that failed is not complete yet, and where the row is.
    """
    refused, inputs = _refused(cell_type.cell, str(error))
    told: CellrtError = CellError(f"{whose}: {error}")
    if refused:
        ports = list(zip(tables.types["num_inputs"].tolist(), tables.types["num_outputs"].tolist()))
        places = [place for place, name in enumerate(cell_type.cell.inputs) if name in inputs]
        if places and are_given(program, ports, cell_type.id, places, _is_leading(tables, subgraph)):
            told = RequestError(f"{whose}: cell {cell_type.cell.name!r}, {refused}")
    told.__cause__ = error if error.__cause__ is None else error.__cause__
    return told


def _refused(cell: Cell, said: str) -> tuple[str, Collection[str]]:
    """What an error says of a number that the cell was given, and of which inputs it may be; or nothing."""
    if (refused := read_refused(said)) is not None:
        return str(refused), (refused.input,)
    if BEYOND_LIMITS in said:
        numbers = [name for name, spec in cell.inputs.items() if not (spec.dtype.is_floating_point or spec.has_nodes)]
        return BEYOND_LIMITS, numbers
    return "", ()


def _is_leading(tables: Tables, subgraph: int) -> bool:
    """Whether the next rows of a loop to be done are those that its first step reads, such as a prompt's."""
    row = tables.subgraphs[subgraph]
    record = int(row["record"])
    return bool(row["what"] == LOOP and tables.links[record + DONE] <= tables.links[record + LEAD])
