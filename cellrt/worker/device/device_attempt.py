"""Attempts to run a cell on the rows of a task on a device, without looking at a value.

Loops follow DESIGN rule 9: the host does not know which rows have stopped, so all rows run all steps, and rows past
their stop are masked. Such a row gets the inputs of its last step again and again, so that the cell never sees values
that a stopped row would not have reached; its outputs stay those of that step. A row that stopped in a task before,
which the host did not know when it sent this one, gets zeros, as in the cell's trial; it takes no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cellrt.definition.spec import CellInput
from cellrt.errors import InternalError
from cellrt.worker.device.device import Device
from cellrt.worker.device.placement import PlacedCell, zeros
from cellrt.worker.device.signature import HAD_STOPPED, NOT_FINITE, OUTSIDE
from cellrt.worker.failed_rows import Attempt, part_of, take_rows
from cellrt.worker.outputs import plain_outputs
from cellrt.worker.torch_state import CellMode


class Inputs(NamedTuple):
    """Inputs of some rows of a task, on the device: steps-first, packed; ``sizes[s]`` rows take part in step s.

    ``sizes`` include the padding. ``lengths`` ``[sizes[0]]`` int64: the most steps that each row of a loop takes.
    ``bad``
    int32: for each position (of a loop: row) whether an input was outside its limits, and was clamped; None: none was.
    ``stopped`` bool ``[sizes[0]]``: rows of loops that stopped in a task before; None: none has.
    """

    sizes: list[int]
    values: list[CellInput]
    lengths: torch.Tensor | None
    bad: torch.Tensor | None
    stopped: torch.Tensor | None = None


class DeviceOutcome(NamedTuple):
    """Outputs of some rows, by position; of a loop the last by row, and ``[rows, steps, *shape]``.

    ``bad``: for each position (row of a loop) int32 flags of its faults (see ``signature.py``). ``done_steps`` int32:
    steps
    that each row of a loop took, negative if it stopped; of other tasks, if rows may have stopped before, the answer of
    each row. ``is_over`` bool: whether a row of a loop goes no further: it has stopped, in this task or before, or it
    is
    bad.
    """

    outputs: list[torch.Tensor]
    every_step: list[torch.Tensor]
    bad: torch.Tensor
    done_steps: torch.Tensor
    is_over: torch.Tensor


NO_LOOP = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.bool)
"""The ``done_steps`` and ``is_over`` of tasks that are no loops."""


class DeviceAttempt(Attempt[DeviceOutcome]):
    """An attempt to run a cell on one task.

    Args:
        placed: the cell on the device.
        device: decides which errors are its own.
        num_rows: the number of the task's rows, without the padding.
        gather: copies the task's inputs.
        stop: the index of a loop's output that says stop, or -1.
        every: which of a loop's outputs are kept at every step; None: it is no loop.

    Attributes:
        tries_unpadded: whether the rows are tried once more without the padding if they fail with it.
        padding_error: the error after which they were.
    """

    tries_unpadded = False
    padding_error: BaseException | None = None

    def __init__(
        self,
        placed: PlacedCell,
        device: Device,
        num_rows: int,
        gather: Callable[[], Inputs],
        stop: int,
        every: list[bool] | None,
    ) -> None:
        self.cell, self.num_rows, self.mode = placed.cell, num_rows, CellMode(device.torch_device.type)
        self._placed, self._device, self._gather, self._stop, self._every = placed, device, gather, stop, every
        names = list(self.cell.outputs)
        carry = self.cell.carry
        self._sources = [names.index(carry[name]) if name in carry else -1 for name in self.cell.inputs]
        self._whole_inputs: Inputs | None = None

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise an error that means that the device is lost (see ``Attempt``)."""
        if self._device.is_fatal(error):
            raise error
        self._device.check()

    def run(self, first: int, end: int) -> DeviceOutcome:
        """Run rows first..end (see ``Attempt``)."""
        if end - first < self.num_rows:
            return self._run(self._take(first, end))
        try:
            return self._run(self._gather())
        except BaseException as error:
            if not self.tries_unpadded:
                raise
            self.raise_if_lost(error)
            self.padding_error = error
        whole = self.nothing()
        self.put(whole, first, end, self._run(self._take(first, end)))
        return whole

    def _run(self, inputs: Inputs) -> DeviceOutcome:
        if self._every is not None:
            return self._run_loop(inputs, self._every)
        sizes, values, _, outside, stopped = inputs
        positions = sum(sizes)
        outputs = self._placed.call(values) if len(sizes) == 1 else self._placed.steps(sizes, values)
        outputs = plain_outputs(self.cell, outputs, positions, self._device.torch_device)
        bad = self._not_finite(outputs, positions)
        if outside is not None:
            bad[: len(outside)] |= outside  # of carried inputs only those of the first step
        if stopped is None:
            return DeviceOutcome(outputs, [], bad, *NO_LOOP)
        rows = len(stopped)
        bad[:rows] *= ~stopped
        said = torch.zeros(rows, dtype=torch.int32, device=bad.device)
        if self._stop >= 0:
            said |= outputs[self._stop][:rows].reshape(rows) != 0
        said = said.masked_fill(stopped, HAD_STOPPED)
        return DeviceOutcome(outputs, [], bad, said, (said | bad[:rows]) != 0)

    def nothing(self) -> DeviceOutcome:
        """Return zeros for all rows (see ``Attempt``)."""
        device, (sizes, _, lengths, _, stopped) = self._device.torch_device, self._inputs()
        count = sum(sizes) if self._every is None else sizes[0]
        specs = list(self.cell.outputs.values())
        outputs = [zeros(spec, device, count) for spec in specs]
        bad = torch.zeros(count, dtype=torch.int32, device=device)
        if stopped is not None and self._every is None:
            return DeviceOutcome(outputs, [], bad, HAD_STOPPED * stopped.to(torch.int32), torch.ones_like(stopped))
        if self._every is None or lengths is None:
            return DeviceOutcome(outputs, [], bad, *NO_LOOP)
        every = [zeros(spec, device, count, len(sizes) if kept else 0) for spec, kept in zip(specs, self._every)]
        done = lengths.to(torch.int32) if stopped is None else lengths.to(torch.int32).masked_fill(stopped, 0)
        return DeviceOutcome(outputs, every, bad, done, torch.ones_like(done, dtype=torch.bool))

    def put(self, whole: DeviceOutcome, first: int, end: int, outcome: DeviceOutcome) -> None:
        """Put the outcome of some rows in its place (see ``Attempt``)."""
        rows = range(first, end)
        positions = rows if self._every is not None else part_of(self._inputs().sizes, rows)[1]
        to = torch.tensor(positions, dtype=torch.int64, device=self._device.torch_device)
        for target, value in zip((*whole.outputs, whole.bad), (*outcome.outputs, outcome.bad)):
            target.index_copy_(0, to, value[: len(to)])
        for target, value in zip(_by_row(whole), _by_row(outcome)):
            target[first:end] = value[: end - first]

    def _inputs(self) -> Inputs:
        """Return the whole task's inputs, gathered anew: the cell may have written to those of the first run."""
        if self._whole_inputs is None:
            self._whole_inputs = self._gather()
        return self._whole_inputs

    def _take(self, first: int, end: int) -> Inputs:
        """Return the inputs of rows first..end, padded with the last of them if the cell names batch sizes."""
        whole, is_loop, count = self._inputs(), self._every is not None, end - first
        rows = list(range(first, end))
        if self.cell.batch_sizes and (is_loop or len(whole.sizes) == 1):
            padded = next(size for size in self.cell.batch_sizes if size >= count)
            rows += [end - 1] * (padded - count)
        sizes, positions = part_of(whole.sizes[:1] if is_loop else whole.sizes, rows)
        values = [
            take_rows(value, rows if source >= 0 else positions) for value, source in zip(whole.values, self._sources)
        ]
        chosen = torch.tensor(rows, device=self._device.torch_device)
        lengths = None if whole.lengths is None else whole.lengths.index_select(0, chosen)
        bad = None
        if whole.bad is not None:
            at = torch.tensor([p for p in positions if p < len(whole.bad)], dtype=torch.int64, device=chosen.device)
            bad = whole.bad.index_select(0, chosen if is_loop else at)
        stopped = None if whole.stopped is None else whole.stopped.index_select(0, chosen)
        return Inputs(sizes * len(whole.sizes) if is_loop else sizes, values, lengths, bad, stopped)

    def _run_loop(self, inputs: Inputs, every: list[bool]) -> DeviceOutcome:
        sizes, values, lengths, outside, stopped = inputs
        if lengths is None:
            raise InternalError("a loop's task without lengths")
        # Rows that stopped in an earlier task take no step and read zeros.
        rows, steps, current = sizes[0], len(sizes), list(values)
        is_active = lengths > 0
        if stopped is not None:
            is_active = ~stopped
            current = [without(stopped, value) for value in current]
        is_over = ~is_active
        has_stopped = torch.zeros_like(is_active)
        bad = torch.zeros(rows, dtype=torch.int32, device=is_active.device)
        if outside is not None:
            bad |= outside[:rows] * is_active
        done = torch.zeros(rows, dtype=torch.int32, device=is_active.device)
        last: list[torch.Tensor] = []
        kept: list[list[torch.Tensor]] = [[] for _ in every]
        # Run all steps for all rows. Rows that are not active keep their last outputs.
        for step in range(steps):
            if step > 0:
                bad |= self._bring_within(current) * is_active
            outputs = plain_outputs(self.cell, self._placed.call(current), rows, self._device.torch_device)
            bad |= self._not_finite(outputs, rows) * is_active
            last = outputs if step == 0 else [_where(is_active, new, old) for new, old in zip(outputs, last)]
            for kept_values, value, is_kept in zip(kept, last, every):
                if is_kept:
                    kept_values.append(value)
            done += is_active
            # A row becomes inactive when it stops, or at its last step.
            if self._stop >= 0:
                stops = (outputs[self._stop].reshape(rows) != 0) & is_active
                has_stopped |= stops
                is_active = is_active & ~stops
            is_active = is_active & (lengths > step + 1)
            # Feed carried inputs from the outputs of this step.
            if step + 1 < steps:
                current = [
                    _where(is_active, last[source], value) if source >= 0 and isinstance(value, torch.Tensor) else value
                    for value, source in zip(current, self._sources)
                ]
        # Stack the outputs of every step, and mark the rows that go no further.
        every_step = [
            torch.stack(kept_values, 1) if kept_values else value.new_zeros((rows, 0))
            for kept_values, value in zip(kept, last)
        ]
        is_over = is_over | has_stopped | (bad != 0)
        return DeviceOutcome(last, every_step, bad, torch.where(has_stopped, -done, done), is_over)

    def _bring_within(self, current: list[CellInput]) -> torch.Tensor:
        """Clamp a loop's carried inputs to their limits; return int32 ``[rows]``, not 0 where a value was outside."""
        bad = torch.zeros((), dtype=torch.int32, device=self._device.torch_device)
        for number, (name, value) in enumerate(zip(self.cell.inputs, current)):
            limits = self._placed.limits.get(name)
            if limits is not None and isinstance(value, torch.Tensor) and self._sources[number] >= 0:
                bad = bad | OUTSIDE * limits.are_left_by(value).to(torch.int32)
                current[number] = value.clamp(limits.first, limits.end - 1)
        return bad

    def _not_finite(self, outputs: list[torch.Tensor], positions: int) -> torch.Tensor:
        """Return flags int32 ``[positions]`` of values that are not finite where the cell declares finite ones."""
        bad = torch.zeros(positions, dtype=torch.int32, device=self._device.torch_device)
        for name, value in zip(self.cell.outputs, outputs):
            if name in self.cell.finite:
                bad |= NOT_FINITE * ~torch.isfinite(value).reshape(positions, -1).all(1)
        return bad


def _by_row(outcome: DeviceOutcome) -> list[torch.Tensor]:
    """Return the parts of an outcome that have one entry for each row."""
    return [*outcome.every_step, *([outcome.done_steps, outcome.is_over] if len(outcome.is_over) else [])]


def without(rows: torch.Tensor, value: CellInput) -> CellInput:
    """Return an input with zeros for the rows that ``rows`` marks; it may have further rows, which stay."""
    if not isinstance(value, torch.Tensor):
        return value
    if len(value) > len(rows):
        rows = torch.cat([rows, rows.new_zeros(len(value) - len(rows))])
    return value.masked_fill(rows.view(-1, *[1] * (value.dim() - 1)), 0)


def _where(is_new: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return rows of ``new`` where ``is_new`` ``[rows]``, else of ``old``."""
    return torch.where(is_new.view(-1, *[1] * (new.dim() - 1)), new, old)
