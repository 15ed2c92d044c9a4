"""Tasks of cells that read and write arena rows themselves (``FusedModule``).

Every position of every output that somebody reads needs a row of the arena. Those that the scheduler gave no row lie
in the arena's scratch rows: state for the next step of the run takes turns in two sets of rows, a result that nobody
else reads has one of its own until it is downloaded.

A run of several steps goes step by step, or in one call (``ChainModule``) where that was measured to be
faster. No row is both read and written in a task, so it may be run again, and its first run of a kind is measured both
ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.tables import HOST, MIXED
from cellrt.definition.fused import IndexedRows, RunSizes
from cellrt.worker.blame import Failures, describe_error
from cellrt.worker.device import launch
from cellrt.worker.device.attempt import DeviceOutcome
from cellrt.worker.device.operations import Operations
from cellrt.worker.device.packing import NOWHERE, OUTSIDE, InputSignature, OutputSignature, Packing, TaskReader
from cellrt.worker.torch_state import CellMode


class CannotFuseError(Exception):
    """The task must run through the cell's plain form."""


class FusedReader(TaskReader):
    """Reads a task of such a cell; raises CannotFuseError if it cannot run fused."""

    is_fused = True
    keeps_finite = False
    """Whether what must be finite is kept at every position until the end, not only until the next step."""

    def read(self) -> Packing:
        """Reads it."""
        self._scratch_used: dict[int, int] = {}
        return super().read()

    def _input(self, kind: int, source: int, count: int, at: int, offsets_at: int) -> InputSignature:
        if self._is_loop or source == MIXED or offsets_at >= 0 or source not in (-2, HOST, self._location):
            raise CannotFuseError
        return super()._input(kind, source, count, at, offsets_at)

    def _output(
        self,
        number: int,
        kind: int,
        stores: int,
        positions_at: int,
        rows_at: int,
        results: int,
        result_positions_at: int,
        result_rows_at: int,
        every_step: int,
    ) -> OutputSignature:
        num_positions = self._padded if self._steps == 1 else self._positions
        if stores == self._positions and not results:
            first_row = self._copy(rows_at, stores, num_positions, -1)
            return OutputSignature(kind, num_positions, first_row, NOWHERE, 0, NOWHERE, NOWHERE, False)
        rows, first_shown = self._scratch_rows(number, kind, results)
        first_row = self._fix(rows, num_positions, -1)
        self._operations.append((launch.SHOW, first_row, result_positions_at, first_shown, results, 0, 0))
        self._operations.append((launch.STORE, first_row, positions_at, rows_at, stores, 0, 0))
        delivered = self._results(kind, results, result_rows_at)
        if results:
            padded, at, trash = delivered[0], delivered[2], self._arenas.trash_row(kind)
            self._operations.append((launch.LOOK_UP, at, result_positions_at, first_row, results, padded, trash))
        return OutputSignature(kind, num_positions, first_row, NOWHERE, *delivered, False)

    def _scratch_rows(self, number: int, kind: int, results: int) -> tuple[NDArray[np.int64], int]:
        """A scratch row for each position that needs one if it is not stored, else -1; the first one of results."""
        cell = self._type.cell
        name = list(cell.outputs)[number]
        rows: NDArray[np.int64] = np.empty(self._positions, np.int64)
        rows.fill(-1)
        first, room = self._arenas.scratch_rows(kind)
        used = self._scratch_used.get(kind, 0)
        if name in cell.finite and self.keeps_finite:
            rows[:] = np.arange(self._positions) + (first + used)
            used += self._positions
        elif name in cell.carry.values() or name in cell.finite:
            start = 0
            for step, size in enumerate(self._sizes):
                rows[start : start + size] = np.arange(size) + (first + used + step % 2 * self._rows)
                start += size
            used += 2 * self._rows
        first_shown = first + used
        used += results
        if used > room:
            raise CannotFuseError
        self._scratch_used[kind] = used
        return rows, first_shown


class ChainReader(FusedReader):
    """Reads a run of several steps that may go in one call."""

    keeps_finite = True

    def _sizes_words(self) -> int:
        return self._copy(self._task.batch_sizes_at, self._steps, self._steps, 0)


class FusedOperations(Operations):
    """Calls ``run_rows`` step by step, or ``run_chain_rows``."""

    _is_captured = False

    def prepare_capture(self) -> None:
        """Chooses how the run goes, which may take a measurement."""
        self._is_captured = True
        if self._signature.sizes_at != NOWHERE:
            self._goes_in_one_call()

    def run(self, rows: int, failures: Failures | None) -> None:
        """See ``Operations.run``; on an error the task is run again by the plain form, to find the rows to blame."""
        try:
            with CellMode(self._memory.device.torch_device.type):
                bad = self._run_whole() if self._signature.sizes_at != NOWHERE else self._run_steps()
        except BaseException as error:
            if failures is None or self._memory.device.is_fatal(error):
                raise
            self._memory.device.check()
            failures.split = error
            super().run(rows, failures)
            return
        for k, output in enumerate(self._signature.outputs):
            if output.results:
                self._deliver(k, output, self._arena(output.kind))
        if self._signature.tells_bad:
            self._answer([torch.cat([part.to(torch.int32) for part in bad]) | self._outside()])

    def _store(self, output: OutputSignature, value: torch.Tensor) -> None:
        """Every position has a row, but those that nobody reads have none: they go where nobody looks."""
        arena, rows = self._arena(output.kind), self._slice(output.rows_at, output.stores)
        arena.index_copy_(0, torch.where(rows < 0, len(arena) - 1, rows), value[: output.stores])

    def _show(self, number: int, output: OutputSignature, outcome: DeviceOutcome) -> None:
        if output.results:
            self._deliver(number, output, self._arena(output.kind))

    def _run_whole(self) -> list[torch.Tensor]:
        """Runs a run either way; returns which positions have a value that is not finite where they must be."""
        if not (self._goes_in_one_call() and self._run_chain()):
            self._run_steps()
        return [self._not_finite(0, sum(self._signature.sizes))]

    def _goes_in_one_call(self) -> bool:
        """Whether a run like this one goes in one call; measured if that is not known yet."""
        chains, sizes = self._placed.chains, self._signature.sizes
        if chains is None:
            return False
        choice = chains.find(sizes, self._is_captured)
        if choice is None:
            choice = self._is_chain_faster()
            chains.keep(sizes, self._is_captured, choice)
        return choice

    def _is_chain_faster(self) -> bool:
        """Runs the task both ways, as it would run from now on, and measures them."""
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
        """Runs all steps in one call, if the cell takes these."""
        cell, signature, chains = self._placed.cell, self._signature, self._placed.chains
        if chains is None:
            return False
        positions = sum(signature.sizes)
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
        """Runs all steps; returns which positions of each have a value that is not finite where they must be.

        It does not look where every position keeps what must be finite until the end.
        """
        cell, signature, run_rows = self._placed.cell, self._signature, self._placed.run_rows
        if run_rows is None:
            raise CannotFuseError(f"cell {cell.name!r} has no method run_rows")
        outputs = dict(zip(cell.outputs, signature.outputs))
        bad, start, before = [], 0, 0
        for step, size in enumerate(signature.sizes):
            inputs = {}
            for number, (name, given) in enumerate(zip(cell.inputs, signature.inputs)):
                if name in cell.carry and step > 0:
                    made = outputs[cell.carry[name]]
                    inputs[name] = IndexedRows(self._arena(made.kind), self._slice(made.rows_at + before, size))
                else:
                    source = given.sources[0]
                    at = source.rows_at if name in cell.carry else source.rows_at + start
                    values = self._rows_at(given.kind, self._specs[number], source)
                    inputs[name] = IndexedRows(values, self._slice(at, size))
            run_rows(
                inputs,
                {
                    name: IndexedRows(self._arena(output.kind), self._slice(output.rows_at + start, size))
                    for name, output in outputs.items()
                },
            )
            if signature.tells_bad and signature.sizes_at == NOWHERE:
                bad.append(self._not_finite(start, size))
            before, start = start, start + size
        return bad

    def _not_finite(self, start: int, size: int) -> torch.Tensor:
        """Which of these positions have a value that is not finite where the cell declares finite ones: bool."""
        cell = self._placed.cell
        bad = torch.zeros(size, dtype=torch.bool, device=self._words.device)
        for name, output in zip(cell.outputs, self._signature.outputs):
            if name not in cell.finite:
                continue
            rows = self._slice(output.rows_at + start, size).clamp(min=0)
            bad |= ~torch.isfinite(self._arena(output.kind).index_select(0, rows)).reshape(size, -1).all(1)
        return bad

    def _outside(self) -> torch.Tensor:
        """Which positions read what is outside an input's limits: a fused form reads nothing there."""
        bad = torch.zeros(sum(self._signature.sizes), dtype=torch.int32, device=self._words.device)
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
