"""Plans: how tasks of one layout are read, in the form that compiled code takes (``launch.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.copying import LARGE_BYTES
from cellrt.core.task_layout import H_BATCH_SIZES, H_NOTES, H_STEPS, HEADER, INPUT, OUTPUT, TaskView
from cellrt.worker.arenas import Arenas
from cellrt.worker.cell_type import CellType
from cellrt.worker.device import launch
from cellrt.worker.device.arenas import DeviceArenas
from cellrt.worker.device.fused import CannotFuseError, ChainReader, FusedReader, PaddedSpanReader, SpanReader
from cellrt.worker.device.packing import NOWHERE, Packing, TaskReader, Transfer
from cellrt.worker.device.placement import PlacedCell
from cellrt.worker.device.ring import pieces_of

MAX_KNOWN = 8192
ANSWER_BYTES = 4
Ints = NDArray[np.int32]


class Plan(NamedTuple):
    """A packing as compiled code takes it."""

    packing: Packing
    arrays: tuple[NDArray[np.int64], ...]
    """Numbers, fixed words, operations, uploads, downloads, and the pieces of the blocks up and down."""
    num_slots: int
    down_at: int
    """Where in the slots the block of the ring down is."""
    has_download: bool
    is_large: bool
    """Whether so much is copied on the host that others should have the interpreter meanwhile."""
    is_unfused: bool
    """Whether it runs through the plain form of a cell that has a fused one, which does not take it."""
    is_plain_faster: bool
    """Whether it runs through the plain form since that measured faster."""


class Plans:
    """Reads the tasks of one location, those of one layout once.

    Args:
        location: of the worker.
        types: of the engine.
        arenas: of the location.
        host: arenas of the host.
        pad: pad rows and counts to a few sizes, so that signatures recur; else only as the cell demands.
    """

    def __init__(
        self, location: int, types: Mapping[int, CellType], arenas: DeviceArenas, host: Arenas, pad: bool
    ) -> None:
        self._location, self._types, self._arenas, self._host, self._pad = location, types, arenas, host, pad
        self._known: dict[tuple[int, bytes], Plan] = {}
        self._num_words: dict[int, int] = {}

    def of(self, placed: PlacedCell, type_id: int, buffer: Ints) -> Plan:
        """Reads a task: for the fused form of its cell where that goes, else for the plain form."""
        num_words = self._num_words.get(type_id)
        if num_words is None:
            cell_type = self._types[type_id]
            num_words = HEADER + INPUT * len(cell_type.input_kinds) + OUTPUT * len(cell_type.output_kinds)
            self._num_words[type_id] = num_words
        key = type_id, _layout_key(buffer, num_words)
        plan = self._known.get(key)
        if plan is None:
            plan = self._read(placed, type_id, buffer)
            if not plan.packing.computed:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = plan
        return plan

    def forget(self, type_id: int) -> None:
        """Drops what was read of tasks of a cell type; while the worker's thread reads those of others."""
        for key in [key for key in list(self._known) if key[0] == type_id]:
            self._known.pop(key, None)
        self._num_words.pop(type_id, None)

    def _read(self, placed: PlacedCell, type_id: int, buffer: Ints) -> Plan:
        cell_type = self._types[type_id]
        task = TaskView(buffer, len(cell_type.input_kinds), len(cell_type.output_kinds))
        readers = _fused_readers(placed, task)
        for reader in readers:
            with suppress(CannotFuseError):
                return self._plan(self._packing(reader, cell_type, task, placed))
        is_plain_faster = placed.run_rows is not None and placed.prefers_plain(task.num_rows)
        return self._plan(self._packing(TaskReader, cell_type, task, placed), bool(readers), is_plain_faster)

    def _packing(self, reader: type[TaskReader], cell_type: CellType, task: TaskView, placed: PlacedCell) -> Packing:
        return reader(self._location, cell_type, task, self._arenas, self._pad, placed.limits).read()

    def _plan(self, packing: Packing, is_unfused: bool = False, is_plain_faster: bool = False) -> Plan:
        signature = packing.signature
        behind = signature.sizes[0] if signature.is_loop or signature.stop >= 0 else 0
        bad = packing.rows if signature.is_loop else packing.positions if signature.tells_bad else 0
        numbers = [signature.num_words, signature.answers_at, signature.answers, behind, bad]
        ups, downs = self._transfers(packing.uploads), self._transfers(packing.downloads)
        for number, limits in packing.checked:
            ups[number, launch.FIRST : launch.END + 1] = limits
        row_bytes, padded = ups[:, launch.ROW_BYTES].tolist(), ups[:, launch.NUM_ROWS].tolist()
        up_pieces = [(8 * signature.num_words, 8), *((n * size, size) for n, size in zip(padded, row_bytes))]
        row_bytes, padded = downs[:, launch.ROW_BYTES].tolist(), downs[:, launch.NUM_PADDED].tolist()
        down_pieces = [(n * size, size) for n, size in zip(padded, row_bytes)]
        down_pieces.append((signature.answers * ANSWER_BYTES, ANSWER_BYTES))
        down_at = launch.UP_BLOCK + launch.STARTS + len(up_pieces)
        return Plan(
            packing,
            (
                np.array(numbers, np.int64),
                packing.fixed,
                np.array(packing.operations, np.int64).reshape(-1, launch.EXTRA + 1),
                ups,
                downs,
                pieces_of(up_pieces),
                pieces_of(down_pieces),
            ),
            down_at + launch.STARTS + len(down_pieces),
            down_at,
            bool(packing.downloads or signature.answers),
            sum(size for size, _ in (*up_pieces, *down_pieces)) >= LARGE_BYTES,
            is_unfused,
            is_plain_faster,
        )

    def _transfers(self, transfers: list[Transfer]) -> NDArray[np.int64]:
        made = np.zeros((len(transfers), launch.TRANSFER), np.int64)
        for k, transfer in enumerate(transfers):
            arena = self._host[transfer.kind]
            row_bytes = arena[0].numel() * arena.element_size()
            source = NOWHERE if transfer.rows is not None else transfer.source
            words = arena.data_ptr(), row_bytes, source, transfer.num_rows, transfer.at, transfer.padded
            made[k, : launch.FIRST] = words
        return made


def _layout_key(buffer: Ints, num_words: int) -> bytes:
    """As ``TaskView.layout_key``."""
    key = buffer[:H_NOTES].tobytes() + buffer[HEADER:num_words].tobytes()
    steps = int(buffer[H_STEPS])
    if steps == 1:
        return key
    sizes_at = int(buffer[H_BATCH_SIZES])
    return key + buffer[sizes_at : sizes_at + steps].tobytes()


def _fused_readers(placed: PlacedCell, task: TaskView) -> list[type[FusedReader]]:
    """How a task may be read for the fused form of its cell, the best first."""
    if placed.run_rows is None or task.is_loop or task.stop_output >= 0 or placed.prefers_plain(task.num_rows):
        return []
    if placed.reads_spans:
        return [PaddedSpanReader, SpanReader]
    is_run = task.num_steps > 1
    chains: list[type[FusedReader]] = [ChainReader] if is_run and placed.chains is not None else []
    return [*chains, *([] if is_run and placed.prefers_steps else [FusedReader])]
