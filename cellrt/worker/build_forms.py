"""Compilation of every kernel of a cell on a device when its model is registered.

Kernels are compiled when they are first launched, which takes seconds, and must not happen while requests wait. A
kernel may have a form for each power of two that numbers of rows are rounded up to, and one more for runs of many rows.
"""

from __future__ import annotations

from collections.abc import Callable

from cellrt.definition.cell import Cell
from cellrt.worker.device.fused_loops import warm_up_loop_kernel
from cellrt.worker.device.placement import EXAMPLE_ROWS, PlacedCell

EXAMPLE_STEPS = 2
PIECES, LONG_KEYS = (1, 2, 3, 5, 9, 17, 33), 8192
"""Numbers of rows of a node: a step, and the shortest pieces for each number of heads a group; and a long context."""


def build_forms(placed: PlacedCell) -> None:
    """Run a step of zeros of each class of rows, and a run of the usual number of rows and of the most.

    A cell without a fused form launches torch's kernels, which are compiled. An error of the cell is ignored: it may
    refuse
    zeros, and runs again when there are rows to compute. A cell with spans may launch kernels whose form depends on
    whether
    a node has a row or many, and much or little before it.
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
    _try(lambda: warm_up_loop_kernel(placed.device))
    for rows in {min(most, EXAMPLE_ROWS), most}:
        run = placed.example_run(rows, EXAMPLE_STEPS)
        if run is not None:
            _try(run)


def classes_of_rows(cell: Cell) -> list[int]:
    """Return numbers of rows that together need every form: powers of two, and the most; or the cell's batch sizes."""
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
