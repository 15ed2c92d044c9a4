"""Runs a cell on the rows of a task on a device; finds the rows to blame if it fails. See ``batch.py`` for the CPU.

Loops follow DESIGN rule 9: the host does not know which rows have stopped, so all rows run all steps, and rows past
their stop are masked. Such a row is given the inputs of its last step over and over, so that the cell never sees
what a row that stopped would not have come to; its outputs stay those of that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cellrt.definition.spec import CellInput, RaggedRows
from cellrt.errors import CellError
from cellrt.worker.blame import Failure, Failures, as_cell_error
from cellrt.worker.device.device import Device
from cellrt.worker.device.placement import PlacedCell, zeros
from cellrt.worker.outputs import plain_outputs


@dataclass
class DeviceBatch:
    """Inputs of some rows of a task, on the device: steps-first, packed; ``sizes[s]`` rows take part in step s.

    ``sizes`` include the padding, ``rows`` (their numbers in the task) do not. ``lengths`` ``[sizes[0]]`` int64 is how
    many steps each row of a loop takes at most.
    """

    sizes: list[int]
    inputs: list[CellInput]
    lengths: torch.Tensor | None
    rows: list[int]
    is_loop: bool


class DeviceOutcome(NamedTuple):
    """Outputs of a batch, by position; of a loop the last by row, and ``[rows, steps, *shape]``.

    ``bad``: for each position (row of a loop) whether a value is not finite where the cell declares finite ones.
    ``done_steps`` int32: steps that each row of a loop took, negative if it stopped.
    """

    outputs: list[torch.Tensor]
    every_step: list[torch.Tensor]
    bad: torch.Tensor
    done_steps: torch.Tensor


class Attempt:
    """Runs one cell on batches of one task.

    Args:
        placed: the cell on the device.
        device: says which errors are its own.
        stop: output of a loop that says stop, or -1.
        every: outputs of a loop that are kept at every step.
    """

    def __init__(self, placed: PlacedCell, device: Device, stop: int, every: list[bool]) -> None:
        self._placed, self._cell = placed, placed.cell
        self._device, self._stop, self._every = device, stop, every
        names = list(self._cell.outputs)
        carry = self._cell.carry
        self._sources = [names.index(carry[name]) if name in carry else -1 for name in self._cell.inputs]

    def run_or_blame(self, batch: DeviceBatch, failures: Failures) -> DeviceOutcome:
        """Runs a batch; on an error halves it until the culprits are alone, with zeros for them.

        Raises what the device says it is lost by.
        """
        try:
            return self.run(batch)
        except BaseException as error:
            if self._device.is_fatal(error):
                raise
            self._device.check()
            if len(batch.rows) == 1:
                failures.append(Failure(batch.rows[0], as_cell_error(self._cell, error)))
                return self._nothing(batch)
            failures.split = error if failures.split is None else failures.split
        whole = self._nothing(batch)
        middle = (len(batch.rows) + 1) // 2
        for first, end in ((0, middle), (middle, len(batch.rows))):
            part, positions = self._take(batch, first, end)
            half = self.run_or_blame(part, failures)
            for to, value in zip((*whole.outputs, whole.bad), (*half.outputs, half.bad)):
                to.index_copy_(0, positions, value[: len(positions)])
            if batch.is_loop:
                whole.done_steps[first:end] = half.done_steps[: end - first]
                for to, value in zip(whole.every_step, half.every_step):
                    to[first:end] = value[: end - first]
        return whole

    def run(self, batch: DeviceBatch) -> DeviceOutcome:
        """Runs a batch; raises what the cell raises."""
        if batch.is_loop:
            return self._run_loop(batch)
        positions = sum(batch.sizes)
        is_one_step = len(batch.sizes) == 1
        outputs = self._placed.call(batch.inputs) if is_one_step else self._placed.steps(batch.sizes, batch.inputs)
        outputs = plain_outputs(self._cell, outputs, positions, self._device.torch_device)
        nothing = torch.empty(0, dtype=torch.int32)
        return DeviceOutcome(outputs, [], self._not_finite(outputs, positions), nothing)

    def _run_loop(self, batch: DeviceBatch) -> DeviceOutcome:
        if batch.lengths is None:
            raise CellError("a loop's task without lengths")
        rows, steps, current = batch.sizes[0], len(batch.sizes), list(batch.inputs)
        is_active = batch.lengths > 0
        has_stopped = torch.zeros_like(is_active)
        bad = torch.zeros_like(is_active)
        done = torch.zeros(rows, dtype=torch.int32, device=is_active.device)
        last: list[torch.Tensor] = []
        kept: list[list[torch.Tensor]] = [[] for _ in self._every]
        for step in range(steps):
            outputs = plain_outputs(self._cell, self._placed.call(current), rows, self._device.torch_device)
            bad |= self._not_finite(outputs, rows) & is_active
            last = outputs if step == 0 else [_where(is_active, new, old) for new, old in zip(outputs, last)]
            for values, value, is_kept in zip(kept, last, self._every):
                if is_kept:
                    values.append(value)
            done += is_active
            if self._stop >= 0:
                stops = (outputs[self._stop].reshape(rows) != 0) & is_active
                has_stopped |= stops
                is_active = is_active & ~stops
            is_active = is_active & (batch.lengths > step + 1)
            if step + 1 < steps:
                current = [
                    _where(is_active, last[source], value) if source >= 0 and isinstance(value, torch.Tensor) else value
                    for value, source in zip(current, self._sources)
                ]
        every_step = [
            torch.stack(values, 1) if values else value.new_zeros((rows, 0)) for values, value in zip(kept, last)
        ]
        return DeviceOutcome(last, every_step, bad, torch.where(has_stopped, -done, done))

    def _not_finite(self, outputs: list[torch.Tensor], positions: int) -> torch.Tensor:
        """Positions with a value that is not finite where the cell declares finite ones ``[positions]`` bool."""
        bad = torch.zeros(positions, dtype=torch.bool, device=self._device.torch_device)
        for name, value in zip(self._cell.outputs, outputs):
            if name in self._cell.finite:
                bad |= ~torch.isfinite(value).reshape(positions, -1).all(1)
        return bad

    def _nothing(self, batch: DeviceBatch) -> DeviceOutcome:
        """Zeros for every row, as if all steps had been taken."""
        device = self._device.torch_device
        count = batch.sizes[0] if batch.is_loop else sum(batch.sizes)
        specs = list(self._cell.outputs.values())
        outputs = [zeros(spec, device, count) for spec in specs]
        bad = torch.zeros(count, dtype=torch.bool, device=device)
        if not batch.is_loop or batch.lengths is None:
            return DeviceOutcome(outputs, [], bad, torch.empty(0, dtype=torch.int32))
        steps = len(batch.sizes)
        every = [zeros(spec, device, count, steps if kept else 0) for spec, kept in zip(specs, self._every)]
        return DeviceOutcome(outputs, every, bad, batch.lengths.to(torch.int32))

    def _take(self, batch: DeviceBatch, first: int, end: int) -> tuple[DeviceBatch, torch.Tensor]:
        """Rows first..end of a batch, padded if the cell names batch sizes; the positions of their outputs."""
        count = end - first
        is_padded = bool(self._cell.batch_sizes) and (batch.is_loop or len(batch.sizes) == 1)
        padded = next(size for size in self._cell.batch_sizes if size >= count) if is_padded else count
        taken = [*range(first, end), *[end - 1] * (padded - count)]
        positions, sizes, start = [], [], 0
        for size in [batch.sizes[0]] if batch.is_loop else batch.sizes:
            part = [start + row for row in taken if row < size]
            positions += part
            if part:
                sizes.append(len(part))
            start += size
        if batch.is_loop:
            sizes = [padded] * len(batch.sizes)
        at, rows_at = self._indices(positions), self._indices(taken)
        inputs = [
            _take_input(value, (rows_at, taken) if source >= 0 else (at, positions))
            for value, source in zip(batch.inputs, self._sources)
        ]
        lengths = None if batch.lengths is None else batch.lengths.index_select(0, rows_at)
        kept = at[:count] if is_padded else at
        return DeviceBatch(sizes, inputs, lengths, batch.rows[first:end], batch.is_loop), kept

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)


def _where(is_new: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Rows of ``new`` where ``is_new`` ``[rows]``, else of ``old``."""
    return torch.where(is_new.view(-1, *[1] * (new.dim() - 1)), new, old)


def _take_input(value: CellInput, which: tuple[torch.Tensor, list[int]]) -> CellInput:
    """Some rows of an input; of a ragged one all values of some nodes. Reads offsets, so it waits for the device."""
    at, numbers = which
    if not isinstance(value, RaggedRows):
        return value.index_select(0, at)
    offsets = value.offsets.tolist()
    parts = [value.values[offsets[k] : offsets[k + 1]] for k in numbers]
    counts = torch.tensor([0, *(len(part) for part in parts)], device=value.offsets.device)
    return RaggedRows(torch.cat(parts) if parts else value.values[:0], counts.cumsum(0))
