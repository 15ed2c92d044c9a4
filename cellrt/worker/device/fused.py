"""Tasks of cells that read and write arena rows themselves (``placement.FusedModule``).

Every position of every output that somebody reads needs a row of the arena. Those that the scheduler gave no row lie
in the arena's scratch rows: state for the next step of the run takes turns in two sets of rows, a result that nobody
else reads has one of its own until it is downloaded.

A run of several steps goes step by step, or in one call (``placement.ChainModule``) where that was measured to be
faster. No row is both read and written in a task, so it may be run again, and its first run of a kind is measured both
ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core import task_layout as layout_words
from cellrt.core.tables import HOST, MIXED
from cellrt.worker.blame import Failures, describe_error
from cellrt.worker.device.attempt import DeviceOutcome
from cellrt.worker.device.placement import Rows, RunSizes
from cellrt.worker.device.program import Program
from cellrt.worker.device.task_plan import NOWHERE, InputLayout, OutputLayout, Plan, Reading
from cellrt.worker.torch_state import CellMode


class CannotFuseError(Exception):
    """The task must run through the cell's plain form."""


class FusedReading(Reading):
    """Reads a task of such a cell; raises CannotFuseError if it cannot run fused."""

    is_fused = True
    keeps_finite = False
    """Whether what must be finite is kept at every position until the end, not only until the next step."""

    def plan(self) -> Plan:
        """Reads it."""
        self._scratch_used: dict[int, int] = {}
        return super().plan()

    def _input(self, kind: int, source: int, count: int, at: int, offsets_at: int) -> InputLayout:
        if self._is_loop or source == MIXED or offsets_at >= 0 or source not in (-2, HOST, self._location):
            raise CannotFuseError
        return super()._input(kind, source, count, at, offsets_at)

    def _output(self, number: int, kind: int, record: list[int]) -> OutputLayout:
        stores, positions_at, rows_at, results, result_positions_at, result_rows_at, _ = record
        buffer, trash = self._buffer, self._arenas.trash_row(kind)
        num_positions = self._padded if self._steps == 1 else self._positions
        if stores == self._positions and not results:
            first_row = self._copy(rows_at, stores, num_positions, -1)
            return OutputLayout(kind, num_positions, first_row, NOWHERE, 0, NOWHERE, NOWHERE, False)
        shown = buffer[result_positions_at : result_positions_at + results]
        rows = self._scratch_rows(number, kind, shown)
        rows[buffer[positions_at : positions_at + stores]] = buffer[rows_at : rows_at + stores]
        first_row = self._compute(rows, num_positions, -1)
        delivered = self._results(kind, results, NOWHERE, result_rows_at, rows[shown], trash)
        return OutputLayout(kind, num_positions, first_row, NOWHERE, *delivered, False)

    def _scratch_rows(self, number: int, kind: int, shown: NDArray[np.int32]) -> NDArray[np.int64]:
        """A scratch row for each position that needs one if it is not stored, else -1."""
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
        rows[shown] = np.arange(len(shown)) + (first + used)
        used += len(shown)
        if used > room:
            raise CannotFuseError
        self._scratch_used[kind] = used
        return rows


class ChainReading(FusedReading):
    """Reads a run of several steps that may go in one call."""

    keeps_finite = True

    def _sizes_words(self) -> int:
        return self._copy(self._header[layout_words.H_BATCH_SIZES], self._steps, self._steps, 0)


class FusedProgram(Program):
    """Calls ``run_rows`` step by step, or ``run_chain_rows``."""

    _is_captured = False

    def prepare_capture(self) -> None:
        """Chooses how the run goes, which may take a measurement."""
        self._is_captured = True
        if self._layout.sizes_at != NOWHERE:
            self._goes_in_one_call()

    def run(self, rows: int, failures: Failures | None) -> None:
        """See ``Program.run``; on an error the task is run again by the plain form, to find the rows to blame."""
        try:
            with CellMode(self._memory.device.torch_device.type):
                bad = self._run_whole() if self._layout.sizes_at != NOWHERE else self._run_steps()
        except BaseException as error:
            if failures is None or self._memory.device.is_fatal(error):
                raise
            self._memory.device.check()
            failures.split = error
            super().run(rows, failures)
            return
        for k, output in enumerate(self._layout.outputs):
            if output.results:
                self._deliver(k, output, self._arena(output.kind))
        if self._layout.answers:
            self._answer(bad)

    def _store(self, output: OutputLayout, value: torch.Tensor) -> None:
        """Every position has a row, but those that nobody reads have none: they go where nobody looks."""
        arena, rows = self._arena(output.kind), self._slice(output.rows_at, output.stores)
        arena.index_copy_(0, torch.where(rows < 0, len(arena) - 1, rows), value[: output.stores])

    def _show(self, number: int, output: OutputLayout, outcome: DeviceOutcome) -> None:
        if output.results:
            self._deliver(number, output, self._arena(output.kind))

    def _run_whole(self) -> list[torch.Tensor]:
        """Runs a run either way; returns which positions have a value that is not finite where they must be."""
        if not (self._goes_in_one_call() and self._run_chain()):
            self._run_steps()
        return [self._not_finite(0, sum(self._layout.sizes))] if self._placed.cell.finite else []

    def _goes_in_one_call(self) -> bool:
        """Whether a run like this one goes in one call; measured if that is not known yet."""
        chains, sizes = self._placed.chains, self._layout.sizes
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
        def program() -> None:
            way()

        device = self._memory.device
        return device.time(device.capture(program) if self._is_captured else program)

    def _run_chain(self) -> bool:
        """Runs all steps in one call, if the cell takes these."""
        cell, layout, chains = self._placed.cell, self._layout, self._placed.chains
        if chains is None:
            return False
        positions = sum(layout.sizes)
        inputs = {}
        for number, (name, given) in enumerate(zip(cell.inputs, layout.inputs)):
            part, count = given.parts[0], layout.sizes[0] if name in cell.carry else positions
            inputs[name] = Rows(self._source(given.kind, self._specs[number], part), self._slice(part.rows_at, count))
        outputs = {
            name: Rows(self._arena(output.kind), self._slice(output.rows_at, positions))
            for name, output in zip(cell.outputs, layout.outputs)
        }
        return chains.run(RunSizes(layout.sizes, self._slice(layout.sizes_at, len(layout.sizes))), inputs, outputs)

    def _run_steps(self) -> list[torch.Tensor]:
        """Runs all steps; returns which positions of each have a value that is not finite where they must be.

        It does not look where every position keeps what must be finite until the end.
        """
        cell, layout, run_rows = self._placed.cell, self._layout, self._placed.run_rows
        if run_rows is None:
            raise CannotFuseError(f"cell {cell.name!r} has no method run_rows")
        outputs = dict(zip(cell.outputs, layout.outputs))
        bad, start, before = [], 0, 0
        for step, size in enumerate(layout.sizes):
            inputs = {}
            for number, (name, given) in enumerate(zip(cell.inputs, layout.inputs)):
                if name in cell.carry and step > 0:
                    made = outputs[cell.carry[name]]
                    inputs[name] = Rows(self._arena(made.kind), self._slice(made.rows_at + before, size))
                else:
                    part = given.parts[0]
                    at = part.rows_at if name in cell.carry else part.rows_at + start
                    source = self._source(given.kind, self._specs[number], part)
                    inputs[name] = Rows(source, self._slice(at, size))
            run_rows(
                inputs,
                {
                    name: Rows(self._arena(output.kind), self._slice(output.rows_at + start, size))
                    for name, output in outputs.items()
                },
            )
            if cell.finite and layout.sizes_at == NOWHERE:
                bad.append(self._not_finite(start, size))
            before, start = start, start + size
        return bad

    def _not_finite(self, start: int, size: int) -> torch.Tensor:
        """Which of these positions have a value that is not finite where the cell declares finite ones."""
        cell = self._placed.cell
        bad = torch.zeros(size, dtype=torch.bool, device=self._words.device)
        for name, output in zip(cell.outputs, self._layout.outputs):
            if name not in cell.finite:
                continue
            rows = self._slice(output.rows_at + start, size).clamp(min=0)
            bad |= ~torch.isfinite(self._arena(output.kind).index_select(0, rows)).reshape(size, -1).all(1)
        return bad

    def _arena(self, kind: int) -> torch.Tensor:
        return self._memory.arenas[self._memory.location][kind]
