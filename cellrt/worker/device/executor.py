"""Execution of tasks on a device: their inputs are packed, their operations submitted, and their results written.

``begin`` and ``collect`` are called by the worker's thread. In between the device owns the task's blocks of both
rings. The host's rows are read by ``begin`` and written by ``collect``, and by no other code on this side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.copying import get_rows
from cellrt.core.state.tables import HOST
from cellrt.core.state.task_layout import TaskView
from cellrt.definition.cell import Cell
from cellrt.errors import InternalError
from cellrt.worker.arenas import Arenas
from cellrt.worker.base import Launch
from cellrt.worker.cell_type import CellType
from cellrt.worker.device import launch as compiled
from cellrt.worker.device.captures import Captures
from cellrt.worker.device.checks import bad_rows, check_uploaded, error_of
from cellrt.worker.device.compilations import COMPILATIONS
from cellrt.worker.device.device import Device
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.in_flight import InFlight
from cellrt.worker.device.operations import ANSWER, Memory
from cellrt.worker.device.placement import Forms, PlacedCell, UnplacedCell
from cellrt.worker.device.plans import Plan, Plans
from cellrt.worker.device.ring import Ring, bytes_for
from cellrt.worker.device.shape import compile_shapes
from cellrt.worker.device.works import WORD_BYTES, Works
from cellrt.worker.failed_rows import Failure


@dataclass(frozen=True)
class DeviceOptions:
    """Sizes and switches of a device worker.

    Attributes:
        ring_bytes: pinned memory, and as much on the device, for uploads of tasks; the same again for downloads. A task
            that needs more gets memory of its own.
        graph_bytes: device memory for captured CUDA graphs; 0 runs everything eagerly.
        capture_after: the eager runs of a signature before it is captured.
        whole_runs_after: the runs of a signature over captured steps, of which there are few, before the run is
            captured
            as a whole; None: it never is. Such a capture held up all requests of an H200 for 0.4 s, and gained nothing
            that could be measured. It is for cells whose kernels read the number of rows on the device.
        fused: use ``run_rows`` of cells that have it: always, never, or (None) if it measures faster than their plain
            form in the geometric mean over numbers of rows.
        chains: use ``run_chain_rows`` of such cells for runs of several steps: always, never, or (None) where it
            measures faster and runs are captured as a whole.
        compiled: pass other cells through ``torch.compile`` when they are registered, gather and scatter included.
            Those with pages or spans run as they are, with a warning.
        compile_backend: the backend of ``torch.compile``.
        completion: the way to notice that a task is done: "signal" (a kernel stores a count in pinned memory), "copy"
            (a
            copy does) or "event" (a CUDA event is queried). Default: "signal" where Triton is installed, else "copy".
        direct: have compiled code launch captured tasks by the driver's functions, where there is a driver.
        hang_s: a task that takes longer than this, and than 100 times the longest of its cell so far, loses the device.
        dry_delay_s: the delay of the device "dry".
    """

    ring_bytes: int = 32 << 20
    graph_bytes: int = 1 << 30
    capture_after: int = 2
    whole_runs_after: int | None = None
    fused: bool | None = None
    chains: bool | None = None
    compiled: bool = False
    compile_backend: str = "inductor"
    completion: str | None = None
    direct: bool = True
    hang_s: float = 10.0
    dry_delay_s: float = 0.0

    @property
    def forms(self) -> Forms:
        """The forms of cells that are used."""
        return Forms(self.fused, self.chains, self.compile_backend if self.compiled else None)


class DeviceExecutor:
    """The executor of one location's tasks on its device. ``num_flags``: of loops (``core/state/task_layout.py``)."""

    def __init__(
        self,
        location: int,
        arenas: list[Arenas],
        types: Mapping[int, CellType],
        device: Device,
        options: DeviceOptions,
        num_flags: int,
    ) -> None:
        self.device, self._location, self._arenas, self._types = device, location, arenas, types
        own = arenas[location]
        if not isinstance(own, DeviceArenas):
            raise InternalError(f"location {location} has no arenas of a device")
        compiled.compile_all(np.zeros(1, np.int32))
        compile_shapes(np.zeros(1, np.int32))
        whole_after = 0 if options.chains and options.whole_runs_after is None else options.whole_runs_after
        self._captures = Captures(device, options.graph_bytes, options.capture_after, whole_after)
        pads, whole = options.graph_bytes > 0, self._captures.goes_whole
        self._plans = Plans(location, types, own, arenas[HOST], pads, whole)
        up, down = (Ring(device, options.ring_bytes) for _ in range(2))
        flags = torch.zeros(num_flags, dtype=torch.bool, device=device.torch_device)
        self._memory = Memory(device, location, arenas, up, down, flags)
        self._works = Works(device, self._memory, self._captures)
        self._placed: dict[int, PlacedCell] = {}
        self._waiting: tuple[Launch, Plan] | None = None
        """A task for which there was no room in the rings, with its plan; it is begun again later."""
        self._host_bytes: list[NDArray[np.uint8]] = []
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Return the counts of ``CudaWorker.counts``; any thread may call this."""
        names = (*Captures.COUNTED, "eager", "unfused", "plain_faster", "compilations", "not_compiled")
        counted = self._captures.counts | self._plans.counts | self._works.counts | self._counts
        counted["not_compiled"] = self.device.placements.num_not_compiled()
        return {name: counted[name] for name in names}

    def place(self, cell_type: CellType) -> PlacedCell:
        """Return the cell with its weights on this device, copied the first time.

        Raise the error by which the device is lost.
        """
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

    def forget(self, cell_type: CellType) -> None:
        """Drop everything that was kept for a cell type without tasks: above all its weights and captures."""
        self._plans.forget(cell_type.id)
        self._captures.forget(cell_type.id)
        self._placed.pop(cell_type.id, None)
        self.device.placements.forget(cell_type.cell.identity)  # though no task placed it: it may have been measured

    def begin(self, launch: Launch) -> InFlight | None:
        """Submit a task; return None if the rings have no room until a task in flight is collected."""
        begun_ns = time.perf_counter_ns()
        placed = self.place(self._types[launch.type_id])
        if self._waiting is not None and self._waiting[0] is launch:
            plan = self._waiting[1]
        else:
            plan = self._plans.of(placed, launch.type_id, launch.buffer)
        slots = np.empty(plan.num_slots, np.int64)
        begun = InFlight(launch, plan, self._memory.up, self._memory.down, slots, begun_ns)
        code = self._launch(begun)
        if code in (compiled.NO_ROOM, compiled.NOT_CAPTURED):
            if not self._submit(begun, placed):
                self._waiting = launch, plan
                return None
        elif code:
            raise RuntimeError(f"CUDA driver error {code} where a task was launched")
        else:
            self.device.note_launched(plan.has_download)
            self._check_inputs(begun, placed.cell)
        self._waiting = None
        self._captures.note_task()
        return begun

    def collect(self, done: InFlight) -> list[Failure]:
        """Write the results of a completed task; return the rows on which its cell failed."""
        plan, failures = done.plan, done.failures
        take_in = compiled.take_in_nogil if plan.is_large else compiled.take_in
        is_bad = take_in(done.launch.buffer, plan.arrays, done.up.state, done.down.state, done.slots)
        if is_bad or failures or failures.split is not None:
            self._note_failures(done)
        return failures

    def _launch(self, begun: InFlight) -> int:
        """Launch a task by compiled code, if it was captured for that; return the code that it returns."""
        plan, direct, steps = begun.plan, self.device.direct, begun.plan.packing.steps
        if direct is None or not plan.packing.can_capture:
            return compiled.NOT_CAPTURED
        arguments = begun.launch.buffer, plan.arrays, begun.up.state, begun.down.state, begun.slots, direct
        if steps is None:
            capture = self._captures.find(plan.packing.signature)
            numbers = None if capture is None else capture.next_numbers()
            if numbers is None:
                return compiled.NOT_CAPTURED
            code = int((compiled.launch_nogil if plan.is_large else compiled.launch)(*arguments, numbers))
        else:
            captured = [self._captures.find_steps(signature) for signature in (steps.first, steps.later)]
            if captured[0] is None or captured[1] is None:
                return compiled.NOT_CAPTURED
            run = compiled.launch_run_nogil if plan.is_large else compiled.launch_run
            code = int(run(*arguments, captured[0].numbers, captured[1].numbers))
        self._captures.counts["replayed"] += code == 0
        return code

    def _submit(self, begun: InFlight, placed: PlacedCell) -> bool:
        """Run a task call by call, or replay its capture; return False if the rings have no room."""
        plan, buffer = begun.plan, begun.launch.buffer
        prepare = compiled.prepare_nogil if plan.is_large else compiled.prepare
        if not prepare(buffer, plan.arrays, begun.up.state, begun.down.state, begun.slots):
            if not (begun.up.is_empty and begun.down.is_empty):
                return False
            # A task that the rings can never hold gets memory of its own.
            pieces = plan.arrays[compiled.UP_PIECES], plan.arrays[compiled.DOWN_PIECES]
            begun.up, begun.down = (Ring(self.device, bytes_for(some)) for some in pieces)
            prepare(buffer, plan.arrays, begun.up.state, begun.down.state, begun.slots)
        if plan.packing.computed:
            self._write_computed(begun)
        self._check_inputs(begun, placed.cell)
        before = COMPILATIONS.of_this_thread()
        self.device.submit(self._works.of(begun, placed), plan.has_download)
        self._counts["compilations"] += COMPILATIONS.of_this_thread() - before
        return True

    def _write_computed(self, begun: InFlight) -> None:
        """Write the words and rows of a task whose inputs lie at several places."""
        packing, block = begun.plan.packing, begun.up_block
        words = begun.up.array[block.starts[0] : block.starts[0] + WORD_BYTES * packing.signature.num_words]
        for at, values in packing.computed:
            words.view(np.int64)[at : at + len(values)] = values
        for upload, start in zip(packing.uploads, block.starts[1:]):
            if upload.rows is not None:
                arena = self._host(upload.kind)
                target = begun.up.array[start : start + upload.num_rows * arena.shape[1]]
                get_rows(arena, upload.rows, target.reshape(upload.num_rows, -1))

    def _check_inputs(self, begun: InFlight, cell: Cell) -> None:
        """Fail the rows with a number outside an input's limits, which was clamped for the device."""
        if not begun.slots[compiled.IS_OUTSIDE]:
            return
        for number, limits in begun.plan.packing.checked:
            upload = begun.plan.packing.uploads[number]
            rows = torch.from_numpy(upload.host_rows(begun.launch.buffer).astype(np.int64))
            values = self._arenas[HOST][upload.kind].index_select(0, rows)
            check_uploaded(cell, begun.task, values.numpy().reshape(len(rows), -1), limits, begun.failures)

    def _note_failures(self, done: InFlight) -> None:
        """Add the faults in the answers to the cell's failures, and mark the failed rows."""
        failures, task, packing = done.failures, done.task, done.plan.packing
        cell_type = self._types[done.launch.type_id]
        at = done.down_block.starts[-1]
        answers = done.down.array[at : at + ANSWER.num_bytes * packing.signature.answers].view(np.int32)
        failed = {failure.row for failure in failures}
        if failures.split is not None:
            cell_type.retries.note(cell_type.cell.name, failures.split, len(failures))
        for row, what in bad_rows(packing.signature, task, answers).items():
            if row not in failed:
                failures.append(Failure(row, error_of(cell_type.cell, what)))
        if cell_type.cell.has_spans:  # they fail as a whole
            failures += _rest_of_spans(task, failures)
        for failure in failures:
            task.has_failed[failure.row] = 1

    def _host(self, kind: int) -> NDArray[np.uint8]:
        """Return the host's arena of a kind as rows of bytes."""
        while len(self._host_bytes) <= kind:
            arena = self._arenas[HOST][len(self._host_bytes)]
            self._host_bytes.append(arena.view(len(arena), -1).view(torch.uint8).numpy())
        return self._host_bytes[kind]


def _rest_of_spans(task: TaskView, failures: list[Failure]) -> list[Failure]:
    """Return failures of the rows that are of one span with a row that failed."""
    failed = {failure.row: failure.error for failure in failures}
    spans = np.searchsorted(task.spans, list(failed), side="right") - 1
    errors = dict(zip(spans.tolist(), failed.values()))
    rest = ((row, error) for span, error in errors.items() for row in task.rows_of_span(span) if row not in failed)
    return [Failure(*each) for each in rest]
