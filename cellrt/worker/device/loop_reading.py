"""Readers of the shapes of loops whose cells read and write arena rows themselves (``FusedModule``).

Each step writes scratch rows: state takes turns in two sets of them; outputs that are needed of every step, or checked
in the end, have a row for each. The words hold a rule for where the rows are (``cellrt.kernels.loop_rows``), as only
the
device knows which rows go on. In the end the last rows are copied to the rows that the scheduler chose.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import HOST
from cellrt.definition.cell import Cell
from cellrt.worker.device import words
from cellrt.worker.device.fused_reading import SPAN, CannotFuseError, check_place
from cellrt.worker.device.limits import Limits
from cellrt.worker.device.packing import Packing, TaskReader
from cellrt.worker.device.ragged_reading import RaggedInputs
from cellrt.worker.device.shape import LOOP, InputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature


class LoopReader(TaskReader):
    """A reader of the shape of such a task; raises CannotFuseError if it cannot run fused."""

    is_fused = True
    padding_steps = 0

    def read(self) -> Packing:
        """Return the packing of the shape."""
        stop = self._shape.stop
        if stop >= 0 and list(self._type.cell.outputs.values())[stop].dtype != torch.bool:
            raise CannotFuseError
        packing = super().read()
        self._used: dict[int, int] = {}
        outputs = [self._output_rows(number) for number in range(len(self._type.output_kinds))]
        inputs = [self._input_rows(number) for number in range(len(self._type.input_kinds))]
        plan_at = self._plan(outputs, inputs, [given.sources[0].rows_at for given in packing.signature.inputs])
        scratch = tuple(outputs + inputs)
        signature = packing.signature._replace(num_words=self._num_words, plan_at=plan_at, scratch=scratch)
        return packing._replace(signature=signature)

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        check_place(given, self._location)
        return super()._input(number, kind, given)

    def _output_rows(self, number: int) -> int:
        """Return the first scratch row of an output, or NOWHERE if it is not needed."""
        cell, made = self._type.cell, self._shape.outputs[number]
        name = list(cell.outputs)[number]
        if keeps_steps(cell, self._limits, name, made.every_step):
            return self._scratch(self._type.output_kinds[number], self._shape.steps * self._shape.rows)
        if made.stores or made.results or name in cell.carry.values() or number == self._shape.stop:
            return self._scratch(self._type.output_kinds[number], 2 * self._shape.rows)
        return NOWHERE

    def _input_rows(self, number: int) -> int:
        """Return the first scratch row of carried state from the host, which is copied there; or NOWHERE."""
        if number not in carried_inputs(self._type.cell) or self._shape.inputs[number].source != HOST:
            return NOWHERE
        return self._scratch(self._type.input_kinds[number], self._shape.rows)

    def _scratch(self, kind: int, count: int) -> int:
        first, room = self._arenas.scratch_rows(kind)
        used = self._used.get(kind, 0)
        self._used[kind] = used + count
        if self._used[kind] > room:
            raise CannotFuseError
        return first + used

    def _plan(self, outputs: list[int], inputs: list[int], rows_at: list[int]) -> int:
        """Write the places of rows in the layout of ``LoopTask``: of carried inputs, in order, and of all outputs.

        Return the first word.
        """
        cell, rows, steps = self._type.cell, self._shape.rows, self._shape.steps
        carried, names = carried_inputs(cell), list(cell.outputs)
        plan = []
        for number, source in carried.items():
            if self._type.input_kinds[number] != self._type.output_kinds[source]:
                raise CannotFuseError
            plan += [source, rows_at[number] if inputs[number] == NOWHERE else NOWHERE, inputs[number]]
        for number, first in enumerate(outputs):
            source = next((k for k, made in enumerate(carried.values()) if made == number), NOWHERE)
            if first == NOWHERE:
                plan += [NOWHERE, 0, 0, 1, source]
            elif keeps_steps(cell, self._limits, names[number], self._shape.outputs[number].every_step):
                plan += [first, steps, 1, steps, source]
            else:
                plan += [first, 1, rows, 2, source]
        plan_at = self._room(len(plan))
        self._operations += [(words.FILL, plan_at + k, 0, 0, 0, 1, number) for k, number in enumerate(plan)]
        return plan_at


class SpanLoopReader(LoopReader):
    """A reader of a loop's task of a form that reads spans, padded to few numbers of rows."""

    form = LOOP

    def _spans_words(self) -> int:
        at = self._room(SPAN)
        self._operations.append((words.SPANS, at, layout.H_BATCH_SIZES, 0, layout.H_STEPS, 0, 0))
        return at


class RaggedLoopReader(RaggedInputs, SpanLoopReader):
    """A reader of a loop's task of a form that reads spans and takes ragged inputs, whose numbers of rows are padded,
    too.
    """


def keeps_steps(cell: Cell, limits: Mapping[str, Limits], name: str, every_step: bool) -> bool:
    """Return whether an output of a loop has rows for every step, to be shown, or checked in the end."""
    return (
        every_step or name in cell.finite or any(limits.keys() & {key for key in cell.carry if cell.carry[key] == name})
    )


def carried_inputs(cell: Cell) -> dict[int, int]:
    """Return the numbers of the inputs that a loop carries, with those of their outputs."""
    inputs, outputs = list(cell.inputs), list(cell.outputs)
    return {inputs.index(name): outputs.index(source) for name, source in cell.carry.items()}
