"""Call a cell on some spans of a task on a CPU. After an error whole spans are tried again, as their rows depend on
each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.task_layout import TaskView
from cellrt.definition.bits import as_bits
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.span_form import SpanForm
from cellrt.definition.spans import PagedRows, Spans, taken_rows
from cellrt.definition.spec import CellInput
from cellrt.worker.cpu.attempt import CPU, NO_STEPS, CpuOutcome, positions_not_finite, zero_bits
from cellrt.worker.failed_rows import Attempt, take_rows
from cellrt.worker.outputs import plain_outputs
from cellrt.worker.torch_state import CellMode


class SpanAttempt(Attempt[CpuOutcome]):
    """Runs one task of a cell with spans; each row of the task is one step.

    The arguments are those of ``CpuAttempt``. Where ``Attempt`` has rows, this class has spans. If the compiled form
    refuses the task, the module runs.
    """

    can_be_watched = True

    def __init__(
        self,
        cell: Cell,
        task: TaskView,
        gather: Callable[[], list[CellInput]],
        mode: CellMode,
        form: CompiledForm | None,
    ) -> None:
        self._form = form if isinstance(form, SpanForm) else None
        self.cell, self.num_rows, self.mode = cell, len(task.spans) - 1, mode
        self._gather, self._count, self._offsets = gather, task.num_rows, task.spans.copy()

    def run(self, first: int, end: int) -> CpuOutcome:
        """Run the spans from ``first`` up to ``end`` (``Attempt.run``).

        A span that is run again appends its rows to the same places as before.
        """
        inputs, offsets, count = self._gather(), self._offsets, self._count
        if end - first < self.num_rows:
            inputs, offsets = self._take(inputs, first, end)
            count = int(offsets[-1])
        outputs = self._run(inputs, count)
        not_finite: dict[int, str] = {}
        for name, bad in positions_not_finite(self.cell, outputs, count).items():
            spans = np.searchsorted(offsets, bad.nonzero()[0], side="right") - 1
            not_finite = dict.fromkeys(spans.tolist(), name) | not_finite
        return CpuOutcome([as_bits(value) for value in outputs], [], NO_STEPS, not_finite)

    def _take(self, inputs: list[CellInput], first: int, end: int) -> tuple[list[CellInput], NDArray[np.int32]]:
        """Return the inputs of some spans, and their offsets ``[spans + 1]`` among these rows."""
        offsets, rows = taken_rows(torch.from_numpy(self._offsets), range(first, end))
        return [_taken(value, range(first, end), rows.tolist()) for value in inputs], offsets.numpy()

    def _run(self, inputs: list[CellInput], count: int) -> list[torch.Tensor]:
        if self._form is not None:
            made = self._form.run_gathered(count, dict(zip(self.cell.inputs, inputs)))
            if made is not None:
                return [made[name] for name in self.cell.outputs]
        return plain_outputs(self.cell, self.cell.run_step(*inputs), count, CPU)

    def nothing(self) -> CpuOutcome:
        """Return an outcome of zeros for all rows (``Attempt.nothing``)."""
        return CpuOutcome([zero_bits(spec, self._count) for spec in self.cell.outputs.values()], [], NO_STEPS, {})

    def put(self, whole: CpuOutcome, first: int, end: int, outcome: CpuOutcome) -> None:
        """Copy the outcome of some spans to its place in the outcome of the task (``Attempt.put``)."""
        whole.not_finite.update({first + span: output for span, output in outcome.not_finite.items()})
        rows = slice(int(self._offsets[first]), int(self._offsets[end]))
        for output, value in zip(whole.outputs, outcome.outputs):
            output[rows] = value


def _taken(value: CellInput, spans: range, rows: list[int]) -> CellInput:
    return value.take(spans) if isinstance(value, PagedRows | Spans) else take_rows(value, rows)
