"""Calls of a cell on some rows of a task on a CPU. The rows of a loop leave at the step that stops them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.task_layout import OUT_RESULT_STEPS, TaskView
from cellrt.definition.bits import NUMPY_DTYPES, as_bits
from cellrt.definition.cell import Cell
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec
from cellrt.worker.failed_rows import Attempt, part_of, take_rows
from cellrt.worker.outputs import plain_outputs
from cellrt.worker.torch_state import CellMode

CPU = torch.device("cpu")
NO_STEPS = np.empty(0, np.int32)


class CpuOutcome(NamedTuple):
    """The outputs of some rows, as bits (``as_bits``): one for each position, or of a loop the last one of each row."""

    outputs: list[NDArray[Any]]
    every_step: list[NDArray[Any]]
    """The outputs whose every step is a result, of a loop: ``[rows, steps, *shape]``; the others have no steps."""
    done_steps: NDArray[np.int32]
    """The number of steps that each row of a loop took, negative if it stopped; else NO_STEPS."""
    not_finite: dict[int, str]
    """The rows with a value that is not finite in an output that the cell declares finite, and that output's name."""


class CpuAttempt(Attempt[CpuOutcome]):
    """Calls of a cell on one task.

    Args:
        cell: the cell.
        task: the task, with the records of its outputs.
        gather: copies the task's input rows.
        mode: see ``Attempt``.
    """

    can_be_watched = True

    def __init__(self, cell: Cell, task: TaskView, gather: Callable[[], list[CellInput]], mode: CellMode) -> None:
        self.cell, self.num_rows, self.mode = cell, task.num_rows, mode
        self._gather, self._is_loop = gather, task.is_loop
        self._sizes: list[int] = task.batch_sizes.tolist()
        if task.is_loop:
            self._lengths, self._stop, self._least = task.lengths, task.stop_output, task.least_steps
            self._every = [bool(words[OUT_RESULT_STEPS]) for words in task.outputs]
        self._whole_inputs: list[CellInput] | None = None

    def run(self, first: int, end: int) -> CpuOutcome:
        """Run the rows from ``first`` up to ``end`` (``Attempt.run``)."""
        if end - first == self.num_rows:
            inputs, sizes = self._gather(), self._sizes
        else:
            inputs, sizes = self._take(first, end)
        if self._is_loop and len(sizes) > 1:
            lengths = self._lengths[first:end]
            return _LoopRun(self.cell, inputs, lengths, len(sizes), self._stop, self._every, self._least).run()
        outputs = self.cell.run_padded(inputs) if len(sizes) == 1 else self.cell.run_steps(sizes, *inputs)
        outputs = plain_outputs(self.cell, outputs, sum(sizes), CPU)
        not_finite: dict[int, str] = {}
        if self.cell.finite:
            row_of = np.concatenate([np.arange(size) for size in sizes])
            for name, bad in positions_not_finite(self.cell, outputs, sum(sizes)).items():
                not_finite = dict.fromkeys(row_of[bad].tolist(), name) | not_finite
        bits = [as_bits(value) for value in outputs]
        if not self._is_loop:
            return CpuOutcome(bits, [], NO_STEPS, not_finite)
        done = np.ones(end - first, np.int32)
        if self._stop >= 0:
            done[bits[self._stop].reshape(-1).astype(bool, copy=False)] = -1
        every = [value[:, None] if is_kept else value[:, None][:, :0] for value, is_kept in zip(bits, self._every)]
        return CpuOutcome(bits, every, done, not_finite)

    def nothing(self) -> CpuOutcome:
        """Return an outcome of zeros for all rows (``Attempt.nothing``)."""
        if self._is_loop:
            return _empty_outcome(self.cell, self._lengths, len(self._sizes), self._every)
        count = sum(self._sizes)
        return CpuOutcome([zero_bits(spec, count) for spec in self.cell.outputs.values()], [], NO_STEPS, {})

    def put(self, whole: CpuOutcome, first: int, end: int, outcome: CpuOutcome) -> None:
        """Copy the outcome of some rows to its place in the whole (``Attempt.put``)."""
        whole.not_finite.update({first + row: output for row, output in outcome.not_finite.items()})
        positions: slice | list[int] = slice(first, end)
        if self._is_loop:
            whole.done_steps[first:end] = outcome.done_steps
            for every, value in zip(whole.every_step, outcome.every_step):
                every[first:end, : value.shape[1]] = value
        else:
            _, positions = part_of(self._sizes, range(first, end))
        for output, value in zip(whole.outputs, outcome.outputs):
            output[positions] = value

    def _take(self, first: int, end: int) -> tuple[list[CellInput], list[int]]:
        """Return the inputs of the rows from ``first`` up to ``end``, and the number of these rows at each step."""
        if self._whole_inputs is None:  # gathered anew: the cell may have written to those it was given
            self._whole_inputs = self._gather()
        rows = range(first, end)
        sizes, positions = part_of(self._sizes, rows)
        inputs = [
            take_rows(value, rows if self._is_loop or name in self.cell.carry else positions)
            for name, value in zip(self.cell.inputs, self._whole_inputs)
        ]
        return inputs, sizes


class _LoopRun:
    """Several steps of a loop's rows; a row leaves at the step that stops it or at its last.

    Args:
        stop: the number of the output that says stop, or -1.
        every: for each output, whether every step of it is a result.
        least: after this many steps all rows leave with the first that does.
    """

    def __init__(
        self,
        cell: Cell,
        inputs: list[CellInput],
        lengths: NDArray[np.int32],
        num_steps: int,
        stop: int,
        every: list[bool],
        least: int,
    ) -> None:
        self._least, self._has_ended = least, False
        self._cell, self._inputs, self._lengths, self._stop, self._every = cell, inputs, lengths, stop, every
        outputs = list(cell.outputs)
        self._sources = [outputs.index(cell.carry[name]) if name in cell.carry else -1 for name in cell.inputs]
        self._outcome = _empty_outcome(cell, lengths, num_steps, every)
        self._keeps = any(every) or bool(cell.finite)
        self._active = np.arange(len(lengths))
        self._step = 0

    def run(self) -> CpuOutcome:
        """Run all rows to their ends."""
        while self._active.size:
            count = self._active.size
            ahead = self._steps_ahead()
            outputs = self._run_ahead(ahead)
            bits = [as_bits(value) for value in outputs]
            has_stopped, last = self._stops(bits, ahead)
            if self._keeps:
                self._keep(outputs, bits, last, ahead)
            leaving = has_stopped | (self._lengths[self._active] == self._step + ahead)
            self._has_ended = self._has_ended or bool(leaving.any())
            if self._has_ended and self._step + ahead >= self._least:
                leaving[:] = True
            state = outputs if ahead == 1 else [value[(ahead - 1) * count :] for value in outputs]
            if leaving.any():
                state = self._leave(leaving, has_stopped, last, bits, state)
            self._inputs = [state[k] if k >= 0 else value for value, k in zip(self._inputs, self._sources)]
            self._step += ahead
        return self._outcome

    def _steps_ahead(self) -> int:
        """Return the number of steps that a loop runs before its stop flags are looked at.

        With few rows the calls cost more than the steps, so a cell with a steps-first form runs a few steps ahead. The
        steps after a row's stop are dropped (DESIGN, rule 9).
        """
        if not self._cell.has_steps or any(isinstance(value, RaggedRows) for value in self._inputs):
            return 1
        left = int(self._lengths[self._active].min()) - self._step
        if self._stop < 0:
            return left
        rows = self._active.size
        return min(left, 8 if rows <= 4 else 4 if rows <= 16 else 2 if rows <= 64 else 1)

    def _run_ahead(self, ahead: int) -> list[torch.Tensor]:
        """Return the outputs ``[ahead * rows, *shape]`` of the next steps; each has the same inputs but for state."""
        rows = self._active.size
        if ahead == 1:
            outputs = self._cell.run_padded(self._inputs)
        else:
            packed = [
                value.repeat(ahead, *[1] * (value.dim() - 1)) if k < 0 and isinstance(value, torch.Tensor) else value
                for value, k in zip(self._inputs, self._sources)
            ]
            outputs = self._cell.run_steps([rows] * ahead, *packed)
        return plain_outputs(self._cell, outputs, ahead * rows, CPU)

    def _stops(self, bits: list[NDArray[Any]], ahead: int) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Return whether each row stopped in these steps ``[rows]``, and its last one of them ``[rows]``."""
        count = self._active.size
        if self._stop < 0:
            return np.zeros(count, bool), np.full(count, ahead - 1)
        stopped = bits[self._stop].reshape(ahead, count).astype(bool, copy=False)
        if ahead == 1:
            return stopped[0], np.zeros(count, np.intp)
        has_stopped: NDArray[np.bool_] = np.asarray(stopped.any(0))
        return has_stopped, np.where(has_stopped, stopped.argmax(0), ahead - 1)

    def _keep(self, outputs: list[torch.Tensor], bits: list[NDArray[Any]], last: NDArray[np.intp], ahead: int) -> None:
        """Keep the results of the steps up to each row's ``last``, and record rows with values that are not finite."""
        not_finite, active = self._outcome.not_finite, self._active
        taken = np.less_equal(np.arange(ahead)[:, None], last)
        for name, bad in positions_not_finite(self._cell, outputs, taken.size).items():
            for row in active[(bad.reshape(taken.shape) & taken).any(0)].tolist():
                not_finite.setdefault(row, name)
        for kept, is_kept, values in zip(self._outcome.every_step, self._every, bits):
            for step, is_taken in enumerate(taken if is_kept else ()):
                kept[active[is_taken], self._step + step] = values[step * active.size :][: active.size][is_taken]

    def _leave(
        self,
        leaving: NDArray[np.bool_],
        has_stopped: NDArray[np.bool_],
        last: NDArray[np.intp],
        bits: list[NDArray[Any]],
        state: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Remove the rows that stopped or took all their steps, and return the state of the others."""
        places = np.arange(leaving.size)  # a mask keeps the interpreter lock, which numpy.nonzero gives up
        left, stay = places[leaving], places[~leaving]
        taken = self._active[left]
        for whole, value in zip(self._outcome.outputs, bits):
            whole[taken] = value[last[left] * self._active.size + left]
        done = self._step + last[left] + 1
        self._outcome.done_steps[taken] = np.where(has_stopped[left], -done, done)
        self._active = self._active[stay]
        if not stay.size:
            return state
        rows = stay.tolist()
        self._inputs = [value if k >= 0 else take_rows(value, rows) for value, k in zip(self._inputs, self._sources)]
        kept = torch.from_numpy(stay)
        return [value.index_select(0, kept) if place in self._sources else value for place, value in enumerate(state)]


def _empty_outcome(cell: Cell, lengths: NDArray[np.int32], num_steps: int, every: list[bool]) -> CpuOutcome:
    """Return a loop's outcome of zeros, in which no row stopped."""
    rows, specs = len(lengths), list(cell.outputs.values())
    return CpuOutcome(
        [zero_bits(spec, rows) for spec in specs],
        [zero_bits(spec, rows, num_steps if is_kept else 0) for spec, is_kept in zip(specs, every)],
        lengths.copy(),
        {},
    )


def zero_bits(spec: RowSpec, *rows: int) -> NDArray[Any]:
    """Return rows of zeros, in the dtype that ``as_bits`` gives."""
    return np.zeros((*rows, *spec.shape), NUMPY_DTYPES.get(spec.dtype, np.dtype(np.int16)))


def positions_not_finite(cell: Cell, outputs: list[torch.Tensor], positions: int) -> dict[str, NDArray[np.bool_]]:
    """Return the positions with a value that is not finite, as a mask for each output that the cell declares finite."""
    return {
        name: ~torch.isfinite(value).reshape(positions, -1).all(1).numpy()
        for name, value in zip(cell.outputs, outputs)
        if name in cell.finite
    }
