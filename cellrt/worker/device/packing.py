"""Reading of a task's shape (``shape.py``) for a device: operations that write one vector of words, and a signature.

The *words* are the row numbers of all inputs and outputs, int64, in one piece, so that they travel in one copy. The
*signature* says where in the words each of them lies and how many there are; it holds no addresses and no row numbers,
so tasks with equal signatures do the same operations on the same memory, and can share a captured graph.

Rows that come from the host lie in the upload ring, and are named like rows of an arena. Where the number of rows
is padded, padding inputs repeat the last row, which is always legal for the cell, and padding outputs go to the
arena's trash row, which is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK
from cellrt.core.state.task_layout import input_record_at, output_record_at
from cellrt.worker.cell_type import CellType
from cellrt.worker.device import step_words, words
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.limits import Limits
from cellrt.worker.device.shape import PLAIN, InputShape, OutputShape, Shape
from cellrt.worker.device.signature import NOWHERE, InputSignature, OutputSignature, Signature, Source
from cellrt.worker.device.words import REPEAT

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64] | Ints


class Transfer(NamedTuple):
    """Rows that are uploaded or downloaded: ``words[at : at + padded]`` become their rows in that ring.

    ``source`` and ``num_rows`` are fields of a task: the place of the numbers of the host's rows, and their number. If
    ``source`` is NOWHERE the numbers are ``rows``, and ``num_rows`` is their number.
    """

    kind: int
    source: int
    num_rows: int
    at: int
    padded: int
    rows: Ints | None = None

    def host_rows(self, buffer: Ints) -> Ints:
        """Return the numbers of the host's rows."""
        if self.rows is not None:
            return self.rows
        first = int(buffer[self.source])
        return buffer[first : first + int(buffer[self.num_rows])]


Part = tuple[int, int, int, int, int, int, int]
"""An array of a block, in the layout of ``step_words.py``."""


class RunSteps(NamedTuple):
    """The way of a run step by step.

    Attributes:
        sizes: the numbers of rows that a step may have, rising.
        parts: the arrays of a block.
        first: the signature of the first step, for one row; ``sizes`` is empty, as it is that of all sizes.
        later: the same for the other steps, whose carried inputs lie in arena rows, wherever the first step's are.
    """

    sizes: list[int]
    parts: list[Part]
    first: Signature
    later: Signature

    def num_words(self, rows: int) -> int:
        """Return the words of the block of a step of this many rows."""
        return step_words.HEAD + len(self.parts) * rows


class Packing(NamedTuple):
    """The result of reading a task's shape.

    Tasks of the same shape have the same packing, unless ``computed`` has entries.
    """

    signature: Signature
    operations: list[tuple[int, ...]]
    """The operations that copy the buffer's numbers into the words (``words.py``)."""
    computed: list[tuple[int, Numbers]]
    """Pairs of (word, values) for numbers that are not in the buffer."""
    uploads: list[Transfer]
    downloads: list[Transfer]
    checked: list[tuple[int, Limits]]
    """The numbers of uploads whose values must be within limits."""
    can_capture: bool
    steps: RunSteps | None = None
    """The way of a run step by step; None: it is no run, or goes in one call."""


class TaskReader:
    """A reader of one shape: it appends words, one array after the other.

    Args:
        location: the location of the worker.
        cell_type: the cell type of the task.
        shape: the shape of the task.
        buffer: the task's buffer. It is only read where numbers of the shape are computed.
        arenas: the arenas of the location.
        pads: whether numbers of rows are padded, and tasks are captured.
        limits: the limits of the inputs.
    """

    form = PLAIN
    is_fused = False
    pads_ragged = False
    has_further = False
    """True if padding nodes have rows of ragged inputs."""
    padding_steps = 1
    """The steps of a loop that padding rows take."""

    def __init__(
        self,
        location: int,
        cell_type: CellType,
        shape: Shape,
        buffer: Ints,
        arenas: DeviceArenas,
        pads: bool,
        limits: Mapping[str, Limits],
    ) -> None:
        self._location, self._type, self._shape, self._buffer = location, cell_type, shape, buffer
        self._arenas, self._limits = arenas, limits
        self._is_run = shape.steps > 1 and not shape.is_loop
        self._pads = pads and (self.pads_ragged or not any(spec.ragged for spec in cell_type.cell.inputs.values()))
        self._num_words = 0
        self._operations: list[tuple[int, ...]] = []
        self._computed: list[tuple[int, Numbers]] = []
        self._uploads: list[Transfer] = []
        self._downloads: list[Transfer] = []
        self._checked: list[tuple[int, Limits]] = []
        self._can_capture = self._pads

    def read(self) -> Packing:
        """Return the packing of the shape."""
        cell, shape = self._type.cell, self._shape
        # Inputs and outputs, with the transfers that they need.
        inputs = []
        for number, (name, kind, given) in enumerate(zip(cell.inputs, self._type.input_kinds, shape.inputs)):
            if self._is_checked_here(name, given) and given.num_rows:
                self._checked.append((len(self._uploads), self._limits[name]))
            inputs.append(self._input(number, kind, given))
        outputs = tuple(
            self._output(number, kind, made)
            for number, (kind, made) in enumerate(zip(self._type.output_kinds, shape.outputs))
        )
        # The number of steps of each row of a loop.
        lengths_at, answers_at = NOWHERE, NOWHERE
        if shape.is_loop:
            lengths_at = self._copy(layout.H_LENGTHS, layout.H_ROWS, shape.rows, self.padding_steps)
        # The answers: which rows failed or stopped, as far as the host needs to know.
        tells_bad = not shape.is_loop and (bool(cell.finite) or self._reads_unchecked())
        tells_rows = shape.is_loop or shape.stop >= 0
        tells_rows = tells_rows or (shape.has_flags and any(made.results for made in shape.outputs))
        answers = self._num_answers(tells_rows, tells_bad)
        if answers:
            answers_at = self._room(answers)
        # Further arrays that the device reads, and the flags of loops that go ahead.
        sizes_at, spans_at, nodes_at = self._sizes_words(), self._spans_words(), self._nodes_words()
        flags_at = NOWHERE
        if shape.has_flags:
            flags_at = self._copy(layout.H_FLAGS, layout.H_ROWS, shape.rows, REPEAT)
            self._copy(layout.H_NEW_FLAGS, layout.H_ROWS, shape.rows, layout.NOBODYS)
        signature = Signature(
            self._type.id,
            self.is_fused,
            self._sizes(),
            shape.positions,
            shape.is_loop,
            shape.stop,
            tuple(inputs),
            outputs,
            lengths_at,
            answers,
            answers_at,
            tells_bad,
            sizes_at,
            spans_at,
            flags_at,
            self._num_words,
            tells_rows,
            shape.nodes,
            nodes_at,
        )
        return Packing(
            signature,
            self._operations,
            self._computed,
            self._uploads,
            self._downloads,
            self._checked,
            self._can_capture,
        )

    def _num_answers(self, tells_rows: bool, tells_bad: bool) -> int:
        """Return the number of answers (see ``Signature.answers``)."""
        shape = self._shape
        if shape.is_loop:
            return 2 * shape.rows
        return (shape.rows if tells_rows else 0) + (shape.positions if tells_bad else 0)

    def _is_checked_here(self, name: str, given: InputShape) -> bool:
        """Return whether the host checks an input with limits: it uploads all of it, a row for each position."""
        is_uploaded = given.source == HOST and given.num_offsets < 0
        return is_uploaded and name in self._limits and self._type.cell.inputs[name].dtype == torch.int64

    def _reads_unchecked(self) -> bool:
        """Return whether an input with limits is left for the device to check."""
        given = zip(self._type.cell.inputs, self._shape.inputs)
        return any(name in self._limits and not self._is_checked_here(name, one) for name, one in given)

    def _sizes(self) -> tuple[int, ...]:
        """Return the rows of each step, with the padding."""
        return self._shape.sizes if self._is_run else (self._shape.rows,) * self._shape.steps

    def _sizes_words(self) -> int:
        """Return the first word of the steps' sizes, where they are needed."""
        return NOWHERE

    def _spans_words(self) -> int:
        """Return the first word of the steps' spans, where they are needed."""
        return NOWHERE

    def _nodes_words(self) -> int:
        """Return the first word of the arrays of nodes, where they are needed."""
        return NOWHERE

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        record = input_record_at(number)
        if given.source == MIXED:
            self._can_capture = False
            at, count = self._buffer[record + layout.IN_ROWS], self._buffer[record + layout.IN_COUNT]
            sources = self._sources(kind, self._buffer[at : at + count], given.num_rows)
        else:
            sources = (self._source(kind, given, record),)
        if given.num_offsets < 0:
            return InputSignature(kind, given.num_rows, sources, NOWHERE, 0)
        # The offsets lie right before the rows.
        offsets_at = self._room(given.num_offsets)
        fields = record + layout.IN_OFFSETS, record + layout.IN_ROWS, record + layout.IN_COUNT
        end = given.num_rows if self.has_further else 0
        self._operations.append((words.OFFSETS, offsets_at, *fields, given.num_offsets, end))
        return InputSignature(kind, given.num_rows, sources, offsets_at, given.num_offsets)

    def _source(self, kind: int, given: InputShape, record: int) -> Source:
        """Return the source of rows that all lie at one location."""
        location = given.source if given.source >= 0 else self._location
        fields, padded = (record + layout.IN_ROWS, record + layout.IN_COUNT), given.num_rows
        if location == HOST and padded:
            at = self._room(padded)
            self._uploads.append(Transfer(kind, *fields, at, padded))
        else:
            self._can_capture = self._can_capture and location in (self._location, HOST)
            at = self._copy(*fields, padded, REPEAT)
        return Source(location, padded, at, NOWHERE)

    def _sources(self, kind: int, handles: Ints, padded: int) -> tuple[Source, ...]:
        """Return the sources of rows from several locations."""
        if padded > len(handles):
            handles = np.concatenate([handles, np.repeat(handles[-1:], padded - len(handles))])
        locations = np.where(handles < NUM_PERMANENT, self._location, handles >> LOCATION_SHIFT)
        sources = []
        for location in np.unique(locations).tolist():
            positions = np.flatnonzero(locations == location)
            rows, count = handles[positions] & ROW_MASK, len(positions)
            positions_at = self._compute(positions)
            if location == HOST:
                at = self._room(count)
                self._uploads.append(Transfer(kind, NOWHERE, count, at, count, rows))
            else:
                at = self._compute(rows)
            sources.append(Source(location, count, at, positions_at))
        return tuple(sources)

    def _record_of(self, number: int) -> int:
        """Return the place of the record of an output."""
        return output_record_at(len(self._type.input_kinds), number)

    def _output(self, number: int, kind: int, made: OutputShape) -> OutputSignature:
        record = self._record_of(number)
        first_row = first_position = NOWHERE
        if made.stores:
            trash, count = self._arenas.trash_row(kind), record + layout.OUT_STORES
            first_row = self._copy(record + layout.OUT_STORE_ROWS, count, made.stores, trash)
            if not made.is_whole:
                first_position = self._copy(record + layout.OUT_STORE_POSITIONS, count, made.stores, 0)
        delivered = self._results(kind, made.results, record)
        if made.results:
            padded_rows = self._shape.rows if made.every_step else NOWHERE
            fields = record + layout.OUT_RESULT_POSITIONS, 0, record + layout.OUT_RESULTS
            self._operations.append((words.SHIFT, delivered[2], *fields, made.results, padded_rows))
        return OutputSignature(kind, made.stores, first_row, first_position, *delivered, made.every_step)

    def _results(self, kind: int, count: int, record: int) -> tuple[int, int, int]:
        """Add the download of results to host rows.

        Return their number, the first word of their rows in the ring, and the first word of their positions, which the
        caller
        writes.
        """
        if not count:
            return 0, NOWHERE, NOWHERE
        words_at = self._room(count)
        at = self._room(count)
        fields = record + layout.OUT_RESULT_ROWS, record + layout.OUT_RESULTS
        self._downloads.append(Transfer(kind, *fields, at, count))
        return count, at, words_at

    def _room(self, count: int) -> int:
        at = self._num_words
        self._num_words += count
        return at

    def _copy(self, source: int, count: int, padded: int, pad: int) -> int:
        """Add words that are copied from the buffer, from the place and in the number of two
        fields; return the first.
        """
        at = self._room(padded)
        self._operations.append((words.COPY, at, source, 0, count, padded, pad))
        return at

    def _compute(self, values: Numbers) -> int:
        """Add words with values of their own; return the first."""
        at = self._room(len(values))
        self._computed.append((at, values))
        return at
