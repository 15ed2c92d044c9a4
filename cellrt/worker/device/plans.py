"""Plans: the packings of tasks of one shape, in the form that compiled code takes (``launch.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.copying import LARGE_BYTES
from cellrt.core.state.task_layout import (
    H_FLAGS,
    H_IS_LOOP,
    H_POSITIONS,
    H_ROWS,
    H_STEPS,
    H_STOP_OUTPUT,
    OUT_RESULT_POSITIONS,
    OUT_RESULT_STEPS,
    output_record_at,
)
from cellrt.errors import InternalError
from cellrt.worker.arenas import Arenas
from cellrt.worker.cell_type import CellType
from cellrt.worker.device import launch, step_words, words
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.fused_reading import CannotFuseError, ChainReader, ExactSpanReader, FusedReader, SpanReader
from cellrt.worker.device.loop_reading import LoopReader, RaggedLoopReader, SpanLoopReader
from cellrt.worker.device.node_reading import NodeReader
from cellrt.worker.device.packing import Packing, TaskReader, Transfer
from cellrt.worker.device.placement import PlacedCell
from cellrt.worker.device.ragged_reading import RaggedReader, RaggedSpanReader
from cellrt.worker.device.ring import pieces_of
from cellrt.worker.device.shape import Shape, find_shape, room_for, rules_of, shape_of
from cellrt.worker.device.signature import NOWHERE, Signature
from cellrt.worker.device.steps_reading import FusedStepsReader, SpanStepsReader, StepsReader

MAX_KNOWN = 8192
ANSWER_BYTES = 4
Ints = NDArray[np.int32]


class Plan(NamedTuple):
    """A packing in the form that compiled code takes."""

    packing: Packing
    arrays: tuple[NDArray[np.int64], ...]
    """Arrays for compiled code.

    They are numbers, operations, uploads, downloads, the pieces of the blocks up and down, and, for a run that goes
    step by
    step, the arrays of a step and the sizes that it may have.
    """
    run_words: NDArray[np.int64]
    """The words of all positions of such a run."""
    num_slots: int
    down_at: int
    """The index in the slots of the block of the download ring."""
    has_download: bool
    is_large: bool
    """True if so much is copied on the host that other threads should have the interpreter meanwhile."""


class Plans:
    """The plans of the tasks of one location, one for each shape.

    Args:
        location: the worker's location.
        types: the engine's cell types.
        arenas: the arenas at that location.
        host: arenas of the host.
        pads: pad rows and counts to a few sizes, so that shapes recur; else only as the cell requires.
        goes_whole: returns whether a run of that signature is captured as a whole, or is to be; else it goes by steps,
            which need few captures.

    Attributes:
        counts: tasks that were ``unfused``, in the plain form of a cell whose fused one does not take them; and those
            whose plain form measured faster (``plain_faster``).
    """

    def __init__(
        self,
        location: int,
        types: Mapping[int, CellType],
        arenas: DeviceArenas,
        host: Arenas,
        pads: bool,
        goes_whole: Callable[[Signature], bool],
    ) -> None:
        self._location, self._types, self._arenas, self._host, self._pads = location, types, arenas, host, pads
        self._goes_whole = goes_whole
        self._known: dict[tuple[int, type[TaskReader], bytes], Plan | None] = {}
        """Plans by cell type, reader and shape; None: that reader cannot read the task."""
        self._rules: dict[tuple[int, int], tuple[NDArray[np.int64], int]] = {}
        """Rules by cell type and form, with the numbers that a shape may have besides those of its steps."""
        self._signatures: dict[Signature, Signature] = {}
        """Signatures, each once, so that equal ones of different plans need not be compared number by number."""
        self._shape = np.zeros(0, np.int64)
        self.counts: Counter[str] = Counter()

    def of(self, placed: PlacedCell, type_id: int, buffer: Ints) -> Plan:
        """Return the plan of a task: for the fused form of its cell where possible, else for the plain form."""
        readers = _readers(placed, buffer, self._pads)
        if not readers[0].is_fused and placed.run_rows is not None and placed.prefers_plain:
            self.counts["plain_faster"] += 1
        for reader in readers:
            rules, least = self._rules_of(type_id, reader.form)
            room = self._room_for(least + buffer.item(H_STEPS))
            found = room[: find_shape(buffer, rules, room)]
            key = type_id, reader, found.tobytes()
            plan = self._known.get(key, self)
            if isinstance(plan, Plans):
                plan = self._read(placed, reader, type_id, shape_of(found, rules), buffer)
                if plan is None or not plan.packing.computed:
                    if len(self._known) >= MAX_KNOWN:
                        self._known.clear()
                        self._signatures.clear()
                    self._known[key] = plan
            if plan is not None and self._is_taken(plan, reader, readers):
                self.counts["unfused"] += readers[0].is_fused and not reader.is_fused
                return plan
        raise InternalError(f"no form of cell type {type_id} takes a task")

    def _is_taken(self, plan: Plan, reader: type[TaskReader], readers: list[type[TaskReader]]) -> bool:
        """Return whether this reader's plan is used, where another one has the task by steps."""
        may_go_by_steps = reader is SpanReader and SpanStepsReader in readers and plan.packing.can_capture
        return not may_go_by_steps or self._goes_whole(plan.packing.signature)

    def forget(self, type_id: int) -> None:
        """Drop the plans of a cell type; the worker's thread may use those of others meanwhile."""
        for key in [key for key in list(self._known) if key[0] == type_id]:
            self._known.pop(key, None)
        for rule in [rule for rule in list(self._rules) if rule[0] == type_id]:
            self._rules.pop(rule, None)
        for signature in [signature for signature in list(self._signatures) if signature.type_id == type_id]:
            self._signatures.pop(signature, None)

    def _rules_of(self, type_id: int, form: int) -> tuple[NDArray[np.int64], int]:
        known = self._rules.get((type_id, form))
        if known is None:
            rules = rules_of(self._types[type_id].cell, form, self._pads)
            known = self._rules[type_id, form] = rules, room_for(rules)
        return known

    def _room_for(self, needed: int) -> NDArray[np.int64]:
        if needed > len(self._shape):
            self._shape = np.zeros(2 * needed, np.int64)
        return self._shape

    def _read(
        self, placed: PlacedCell, reader: type[TaskReader], type_id: int, shape: Shape, buffer: Ints
    ) -> Plan | None:
        made = reader(self._location, self._types[type_id], shape, buffer, self._arenas, self._pads, placed.limits)
        try:
            return self._plan(self._with_known_signatures(made.read()))
        except CannotFuseError:
            return None

    def _with_known_signatures(self, packing: Packing) -> Packing:
        steps, known = packing.steps, self._signatures.setdefault
        if steps is not None:
            first, later = (known(signature, signature) for signature in (steps.first, steps.later))
            steps = steps._replace(first=first, later=later)
        return packing._replace(signature=known(packing.signature, packing.signature), steps=steps)

    def _plan(self, packing: Packing) -> Plan:
        signature = packing.signature
        # The numbers of the answers, and where they begin.
        behind = signature.sizes[0] if signature.tells_rows else 0
        bad = H_ROWS if signature.is_loop else H_POSITIONS if signature.tells_bad else NOWHERE
        steps = packing.steps
        kept = np.empty(0 if steps is None else signature.num_words, np.int64)
        at = 0 if steps is None else kept.ctypes.data
        numbers = [signature.num_words, signature.answers_at, signature.answers, behind, bad, at]
        # The transfers, with the limits of inputs that are checked on the way.
        ups, downs = self._transfers(packing.uploads), self._transfers(packing.downloads)
        for number, limits in packing.checked:
            ups[number, launch.FIRST : launch.END + 1] = limits
        # The results of loops that go ahead: only those of rows that have not stopped are copied.
        if signature.flags_at != NOWHERE:
            shown = [number for number, output in enumerate(signature.outputs) if output.results]
            records = np.array([output_record_at(len(signature.inputs), number) for number in shown], np.int64)
            downs[:, launch.POSITIONS_AT] = records + OUT_RESULT_POSITIONS
            downs[:, launch.BY_STEP] = records + OUT_RESULT_STEPS
        # The pieces of the blocks of both rings, with their sizes and alignments.
        row_bytes, padded = ups[:, launch.ROW_BYTES].tolist(), ups[:, launch.NUM_PADDED].tolist()
        up_pieces = [(8 * signature.num_words, 8), *((n * size, size) for n, size in zip(padded, row_bytes))]
        row_bytes, padded = downs[:, launch.ROW_BYTES].tolist(), downs[:, launch.NUM_PADDED].tolist()
        down_pieces = [(n * size, size) for n, size in zip(padded, row_bytes)]
        down_pieces.append((signature.answers * ANSWER_BYTES, ANSWER_BYTES))
        down_at = launch.UP_BLOCK + launch.STARTS + len(up_pieces)
        return Plan(
            packing,
            (
                np.array(numbers, np.int64),
                np.array(packing.operations, np.int64).reshape(-1, words.EXTRA + 1),
                ups,
                downs,
                pieces_of(up_pieces),
                pieces_of(down_pieces),
                np.array([] if steps is None else steps.parts, np.int64).reshape(-1, step_words.PART),
                np.array([] if steps is None else steps.sizes, np.int64),
            ),
            kept,
            down_at + launch.STARTS + len(down_pieces),
            down_at,
            bool(packing.downloads or signature.answers),
            sum(size for size, _ in (*up_pieces, *down_pieces)) >= LARGE_BYTES,
        )

    def _transfers(self, transfers: list[Transfer]) -> NDArray[np.int64]:
        made = np.zeros((len(transfers), launch.TRANSFER), np.int64)
        for k, transfer in enumerate(transfers):
            arena = self._host[transfer.kind]
            row_bytes = arena[0].numel() * arena.element_size()
            fields = transfer.source, transfer.num_rows, transfer.at, transfer.padded
            made[k, : launch.FIRST] = arena.data_ptr(), row_bytes, *fields
        return made


def _readers(placed: PlacedCell, buffer: Ints, captures: bool) -> list[type[TaskReader]]:
    """Return the readers for a task, the best first; the last one takes all.

    ``captures``: whether steps are captured.
    """
    if placed.cell.has_spans:
        return [NodeReader]
    is_loop, is_fused = buffer[H_IS_LOOP], placed.run_rows is not None and not placed.prefers_plain
    is_run = buffer[H_STEPS] > 1 and not is_loop
    plain: list[type[TaskReader]] = [TaskReader]
    if placed.pads_ragged and captures and not is_run:
        plain = [RaggedReader, TaskReader]
    if is_loop:
        return [_loop_reader(placed), *plain] if is_fused else plain
    if is_run and (buffer[H_STOP_OUTPUT] >= 0 or buffer[H_FLAGS] > 0):
        return [TaskReader]
    goes_by_steps = is_run and (not placed.cell.has_steps or (captures and placed.goes_by_steps))
    if goes_by_steps:
        plain = [StepsReader, TaskReader]
    if not is_fused:
        return plain
    if placed.reads_spans and placed.reads_ragged and not is_run:
        return [RaggedSpanReader, *plain]
    if placed.reads_spans:
        by_steps = is_run and captures and not (placed.chains is not None and placed.chains.always)
        return [SpanReader, *([SpanStepsReader] if by_steps else []), ExactSpanReader, *plain]
    if not is_run:
        return [FusedReader, *plain]
    if placed.chains is not None:
        return [ChainReader, FusedReader, *plain]
    return plain if placed.prefers_steps and not goes_by_steps else [FusedStepsReader, FusedReader, *plain]


def _loop_reader(placed: PlacedCell) -> type[TaskReader]:
    """Return the reader for a loop of a fused form."""
    if not placed.reads_spans:
        return LoopReader
    return RaggedLoopReader if placed.reads_ragged else SpanLoopReader
