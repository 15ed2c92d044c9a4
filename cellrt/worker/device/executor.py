"""Runs tasks on a device: packs what a task needs, submits its operations, and takes in what came back.

``begin`` and ``collect`` are called by the worker's thread. In between the device owns the task's blocks of both
rings. The host's rows are read by ``begin`` and written by ``collect``, and by nobody else on this side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.copying import LARGE_BYTES, get_rows, get_rows_nogil, move_rows, move_rows_nogil
from cellrt.core.tables import HOST
from cellrt.core.task_layout import TaskView
from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.errors import InternalError
from cellrt.worker.arenas import Arenas
from cellrt.worker.base import Launch
from cellrt.worker.blame import Failure, Failures
from cellrt.worker.cell_type import CellType
from cellrt.worker.device.arenas import DeviceArenas
from cellrt.worker.device.captures import Captures
from cellrt.worker.device.checks import bad_rows, check_uploaded, error_of
from cellrt.worker.device.compilations import COMPILATIONS
from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.fused import CannotFuseError, ChainReader, FusedOperations, FusedReader
from cellrt.worker.device.operations import ANSWER, Memory, Operations
from cellrt.worker.device.pack_words import pack_words
from cellrt.worker.device.packing import Packing, Packings, Signature
from cellrt.worker.device.placement import Forms, PlacedCell, UnplacedCell
from cellrt.worker.device.ring import Block, Ring, block_from

WORD_BYTES = 8


@dataclass(frozen=True)
class DeviceOptions:
    """Sizes and switches of a device worker.

    Attributes:
        ring_bytes: pinned memory, and as much on the device, for what tasks upload; the same again for what they
            download. A task that needs more gets memory of its own.
        graph_bytes: device memory for captured CUDA graphs; 0 runs everything eagerly.
        capture_after: how often a task of the same signature runs eagerly before it is captured.
        fused: use ``run_rows`` of cells that have it.
        chains: use ``run_chain_rows`` of such cells for runs of several steps: always, never, or (None) where it
            measures faster.
        compiled: pass other cells through ``torch.compile`` when they are registered, gather and scatter included.
        compile_backend: which of its backends compiles them.
        completion: how a finished task is noticed: "signal" (a kernel stores a count in pinned memory), "copy" (a copy
            does) or "event" (a CUDA event is asked). Default: "signal" where Triton is installed, else "copy".
        hang_s: a task that takes longer than this, and than 100 times the longest of its cell so far, loses the device.
        dry_delay_s: how late the device "dry" is.
    """

    ring_bytes: int = 32 << 20
    graph_bytes: int = 1 << 30
    capture_after: int = 2
    fused: bool = True
    chains: bool | None = None
    compiled: bool = False
    compile_backend: str = "inductor"
    completion: str | None = None
    hang_s: float = 10.0
    dry_delay_s: float = 0.0

    @property
    def forms(self) -> Forms:
        """The forms of cells that are used."""
        return Forms(self.fused, self.chains, self.compile_backend if self.compiled else None)


@dataclass
class InFlight:
    """A task on the device."""

    launch: Launch
    task: TaskView
    packing: Packing
    up: Ring
    up_block: Block
    down: Ring
    down_block: Block
    begun_ns: int
    failures: Failures = field(default_factory=Failures)


class DeviceExecutor:
    """Executes the tasks of one location on its device."""

    def __init__(
        self, location: int, arenas: list[Arenas], types: Mapping[int, CellType], device: Device, options: DeviceOptions
    ) -> None:
        self.device, self._location, self._arenas, self._types = device, location, arenas, types
        own = arenas[location]
        if not isinstance(own, DeviceArenas):
            raise InternalError(f"location {location} has no arenas of a device")
        self._captures = Captures(device, options.graph_bytes, options.capture_after)
        self._packings = Packings(location, types, own, pad=options.graph_bytes > 0)
        up, down = (Ring(device, options.ring_bytes) for _ in range(2))
        self._memory = Memory(device, location, arenas, up, down)
        self._placed: dict[int, PlacedCell] = {}
        self._host_bytes: list[NDArray[np.uint8]] = []
        self._counting = np.arange(0, dtype=np.int32)
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """See ``CudaWorker.counts``; any thread may ask."""
        names = (*Captures.COUNTED, "eager", "unfused", "compilations")
        counted = self._captures.counts | self._counts
        return {name: counted[name] for name in names}

    def place(self, cell_type: CellType) -> PlacedCell:
        """The cell with its weights on this device, copied the first time. Raises what the device is lost by."""
        placed = self._placed.get(cell_type.id)
        if placed is None:
            try:
                placed = self.device.placements.of(cell_type.cell)
            except BaseException as error:  # its author's code runs meanwhile
                if self.device.is_fatal(error):
                    raise
                placed = UnplacedCell(cell_type.cell, error)
            self._placed[cell_type.id] = placed
        return placed

    def forget(self, type_id: int) -> None:
        """Drops what was kept for a cell type that no task has: its weights and captures, above all."""
        self._packings.forget(type_id)
        self._captures.forget(type_id)
        placed = self._placed.pop(type_id, None)
        if placed is not None:
            self.device.placements.forget(placed.cell.identity)

    def begin(self, launch: Launch) -> InFlight | None:
        """Submits a task; None if the rings have no room until a task in flight is collected."""
        begun_ns = time.perf_counter_ns()
        placed, task = self.place(self._types[launch.type_id]), TaskView(launch.buffer)
        packing = self._pack(placed, task, launch.type_id)
        uploads, downloads = packing.uploads, packing.downloads
        up_bytes = [self._row_bytes(upload.kind) for upload in uploads]
        down_bytes = [self._row_bytes(download.kind) for download in downloads]
        num_words, answers = packing.signature.num_words, packing.signature.answers
        pieces = [(num_words * WORD_BYTES, WORD_BYTES)]
        pieces += [(upload.num_rows * size, size) for upload, size in zip(uploads, up_bytes)]
        returned = [(download.padded * size, size) for download, size in zip(downloads, down_bytes)]
        returned.append((answers * ANSWER.num_bytes, ANSWER.num_bytes))
        blocks = self._take(pieces, returned)
        if blocks is None:
            return None
        up, up_block, down, down_block = blocks
        (words_start, *up_starts), (*down_starts, answers_start) = up_block.starts, down_block.starts
        ranges = [
            (upload.at, start // size, upload.num_rows, upload.padded)
            for upload, size, start in zip(uploads, up_bytes, up_starts)
        ]
        ranges += [
            (download.at, start // size, download.padded, download.padded)
            for download, size, start in zip(downloads, down_bytes, down_starts)
        ]
        ranges.append((packing.signature.answers_at, answers_start // ANSWER.num_bytes, answers, answers))
        words = up.array[words_start : words_start + WORD_BYTES * num_words].view(np.int64)
        pack_words(words, launch.buffer, packing.copies, np.array(ranges, np.int64))
        for at, values in packing.computed:
            words[at : at + len(values)] = values
        for upload, size, start in zip(uploads, up_bytes, up_starts):
            target = up.array[start : start + upload.num_rows * size].reshape(upload.num_rows, size)
            get = get_rows if target.size < LARGE_BYTES else get_rows_nogil
            get(self._host(upload.kind), upload.host_rows(launch.buffer), target)
        begun = InFlight(launch, task, packing, up, up_block, down, down_block, begun_ns)
        for number, limits in packing.checked:
            upload, start = uploads[number], up_starts[number]
            uploaded = up.array[start : start + upload.num_rows * up_bytes[number]]
            dtype = self._arenas[HOST][upload.kind].dtype
            numbers = uploaded.view(NUMPY_DTYPES[dtype]).reshape(upload.num_rows, -1)
            check_uploaded(placed.cell, task, numbers, limits, begun.failures)
        has_download = bool(downloads or answers)
        compiled = COMPILATIONS.of_this_thread()
        self.device.submit(self._work(begun, placed, has_download), has_download)
        self._counts["compilations"] += COMPILATIONS.of_this_thread() - compiled
        return begun

    def collect(self, done: InFlight) -> list[Failure]:
        """Takes in what a task that is done brought back; returns the rows on which its cell failed."""
        packing, task, failures = done.packing, done.task, done.failures
        *starts, at = done.down_block.starts
        answers = done.down.array[at : at + ANSWER.num_bytes * packing.signature.answers].view(np.int32)
        failed = {failure.row for failure in failures}
        cell_type = self._types[done.launch.type_id]
        cell = cell_type.cell
        if failures.split is not None:
            cell_type.retries.note(cell.name, failures.split, len(failures))
        for row, what in bad_rows(packing, task, answers).items():
            if row not in failed:
                failures.append(Failure(row, error_of(cell, what)))
        if task.is_loop:
            task.done_steps[:] = answers[: task.num_rows]
        elif task.stop_output >= 0:
            task.done_steps[:] = np.where(answers[: task.num_rows], -task.lengths, task.lengths)
        for failure in failures:
            task.has_failed[failure.row] = 1
        for download, start in zip(packing.downloads, starts):
            self._put(download.kind, download.host_rows(task.buffer), done.down.array[start:])
        if done.up is self._memory.up:
            done.up.give_back()
            done.down.give_back()
        return failures

    def _work(self, begun: InFlight, placed: PlacedCell, has_download: bool) -> Work:
        """All that the device does for a task."""
        packing, up, down, captures = begun.packing, begun.up, begun.down, self._captures
        signature = packing.signature
        is_own = up is not self._memory.up
        can_capture = packing.can_capture and not is_own
        words_start = begun.up_block.starts[0]
        words_bytes = slice(words_start, words_start + WORD_BYTES * signature.num_words)
        up_bytes = slice(begun.up_block.first, begun.up_block.end)
        down_bytes = slice(begun.down_block.first, begun.down_block.end)

        def work() -> None:
            self.device.upload(up.device[up_bytes], up.host[up_bytes])
            words = up.device[words_bytes].view(torch.int64)
            capture = captures.find(signature) if can_capture else None
            if capture is not None:
                capture.words.copy_(words)
                capture.replay()
            else:
                self._counts["eager"] += 1
                memory = self._memory._replace(up=up, down=down) if is_own else self._memory
                host_words = up.host[words_bytes].view(torch.int64)
                self._operations(placed, signature, memory, words, host_words).run(packing.rows, begun.failures)
                if can_capture and not begun.failures and captures.is_due(signature):
                    captures.make(signature, words, lambda words: self._captured(placed, packing, words))
            if has_download:
                self.device.download(down.host[down_bytes], down.device[down_bytes])

        return work

    def _pack(self, placed: PlacedCell, task: TaskView, type_id: int) -> Packing:
        """Reads a task: for the fused form of its cell where that goes, else for the plain form."""
        is_run = task.num_steps > 1
        readers: list[type[FusedReader]] = []
        if placed.run_rows is not None and not task.is_loop and task.stop_output < 0:
            if is_run and placed.chains is not None:
                readers.append(ChainReader)
            if not (is_run and placed.prefers_steps):
                readers.append(FusedReader)
        for reader in readers:
            with suppress(CannotFuseError):
                return self._packings.of(type_id, task.buffer, placed.limits, reader)
        self._counts["unfused"] += bool(readers)
        return self._packings.of(type_id, task.buffer, placed.limits)

    def _operations(
        self,
        placed: PlacedCell,
        signature: Signature,
        memory: Memory,
        words: torch.Tensor,
        host_words: torch.Tensor | None,
    ) -> Operations:
        kind = FusedOperations if signature.fused else Operations
        return kind(placed, signature, memory, words, host_words)

    def _captured(self, placed: PlacedCell, packing: Packing, words: torch.Tensor) -> Work:
        operations = self._operations(placed, packing.signature, self._memory, words, None)
        operations.prepare_capture()
        return lambda: operations.run(packing.rows, None)

    def _take(
        self, pieces: list[tuple[int, int]], returned: list[tuple[int, int]]
    ) -> tuple[Ring, Block, Ring, Block] | None:
        """Blocks for a task; None if they must wait for tasks in flight. What the rings can never hold gets memory of
        its own."""
        up, down = self._memory.up, self._memory.down
        up_block = up.take(pieces)
        down_block = None if up_block is None else down.take(returned)
        if up_block is not None and down_block is not None:
            return up, up_block, down, down_block
        if up_block is not None:
            up.take_last_back()
        if not (up.is_empty and down.is_empty):
            return None
        up_block, down_block = block_from(pieces, 0), block_from(returned, 0)
        return Ring(self.device, up_block.end), up_block, Ring(self.device, down_block.end), down_block

    def _row_bytes(self, kind: int) -> int:
        return int(self._host(kind).shape[1])

    def _host(self, kind: int) -> NDArray[np.uint8]:
        """The host's arena of a kind as rows of bytes."""
        while len(self._host_bytes) <= kind:
            arena = self._arenas[HOST][len(self._host_bytes)]
            self._host_bytes.append(arena.view(len(arena), -1).view(torch.uint8).numpy())
        return self._host_bytes[kind]

    def _put(self, kind: int, rows: NDArray[np.int32], values: NDArray[np.uint8]) -> None:
        """Copies result rows, one after the other in ``values``, to the host's arena."""
        arena, count = self._host(kind), len(rows)
        given = values[: count * arena.shape[1]].reshape(count, arena.shape[1])
        (move_rows if given.size < LARGE_BYTES else move_rows_nogil)(arena, rows, given, self._counting_to(count))

    def _counting_to(self, count: int) -> NDArray[np.int32]:
        """0, 1, ... up to ``count - 1``."""
        if len(self._counting) < count:
            self._counting = np.arange(2 * count, dtype=np.int32)
        return self._counting[:count]
