"""Which rows of a task a cell failed on, and why."""

from __future__ import annotations

from typing import NamedTuple

from cellrt.definition.cell import Cell
from cellrt.errors import CellError


class Failure(NamedTuple):
    """A row of a task on which the cell failed, and why."""

    row: int
    error: CellError


class Failures(list[Failure]):
    """The rows of a task on which the cell failed.

    Attributes:
        split: the error on which the task was first tried again in halves, if it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split: Exception | None = None


def as_cell_error(cell: Cell, error: Exception) -> CellError:
    """What a cell raised, as an error that names the cell."""
    if isinstance(error, CellError):
        return error
    made = CellError(f"cell {cell.name!r} raised {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
