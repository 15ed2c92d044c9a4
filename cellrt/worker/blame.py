"""Which rows of a task a cell failed on, and why.

A cell is its author's: it may raise anything, also what ends a program elsewhere (``SystemExit``), and what cannot even
be printed. None of it may cost more than the cell's own requests.
"""

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
        self.split: BaseException | None = None


def as_cell_error(cell: Cell, error: BaseException) -> CellError:
    """What a cell raised, as an error that names the cell and can be printed; what was raised is its cause."""
    name = f"cell {cell.name!r}"
    if type(error) is CellError and all(type(said) is str for said in error.args):
        said = str(error)
        return error if said.startswith(name) else CellError(f"{name}: {said}")
    made = CellError(f"{name} raised {describe_error(error)}")
    made.__cause__ = error
    return made


def describe_error(error: BaseException) -> str:
    """Type and text of an error, whose text may itself raise."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except BaseException as raised:
        return f"{kind}, whose text raises {type(raised).__name__}"
