"""Readers of runs that go step by step. A step is captured once, and is then part of any run.

The numbers of rows of a run's steps differ from run to run. They are rounded up to a few sizes, and a step's operations
are captured once for each size. The words of a run are blocks, one for each step (``step_words.py``). A captured step
copies its block, which also says where the next step's block is.

State for the next step is in scratch rows, as in a fused form (``fused_reading.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import HOST
from cellrt.worker.device import step_words, words
from cellrt.worker.device.fused_reading import CannotFuseError, FusedReader
from cellrt.worker.device.packing import Packing, Part, RunSteps, TaskReader, Transfer
from cellrt.worker.device.shape import LEAST_ROWS, RUN, InputShape, OutputShape, next_size
from cellrt.worker.device.signature import NOWHERE, InputSignature, OutputSignature, Signature, Source


class StepsReader(TaskReader):
    """A reader of runs in the plain form. Raises CannotFuseError unless all inputs are at this worker or the host."""

    form = RUN
    unused = 0
    """The row of an output that is never read; 0: the arena's trash row."""

    def read(self) -> Packing:
        """Return the packing of the shape."""
        self._parts: list[Part] = []
        self._part_of_input: dict[int, int] = {}
        self._scratch_used: dict[int, int] = {}
        sizes = self._sizes_of_steps()
        if self._shape.rows > sizes[-1] or not self._pads:
            raise CannotFuseError
        packing = super().read()
        signature = packing.signature
        if signature.tells_bad:
            last = signature.answers_at + signature.answers - 1
            self._parts.append((signature.answers_at, NOWHERE, step_words.PAD_WORD, last, NOWHERE, 0, 0))
        steps = RunSteps(sizes, self._parts, self._step(signature, True), self._step(signature, False))
        return packing._replace(steps=steps)

    def _sizes_of_steps(self) -> list[int]:
        """Return the numbers of rows that a step may have."""
        return sizes_of_steps(self._type.cell.batch_sizes, self._type.cell.max_batch)

    def _step(self, run: Signature, is_first: bool) -> Signature:
        """Return the signature of a step of one row. Its ``sizes`` are empty, as all sizes of a step use it."""
        inputs, cell = [], self._type.cell
        for number, (name, given) in enumerate(zip(cell.inputs, run.inputs)):
            kind, location = given.kind, given.sources[0].location
            if name in cell.carry and not is_first:
                kind, location = run.outputs[list(cell.outputs).index(cell.carry[name])].kind, self._location
            source = Source(location, 1, step_words.HEAD + self._part_of_input[number], NOWHERE)
            inputs.append(InputSignature(kind, 1, (source,), NOWHERE, 0))
        last = step_words.HEAD + len(self._parts) - 1
        return run._replace(
            sizes=(),
            positions=1,
            inputs=tuple(inputs),
            answers=int(run.tells_bad),
            answers_at=last if run.tells_bad else NOWHERE,
            num_words=step_words.HEAD + len(self._parts),
        )

    def _num_answers(self, tells_rows: bool, tells_bad: bool) -> int:
        """Return the number of answers, with one more for padding rows."""
        return self._shape.positions + 1 if tells_bad else 0

    def _sizes(self) -> tuple[int, ...]:
        return (self._shape.rows,)

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        if given.num_offsets >= 0 or given.source not in (-2, HOST, self._location):
            raise CannotFuseError
        self._part_of_input[number] = len(self._parts)
        made = super()._input(number, kind, given)
        self._parts.append((made.sources[0].rows_at, NOWHERE, words.REPEAT, 0, NOWHERE, 0, 0))
        return made

    def _output(self, number: int, kind: int, made: OutputShape) -> OutputSignature:
        """Give each position an arena row and, if the output is a result, a row of the results' ring."""
        record, cell = self._record_of(number), self._type.cell
        name = list(cell.outputs)[number]
        is_kept = name in cell.carry.values() or self._needs_rows(name, made)
        part = results_part = NOWHERE
        if is_kept or made.stores:
            first_row = self._rows_of_positions(number, kind, made, record)
            part = self._add(first_row, self._unused_row(kind))
            for source, output in cell.carry.items():
                if output == name:
                    at = self._part_of_input[list(cell.inputs).index(source)]
                    self._parts[at] = (first_row, self._parts[at][0], words.REPEAT, 0, NOWHERE, 0, 0)
        if made.results:
            results_part = self._show(kind, made.results, record)
        return OutputSignature(
            kind, int(part >= 0), part, NOWHERE, int(results_part >= 0), results_part, self._shown_at(part), False
        )

    def _needs_rows(self, name: str, made: OutputShape) -> bool:
        return False

    def _shown_at(self, part: int) -> int:
        """Return the place of the arena rows that results are copied from; NOWHERE if they are copied when computed."""
        return NOWHERE

    def _unused_row(self, kind: int) -> int:
        return self._arenas.trash_row(kind)

    def _rows_of_positions(self, number: int, kind: int, made: OutputShape, record: int) -> int:
        """Add words with an arena row for each position: the one where it is stored, or a scratch row if it is carried.

        Return the first word.
        """
        cell, positions = self._type.cell, self._shape.positions
        at = self._room(positions)
        if list(cell.outputs)[number] in cell.carry.values():
            first, room = self._arenas.scratch_rows(kind)
            used = self._scratch_used.get(kind, 0)
            self._scratch_used[kind] = used + 2 * self._shape.rows
            if self._scratch_used[kind] > room:
                raise CannotFuseError
            fields = layout.H_BATCH_SIZES, self._shape.rows, layout.H_STEPS
            self._operations.append((words.TURNS, at, *fields, 0, first + used))
        else:
            self._operations.append((words.FILL, at, 0, 0, 0, positions, self._unused_row(kind)))
        fields = record + layout.OUT_STORE_POSITIONS, record + layout.OUT_STORE_ROWS, record + layout.OUT_STORES
        self._operations.append((words.STORE, at, *fields, 0, 0))
        return at

    def _show(self, kind: int, count: int, record: int) -> int:
        """Add a row of the results' ring for each position. Positions without a result share one further row.

        Return the place of the array in a block of one row.
        """
        names_at, at = self._room(count + 1), self._room(self._shape.positions)
        fields = record + layout.OUT_RESULT_ROWS, record + layout.OUT_RESULTS
        self._downloads.append(Transfer(kind, *fields, names_at, count + 1))
        shown = record + layout.OUT_RESULT_POSITIONS, record + layout.OUT_RESULTS
        self._parts.append((at, NOWHERE, step_words.PAD_WORD, names_at + count, names_at, *shown))
        return step_words.HEAD + len(self._parts) - 1

    def _add(self, at: int, pad: int) -> int:
        """Add an array with a word for each position to the blocks; return its place in a block of one row."""
        self._parts.append((at, NOWHERE, step_words.PAD_NUMBER, pad, NOWHERE, 0, 0))
        return step_words.HEAD + len(self._parts) - 1

    def _copy(self, source: int, count: int, padded: int, pad: int) -> int:
        """Add copied words without padding, as the blocks are padded."""
        at = self._room(padded)
        self._operations.append((words.COPY, at, source, 0, count, 0, pad))
        return at


class FusedStepsReader(StepsReader, FusedReader):
    """A reader of runs in a fused form, which reads and writes arena rows. The host knows the number of rows."""

    is_fused = True

    def _needs_rows(self, name: str, made: OutputShape) -> bool:
        return True

    def _shown_at(self, part: int) -> int:
        return part

    def _unused_row(self, kind: int) -> int:
        return -1

    def _rows_of_positions(self, number: int, kind: int, made: OutputShape, record: int) -> int:
        at = self._room(self._shape.positions)
        self._scratch_rows(number, kind, made.results, at)
        fields = record + layout.OUT_STORE_POSITIONS, record + layout.OUT_STORE_ROWS, record + layout.OUT_STORES
        self._operations.append((words.STORE, at, *fields, 0, 0))
        return at


class SpanStepsReader(FusedStepsReader):
    """A reader of runs in a fused form that reads the number of a step's rows on the device."""

    def _sizes_of_steps(self) -> list[int]:
        """Return the numbers of rows that a step may have: only a few, as missing rows cost a kernel little."""
        most, least = self._type.cell.max_batch, min(LEAST_ROWS, self._type.cell.max_batch)
        return sorted({least, *(min(1 << power, most) for power in range(least.bit_length(), most.bit_length() + 1))})

    def _step(self, run: Signature, is_first: bool) -> Signature:
        return super()._step(run, is_first)._replace(spans_at=step_words.SPANS_AT)


def sizes_of_steps(batch_sizes: Sequence[int], max_batch: int) -> list[int]:
    """Return the numbers of rows that a step may have."""
    if batch_sizes:
        return list(batch_sizes)
    sizes, count = [], 0
    while count < max_batch:
        count = min(next_size(count + 1), max_batch)
        sizes.append(count)
    return sizes


def at_rows(step: Signature, rows: int) -> Signature:
    """Return the signature of a step of ``rows`` rows, given that of one row."""

    def place(at: int) -> int:
        return NOWHERE if at == NOWHERE else step_words.HEAD + (at - step_words.HEAD) * rows

    inputs = [
        given._replace(
            num_rows=rows,
            sources=tuple(Source(source.location, rows, place(source.rows_at), NOWHERE) for source in given.sources),
        )
        for given in step.inputs
    ]
    outputs = [
        made._replace(
            stores=made.stores * rows,
            rows_at=place(made.rows_at),
            results=made.results * rows,
            result_rows_at=place(made.result_rows_at),
            result_positions_at=place(made.result_positions_at),
        )
        for made in step.outputs
    ]
    return step._replace(
        sizes=(rows,),
        positions=rows,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        answers=step.answers * rows,
        answers_at=place(step.answers_at),
        num_words=step_words.HEAD + (step.num_words - step_words.HEAD) * rows,
    )
