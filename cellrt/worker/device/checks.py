"""Checks of a task's rows: outputs that are not finite, inputs outside their limits (``limits.py``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.task_layout import TaskView
from cellrt.definition.cell import Cell
from cellrt.errors import CellError
from cellrt.worker.device.limits import Limits
from cellrt.worker.device.signature import OUTSIDE, Signature
from cellrt.worker.failed_rows import Failure, Failures


def check_uploaded(cell: Cell, task: TaskView, values: NDArray[Any], limits: Limits, failures: Failures) -> None:
    """Fail the rows of a task with a number outside an input's limits, and clamp it.

    ``values`` ``[n, numbers of a row]`` are those of the first positions.
    """
    if values.min() >= limits.first and values.max() < limits.end:
        return
    is_outside = ((values < limits.first) | (values >= limits.end)).any(1)
    np.clip(values, limits.first, limits.end - 1, out=values)
    for row in sorted(set(_row_of_position(task)[np.flatnonzero(is_outside)].tolist())):
        if all(failure.row != row for failure in failures):
            failures.append(Failure(row, error_of(cell, OUTSIDE)))


def bad_rows(signature: Signature, task: TaskView, answers: NDArray[np.int32]) -> dict[int, int]:
    """Return the flags of the bad rows, by row."""
    if not (signature.tells_bad or signature.is_loop):
        return {}
    behind = signature.sizes[0] if signature.tells_rows else 0
    codes = answers[behind : behind + (task.num_rows if signature.is_loop else task.num_positions)]
    bad = np.flatnonzero(codes)
    rows = bad if signature.is_loop or not bad.size else _row_of_position(task)[bad]
    found: dict[int, int] = {}
    for row, code in zip(rows.tolist(), codes[bad].tolist()):
        found[row] = found.get(row, 0) | code
    return dict(sorted(found.items()))


def error_of(cell: Cell, what: int) -> CellError:
    """Return the error of a row with these flags."""
    if what & OUTSIDE:
        said = "a number of an integer input is outside what the cell indexes with it"
        return CellError(f"cell {cell.name!r} raised IndexError: {said}")  # as it does where it sees the number
    outputs = " or ".join(map(repr, cell.finite))
    return CellError(f"cell {cell.name!r} returned a value that is not finite in output {outputs}")


def _row_of_position(task: TaskView) -> NDArray[np.int64]:
    """Return the row of each position. A loop's first positions are its rows, too."""
    return np.concatenate([np.arange(size) for size in task.batch_sizes])
