"""Builds every form of a cell's kernels on a device when its model is registered.

Kernels are compiled when they are first launched, which takes seconds; while requests wait, none is. A kernel may have
a form for each power of two that numbers of rows are rounded up to, and one more for runs of many rows.
"""

from __future__ import annotations

from collections.abc import Callable

from cellrt.definition.cell import Cell
from cellrt.worker.device.fused_loops import build_loop_kernel
from cellrt.worker.device.placement import EXAMPLE_ROWS, PlacedCell

EXAMPLE_STEPS = 2
PIECES, LONG_KEYS = (1, 2, 3, 5, 9, 17, 33), 8192
"""Rows of a node: a step, and pieces as short as can be for each number of heads a group; and a long context."""


def build_forms(placed: PlacedCell) -> None:
    """Runs a step of zeros of each class of rows, and a run of the usual number of rows and of the most.

    A cell without a form of its own for arena rows launches torch's kernels, which are there. What a cell refuses is
    left out: it may refuse zeros, and is asked again when there are rows to compute. One that is told which rows are of
    one node may launch kernels whose form depends on whether a node has a row or many, and much or little behind it.
    """
    if placed.cell.has_spans:
        for rows in {min(placed.cell.max_batch_rows, rows) for rows in PIECES}:
            for keys in (rows, LONG_KEYS):
                _try(placed.step_of_nodes(1, rows, keys))
    if placed.run_rows is None:
        return
    most = placed.cell.max_batch
    for rows in classes_of_rows(placed.cell):
        _try(lambda rows=rows: placed.fused_step(rows)())  # type: ignore[misc]
    _try(lambda: build_loop_kernel(placed.device))
    for rows in {min(most, EXAMPLE_ROWS), most}:
        run = placed.example_run(rows, EXAMPLE_STEPS)
        if run is not None:
            _try(run)


def classes_of_rows(cell: Cell) -> list[int]:
    """The numbers of rows that between them need every form: powers of two, and the most; or those that it takes."""
    if cell.batch_sizes:
        return list(cell.batch_sizes)
    return [1 << power for power in range((cell.max_batch - 1).bit_length())] + [cell.max_batch]


def _try(work: Callable[[], object]) -> None:
    try:
        work()
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever a cell raises: see build_forms
        return
