"""Reads a task's buffer (``core/task_layout.py``) into what a device needs: one vector of words, and a signature.

The *words* are the row numbers of all inputs and outputs, int64, in one piece, so that they travel in one copy. The
*signature* says where in the words each of them lies and how many there are; it holds no addresses and no row numbers,
so tasks with equal signatures do the same operations on the same memory, and can share a captured graph.

Rows that come from the host lie in the upload ring, and are named like rows of an arena. Where the number of rows
is padded, further inputs repeat the last row, which is always legal for the cell, and further outputs go to the
arena's last row, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.tables import HOST, LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK
from cellrt.core.task_layout import IN_COUNT, IN_OFFSETS, IN_SOURCE, TaskView
from cellrt.worker.cell_type import CellType
from cellrt.worker.device import launch
from cellrt.worker.device.arenas import DeviceArenas
from cellrt.worker.device.launch import REPEAT
from cellrt.worker.device.limits import Limits

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64] | Ints

NOWHERE = -1
NOT_FINITE, OUTSIDE = 1, 2
"""What is bad of a position (of a loop: a row), or both: an output is not finite, an input is outside its limits."""


class Source(NamedTuple):
    """Rows of an input that lie at one location."""

    location: int
    num_rows: int
    rows_at: int
    """First word of their row numbers there; at the host, in the upload ring."""
    positions_at: int
    """First word of which of the input's rows they are, or NOWHERE: all, in order."""


class InputSignature(NamedTuple):
    """One input: its rows, and for a ragged one ``num_offsets`` offsets."""

    kind: int
    num_rows: int
    sources: tuple[Source, ...]
    offsets_at: int
    num_offsets: int


class OutputSignature(NamedTuple):
    """One output: which of its rows go to the arena, and which to the host (to rows of the download ring).

    Of a fused cell, ``stores`` are all its positions, and ``result_positions_at`` has rows of the arena.
    """

    kind: int
    stores: int
    rows_at: int
    positions_at: int
    """NOWHERE: all, in order."""
    results: int
    result_rows_at: int
    result_positions_at: int
    every_step: bool


class Signature(NamedTuple):
    """What a task does, apart from which rows it does it to."""

    type_id: int
    fused: bool
    """Whether the cell reads and writes arena rows itself."""
    sizes: tuple[int, ...]
    """Rows of each step, the padding included; of a loop, all rows at every step; where the device counts them, the
    most there may be."""
    positions: int
    """Rows of all steps, the padding included; of a loop, those of a step."""
    is_loop: bool
    stop: int
    """Output that says stop, of a loop or at the first step of rows that are of some; or NOWHERE."""
    inputs: tuple[InputSignature, ...]
    outputs: tuple[OutputSignature, ...]
    lengths_at: int
    answers: int
    """Integers that come back: of a loop, steps done and what is bad, for each row; of other tasks for each row of the
    first step whether it says stop, where an output does, and if ``tells_bad`` what is bad of each position."""
    answers_at: int
    tells_bad: bool
    """Whether, of what is no loop, there is an answer for each position: ``NOT_FINITE``, ``OUTSIDE``, or 0."""
    sizes_at: int
    """First word of the sizes of a fused run that may go in one call, else NOWHERE."""
    spans_at: int
    """First word of the spans that a fused cell reads (``SpannedRows``): that of the first state, then of each step; or
    NOWHERE."""
    num_words: int


class Transfer(NamedTuple):
    """Rows that travel with the task, or come back: ``words[at : at + padded]`` become their rows in that ring."""

    kind: int
    num_rows: int
    source: int
    """Where in the buffer the numbers of the host's rows begin, or NOWHERE: then they are ``rows``."""
    at: int
    padded: int
    rows: Ints | None = None

    def host_rows(self, buffer: Ints) -> Ints:
        """The numbers of the host's rows."""
        return buffer[self.source : self.source + self.num_rows] if self.rows is None else self.rows


class Packing(NamedTuple):
    """A task, read. Tasks of the same header and records have the same packing, unless ``computed`` is not empty."""

    signature: Signature
    rows: int
    positions: int
    sizes: tuple[int, ...]
    """Rows of each step, without padding."""
    fixed: NDArray[np.int64]
    """Words as they are for every task of this packing, as far as no operation writes them."""
    operations: list[tuple[int, ...]]
    """How the buffer's numbers get into the words, as ``launch.py`` has it."""
    computed: list[tuple[int, Numbers]]
    """(word, values): what is not in the buffer as it is."""
    uploads: list[Transfer]
    downloads: list[Transfer]
    checked: list[tuple[int, Limits]]
    """Uploads whose values must be within limits."""
    can_capture: bool


class TaskReader:
    """One task being read: words are appended one array after the other."""

    is_fused = False

    def __init__(
        self,
        location: int,
        cell_type: CellType,
        task: TaskView,
        arenas: DeviceArenas,
        pad: bool,
        limits: Mapping[str, Limits],
    ) -> None:
        self._location, self._type, self._task, self._buffer = location, cell_type, task, task.buffer
        self._arenas, self._limits = arenas, limits
        self._rows, self._positions, self._steps = task.num_rows, task.num_positions, task.num_steps
        self._is_loop = task.is_loop
        self._sizes: list[int] = task.batch_sizes.tolist()
        is_ragged = any(spec.ragged for spec in cell_type.cell.inputs.values())
        self._pads_counts = pad and not is_ragged
        self._padded = self._rows
        if self._steps == 1 or self._is_loop:
            self._padded = _padded_rows(cell_type, self._rows, self._pads_counts)
        self._padded_positions = self._padded if self._steps == 1 or self._is_loop else self._positions
        self._num_words = 0
        self._fixed: list[tuple[int, Numbers]] = []
        self._operations: list[tuple[int, ...]] = []
        self._computed: list[tuple[int, Numbers]] = []
        self._uploads: list[Transfer] = []
        self._downloads: list[Transfer] = []
        self._checked: list[tuple[int, Limits]] = []
        self._can_capture = self._pads_counts

    def read(self) -> Packing:
        """Reads it."""
        cell, task = self._type.cell, self._task
        inputs = []
        for name, kind, words in zip(cell.inputs, self._type.input_kinds, task.inputs):
            if self._is_checked_here(name, words) and words[IN_COUNT]:
                self._checked.append((len(self._uploads), self._limits[name]))
            inputs.append(self._input(kind, *words))
        outputs = tuple(
            self._output(number, kind, *words)
            for number, (kind, words) in enumerate(zip(self._type.output_kinds, task.outputs))
        )
        lengths_at, answers, answers_at, tells_bad = NOWHERE, 0, NOWHERE, False
        if self._is_loop:
            lengths_at = self._copy(task.lengths_at, self._rows, self._padded, 1)
            answers = 2 * self._padded
        else:
            answers = self._padded if task.stop_output >= 0 else 0
            tells_bad = bool(cell.finite) or self._reads_unchecked()
            if tells_bad:
                answers += self._padded_positions
        if answers:
            answers_at = self._room(answers)
        sizes_at, spans_at = self._sizes_words(), self._spans_words()
        signature = Signature(
            self._type.id,
            self.is_fused,
            self._padded_sizes(),
            self._padded_positions,
            self._is_loop,
            task.stop_output,
            tuple(inputs),
            outputs,
            lengths_at,
            answers,
            answers_at,
            tells_bad,
            sizes_at,
            spans_at,
            self._num_words,
        )
        return Packing(
            signature,
            self._rows,
            self._positions,
            tuple(self._sizes),
            self._fixed_words(),
            self._operations,
            self._computed,
            self._uploads,
            self._downloads,
            self._checked,
            self._can_capture,
        )

    def _is_checked_here(self, name: str, words: list[int]) -> bool:
        """Whether the host checks an input with limits: it does where it uploads all of it, a row for each position."""
        is_uploaded = words[IN_SOURCE] == HOST and words[IN_OFFSETS] < 0
        return is_uploaded and name in self._limits and self._type.cell.inputs[name].dtype == torch.int64

    def _reads_unchecked(self) -> bool:
        """Whether an input with limits is left for the device to check."""
        given = zip(self._type.cell.inputs, self._task.inputs)
        return any(name in self._limits and not self._is_checked_here(name, words) for name, words in given)

    def _padded_sizes(self) -> tuple[int, ...]:
        """Rows of each step, with the padding."""
        if self._is_loop or self._steps == 1:
            return (self._padded,) * self._steps
        return tuple(self._sizes)

    def _sizes_words(self) -> int:
        """Words of the steps' sizes, where they are needed."""
        return NOWHERE

    def _spans_words(self) -> int:
        """Words of the steps' spans, where they are needed."""
        return NOWHERE

    def _input(self, kind: int, source: int, count: int, at: int, offsets_at: int) -> InputSignature:
        padded = count
        if offsets_at < 0 and count in (self._rows, self._positions):
            padded = self._padded if count == self._rows else self._padded_positions
        if source == MIXED:
            self._can_capture = False
            sources = self._sources(kind, self._buffer[at : at + count], padded)
        else:
            sources = (self._source(kind, source if source >= 0 else self._location, at, count, padded),)
        if offsets_at < 0:
            return InputSignature(kind, padded, sources, NOWHERE, 0)
        # The offsets lie right before the rows. Further nodes have no rows.
        num_offsets = at - offsets_at
        padded_offsets = self._padded + 1 if num_offsets == self._rows + 1 else num_offsets
        words_at = self._copy(offsets_at, num_offsets, padded_offsets, count)
        return InputSignature(kind, count, sources, words_at, padded_offsets)

    def _source(self, kind: int, location: int, rows_at: int, count: int, padded: int) -> Source:
        """Rows that all lie at one location."""
        if location == HOST and count:
            at = self._room(padded)
            self._uploads.append(Transfer(kind, count, rows_at, at, padded))
        else:
            self._can_capture = self._can_capture and location in (self._location, HOST)
            at = self._copy(rows_at, count, padded, REPEAT)
        return Source(location, padded, at, NOWHERE)

    def _sources(self, kind: int, handles: Ints, padded: int) -> tuple[Source, ...]:
        """Splits rows from several locations."""
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
                self._uploads.append(Transfer(kind, count, NOWHERE, at, count, rows))
            else:
                at = self._compute(rows)
            sources.append(Source(location, count, at, positions_at))
        return tuple(sources)

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
        is_packed = self._steps > 1 and not self._is_loop
        is_whole = stores == (self._positions if is_packed else self._rows)
        first_row = first_position = NOWHERE
        padded_stores = 0
        if stores:
            trash = self._arenas.trash_row(kind)
            padded_stores = self._count(stores)
            if is_whole:
                padded_stores = stores if is_packed else self._padded
            first_row = self._copy(rows_at, stores, padded_stores, trash)
            if not is_whole:
                first_position = self._copy(positions_at, stores, padded_stores, 0)
        delivered = self._results(kind, results, result_rows_at)
        if results:
            limit = self._rows * self._steps  # behind the padding's steps, too, lie the last steps
            shift = (self._padded - self._rows) * self._steps if every_step else 0
            at, padded = delivered[2], delivered[0]
            self._operations.append((launch.SHIFT, at, result_positions_at, limit, results, padded, shift))
        return OutputSignature(kind, padded_stores, first_row, first_position, *delivered, bool(every_step))

    def _results(self, kind: int, count: int, rows_at: int) -> tuple[int, int, int]:
        """Results go to host rows.

        Returns (how many, words of their rows in the ring, words of where they are from, which are yet to be written).
        """
        if not count:
            return 0, NOWHERE, NOWHERE
        padded = self._count(count)
        words_at = self._room(padded)
        at = self._room(padded)
        self._downloads.append(Transfer(kind, count, rows_at, at, padded))
        return padded, at, words_at

    def _count(self, count: int) -> int:
        """How many rows are stored or shown where ``count`` are wanted."""
        return next_size(count) if self._pads_counts else count

    def _room(self, count: int) -> int:
        at = self._num_words
        self._num_words += count
        return at

    def _copy(self, source: int, count: int, padded: int, pad: int) -> int:
        """Words that are copied from the buffer; returns the first."""
        at = self._room(padded)
        self._operations.append((launch.COPY, at, source, 0, count, padded, pad))
        return at

    def _fix(self, values: Numbers, padded: int, pad: int) -> int:
        """Words that are the same for all tasks of this layout, but for what operations write; returns the first."""
        at = self._room(padded)
        self._fixed.append((at, np.concatenate([values, np.full(padded - len(values), pad, np.int64)])))
        return at

    def _fixed_words(self) -> NDArray[np.int64]:
        words = np.zeros(self._num_words if self._fixed else 0, np.int64)
        for at, values in self._fixed:
            words[at : at + len(values)] = values
        return words

    def _compute(self, values: Numbers) -> int:
        """Words with values of their own; returns the first."""
        at = self._room(len(values))
        self._computed.append((at, values))
        return at


def next_size(count: int) -> int:
    """The next of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: at most half more than ``count`` above 2."""
    power = 1 << max(0, count - 1).bit_length()
    smaller = 3 * power // 4
    return smaller if power >= 4 and smaller >= count else power


def _padded_rows(cell_type: CellType, rows: int, pad: bool) -> int:
    cell = cell_type.cell
    if cell.batch_sizes:
        return next(size for size in cell.batch_sizes if size >= rows)
    return min(next_size(rows), max(rows, cell.max_batch)) if pad else rows
