"""Reads a task's buffer (``core/task_layout.py``) into what a device needs: one vector of words, and a layout of it.

The *words* are the row numbers of all inputs and outputs, int64, in one piece, so that they travel in one copy. The
*layout* says where in the words each of them lies and how many there are; it holds no addresses and no row numbers,
so tasks with equal layouts do the same operations on the same memory, and can share a captured graph.

Rows that come from the host lie in the upload ring, and are named like rows of an arena. Where the number of rows
is padded, further inputs repeat the last row, which is always legal for the cell, and further outputs go to the
arena's last row, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core import task_layout as layout_words
from cellrt.core.tables import HOST, LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK
from cellrt.worker.cell_type import CellType
from cellrt.worker.device.arenas import DeviceArenas

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64] | Ints

NOWHERE = -1
REPEAT = -2
"""Padding that repeats the last value."""
MAX_KNOWN = 8192


class Part(NamedTuple):
    """Rows of an input that lie at one location."""

    location: int
    num_rows: int
    rows_at: int
    """First word of their row numbers there; at the host, in the upload ring."""
    positions_at: int
    """First word of which of the input's rows they are, or NOWHERE: all, in order."""


class InputLayout(NamedTuple):
    """One input: its rows, and for a ragged one ``num_offsets`` offsets."""

    kind: int
    num_rows: int
    parts: tuple[Part, ...]
    offsets_at: int
    num_offsets: int


class OutputLayout(NamedTuple):
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


class Layout(NamedTuple):
    """What a task does, apart from which rows it does it to."""

    type_id: int
    fused: bool
    """Whether the cell reads and writes arena rows itself."""
    sizes: tuple[int, ...]
    """Rows of each step, the padding included; of a loop, all rows at every step."""
    is_loop: bool
    stop: int
    """Output of a loop that says stop, or NOWHERE."""
    inputs: tuple[InputLayout, ...]
    outputs: tuple[OutputLayout, ...]
    lengths_at: int
    answers: int
    """Integers that come back: of a loop, steps done and whether a value was not finite, for each row; of other tasks
    whose cell declares finite outputs, the latter for each position."""
    answers_at: int
    sizes_at: int
    """First word of ``sizes`` of a fused run that may go in one call, else NOWHERE."""
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


class Plan(NamedTuple):
    """A task, read. Tasks of the same header and records have the same plan, unless ``computed`` is not empty."""

    layout: Layout
    rows: int
    positions: int
    copies: NDArray[np.int64]
    """``[n, 5]``: (word, where in the buffer, how many, how many with the padding, padding or REPEAT)."""
    computed: list[tuple[int, Numbers]]
    """(word, values): what is not in the buffer as it is."""
    uploads: list[Transfer]
    downloads: list[Transfer]
    can_capture: bool


class Planner:
    """Reads the tasks of one location.

    Args:
        location: of the worker.
        types: of the engine.
        arenas: of the location.
        pad: pad rows and counts to a few sizes, so that layouts recur; else only as the cell demands.
    """

    def __init__(self, location: int, types: Mapping[int, CellType], arenas: DeviceArenas, pad: bool) -> None:
        self._location, self._types, self._arenas, self._pad = location, types, arenas, pad
        self._known: dict[tuple[object, ...], Plan] = {}

    def plan(self, type_id: int, buffer: Ints, reading: type[Reading] | None = None) -> Plan:
        """Reads a task. ``reading``: how, if not as a plain cell's; what that raises is raised."""
        key = (type_id, reading, self._key(self._types[type_id], buffer))
        plan = self._known.get(key)
        if plan is None:
            made = (reading or Reading)(self._location, self._types[type_id], buffer, self._arenas, self._pad)
            plan = made.plan()
            if not plan.computed:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = plan
        return plan

    def _key(self, cell_type: CellType, buffer: Ints) -> bytes:
        """All that a layout depends on: the header apart from its last word, the records, and the steps' sizes."""
        inputs, outputs = len(cell_type.input_kinds), len(cell_type.output_kinds)
        end = layout_words.HEADER + layout_words.INPUT * inputs + layout_words.OUTPUT * outputs
        key = buffer[: layout_words.H_NOTES].tobytes() + buffer[layout_words.HEADER : end].tobytes()
        steps = int(buffer[layout_words.H_STEPS])
        if steps > 1:
            at = int(buffer[layout_words.H_BATCH_SIZES])
            key += buffer[at : at + steps].tobytes()
        return key


class Reading:
    """One task being read: words are appended one array after the other."""

    is_fused = False

    def __init__(self, location: int, cell_type: CellType, buffer: Ints, arenas: DeviceArenas, pad: bool) -> None:
        self._location, self._type, self._buffer = location, cell_type, buffer
        self._arenas = arenas
        header: list[int] = buffer[: layout_words.HEADER].tolist()
        self._header = header
        self._rows, self._positions = header[layout_words.H_ROWS], header[layout_words.H_POSITIONS]
        self._steps, self._is_loop = header[layout_words.H_STEPS], bool(header[layout_words.H_IS_LOOP])
        at = header[layout_words.H_BATCH_SIZES]
        self._sizes: list[int] = buffer[at : at + self._steps].tolist()
        is_ragged = any(spec.ragged for spec in cell_type.cell.inputs.values())
        self._pads_counts = pad and not is_ragged
        self._padded = self._rows
        if self._steps == 1 or self._is_loop:
            self._padded = _padded_rows(cell_type, self._rows, self._pads_counts)
        self._num_words = 0
        self._copies: list[tuple[int, int, int, int, int]] = []
        self._computed: list[tuple[int, Numbers]] = []
        self._uploads: list[Transfer] = []
        self._downloads: list[Transfer] = []
        self._can_capture = self._pads_counts

    def plan(self) -> Plan:
        """Reads it."""
        cell = self._type.cell
        counts = [len(cell.inputs), len(cell.outputs)]
        end = layout_words.HEADER + layout_words.INPUT * counts[0] + layout_words.OUTPUT * counts[1]
        records: list[int] = self._buffer[layout_words.HEADER : end].tolist()
        size = layout_words.INPUT
        inputs = tuple(
            self._input(kind, *records[size * k : size * (k + 1)]) for k, kind in enumerate(self._type.input_kinds)
        )
        first, size = size * counts[0], layout_words.OUTPUT
        outputs = tuple(
            self._output(k, kind, records[first + size * k : first + size * (k + 1)])
            for k, kind in enumerate(self._type.output_kinds)
        )
        lengths_at, answers, answers_at = NOWHERE, 0, NOWHERE
        if self._is_loop:
            at = self._header[layout_words.H_LENGTHS]
            lengths_at = self._copy(at, self._rows, self._padded, 1)
            answers = 2 * self._padded
        elif cell.finite:
            answers = self._padded if self._steps == 1 else self._positions
        if answers:
            answers_at = self._room(answers)
        if self._is_loop:
            sizes = (self._padded,) * self._steps
        else:
            sizes = (self._padded,) if self._steps == 1 else tuple(self._sizes)
        stop = self._header[layout_words.H_STOP_OUTPUT] if self._is_loop else NOWHERE
        sizes_at = self._sizes_words()
        layout = Layout(
            self._type.id,
            self.is_fused,
            sizes,
            self._is_loop,
            stop,
            inputs,
            outputs,
            lengths_at,
            answers,
            answers_at,
            sizes_at,
            self._num_words,
        )
        return Plan(
            layout,
            self._rows,
            self._positions,
            np.array(self._copies, np.int64).reshape(-1, 5),
            self._computed,
            self._uploads,
            self._downloads,
            self._can_capture,
        )

    def _sizes_words(self) -> int:
        """Words of the steps' sizes, where they are needed."""
        return NOWHERE

    def _input(self, kind: int, source: int, count: int, at: int, offsets_at: int) -> InputLayout:
        padded = self._padded if offsets_at < 0 and count == self._rows else count
        if source == MIXED:
            self._can_capture = False
            parts = self._parts(kind, self._buffer[at : at + count], padded)
        else:
            parts = (self._part(kind, source if source >= 0 else self._location, at, count, padded),)
        if offsets_at < 0:
            return InputLayout(kind, padded, parts, NOWHERE, 0)
        # The offsets lie right before the rows. Further nodes have no rows.
        num_offsets = at - offsets_at
        padded_offsets = self._padded + 1 if num_offsets == self._rows + 1 else num_offsets
        words_at = self._copy(offsets_at, num_offsets, padded_offsets, count)
        return InputLayout(kind, count, parts, words_at, padded_offsets)

    def _part(self, kind: int, location: int, source: int, count: int, padded: int) -> Part:
        """Rows that all lie at one location."""
        if location == HOST and count:
            at = self._room(padded)
            self._uploads.append(Transfer(kind, count, source, at, padded))
        else:
            self._can_capture = self._can_capture and location in (self._location, HOST)
            at = self._copy(source, count, padded, REPEAT)
        return Part(location, padded, at, NOWHERE)

    def _parts(self, kind: int, handles: Ints, padded: int) -> tuple[Part, ...]:
        """Splits rows from several locations."""
        if padded > len(handles):
            handles = np.concatenate([handles, np.repeat(handles[-1:], padded - len(handles))])
        locations = np.where(handles < NUM_PERMANENT, self._location, handles >> LOCATION_SHIFT)
        parts = []
        for location in np.unique(locations).tolist():
            positions = np.flatnonzero(locations == location)
            rows, count = handles[positions] & ROW_MASK, len(positions)
            positions_at = self._compute(positions, count)
            if location == HOST:
                at = self._room(count)
                self._uploads.append(Transfer(kind, count, NOWHERE, at, count, rows))
            else:
                at = self._compute(rows, count)
            parts.append(Part(location, count, at, positions_at))
        return tuple(parts)

    def _output(self, number: int, kind: int, record: list[int]) -> OutputLayout:
        stores, positions_at, rows_at, results, result_positions_at, result_rows_at, every_step = record
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
        sources: Numbers | None = None
        if every_step and self._padded > self._rows:  # the last steps lie behind those of the padding too
            positions = self._buffer[result_positions_at : result_positions_at + results]
            limit = self._rows * self._steps
            sources = np.where(positions < limit, positions, positions + self._padded * self._steps - limit)
        shown = self._results(kind, results, result_positions_at, result_rows_at, sources, 0)
        return OutputLayout(kind, padded_stores, first_row, first_position, *shown, bool(every_step))

    def _results(
        self, kind: int, count: int, positions_at: int, rows_at: int, sources: Numbers | None, pad: int
    ) -> tuple[int, int, int]:
        """Results go to host rows, from positions of the buffer unless ``sources`` are given.

        Returns (how many, words of their rows in the ring, words of the sources).
        """
        if not count:
            return 0, NOWHERE, NOWHERE
        padded = self._count(count)
        if sources is None:
            sources_at = self._copy(positions_at, count, padded, pad)
        else:
            sources_at = self._compute(sources, padded, pad)
        at = self._room(padded)
        self._downloads.append(Transfer(kind, count, rows_at, at, padded))
        return padded, at, sources_at

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
        self._copies.append((at, source, count, padded, pad))
        return at

    def _compute(self, values: Numbers, padded: int, pad: int = 0) -> int:
        """Words with values of their own; returns the first."""
        at = self._room(padded)
        if padded > len(values):
            values = np.concatenate([values, np.full(padded - len(values), pad, np.int64)])
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
