"""Runs one task: gathers input rows by index, calls the cell, puts its outputs where the task says.

The scheduler's buffer (``core/task_layout.py``) is the only thing it reads. If the cell fails, the task is
tried again in halves until the rows that cause it are alone; their outputs are zeros and their flags in the
buffer are set. This happens before the next task of the worker, so the input rows are still there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.arena import Arenas
from cellrt.cell import Cell, CellInput
from cellrt.core import task_layout as layout
from cellrt.core.tables import HOST, LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK
from cellrt.errors import CellError
from cellrt.registry import CellType
from cellrt.spec import RaggedRows


class Failure(NamedTuple):
    """A row of a task on which the cell failed, and why."""

    row: int
    error: CellError


@dataclass
class Batch:
    """Inputs of some rows of a task: steps-first, packed; ``sizes[s]`` rows take part in step s."""

    sizes: list[int]
    inputs: list[CellInput]
    lengths: NDArray[np.int32]
    rows: list[int] = field(default_factory=list)
    """Their row numbers in the task."""


class Outcome(NamedTuple):
    """Outputs of a batch: final values by row or position, and for loops every step's ``[rows, steps, *shape]``."""

    outputs: list[torch.Tensor]
    every_step: list[torch.Tensor]
    done_steps: NDArray[np.int32]


class Executor:
    """Executes tasks at one location. One thread calls it; reads other locations' arenas where the task says so."""

    def __init__(self, location: int, arenas: list[Arenas], types: list[CellType]) -> None:
        self._location = location
        self._arenas = arenas
        self._types = types

    @torch.inference_mode()
    def execute(self, type_id: int, buffer: NDArray[np.int32]) -> list[Failure]:
        """Runs the task in ``buffer``; writes results, done steps and failure flags. Returns the failed rows."""
        cell_type = self._types[type_id]
        cell = cell_type.cell
        header = buffer[: layout.HEADER].tolist()
        rows, steps, is_loop = header[layout.H_ROWS], header[layout.H_STEPS], bool(header[layout.H_IS_LOOP])
        sizes = buffer[header[layout.H_BATCH_SIZES] :][:steps].tolist()
        lengths = buffer[header[layout.H_LENGTHS] :][:rows]
        records = buffer[layout.HEADER :][
            : layout.INPUT * len(cell.inputs) + layout.OUTPUT * len(cell.outputs)
        ].tolist()
        indices = torch.from_numpy(buffer)
        failures: list[Failure] = []
        inputs = [
            self._gather(kind, records[layout.INPUT * k : layout.INPUT * (k + 1)], buffer, indices)
            for k, kind in enumerate(cell_type.input_kinds)
        ]
        whole = Batch(sizes, inputs, lengths, list(range(rows)))
        if is_loop:
            stop = header[layout.H_STOP_OUTPUT]
            every = [
                bool(records[layout.INPUT * len(cell.inputs) + layout.OUTPUT * k + layout.OUT_RESULT_STEPS])
                for k in range(len(cell.outputs))
            ]
            outcome = _run_loop_safely(cell, whole, stop, every, failures)
            buffer[header[layout.H_DONE_STEPS] :][:rows] = outcome.done_steps
        else:
            outcome = Outcome(_run_safely(cell, whole, failures), [], lengths)
        for failure in failures:
            buffer[header[layout.H_FAILED] + failure.row] = 1
        for k, kind in enumerate(cell_type.output_kinds):
            first = layout.INPUT * len(cell.inputs) + layout.OUTPUT * k
            self._store(kind, records[first : first + layout.OUTPUT], k, outcome, indices)
        return failures

    def _gather(self, kind: int, record: list[int], buffer: NDArray[np.int32], indices: torch.Tensor) -> CellInput:
        source, count, at, offsets_at = record
        rows = indices[at : at + count]
        if source == MIXED:
            values = self._gather_mixed(kind, buffer[at : at + count])
        else:
            location = source if source >= 0 else self._location
            values = self._arenas[location][kind].index_select(0, rows)
        if offsets_at < 0:
            return values
        total_at = offsets_at
        num_rows = at - total_at  # offsets lie right before the rows
        return RaggedRows(values, indices[total_at : total_at + num_rows].to(torch.int64))

    def _gather_mixed(self, kind: int, handles: NDArray[np.int32]) -> torch.Tensor:
        """Rows from several locations: one gather from each, put together in order."""
        locations = np.where(handles < NUM_PERMANENT, self._location, handles >> LOCATION_SHIFT)
        rows = torch.from_numpy(handles & ROW_MASK)
        arena = self._arenas[self._location][kind]
        values = torch.empty((len(handles), *arena.shape[1:]), dtype=arena.dtype)
        for location in np.unique(locations).tolist():
            positions = torch.from_numpy(np.flatnonzero(locations == location))
            values[positions] = self._arenas[location][kind].index_select(0, rows[positions])
        return values

    def _store(self, kind: int, record: list[int], output: int, outcome: Outcome, indices: torch.Tensor) -> None:
        """Copies one output's rows to its arena rows and its results to the host."""
        stores, positions_at, rows_at, results, result_positions_at, result_rows_at, every_step = record
        value = outcome.outputs[output]
        if stores:
            kept = (
                value if stores == len(value) else value.index_select(0, indices[positions_at : positions_at + stores])
            )
            self._arenas[self._location][kind].index_copy_(0, indices[rows_at : rows_at + stores].long(), kept)
        if results:
            shown = value
            if every_step:  # of some rows of a loop; of the others the last, which lie behind
                shown = torch.cat([outcome.every_step[output].flatten(0, 1), value])
            if results != len(shown):
                shown = shown.index_select(0, indices[result_positions_at : result_positions_at + results])
            self._arenas[HOST][kind].index_copy_(0, indices[result_rows_at : result_rows_at + results].long(), shown)


def _run_safely(cell: Cell, batch: Batch, failures: list[Failure]) -> list[torch.Tensor]:
    """Runs a batch; on an error halves it until the culprits are alone, with zeros for them."""
    positions = sum(batch.sizes)
    try:
        outputs = (
            _run_padded(cell, batch.inputs) if len(batch.sizes) == 1 else cell.run_steps(batch.sizes, *batch.inputs)
        )
        cell.check_outputs(outputs, positions)
        failures += [_not_finite(cell, batch.rows[row]) for row in _rows_not_finite(cell, outputs, batch.sizes)]
        return outputs
    except Exception as error:
        if len(batch.rows) == 1:
            failures.append(Failure(batch.rows[0], _as_cell_error(cell, error)))
            return [torch.zeros((positions, *spec.shape), dtype=spec.dtype) for spec in cell.outputs.values()]
    outputs = [torch.zeros((positions, *spec.shape), dtype=spec.dtype) for spec in cell.outputs.values()]
    middle = (len(batch.rows) + 1) // 2
    for first, end in ((0, middle), (middle, len(batch.rows))):
        part, where = _take(cell, batch, first, end)
        for whole, half in zip(outputs, _run_safely(cell, part, failures)):
            whole[where] = half
    return outputs


def _run_loop_safely(cell: Cell, batch: Batch, stop: int, every: list[bool], failures: list[Failure]) -> Outcome:
    """As ``_run_safely``, for a loop's run."""
    steps = len(batch.sizes)
    try:
        outcome, not_finite = _run_loop(cell, batch, stop, every)
        failures += [_not_finite(cell, batch.rows[row]) for row in not_finite]
        return outcome
    except Exception as error:
        if len(batch.rows) == 1:
            failures.append(Failure(batch.rows[0], _as_cell_error(cell, error)))
            return _empty_outcome(cell, 1, steps, every, batch.lengths)
    outcome = _empty_outcome(cell, len(batch.rows), steps, every, batch.lengths)
    middle = (len(batch.rows) + 1) // 2
    for first, end in ((0, middle), (middle, len(batch.rows))):
        inputs = [_take_input(value, list(range(first, end))) for value in batch.inputs]
        sizes = [min(max(size - first, 0), end - first) for size in batch.sizes]
        part = Batch([size for size in sizes if size], inputs, batch.lengths[first:end], batch.rows[first:end])
        half = _run_loop_safely(cell, part, stop, every, failures)
        outcome.done_steps[first:end] = half.done_steps
        for whole, value in zip(outcome.outputs, half.outputs):
            whole[first:end] = value
        for whole, value in zip(outcome.every_step, half.every_step):
            if whole.numel():
                whole[first:end, : value.shape[1]] = value
    return outcome


def _run_loop(cell: Cell, batch: Batch, stop: int, every: list[bool]) -> tuple[Outcome, list[int]]:
    """Runs a loop's rows step by step; a row leaves at the step that stops it or at its last.

    ``done_steps`` is the number of steps a row took, negative if it stopped. The rows that at some step had a
    value that is not finite where the cell declares finite ones come with it.
    """
    names, output_names = list(cell.inputs), list(cell.outputs)
    sources = [output_names.index(cell.carry[name]) if name in cell.carry else -1 for name in names]
    rows, steps = len(batch.rows), len(batch.sizes)
    outcome = _empty_outcome(cell, rows, steps, every, batch.lengths)
    active = np.arange(rows)
    current = list(batch.inputs)
    not_finite: set[int] = set()
    for step in range(steps):
        outputs = _run_padded(cell, current)
        cell.check_outputs(outputs, len(active))
        not_finite.update(active[_rows_not_finite(cell, outputs, [len(active)])].tolist())
        for k, wanted in enumerate(every):
            if wanted:
                outcome.every_step[k][active, step] = outputs[k]
        stopped = outputs[stop].numpy().astype(bool) if stop >= 0 else np.zeros(len(active), bool)
        leaving = stopped | (batch.lengths[active] == step + 1)
        if leaving.any():
            left = torch.from_numpy(np.flatnonzero(leaving))
            to = torch.from_numpy(active[leaving])
            for whole, value in zip(outcome.outputs, outputs):
                whole[to] = value.index_select(0, left)
            outcome.done_steps[active[leaving]] = np.where(stopped[leaving], -(step + 1), step + 1)
            if leaving.all():
                break
            stay = np.flatnonzero(~leaving)
            active = active[stay]
            outputs = [value.index_select(0, torch.from_numpy(stay)) for value in outputs]
            current = [
                value if source >= 0 else _take_input(value, stay.tolist()) for value, source in zip(current, sources)
            ]
        current = [outputs[source] if source >= 0 else value for value, source in zip(current, sources)]
    return outcome, sorted(not_finite)


def _empty_outcome(cell: Cell, rows: int, steps: int, every: list[bool], lengths: NDArray[np.int32]) -> Outcome:
    specs = list(cell.outputs.values())
    return Outcome(
        [torch.zeros((rows, *spec.shape), dtype=spec.dtype) for spec in specs],
        [
            torch.zeros((rows, steps if wanted else 0, *spec.shape), dtype=spec.dtype)
            for spec, wanted in zip(specs, every)
        ],
        lengths.copy(),
    )


def _run_padded(cell: Cell, inputs: list[CellInput]) -> list[torch.Tensor]:
    """Runs one step, padded with zero rows to the next supported batch size if the cell names sizes."""
    if not cell.batch_sizes:
        return cell.run(*inputs)
    first = inputs[0]
    rows = len(first.offsets) - 1 if isinstance(first, RaggedRows) else len(first)
    size = next(size for size in cell.batch_sizes if size >= rows)
    if size == rows:
        return cell.run(*inputs)
    padded: list[CellInput] = []
    for value in inputs:
        if isinstance(value, RaggedRows):
            padded.append(RaggedRows(value.values, torch.cat([value.offsets, value.offsets[-1:].expand(size - rows)])))
        else:
            padded.append(torch.cat([value, value.new_zeros((size - rows, *value.shape[1:]))]))
    return [output[:rows] if output.shape[0] == size else output for output in cell.run(*padded)]


def _rows_not_finite(cell: Cell, outputs: list[torch.Tensor], sizes: list[int]) -> list[int]:
    """Rows (of steps of ``sizes`` rows) with a value that is not finite where the cell declares finite ones."""
    if not cell.finite:
        return []
    bad = np.zeros(sum(sizes), bool)
    for name, value in zip(cell.outputs, outputs):
        if name in cell.finite:
            bad |= (
                ~torch.isfinite(value).flatten(1).all(1).numpy() if value.dim() > 1 else ~torch.isfinite(value).numpy()
            )
    if not bad.any():
        return []
    row_of_position = np.concatenate([np.arange(size) for size in sizes])
    return sorted(set(row_of_position[bad].tolist()))


def _take(cell: Cell, batch: Batch, first: int, end: int) -> tuple[Batch, torch.Tensor]:
    """Rows first..end of a batch, and the positions of their outputs in the whole."""
    positions: list[int] = []
    sizes: list[int] = []
    start = 0
    for size in batch.sizes:
        taken = range(start + min(first, size), start + min(end, size))
        positions += taken
        if len(taken):
            sizes.append(len(taken))
        start += size
    inputs = [
        _take_input(value, list(range(first, end)) if name in cell.carry else positions)
        for name, value in zip(cell.inputs, batch.inputs)
    ]
    return Batch(sizes, inputs, batch.lengths[first:end], batch.rows[first:end]), torch.tensor(positions)


def _take_input(value: CellInput, positions: list[int]) -> CellInput:
    if not isinstance(value, RaggedRows):
        return value.index_select(0, torch.tensor(positions))
    parts = [value.values[int(value.offsets[k]) : int(value.offsets[k + 1])] for k in positions]
    counts = torch.tensor([0, *(len(part) for part in parts)])
    return RaggedRows(torch.cat(parts) if parts else value.values[:0], counts.cumsum(0))


def _not_finite(cell: Cell, row: int) -> Failure:
    return Failure(row, CellError(f"cell {cell.name!r} returned a value that is not finite"))


def _as_cell_error(cell: Cell, error: Exception) -> CellError:
    if isinstance(error, CellError):
        return error
    made = CellError(f"cell {cell.name!r} raised {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
