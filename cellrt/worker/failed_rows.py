"""Running a cell on the rows of a task, and finding the rows on which it fails.

After an error the rows are tried again in halves until the failing ones are alone: a request fails by its own rows
only. A cell is its author's: it may raise anything, also an exception that ends a program elsewhere (``SystemExit``),
and one that cannot even be printed. None of it may cost more than the cell's own requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from cellrt.definition.cell import Cell
from cellrt.definition.lookup import RefusedLookup
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows
from cellrt.definition.trial import describe_error as describe_error
from cellrt.errors import CellError
from cellrt.worker.torch_state import CellMode

Outcome = TypeVar("Outcome")
"""The outputs of some rows, in a device's form."""


class Failure(NamedTuple):
    """A row of a task on which the cell failed, with its error."""

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


class Attempt(ABC, Generic[Outcome]):
    """A device's way to try a cell on the rows of one task, or on some of them.

    Attributes:
        cell: the cell.
        num_rows: the number of the task's rows.
        mode: the torch mode of the thread while the cell runs.
        can_be_watched: whether a lookup that fails raises in the thread that runs it.
    """

    can_be_watched = False
    cell: Cell
    num_rows: int
    mode: CellMode

    @abstractmethod
    def run(self, first: int, end: int) -> Outcome:
        """Return the outcome of rows first..end; raise what the cell raises.

        A cell may leave its inputs in any state.
        """

    @abstractmethod
    def nothing(self) -> Outcome:
        """Return zeros for all rows, as if none had stopped."""

    @abstractmethod
    def put(self, whole: Outcome, first: int, end: int, outcome: Outcome) -> None:
        """Put the outcome of rows first..end in its place in that of all rows."""

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise an error if ``error`` means that the device is lost rather than that the cell is wrong."""


def run_or_blame(attempt: Attempt[Outcome], failures: Failures) -> Outcome:
    """Run all rows of a task; after an error halve them until the failing rows are alone, with zeros as their outputs.

    Raise the error by which the device is lost.
    """
    whole: Outcome | None = None
    parts = [(0, attempt.num_rows)]
    while parts:
        first, end = parts.pop()
        try:
            with attempt.mode:
                outcome = attempt.run(first, end)
            if end - first == attempt.num_rows:
                return outcome
        except BaseException as error:
            attempt.raise_if_lost(error)
            if end - first == 1:
                detail = _refused_lookup(attempt, first, error)
                failures.append(Failure(first, as_cell_error(attempt.cell, error, detail)))
                continue
            failures.split = error if failures.split is None else failures.split
            middle = (first + end + 1) // 2
            parts += [(middle, end), (first, middle)]
        else:
            whole = attempt.nothing() if whole is None else whole
            attempt.put(whole, first, end, outcome)
    return attempt.nothing() if whole is None else whole


def part_of(sizes: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sizes of the steps of some rows, and their positions, in a task whose steps have ``sizes`` rows."""
    part_sizes, positions, start = [], [], 0
    for size in sizes:
        taken = [start + row for row in rows if row < size]
        if taken:
            part_sizes.append(len(taken))
        positions += taken
        start += size
    return part_sizes, positions


def take_rows(value: CellInput, rows: Sequence[int]) -> CellInput:
    """Return a copy of some rows of an input; of a ragged one all values of some nodes, which waits for the device."""
    if isinstance(value, PagedRows | Spans):
        raise TypeError("the rows of a span cannot be taken apart")
    if not isinstance(value, RaggedRows):
        return value.index_select(0, torch.tensor(rows, dtype=torch.int64, device=value.device))
    device, given, chosen = value.offsets.device, value.offsets.cpu().numpy(), np.asarray(rows, np.int64)
    offsets = np.zeros(len(chosen) + 1, np.int64)
    counts = given[chosen + 1] - given[chosen]
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(offsets[-1]) + np.repeat(given[chosen] - offsets[:-1], counts)
    values = value.values.index_select(0, torch.from_numpy(positions).to(device))
    return RaggedRows(values, torch.from_numpy(offsets).to(device))


def as_cell_error(cell: Cell, error: BaseException, detail: str = "") -> CellError:
    """Return a cell's exception as an error that names the cell and can be printed; the exception is its cause."""
    name = f"cell {cell.name!r}"
    if type(error) is CellError and all(type(said) is str for said in error.args):
        said = str(error)
        return error if said.startswith(name) else CellError(f"{name}: {said}")
    made = CellError(f"{name} raised {describe_error(error)}{detail}")
    made.__cause__ = error
    return made


def _refused_lookup(attempt: Attempt[Outcome], row: int, error: BaseException) -> str:
    """Return the index that a lookup refused, in words, after an error that may be about one: the row is tried once
    more.
    """
    if not isinstance(error, IndexError) or not attempt.can_be_watched:
        return ""
    watch, cell = RefusedLookup(), attempt.cell
    attempt.cell = watch.noting(cell)
    try:
        with attempt.mode, watch:
            attempt.run(row, row + 1)
    except Exception as again:
        found = watch.found(again)
        return "" if found is None else f" ({found})"
    finally:
        attempt.cell = cell
    return ""
