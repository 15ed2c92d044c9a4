"""Reads shapes of tasks with ragged inputs, padded to few numbers of nodes and of rows.

A form that says that it can (``reads_ragged``) is given nodes without rows, and rows of no node. A plain form knows
nothing of padding: to it further nodes must look like others. Each has the last node's other inputs, which may speak of
the node's rows, so it has as many rows as that; the last one also has those that fill up their number, which repeat the
last row. So no row is of no node. Where there can be no further node, as the task has as many as the cell takes, or
where those would have too many rows, the task is read as it is, and not captured.
"""

from __future__ import annotations

from cellrt.core.state.tables import HOST
from cellrt.worker.device.fused_reading import CannotFuseError, SpanReader, check_place
from cellrt.worker.device.packing import TaskReader
from cellrt.worker.device.shape import RAGGED, InputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature


class RaggedReader(TaskReader):
    """Reads a shape for the plain form, of a task that is no run; raises CannotFuseError if it cannot be padded."""

    form = RAGGED
    pads_ragged = True
    has_further = True

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        if given.num_rows < 0 or given.source not in (-2, HOST, self._location):
            raise CannotFuseError
        return super()._input(number, kind, given)


class RaggedInputs(TaskReader):
    """Of readers for forms that read spans: they take ragged inputs, too, unless they have limits."""

    pads_ragged = True

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        if given.num_offsets < 0:
            return super()._input(number, kind, given)
        check_place(given._replace(num_offsets=NOWHERE), self._location)
        if list(self._type.cell.inputs)[number] in self._limits:
            raise CannotFuseError
        return TaskReader._input(self, number, kind, given)


class RaggedSpanReader(RaggedInputs, SpanReader):
    """Reads a task of one step for such a form."""
