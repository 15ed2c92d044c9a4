"""Tasks of cells that read and write arena rows themselves (``FusedModule``).

A run of several steps goes step by step, or in one call (``ChainModule``) where that was measured to be faster. No row
is both read and written in a task, so it may be run again, and its first run of a kind is measured both ways.

A form that reads spans (``reads_spans``) reads the number of rows of each step on the device: its tasks are padded to
few numbers of rows, steps and positions. Tasks of one such size have one signature, however ragged they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from cellrt.definition.fused import IndexedRows, RunSizes, SpannedRows, StepRows
from cellrt.definition.spec import CellInput
from cellrt.worker.device.device_attempt import DeviceOutcome, Inputs
from cellrt.worker.device.fused_reading import SPAN, CannotFuseError
from cellrt.worker.device.operations import Counts, Operations
from cellrt.worker.device.signature import HAD_STOPPED, NOWHERE, OUTSIDE, OutputSignature
from cellrt.worker.failed_rows import Failures, describe_error, take_rows
from cellrt.worker.torch_state import CellMode


class FusedOperations(Operations):
    """Operations that call ``run_rows`` step by step, or ``run_chain_rows``."""

    _is_captured = False

    def prepare_capture(self) -> None:
        """Choose whether the run goes in one call, which may take a measurement."""
        self._is_captured = True
        if self._signature.sizes_at != NOWHERE:
            self._goes_in_one_call()

    def run(self, counts: Counts, failures: Failures | None) -> None:
        """Run the task (see ``Operations.run``); after an error run it again by the plain form, to find the failing
        rows.
        """
        self._counts = counts
        try:
            with CellMode(self._memory.device.torch_device.type):
                bad = self._run_whole() if self._signature.sizes_at != NOWHERE else self._run_steps()
        except BaseException as error:
            if failures is None or self._memory.device.is_fatal(error):
                raise
            self._memory.device.check()
            failures.split = error
            super().run(counts, failures)
            return
        for k, output in enumerate(self._signature.outputs):
            if output.results:
                self._deliver(k, output, self._arena(output.kind))
        parts, stopped = [self._stops()] if self._signature.stop != NOWHERE else [], self._stopped()
        if self._signature.tells_bad:
            parts.append(torch.cat([part.to(torch.int32) for part in bad]) | self._outside())
        if stopped is not None:
            parts = self._masked(parts, stopped)
        if parts:
            self._answer(parts)

    def _masked(self, parts: list[torch.Tensor], stopped: torch.Tensor) -> list[torch.Tensor]:
        """Return the answers of a task with rows that may have stopped in a task before.

        Stopped rows were computed like others, of rows that they were given or have left, and wrote to rows of their
        own,
        which are never read.
        """
        signature, rows = self._signature, len(stopped)
        said = parts[0] if signature.stop != NOWHERE else torch.zeros_like(stopped)
        said = said.to(torch.int32).masked_fill(stopped, HAD_STOPPED)
        bad = parts[-1] if signature.tells_bad else None
        if bad is not None:
            bad[:rows] *= ~stopped
        self._note_over((said if bad is None else said | bad[:rows]) != 0)
        return [*([said] if signature.tells_rows else []), *([] if bad is None else [bad])]

    def _stops(self) -> torch.Tensor:
        """Return the stop flag of each row, of a task of one step with rows of loops."""
        output, rows = self._signature.outputs[self._signature.stop], self._signature.sizes[0]
        where = self._slice(output.rows_at, rows).clamp(min=0)
        return self._arena(output.kind).index_select(0, where).reshape(rows) != 0

    def _store(self, output: OutputSignature, value: torch.Tensor) -> None:
        """Store an output. Every position has a row, but a negative one if it is not read: it goes to the trash row."""
        count = min(len(value), output.stores)
        arena, rows = self._arena(output.kind), self._slice(output.rows_at, count)
        arena.index_copy_(0, torch.where(rows < 0, len(arena) - 1, rows), value[:count])

    def _inputs(self) -> Inputs:
        """Return the inputs for the plain form, without the padding of a form that reads spans."""
        inputs = super()._inputs()
        if self._signature.spans_at == NOWHERE:
            return inputs
        counts, carry = self._counts, self._placed.cell.carry
        ends = [counts.rows if name in carry else counts.positions for name in self._placed.cell.inputs]
        values = [
            value[:end] if isinstance(value, torch.Tensor) else take_rows(value, range(end))
            for value, end in zip(inputs.values, ends)
        ]
        bad = None if inputs.bad is None else inputs.bad[: counts.positions]
        stopped = None if inputs.stopped is None else inputs.stopped[: counts.rows]
        return Inputs(counts.sizes, list(values), None, bad, stopped)

    def _result_positions(self, output: OutputSignature) -> torch.Tensor:
        """Return arena rows; of a run that goes step by step some may be negative, and are not shown."""
        return super()._result_positions(output).clamp(min=0)

    def _show(self, number: int, output: OutputSignature, outcome: DeviceOutcome) -> None:
        if output.results:
            self._deliver(number, output, self._arena(output.kind))

    def _run_whole(self) -> list[torch.Tensor]:
        """Run a run either way; return flags of the positions with a value that is not finite where it must be."""
        if not (self._goes_in_one_call() and self._run_chain()):
            self._run_steps()
        return [self._not_finite(0, self._signature.positions)]

    def _goes_in_one_call(self) -> bool:
        """Return whether a run like this one goes in one call, after a measurement if that is not known yet."""
        chains, sizes = self._placed.chains, self._signature.sizes
        if chains is None:
            return False
        choice = chains.find(sizes, self._is_captured)
        if choice is None:
            choice = self._is_chain_faster()
            chains.keep(sizes, self._is_captured, choice)
        return choice

    def _is_chain_faster(self) -> bool:
        """Run the task both ways, as it would run from now on, and return whether one call is faster."""
        device = self._memory.device
        try:
            if not self._run_chain():
                return False
            chain_s = self._time(self._run_chain)
        except BaseException as error:
            if device.is_fatal(error):
                raise
            device.check()
            warnings.warn(
                f"cell {self._placed.cell.name!r} runs step by step: its run_chain_rows raised {describe_error(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._run_steps()
        return chain_s < self._time(self._run_steps)

    def _time(self, way: Callable[[], object]) -> float:
        def work() -> None:
            way()

        device = self._memory.device
        return device.time(device.capture(work).replay if self._is_captured else work)

    def _run_chain(self) -> bool:
        """Run all steps in one call; return False if the cell does not take them."""
        cell, signature, chains = self._placed.cell, self._signature, self._placed.chains
        if chains is None:
            return False
        positions = signature.positions
        inputs = {}
        for number, (name, given) in enumerate(zip(cell.inputs, signature.inputs)):
            source, count = given.sources[0], signature.sizes[0] if name in cell.carry else positions
            values = self._rows_at(given.kind, self._specs[number], source)
            inputs[name] = IndexedRows(values, self._slice(source.rows_at, count))
        outputs = {
            name: IndexedRows(self._arena(output.kind), self._slice(output.rows_at, positions))
            for name, output in zip(cell.outputs, signature.outputs)
        }
        return chains.run(
            RunSizes(signature.sizes, self._slice(signature.sizes_at, len(signature.sizes))), inputs, outputs
        )

    def _run_steps(self) -> list[torch.Tensor]:
        """Run all steps; return for each the positions with a value that is not finite where it must be.

        A form that keeps such values at every position until the end is checked there, and not here.
        """
        cell, signature, run_rows = self._placed.cell, self._signature, self._placed.run_rows
        if run_rows is None:
            raise CannotFuseError(f"cell {cell.name!r} has no method run_rows")
        bad, before, start = [], 0, 0
        for step, size in enumerate(signature.sizes):
            run_rows(
                {name: self._step_input(number, step, before, start) for number, name in enumerate(cell.inputs)},
                {
                    name: self._step_rows(self._arena(output.kind), output.rows_at, output.stores, step, start)
                    for name, output in zip(cell.outputs, signature.outputs)
                },
            )
            if signature.tells_bad and signature.sizes_at == NOWHERE:
                bad.append(self._not_finite(start, size))
            before, start = start, start + size
        return bad

    def _step_input(self, number: int, step: int, before: int, start: int) -> StepRows | CellInput:
        """Return an input's rows at a step whose positions begin at ``start``, those of the step before it at
        ``before``.
        """
        cell, given = self._placed.cell, self._signature.inputs[number]
        source = list(cell.inputs)[number]
        carried = cell.carry.get(source)
        if carried is not None and step > 0:
            made = self._signature.outputs[list(cell.outputs).index(carried)]
            return self._step_rows(self._arena(made.kind), made.rows_at, made.stores, step, before, is_state=True)
        if given.offsets_at != NOWHERE:
            return self._gather(number, given)
        rows = given.sources[0]
        values = self._rows_at(given.kind, self._specs[number], rows)
        first = 0 if carried is not None else start
        return self._step_rows(values, rows.rows_at, rows.num_rows, step, first, is_state=carried is not None)

    def _step_rows(
        self, values: torch.Tensor, rows_at: int, count: int, step: int, start: int, is_state: bool = False
    ) -> StepRows:
        """Return a step's part of ``count`` rows: by its span, or else as many as it has, from ``start`` on."""
        signature, size = self._signature, self._signature.sizes[step]
        if signature.spans_at == NOWHERE:
            return IndexedRows(values, self._slice(rows_at + start, size))
        span_at = signature.spans_at + SPAN * (step if is_state else step + 1)
        return SpannedRows(values, self._slice(rows_at, count), size, self._slice(span_at, SPAN))

    def _not_finite(self, start: int, size: int) -> torch.Tensor:
        """Return bool flags of the positions with a value that is not finite where the cell declares finite ones."""
        cell = self._placed.cell
        bad = torch.zeros(size, dtype=torch.bool, device=self._words.device)
        for name, output in zip(cell.outputs, self._signature.outputs):
            if name not in cell.finite:
                continue
            rows = self._slice(output.rows_at + start, size).clamp(min=0)
            bad |= ~torch.isfinite(self._arena(output.kind).index_select(0, rows)).reshape(size, -1).all(1)
        return bad

    def _outside(self) -> torch.Tensor:
        """Return flags of the positions that read values outside an input's limits; a fused form does not index with
        them.
        """
        bad = torch.zeros(self._signature.positions, dtype=torch.int32, device=self._words.device)
        for number, (name, given) in enumerate(zip(self._placed.cell.inputs, self._signature.inputs)):
            if name in self._placed.limits:
                source = given.sources[0]
                rows = self._slice(source.rows_at, source.num_rows)
                values = self._rows_at(given.kind, self._specs[number], source).index_select(0, rows)
                is_outside = self._placed.limits[name].are_left_by(values)
                bad[: len(is_outside)] |= OUTSIDE * is_outside
        return bad

    def _arena(self, kind: int) -> torch.Tensor:
        return self._memory.arenas[self._memory.location][kind]
