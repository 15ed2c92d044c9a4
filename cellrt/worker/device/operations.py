"""The operations of a task on its device: gather, run the cell, scatter, and copy results into the download ring.

Everything is found through the task's words (``packing.py``), which lie on the device, at addresses that do not
change. So the operations can be captured, and the capture repeated with other words. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cellrt.core.state.tables import HOST
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, plain
from cellrt.worker.arenas import Arenas
from cellrt.worker.device.device import Device
from cellrt.worker.device.device_attempt import DeviceAttempt, DeviceOutcome, Inputs, without
from cellrt.worker.device.limits import Limits
from cellrt.worker.device.placement import PlacedCell, zeros
from cellrt.worker.device.ring import Ring
from cellrt.worker.device.signature import (
    NOWHERE,
    OUTSIDE,
    InputSignature,
    OutputSignature,
    Signature,
    Source,
)
from cellrt.worker.failed_rows import Failures, run_or_blame

ANSWER = RowSpec((), torch.int32)


class Memory(NamedTuple):
    """The memory that a location's operations read and write."""

    device: Device
    location: int
    arenas: list[Arenas]
    """The arenas of all locations."""
    up: Ring
    down: Ring
    flags: torch.Tensor
    """Flags of stopped rows of loops, bool, by the numbers of ``core/state/task_layout.py``."""


class Counts(NamedTuple):
    """The numbers of rows and positions of a task or a step, and the rows of each step, without padding.

    ``offsets``: where the rows of each node begin, and the number of rows, for a cell that gets the rows of each node.
    """

    rows: int
    positions: int
    sizes: list[int]
    offsets: tuple[int, ...] = ()


class Operations:
    """The operations of tasks of one signature.

    Args:
        placed: the cell on this device.
        signature: the signature of the task.
        memory: the memory of the worker's location.
        words: ``[signature.num_words]`` int64 on the device.
        host_words: the same, pinned, for gathers on other devices; None where there are none.
    """

    def __init__(
        self,
        placed: PlacedCell,
        signature: Signature,
        memory: Memory,
        words: torch.Tensor,
        host_words: torch.Tensor | None = None,
    ) -> None:
        self._placed, self._signature = placed, signature
        self._memory, self._words, self._host_words = memory, words, host_words
        self._specs = [RowSpec(spec.shape, spec.dtype) for spec in placed.cell.inputs.values()]
        self._output_specs = list(placed.cell.outputs.values())

    def run(self, counts: Counts, failures: Failures | None) -> None:
        """Run all operations. Captured operations may not depend on ``counts``.

        Rows on which the cell fails are added to ``failures``; their outputs are zeros. With None the error is raised.
        """
        attempt = self._attempt(counts)
        is_ragged = any(given.num_offsets for given in self._signature.inputs)
        # Further nodes have ragged rows that no node was given: they may be what the cell fails on.
        attempt.tries_unpadded = is_ragged and failures is not None and self._signature.sizes[0] > counts.rows
        outcome = attempt.run(0, attempt.num_rows) if failures is None else run_or_blame(attempt, failures)
        if failures is not None and failures.split is None:
            failures.split = attempt.padding_error
        for k, output in enumerate(self._signature.outputs):
            self._store(output, outcome.outputs[k])
            self._show(k, output, outcome)
        self._note_over(outcome.is_over)
        if self._signature.answers:
            self._answer(self._answers(outcome))

    def _attempt(self, counts: Counts) -> DeviceAttempt:
        signature = self._signature
        every = [output.every_step for output in signature.outputs] if signature.is_loop else None
        return DeviceAttempt(self._placed, self._memory.device, counts.rows, self._inputs, signature.stop, every)

    def _answers(self, outcome: DeviceOutcome) -> list[torch.Tensor]:
        """Return the answers beside the results (see ``Signature.answers``)."""
        if self._signature.is_loop:
            return [outcome.done_steps, outcome.bad]
        signature, rows = self._signature, self._signature.sizes[0]
        parts = [outcome.bad] if signature.tells_bad else []
        if signature.tells_rows:
            said = outcome.done_steps
            if signature.flags_at == NOWHERE:
                said = outcome.outputs[signature.stop][:rows].reshape(-1) != 0
            parts.insert(0, torch.cat([said, said.new_zeros(rows - len(said))]) if len(said) < rows else said)
        return parts

    def _note_over(self, is_over: torch.Tensor) -> None:
        """Write flags, for the next task, of the rows of loops that go no further: the first ones, without padding."""
        signature = self._signature
        if signature.flags_at != NOWHERE and (signature.is_loop or signature.stop != NOWHERE):
            flags = self._slice(signature.flags_at + signature.sizes[0], len(is_over))
            self._memory.flags.index_copy_(0, flags, is_over)

    def _stopped(self) -> torch.Tensor | None:
        """Return flags of the rows that stopped in a task before; None: none has."""
        signature = self._signature
        if signature.flags_at == NOWHERE:
            return None
        return self._memory.flags.index_select(0, self._slice(signature.flags_at, signature.sizes[0]))

    def _without(self, number: int, stopped: torch.Tensor, value: CellInput) -> CellInput:
        """Return input ``number`` with zeros for the rows that have stopped."""
        return without(stopped, value)

    def prepare_capture(self) -> None:
        """Prepare the capture of ``run``: do what cannot be done while capturing."""

    def _answer(self, parts: list[torch.Tensor]) -> None:
        answers = torch.cat([part.to(torch.int32) for part in parts])
        self._memory.down.rows(ANSWER).index_copy_(0, self._slice(self._signature.answers_at, len(answers)), answers)

    def _inputs(self) -> Inputs:
        """Return copies of all inputs, clamped to their limits."""
        signature = self._signature
        values, stopped = [self._gather(k, given) for k, given in enumerate(signature.inputs)], self._stopped()
        if stopped is not None and not signature.is_loop:
            values = [self._without(k, stopped, value) for k, value in enumerate(values)]
        bad = None
        for k, name in enumerate(self._placed.cell.inputs):
            if name in self._placed.limits:
                bad = zeros(ANSWER, self._words.device, signature.positions) if bad is None else bad
                values[k] = _bring_within(values[k], self._placed.limits[name], bad)
        return Inputs(list(signature.sizes), values, self._lengths(), bad, stopped)

    def _slice(self, at: int, count: int) -> torch.Tensor:
        return self._words[at : at + count]

    def _lengths(self) -> torch.Tensor | None:
        at = self._signature.lengths_at
        return None if at == NOWHERE else self._slice(at, self._signature.sizes[0])

    def _gather(self, number: int, given: InputSignature) -> CellInput:
        spec = self._specs[number]
        if len(given.sources) == 1:
            values = self._gather_from(given.kind, spec, given.sources[0])
        else:
            values = zeros(spec, self._memory.device.torch_device, given.num_rows)
            for source in given.sources:
                positions = self._slice(source.positions_at, source.num_rows)
                values.index_copy_(0, positions, self._gather_from(given.kind, spec, source))
        if given.offsets_at == NOWHERE:
            return values
        return RaggedRows(values, self._slice(given.offsets_at, given.num_offsets))

    def _gather_from(self, kind: int, spec: RowSpec, source: Source) -> torch.Tensor:
        memory = self._memory
        if source.location in (HOST, memory.location):
            return self._rows_at(kind, spec, source).index_select(0, self._slice(source.rows_at, source.num_rows))
        if self._host_words is None:
            raise RuntimeError("rows of another device cannot be gathered in captured work")
        rows = self._host_words[source.rows_at : source.rows_at + source.num_rows]
        return memory.device.fetch(memory.arenas[source.location][kind], rows)

    def _rows_at(self, kind: int, spec: RowSpec, source: Source) -> torch.Tensor:
        """Return the tensor with the rows from the host or of this location."""
        memory = self._memory
        return memory.up.rows(spec) if source.location == HOST else memory.arenas[memory.location][kind]

    def _store(self, output: OutputSignature, value: torch.Tensor) -> None:
        if not output.stores:
            return
        arena = self._memory.arenas[self._memory.location][output.kind]
        rows = self._slice(output.rows_at, output.stores)
        if output.positions_at == NOWHERE:
            arena.index_copy_(0, rows, value[: output.stores])
        else:
            positions = self._slice(output.positions_at, output.stores)
            arena.index_copy_(0, rows, value.index_select(0, positions))

    def _show(self, number: int, output: OutputSignature, outcome: DeviceOutcome) -> None:
        """Copy an output's results into the download ring."""
        if not output.results:
            return
        value = outcome.outputs[number]
        if output.every_step:  # of some rows of a loop; of the others the last, which lie behind
            value = torch.cat([outcome.every_step[number].flatten(0, 1), value])
        self._deliver(number, output, value)

    def _deliver(self, number: int, output: OutputSignature, source: torch.Tensor) -> None:
        ring = self._memory.down.rows(self._output_specs[number])
        if output.result_positions_at != NOWHERE:
            source = source.index_select(0, self._result_positions(output))
        ring.index_copy_(0, self._slice(output.result_rows_at, output.results), source[: output.results])

    def _result_positions(self, output: OutputSignature) -> torch.Tensor:
        return self._slice(output.result_positions_at, output.results)


def _bring_within(value: CellInput, limits: Limits, bad: torch.Tensor) -> CellInput:
    """Return an input clamped to its limits, and flag those of its first positions in ``bad`` that were outside."""
    given = plain(value)
    values = given.values if isinstance(given, RaggedRows) else given
    is_outside = limits.are_left_by(values).to(torch.int32)
    within = values.clamp(limits.first, limits.end - 1)
    if isinstance(given, RaggedRows):
        position = torch.bucketize(torch.arange(len(values), device=values.device), given.offsets[1:], right=True)
        counts = torch.zeros_like(bad).index_add_(0, position.clamp(max=len(bad) - 1), is_outside)
        bad |= OUTSIDE * (counts > 0)
        return RaggedRows(within, given.offsets)
    bad[: len(is_outside)] |= OUTSIDE * is_outside
    return within
