"""Runs tasks on a device: packs what a task needs, submits its program, and takes in what came back.

``begin`` and ``collect`` are called by the worker's thread. In between the device owns the task's blocks of both
rings. The host's rows are read by ``begin`` and written by ``collect``, and by nobody else on this side.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core import task_layout as layout_words
from cellrt.core.copying import LARGE_BYTES, get_rows, get_rows_freely, move_rows, move_rows_freely
from cellrt.core.tables import HOST
from cellrt.errors import CellError, InternalError
from cellrt.worker.arenas import Arenas
from cellrt.worker.base import Launch
from cellrt.worker.blame import Failure, Failures
from cellrt.worker.cell_type import CellType
from cellrt.worker.device.arenas import DeviceArenas
from cellrt.worker.device.captures import Captures
from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.fused import CannotFuseError, ChainReading, FusedProgram, FusedReading
from cellrt.worker.device.packing import pack_words
from cellrt.worker.device.placement import Forms, PlacedCell
from cellrt.worker.device.program import ANSWER, Memory, Program
from cellrt.worker.device.ring import Ring, place
from cellrt.worker.device.task_plan import Plan, Planner

WORD_BYTES = 8


@dataclass(frozen=True)
class DeviceOptions:
    """Sizes and switches of a device worker.

    Attributes:
        ring_bytes: pinned memory, and as much on the device, for what tasks upload; the same again for what they
            download. A task that needs more gets memory of its own.
        graph_bytes: device memory for captured CUDA graphs; 0 runs everything eagerly.
        capture_after: how often a task of the same layout runs eagerly before it is captured.
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
    plan: Plan
    up: Ring
    down: Ring
    result_places: list[int]
    answers_place: int
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
        self._planner = Planner(location, types, own, pad=options.graph_bytes > 0)
        up, down = (Ring(device, options.ring_bytes) for _ in range(2))
        self._memory = Memory(device, location, arenas, up, down)
        self._host_bytes: list[NDArray[np.uint8]] = []
        self._counting = np.arange(0, dtype=np.int32)

    def place(self, cell_type: CellType) -> PlacedCell:
        """The cell with its weights on this device; they are copied the first time."""
        return self.device.placements.of(cell_type.cell)

    def begin(self, launch: Launch) -> InFlight | None:
        """Submits a task; None if the rings have no room until a task in flight is collected."""
        begun_ns = time.perf_counter_ns()
        cell_type = self._types[launch.type_id]
        plan = self._plan(cell_type, launch)
        uploads, downloads = plan.uploads, plan.downloads
        up_bytes = [self._row_bytes(upload.kind) for upload in uploads]
        down_bytes = [self._row_bytes(download.kind) for download in downloads]
        pieces = [(plan.layout.num_words * WORD_BYTES, WORD_BYTES)]
        pieces += [(upload.num_rows * size, size) for upload, size in zip(uploads, up_bytes)]
        returned = [(download.padded * size, size) for download, size in zip(downloads, down_bytes)]
        returned.append((plan.layout.answers * ANSWER.num_bytes, ANSWER.num_bytes))
        rings = self._take(pieces, returned)
        if rings is None:
            return None
        up, places, down, down_places = rings
        answers_place = down_places[len(downloads)]
        ranges = [
            (upload.at, at // size, upload.num_rows, upload.padded)
            for upload, size, at in zip(uploads, up_bytes, places[1:])
        ]
        ranges += [
            (download.at, at // size, download.padded, download.padded)
            for download, size, at in zip(downloads, down_bytes, down_places)
        ]
        answers = plan.layout.answers
        ranges.append((plan.layout.answers_at, answers_place // ANSWER.num_bytes, answers, answers))
        words = up.array[places[0] : places[0] + WORD_BYTES * plan.layout.num_words].view(np.int64)
        pack_words(words, launch.buffer, plan.copies, np.array(ranges, np.int64))
        for at, values in plan.computed:
            words[at : at + len(values)] = values
        for upload, size, at in zip(uploads, up_bytes, places[1:]):
            target = up.array[at : at + upload.num_rows * size].reshape(upload.num_rows, size)
            get = get_rows if target.size < LARGE_BYTES else get_rows_freely
            get(self._host(upload.kind), upload.host_rows(launch.buffer), target)
        task = InFlight(launch, plan, up, down, down_places[: len(downloads)], answers_place, begun_ns)
        has_download = bool(downloads or answers)
        self.device.submit(self._work(task, cell_type, places, down_places, has_download), has_download)
        return task

    def collect(self, task: InFlight) -> list[Failure]:
        """Takes in what a task that is done brought back; returns the rows on which its cell failed."""
        plan, buffer = task.plan, task.launch.buffer
        at = task.answers_place
        answers = task.down.array[at : at + 4 * plan.layout.answers].view(np.int32)
        header = buffer[: layout_words.HEADER].tolist()
        failed = {failure.row for failure in task.failures}
        cell_type = self._types[task.launch.type_id]
        cell = cell_type.cell
        if task.failures.split is not None:
            cell_type.retries.note(cell.name, task.failures.split, len(task.failures))
        for row in self._rows_not_finite(plan, answers, header, buffer):
            if row not in failed:
                outputs = " or ".join(map(repr, cell.finite))
                error = CellError(f"cell {cell.name!r} returned a value that is not finite in output {outputs}")
                task.failures.append(Failure(row, error))
        if plan.layout.is_loop:
            done_at = header[layout_words.H_DONE_STEPS]
            buffer[done_at : done_at + plan.rows] = answers[: plan.rows]
        for failure in task.failures:
            buffer[header[layout_words.H_FAILED] + failure.row] = 1
        for download, place_ in zip(plan.downloads, task.result_places):
            self._put(download.kind, download.host_rows(buffer), task.down.array[place_:])
        if task.up is self._memory.up:
            task.up.give_back()
            task.down.give_back()
        return task.failures

    def _rows_not_finite(
        self, plan: Plan, answers: NDArray[np.int32], header: list[int], buffer: NDArray[np.int32]
    ) -> list[int]:
        """The rows with a value that is not finite where the cell declares finite ones."""
        if not answers.size:
            return []
        if plan.layout.is_loop:
            padded = plan.layout.sizes[0]
            return np.flatnonzero(answers[padded : padded + plan.rows]).tolist()
        bad = np.flatnonzero(answers[: plan.positions])
        if not bad.size:
            return []
        at, steps = header[layout_words.H_BATCH_SIZES], header[layout_words.H_STEPS]
        row_of = np.concatenate([np.arange(size) for size in buffer[at : at + steps]])
        return sorted(set(row_of[bad].tolist()))

    def _work(
        self, task: InFlight, cell_type: CellType, places: list[int], down_places: list[int], has_download: bool
    ) -> Work:
        """All that the device does for a task."""
        plan, up, down = task.plan, task.up, task.down
        placed = self.place(cell_type)
        is_own = up is not self._memory.up
        can_capture = plan.can_capture and not is_own
        words_at, words_end = places[0], places[0] + WORD_BYTES * plan.layout.num_words

        def work() -> None:
            self.device.upload(up.device[places[-2] : places[-1]], up.host[places[-2] : places[-1]])
            words = up.device[words_at:words_end].view(torch.int64)
            capture = self._captures.find(plan.layout) if can_capture else None
            if capture is not None:
                capture.words.copy_(words)
                capture.replay()
            else:
                memory = self._memory._replace(up=up, down=down) if is_own else self._memory
                program = self._program(placed, plan, memory, words, up.host[words_at:words_end].view(torch.int64))
                program.run(plan.rows, task.failures)
                if can_capture and not task.failures and self._captures.is_due(plan.layout):
                    self._captures.make(plan.layout, words, lambda words: self._captured(placed, plan, words))
            if has_download:
                start, end = down_places[-2], down_places[-1]
                self.device.download(down.host[start:end], down.device[start:end])

        return work

    def _plan(self, cell_type: CellType, launch: Launch) -> Plan:
        """Reads a task: for the fused form of its cell where that goes, else for the plain form."""
        placed, is_run = self.place(cell_type), launch.buffer[layout_words.H_STEPS] > 1
        readings: list[type[FusedReading]] = []
        if placed.run_rows is not None and not launch.buffer[layout_words.H_IS_LOOP]:
            if is_run and placed.chains is not None:
                readings.append(ChainReading)
            if not (is_run and placed.prefers_steps):
                readings.append(FusedReading)
        for reading in readings:
            with suppress(CannotFuseError):
                return self._planner.plan(launch.type_id, launch.buffer, reading)
        return self._planner.plan(launch.type_id, launch.buffer)

    def _program(
        self, placed: PlacedCell, plan: Plan, memory: Memory, words: torch.Tensor, host_words: torch.Tensor | None
    ) -> Program:
        kind = FusedProgram if plan.layout.fused else Program
        return kind(placed, plan.layout, memory, words, host_words)

    def _captured(self, placed: PlacedCell, plan: Plan, words: torch.Tensor) -> Work:
        program = self._program(placed, plan, self._memory, words, None)
        program.prepare_capture()
        return lambda: program.run(plan.rows, None)

    def _take(
        self, pieces: list[tuple[int, int]], returned: list[tuple[int, int]]
    ) -> tuple[Ring, list[int], Ring, list[int]] | None:
        """Blocks for a task; None if they must wait for tasks in flight. What the rings can never hold gets memory of
        its own."""
        up, down = self._memory.up, self._memory.down
        places = up.take(pieces)
        down_places = None if places is None else down.take(returned)
        if places is not None and down_places is not None:
            return up, places, down, down_places
        if places is not None:
            up.take_last_back()
        if not (up.is_empty and down.is_empty):
            return None
        up, down = (Ring(self.device, place(sizes, 0)[-1]) for sizes in (pieces, returned))
        return up, up.take(pieces) or [], down, down.take(returned) or []

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
        (move_rows if given.size < LARGE_BYTES else move_rows_freely)(arena, rows, given, self._counting_to(count))

    def _counting_to(self, count: int) -> NDArray[np.int32]:
        """0, 1, ... up to ``count - 1``."""
        if len(self._counting) < count:
            self._counting = np.arange(2 * count, dtype=np.int32)
        return self._counting[:count]
