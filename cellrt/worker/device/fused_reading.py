"""Readers of the shapes of tasks whose cells read and write arena rows themselves (``FusedModule``).

Every position of every output that is read needs a row of the arena. Positions without a row from the scheduler get
one of the arena's scratch rows: state for the next step of the run takes turns in two sets of rows; a result that is
only downloaded has one of its own until then.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import HOST
from cellrt.worker.device import words
from cellrt.worker.device.packing import Packing, TaskReader
from cellrt.worker.device.shape import FUSED, SPANS, InputShape, OutputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature, OutputSignature

SPAN = 2


class CannotFuseError(Exception):
    """A task must run in the cell's plain form."""


def check_place(given: InputShape, location: int) -> None:
    """Raise CannotFuseError for rows of several or of other places, and for ragged ones."""
    if given.num_offsets >= 0 or given.source not in (-2, HOST, location):
        raise CannotFuseError


class FusedReader(TaskReader):
    """A reader of the shape of such a task; raises CannotFuseError if it cannot run fused."""

    form = FUSED
    is_fused = True
    keeps_finite = False
    """True if values that must be finite are kept at every position until the end, not only until the next step."""

    def read(self) -> Packing:
        """Return the packing of the shape."""
        self._scratch_used: dict[int, int] = {}
        return super().read()

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        check_place(given, self._location)
        return super()._input(number, kind, given)

    def _output(self, number: int, kind: int, made: OutputShape) -> OutputSignature:
        record, positions = self._record_of(number), self._shape.positions
        store_rows, stores = record + layout.OUT_STORE_ROWS, record + layout.OUT_STORES
        if made.is_whole and not made.results:
            first_row = self._copy(store_rows, stores, positions, -1)
            return OutputSignature(kind, positions, first_row, NOWHERE, 0, NOWHERE, NOWHERE, False)
        first_row = self._room(positions)
        self._scratch_rows(number, kind, made.results, first_row)
        stored = record + layout.OUT_STORE_POSITIONS
        self._operations.append((words.STORE, first_row, stored, store_rows, stores, 0, 0))
        delivered = self._results(kind, made.results, record)
        if made.results:
            fields = record + layout.OUT_RESULT_POSITIONS, first_row, record + layout.OUT_RESULTS
            self._operations.append((words.LOOK_UP, delivered[2], *fields, made.results, self._arenas.trash_row(kind)))
        return OutputSignature(kind, positions, first_row, NOWHERE, *delivered, False)

    def _scratch_rows(self, number: int, kind: int, results: int, at: int) -> None:
        """Give each position a scratch row if it needs one and is not stored, and -1 else."""
        cell, shape, record = self._type.cell, self._shape, self._record_of(number)
        name = list(cell.outputs)[number]
        first, room = self._arenas.scratch_rows(kind)
        used = self._scratch_used.get(kind, 0)
        fields = layout.H_BATCH_SIZES, shape.rows, layout.H_STEPS
        if name in cell.finite and self.keeps_finite:
            self._operations.append((words.RANGE, at, 0, 0, layout.H_POSITIONS, shape.positions, first + used))
            used, results = used + shape.positions, 0
        elif name in cell.carry.values() or name in cell.finite or number == shape.stop:
            self._operations.append((words.TURNS, at, *fields, shape.positions, first + used))
            used += 2 * shape.rows
        else:
            self._operations.append((words.FILL, at, 0, 0, 0, shape.positions, -1))
        if results:
            fields = record + layout.OUT_RESULT_POSITIONS, first + used, record + layout.OUT_RESULTS
            self._operations.append((words.SHOW, at, *fields, 0, 0))
        used += results
        if used > room:
            raise CannotFuseError
        self._scratch_used[kind] = used


class ChainReader(FusedReader):
    """A reader of a run of several steps that may go in one call."""

    keeps_finite = True

    def _sizes_words(self) -> int:
        return self._copy(layout.H_BATCH_SIZES, layout.H_STEPS, self._shape.steps, 0)


class ExactSpanReader(FusedReader):
    """A reader of a task of a form that reads spans, with unpadded numbers of rows."""

    def _spans_words(self) -> int:
        steps = self._shape.steps
        at = self._room(SPAN * (1 + steps))
        self._operations.append((words.SPANS, at, layout.H_BATCH_SIZES, 0, layout.H_STEPS, steps, 0))
        return at


class SpanReader(ExactSpanReader):
    """A reader of a task of a form that reads spans, with padded numbers of rows, steps and positions if it is
    captured.

    A run may go in one call.
    """

    form = SPANS
    keeps_finite = True

    def _sizes(self) -> tuple[int, ...]:
        return (self._shape.rows,) * self._shape.steps if self._pads else super()._sizes()

    def _sizes_words(self) -> int:
        is_run = self._shape.steps > 1
        return self._copy(layout.H_BATCH_SIZES, layout.H_STEPS, self._shape.steps, 0) if is_run else NOWHERE
