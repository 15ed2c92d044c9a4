"""A cell in the workers of one engine."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.worker.failed_rows import describe_error


class Retries:
    """A counter of the tasks of one cell type that failed and were tried again in halves. Any thread may read it."""

    def __init__(self) -> None:
        self.count = 0
        self._has_warned = False
        self._lock = threading.Lock()

    def note(self, cell: str, error: BaseException, num_failed: int) -> None:
        """Count a task that ``error`` split, of which ``num_failed`` rows failed in the end.

        Log the first one of which no row failed: then the cell cannot take the batch.
        """
        with self._lock:
            self.count += 1
            if num_failed or self._has_warned:
                return
            self._has_warned = True
        logging.getLogger("cellrt").warning(
            "cell %r fails on a batch but not on its rows alone, so its tasks are run again in halves (in its plain "
            "form, if it has a fused one), which is slow; max_batch or batch_sizes of the cell can keep its batches "
            "small. It said: %s",
            cell,
            describe_error(error),
        )


@dataclass(frozen=True)
class CellType:
    """A cell in an engine: its type id, the kinds of its inputs' and outputs' rows, and its retried tasks.

    ``form`` runs its tasks on a CPU; without one its module does. It stays the same: a cell that gets another form gets
    another type, and requests that use the old one end with it.
    """

    id: int
    cell: Cell
    input_kinds: tuple[int, ...]
    output_kinds: tuple[int, ...]
    form: CompiledForm | None = None
    retries: Retries = field(default_factory=Retries, compare=False)
