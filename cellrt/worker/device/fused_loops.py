"""Tasks of loops whose cells read and write arena rows themselves (``FusedModule``).

Each step is a call of ``run_rows``. Between two steps one launch finds the rows that go on
(``cellrt.kernels.loop_rows``). A row that has stopped reads the rows of its last step again, and writes nothing. Some
rows stopped in an earlier task already, which the host did not know when it sent this one. They read the state that
they were given. So the outputs of a stopped row stay those of its last step, and its state stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cellrt.definition.fused import IndexedRows, SpannedRows, StepRows
from cellrt.definition.spec import CellInput
from cellrt.kernels.loop_rows import LoopRows, LoopTask, begin, go_on
from cellrt.worker.device.fused_reading import SPAN, CannotFuseError
from cellrt.worker.device.loop_reading import carried_inputs, keeps_steps
from cellrt.worker.device.operations import Counts, Operations
from cellrt.worker.device.signature import NOT_FINITE, NOWHERE, OUTSIDE, OutputSignature
from cellrt.worker.failed_rows import Failures
from cellrt.worker.torch_state import CellMode


class FusedLoopOperations(Operations):
    """Operations that call ``run_rows`` for each step."""

    def run(self, counts: Counts, failures: Failures | None) -> None:
        """Run the task, as ``Operations.run`` does. After an error run it again as plain operations, to find the
        failing rows.
        """
        try:
            with CellMode(self._memory.device.torch_device.type):
                state = self._run_steps()
        except BaseException as error:
            if failures is None or self._memory.device.is_fatal(error):
                raise
            self._memory.device.check()
            failures.split = error
            super().run(counts, failures)
            return
        signature, last_rows = self._signature, state.rows[len(self._carried) + len(self._signature.outputs) :]
        for k, output in enumerate(signature.outputs):
            if output.stores:
                self._store(output, self._arena(output.kind).index_select(0, last_rows[k]))
            if output.results:
                self._deliver(k, output, self._results(k, output, last_rows[k]))
        faults = self._faults(state)
        if signature.flags_at != NOWHERE:
            flags = self._slice(signature.flags_at + signature.sizes[0], signature.sizes[0])
            self._memory.flags.index_copy_(0, flags, (state.done <= 0) | (faults != 0))
        self._answer([state.done, faults])

    def _run_steps(self) -> LoopRows:
        """Run all steps; return the state of the rows after the last."""
        cell, signature, run_rows = self._placed.cell, self._signature, self._placed.run_rows
        if run_rows is None:
            raise CannotFuseError(f"cell {cell.name!r} has no method run_rows")
        self._carried = carried_inputs(cell)
        count = len(self._carried), len(signature.outputs)
        places = signature.plan_at, signature.lengths_at, signature.flags_at, signature.stop
        task = LoopTask(self._words, signature.sizes[0], *count, *places)
        flags = self._memory.flags
        stops = flags if signature.stop == NOWHERE else self._arena(signature.outputs[signature.stop].kind)
        self._copy_carried_from_host()
        state = begin(task, flags, stops)
        inputs, outputs = self._step_inputs(state), self._step_outputs(state)
        for step in range(len(signature.sizes)):
            if step > 0:
                go_on(task, state, step - 1, flags, stops)
            run_rows(inputs, outputs)
        go_on(task, state, len(signature.sizes) - 1, flags, stops)
        return state

    def _copy_carried_from_host(self) -> None:
        """Copy carried inputs that lie in host memory to the arena rows in which later steps keep them."""
        signature = self._signature
        for number in self._carried:
            first = signature.scratch[len(signature.outputs) + number]
            if first == NOWHERE:
                continue
            given = signature.inputs[number].sources[0]
            source = self._memory.up.rows(self._specs[number])
            target = self._arena(signature.inputs[number].kind)[first : first + given.num_rows]
            target.copy_(source.index_select(0, self._slice(given.rows_at, given.num_rows)))

    def _step_inputs(self, state: LoopRows) -> Mapping[str, StepRows | CellInput]:
        """Return the inputs of every step. The row numbers of carried inputs are written anew before each step."""
        inputs: dict[str, StepRows | CellInput] = {}
        carried = list(self._carried)
        for number, (name, given) in enumerate(zip(self._placed.cell.inputs, self._signature.inputs)):
            if number in self._carried:
                inputs[name] = self._rows(self._arena(given.kind), state.rows[carried.index(number)])
            elif given.offsets_at != NOWHERE:
                inputs[name] = self._gather(number, given)
            else:
                source = given.sources[0]
                values = self._rows_at(given.kind, self._specs[number], source)
                inputs[name] = self._rows(values, self._slice(source.rows_at, source.num_rows))
        return inputs

    def _step_outputs(self, state: LoopRows) -> Mapping[str, StepRows]:
        first = len(self._carried)
        return {
            name: self._rows(self._arena(output.kind), state.rows[first + k])
            for k, (name, output) in enumerate(zip(self._placed.cell.outputs, self._signature.outputs))
        }

    def _rows(self, values: torch.Tensor, numbers: torch.Tensor) -> StepRows:
        """Return the rows with these numbers. If the task has spans, the device knows how many of them there are."""
        signature = self._signature
        if signature.spans_at == NOWHERE:
            return IndexedRows(values, numbers)
        return SpannedRows(values, numbers, signature.sizes[0], self._slice(signature.spans_at, SPAN))

    def _results(self, number: int, output: OutputSignature, last_rows: torch.Tensor) -> torch.Tensor:
        """Return an output after the last step: ``[rows, *shape]``. If every step is a result, all come before it."""
        arena, signature = self._arena(output.kind), self._signature
        last = arena.index_select(0, last_rows)
        if not output.every_step:
            return last
        first = signature.scratch[number]
        return torch.cat([arena[first : first + len(signature.sizes) * signature.sizes[0]], last])

    def _faults(self, state: LoopRows) -> torch.Tensor:
        """Return the faults of each row in the steps that it took, as flags: int32 ``[rows]``."""
        cell, limits, signature = self._placed.cell, self._placed.limits, self._signature
        rows, done = signature.sizes[0], state.done.abs()
        faults = torch.zeros(rows, dtype=torch.int32, device=done.device)
        for number, (name, given) in enumerate(zip(cell.inputs, signature.inputs)):
            if name in limits:
                source, first = given.sources[0], signature.scratch[len(signature.outputs) + number]
                values = self._rows_at(given.kind, self._specs[number], source)
                if first == NOWHERE:
                    values = values.index_select(0, self._slice(source.rows_at, rows))
                else:
                    values = self._arena(given.kind)[first : first + rows]
                faults |= OUTSIDE * (limits[name].are_left_by(values) & (done > 0))
        for k, (name, output) in enumerate(zip(cell.outputs, signature.outputs)):
            if not keeps_steps(cell, limits, name, False):
                continue
            first, steps = signature.scratch[k], len(signature.sizes)
            values = self._arena(output.kind)[first : first + steps * rows]
            numbers = torch.arange(steps, device=done.device)
            if name in cell.finite:
                is_bad = ~torch.isfinite(values).reshape(rows, steps, -1).all(2)
                faults |= NOT_FINITE * (is_bad & (numbers < done[:, None])).any(1)
            for given_name in limits.keys() & {key for key in cell.carry if cell.carry[key] == name}:
                is_bad = limits[given_name].are_left_by(values).view(rows, steps)
                faults |= OUTSIDE * (is_bad & (numbers + 1 < done[:, None])).any(1)
        return faults

    def _arena(self, kind: int) -> torch.Tensor:
        return self._memory.arenas[self._memory.location][kind]


def warm_up_loop_kernel(device: torch.device) -> None:
    """Compile the kernel that runs between two steps, by launching it once. All loops share it."""
    words, flags = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    begin(LoopTask(words, 1, 0, 0, 0, 0, NOWHERE, NOWHERE), flags, flags)
