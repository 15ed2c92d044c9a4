"""Runs a cell on the rows of a task, and finds out which rows are to blame if it fails.

On an error the rows are tried again in halves until the culprits are alone: a request fails by its own rows only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.bits import NUMPY_DTYPES, as_bits
from cellrt.definition.cell import Cell
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec
from cellrt.errors import CellError
from cellrt.worker.blame import Failure, Failures, as_cell_error
from cellrt.worker.outputs import plain_outputs

CPU = torch.device("cpu")


@dataclass
class Batch:
    """Inputs of some rows of a task: steps-first, packed; ``sizes[s]`` rows take part in step s."""

    sizes: list[int]
    inputs: list[CellInput]
    lengths: NDArray[np.int32]
    rows: list[int] = field(default_factory=list)
    """Their row numbers in the task."""


class Outcome(NamedTuple):
    """Outputs of a batch (see ``as_bits``): by position, or for loops the last by row and ``[rows, steps, *shape]``."""

    outputs: list[NDArray[Any]]
    every_step: list[NDArray[Any]]
    done_steps: NDArray[np.int32]


def run_batch(cell: Cell, batch: Batch, failures: Failures) -> Outcome:
    """Runs a batch; on an error halves it until the culprits are alone, with zeros for them."""
    positions = sum(batch.sizes)
    try:
        outputs = cell.run_padded(batch.inputs) if len(batch.sizes) == 1 else cell.run_steps(batch.sizes, *batch.inputs)
        outputs = plain_outputs(cell, outputs, positions, CPU)
        if cell.finite:
            row_of = np.concatenate([np.arange(size) for size in batch.sizes])
            by_row: dict[int, str] = {}
            for name, bad in _positions_not_finite(cell, outputs, positions).items():
                by_row = dict.fromkeys(row_of[bad].tolist(), name) | by_row
            failures += [_not_finite(cell, batch.rows[row], by_row[row]) for row in sorted(by_row)]
        return Outcome([as_bits(value) for value in outputs], [], batch.lengths)
    except BaseException as error:
        whole = Outcome([_zero_bits(spec, positions) for spec in cell.outputs.values()], [], batch.lengths)
        if len(batch.rows) == 1:
            failures.append(Failure(batch.rows[0], as_cell_error(cell, error)))
            return whole
        failures.split = error if failures.split is None else failures.split
    middle = (len(batch.rows) + 1) // 2
    for first, end in ((0, middle), (middle, len(batch.rows))):
        part, where = _take(cell, batch, first, end)
        for value, half in zip(whole.outputs, run_batch(cell, part, failures).outputs):
            value[where] = half
    return whole


def run_loop(cell: Cell, batch: Batch, stop: int, every: list[bool], failures: Failures) -> Outcome:
    """As ``run_batch``, for a loop's run. ``stop``: output that says stop, or -1; ``every``: outputs kept at every
    step."""
    steps = len(batch.sizes)
    try:
        outcome, not_finite = _run_loop(cell, batch, stop, every)
        failures += [_not_finite(cell, batch.rows[row], not_finite[row]) for row in sorted(not_finite)]
        return outcome
    except BaseException as error:
        if len(batch.rows) == 1:
            failures.append(Failure(batch.rows[0], as_cell_error(cell, error)))
            return _empty_outcome(cell, 1, steps, every, batch.lengths)
        failures.split = error if failures.split is None else failures.split
    outcome = _empty_outcome(cell, len(batch.rows), steps, every, batch.lengths)
    middle = (len(batch.rows) + 1) // 2
    for first, end in ((0, middle), (middle, len(batch.rows))):
        inputs = [_take_input(value, list(range(first, end))) for value in batch.inputs]
        sizes = [min(max(size - first, 0), end - first) for size in batch.sizes]
        part = Batch([size for size in sizes if size], inputs, batch.lengths[first:end], batch.rows[first:end])
        half = run_loop(cell, part, stop, every, failures)
        outcome.done_steps[first:end] = half.done_steps
        for whole, value in zip(outcome.outputs, half.outputs):
            whole[first:end] = value
        for whole, value in zip(outcome.every_step, half.every_step):
            if whole.size:
                whole[first:end, : value.shape[1]] = value
    return outcome


def _run_loop(cell: Cell, batch: Batch, stop: int, every: list[bool]) -> tuple[Outcome, dict[int, str]]:
    """Runs a loop's rows together; a row leaves at the step that stops it or at its last.

    ``done_steps`` is the number of steps a row took, negative if it stopped. The rows that at some step had a
    value that is not finite where the cell declares finite ones come with it, each with the output that had it.
    """
    names, output_names = list(cell.inputs), list(cell.outputs)
    sources = [output_names.index(cell.carry[name]) if name in cell.carry else -1 for name in names]
    outcome = _empty_outcome(cell, len(batch.rows), len(batch.sizes), every, batch.lengths)
    active = np.arange(len(batch.rows))
    current, step = list(batch.inputs), 0
    not_finite: dict[int, str] = {}
    while active.size:
        ahead = _steps_ahead(cell, current, sources, active.size, int(batch.lengths[active].min()) - step, stop)
        outputs = _run_ahead(cell, current, sources, active.size, ahead)
        stopped = np.zeros((ahead, active.size), bool)
        if stop >= 0:
            stopped = as_bits(outputs[stop]).astype(bool).reshape(ahead, active.size)
        has_stopped: NDArray[np.bool_] = np.asarray(stopped.any(0))
        last = np.where(has_stopped, stopped.argmax(0), ahead - 1)
        taken: NDArray[np.bool_] = np.less_equal(np.arange(ahead)[:, None], last)
        bits = [as_bits(value).reshape(ahead, active.size, *value.shape[1:]) for value in outputs]
        for name, bad in _positions_not_finite(cell, outputs, ahead * active.size).items():
            rows_bad = active[(bad.reshape(taken.shape) & taken).any(0)].tolist()
            not_finite = dict.fromkeys(rows_bad, name) | not_finite
        for k, wanted in enumerate(every):
            if wanted:
                steps, rows = np.nonzero(taken)
                outcome.every_step[k][active[rows], step + steps] = bits[k][steps, rows]
        leaving = np.logical_or(has_stopped, batch.lengths[active] == step + ahead)
        state = [value[(ahead - 1) * active.size :] for value in outputs]
        if leaving.any():
            left = np.flatnonzero(leaving)
            for whole, value in zip(outcome.outputs, bits):
                whole[active[left]] = value[last[left], left]
            done = step + last[left] + 1
            outcome.done_steps[active[left]] = np.where(has_stopped[left], -done, done)
            stay = np.flatnonzero(~leaving)
            if not stay.size:
                break
            active = active[stay]
            state = [value.index_select(0, torch.from_numpy(stay)) for value in state]
            current = [value if k >= 0 else _take_input(value, stay.tolist()) for value, k in zip(current, sources)]
        current = [state[k] if k >= 0 else value for value, k in zip(current, sources)]
        step += ahead
    return outcome, not_finite


def _steps_ahead(cell: Cell, inputs: list[CellInput], sources: list[int], rows: int, left: int, stop: int) -> int:
    """How many steps a loop runs before its stop flags are looked at.

    With few rows the calls cost more than the steps, so a cell with a steps-first form runs a few ahead; what lies
    past a row's stop is dropped (DESIGN, rule 9).
    """
    if not cell.has_steps or any(isinstance(value, RaggedRows) for value in inputs):
        return 1
    if stop < 0:
        return left
    return min(left, 8 if rows <= 4 else 4 if rows <= 16 else 2 if rows <= 64 else 1)


def _run_ahead(cell: Cell, inputs: list[CellInput], sources: list[int], rows: int, ahead: int) -> list[torch.Tensor]:
    """Outputs ``[ahead * rows, *shape]`` of a loop's next steps; inputs apart from state are the same at each."""
    if ahead == 1:
        outputs = cell.run_padded(inputs)
    else:
        packed = [
            value.repeat(ahead, *[1] * (value.dim() - 1)) if source < 0 and isinstance(value, torch.Tensor) else value
            for value, source in zip(inputs, sources)
        ]
        outputs = cell.run_steps([rows] * ahead, *packed)
    return plain_outputs(cell, outputs, ahead * rows, CPU)


def _empty_outcome(cell: Cell, rows: int, steps: int, every: list[bool], lengths: NDArray[np.int32]) -> Outcome:
    specs = list(cell.outputs.values())
    return Outcome(
        [_zero_bits(spec, rows) for spec in specs],
        [_zero_bits(spec, rows, steps if wanted else 0) for spec, wanted in zip(specs, every)],
        lengths.copy(),
    )


def _zero_bits(spec: RowSpec, *rows: int) -> NDArray[Any]:
    return np.zeros((*rows, *spec.shape), NUMPY_DTYPES.get(spec.dtype, np.dtype(np.int16)))


def _positions_not_finite(cell: Cell, outputs: list[torch.Tensor], positions: int) -> dict[str, NDArray[np.bool_]]:
    """For each output that the cell declares finite: the positions where a value is not."""
    return {
        name: ~torch.isfinite(value).reshape(positions, -1).all(1).numpy()
        for name, value in zip(cell.outputs, outputs)
        if name in cell.finite
    }


def _take(cell: Cell, batch: Batch, first: int, end: int) -> tuple[Batch, list[int]]:
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
    return Batch(sizes, inputs, batch.lengths[first:end], batch.rows[first:end]), positions


def _take_input(value: CellInput, positions: list[int]) -> CellInput:
    if not isinstance(value, RaggedRows):
        return value.index_select(0, torch.tensor(positions))
    parts = [value.values[int(value.offsets[k]) : int(value.offsets[k + 1])] for k in positions]
    counts = torch.tensor([0, *(len(part) for part in parts)])
    return RaggedRows(torch.cat(parts) if parts else value.values[:0], counts.cumsum(0))


def _not_finite(cell: Cell, row: int, output: str) -> Failure:
    return Failure(row, CellError(f"cell {cell.name!r} returned a value that is not finite in output {output!r}"))
