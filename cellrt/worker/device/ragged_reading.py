"""Readers of the shapes of tasks with ragged inputs, padded to few numbers of nodes and of rows.

A form that declares it (``reads_ragged``) gets nodes without rows, and rows of no node. A plain form knows nothing of
padding: padding nodes must look like others. Each has the last node's other inputs, which may refer to the node's rows,
so it has as many rows as that; the last padding node also has the padding rows, which repeat the last row. So no row is
of no node. Where there can be no padding node, as the task has as many nodes as the cell takes, or where those would
have too many rows, the task is read as it is, and not captured.
"""

from __future__ import annotations

from cellrt.core.state.tables import HOST
from cellrt.worker.device.fused_reading import CannotFuseError, SpanReader, check_place
from cellrt.worker.device.packing import TaskReader
from cellrt.worker.device.shape import RAGGED, InputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature


class RaggedReader(TaskReader):
    """A reader for the plain form, of a task that is no run; raises CannotFuseError if it cannot be padded."""

    form = RAGGED
    pads_ragged = True
    has_further = True

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        if given.num_rows < 0 or given.source not in (-2, HOST, self._location):
            raise CannotFuseError
        return super()._input(number, kind, given)


class RaggedInputs(TaskReader):
    """A base of readers for forms that read spans and take ragged inputs, unless these have limits."""

    pads_ragged = True

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        if given.num_offsets < 0:
            return super()._input(number, kind, given)
        check_place(given._replace(num_offsets=NOWHERE), self._location)
        if list(self._type.cell.inputs)[number] in self._limits:
            raise CannotFuseError
        return TaskReader._input(self, number, kind, given)


class RaggedSpanReader(RaggedInputs, SpanReader):
    """A reader of a task of one step for such a form."""
