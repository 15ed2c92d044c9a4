"""The execution of one task on a CPU: gather input rows by index, call the cell, store its outputs where the task says.

The executor reads nothing but the scheduler's buffer (``core/state/task_layout.py``). A cell with a compiled form does
all of it in one compiled call. The others, and the tasks that such a form refuses, go through the cell's module. Rows
on which the module fails (``worker/failed_rows.py``) get zeros, and their flags in the buffer are set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.tables import HOST, MAX_TYPES, MIXED, NEVER
from cellrt.core.state.task_layout import HEADER, TaskView, input_record_at, output_record_at
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.span_form import SpanForm
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows
from cellrt.definition.task_memory import CARRY, DONE, FIRST_ARENA, FLAG, RECORD, ROW_BYTES
from cellrt.errors import CellError
from cellrt.native.row_types import new_table
from cellrt.worker.arenas import Arenas
from cellrt.worker.cell_type import CellType
from cellrt.worker.cpu.attempt import CpuAttempt, CpuOutcome
from cellrt.worker.cpu.run_span_task import APPENDED_PAGES, PAGES, SPAN, run_span_task
from cellrt.worker.cpu.run_task import run_task
from cellrt.worker.cpu.run_tasks import RUNNABLE_CELL
from cellrt.worker.cpu.span_attempt import SpanAttempt
from cellrt.worker.failed_rows import Attempt, Failure, Failures, run_or_blame
from cellrt.worker.span_rows import most_pages, unpack_pages, unpack_spans
from cellrt.worker.torch_state import CellMode


class CompiledCell(NamedTuple):
    """The arguments of ``run_task`` for a cell type with a compiled form.

    With ``words`` and ``least_rows`` they are those of ``run_span_task``.
    """

    ports: NDArray[np.int64]
    num_inputs: int
    function: int
    constants: int
    keeps: CompiledForm
    words: NDArray[np.int64] | None = None
    least_rows: int = 0


def _compiled_cell(cell_type: CellType, location: int, arenas: list[Arenas]) -> CompiledCell | None:
    """Return the addresses and sizes that the compiled form of a cell type needs; None if it has no such form."""
    cell = cell_type.cell
    form = cell_type.form
    if form is None or any(cell.outputs[name].dtype != torch.float32 for name in cell.finite):
        return None
    if cell.has_spans and not isinstance(form, SpanForm):
        return None
    # Describe each port: its record in the buffer, the bytes of a row, and its arena at each location.
    inputs, outputs = list(cell.inputs), list(cell.outputs)
    ports = np.zeros((len(inputs) + len(outputs), FIRST_ARENA + len(arenas)), np.int64)
    for port, (name, spec) in zip(ports, form.inputs.items()):
        k = inputs.index(name)
        port[RECORD], port[ROW_BYTES], port[FLAG] = input_record_at(k), spec.num_bytes, spec.ragged
        port[CARRY] = list(form.outputs).index(cell.carry[name]) if name in cell.carry else -1
        port[FIRST_ARENA:] = [at[cell_type.input_kinds[k]].data_ptr() for at in arenas]
    for port, (name, spec) in zip(ports[len(inputs) :], form.outputs.items()):
        k = outputs.index(name)
        port[RECORD], port[ROW_BYTES] = output_record_at(len(inputs), k), spec.num_bytes
        port[FLAG] = name in cell.finite
        port[FIRST_ARENA:] = [at[cell_type.output_kinds[k]].data_ptr() for at in arenas]
    made = CompiledCell(ports, len(inputs), form.function.address, form.constants.ctypes.data, form)
    if not isinstance(form, SpanForm):
        return made
    # Kernels of spans take pages in place, so that they need the number of pages, too.
    num_pages: dict[str, int] = {}
    for port, (name, spec) in zip(ports, form.inputs.items()):
        port[FLAG] = APPENDED_PAGES if spec.appends else PAGES if spec.page_size else SPAN if spec.span else spec.ragged
        if spec.page_size:
            num_pages[name] = len(arenas[location][cell_type.input_kinds[inputs.index(name)]])
    return made._replace(words=form.words_with(num_pages), least_rows=form.least_rows)


class Executor:
    """The executor of tasks at one location.

    One thread calls it. It reads other locations' arenas where a task says so.
    """

    def __init__(self, location: int, arenas: list[Arenas], types: Mapping[int, CellType]) -> None:
        self._location = location
        self._arenas = arenas
        self._types = types
        self._compiled: dict[int, CompiledCell | None] = {}
        self.cells = new_table(MAX_TYPES, RUNNABLE_CELL)
        """The types whose form is compiled and has run once, by type, for ``run_tasks.py``."""
        self._replicas: dict[int, Cell] = {}
        """The cells that run as their modules do, each with a module of this thread's own."""
        self.scratch = np.empty(1 << 16, np.uint8)
        """Memory for a task; it is replaced as it grows."""
        self._mode: CellMode | None = None

    def execute(self, type_id: int, buffer: NDArray[np.int32]) -> list[Failure]:
        """Run the task in ``buffer``; write results, done steps and failure flags. Return the failed rows."""
        if type_id not in self._compiled:
            self._compile(type_id)
        compiled = self._compiled[type_id]
        if compiled is not None and self._run_compiled(compiled, buffer):
            return []
        return self._run_module(self._types[type_id], buffer)

    def load(self) -> None:
        """Load the code that runs tasks, which takes some seconds in a new process.

        No task is run: the calls only ask for scratch.
        """
        header, ports, none = np.zeros(HEADER, np.int32), np.zeros((0, FIRST_ARENA), np.int64), np.zeros(0, np.uint8)
        run_task(header, ports, 0, self._location, HOST, 0, 0, none)
        run_span_task(header, ports, 0, self._location, HOST, 0, 0, np.zeros(1, np.int64), 0, none)

    def prepare(self, type_id: int) -> None:
        """Make what the tasks of a type need, before the first one comes."""
        cell_type = self._types[type_id]
        if self._compile(type_id) is None:
            self._replica_of(cell_type)

    def forget(self, type_id: int) -> None:
        """Drop what was kept for a cell type that no task has."""
        self._compiled.pop(type_id, None)
        self.cells[type_id] = 0
        self._replicas.pop(type_id, None)

    def _compile(self, type_id: int) -> CompiledCell | None:
        made = _compiled_cell(self._types[type_id], self._location, self._arenas)
        self._compiled[type_id], row = made, self.cells[type_id]
        if made is not None:
            row["num_inputs"], row["function"], row["constants"] = made.num_inputs, made.function, made.constants
            row["ports_at"], (row["num_ports"], row["port_words"]) = made.ports.ctypes.data, made.ports.shape
            if made.words is not None:
                row["words_at"], row["num_words"] = made.words.ctypes.data, made.words.size
            row["least_rows"], row["last_ns"], row["is_there"] = made.least_rows, NEVER, 1
        return made

    def _run_compiled(self, cell: CompiledCell, buffer: NDArray[np.int32]) -> bool:
        """Run a task in one compiled call and return whether it ran: a cell's form may refuse it."""
        ports, num_inputs, function, constants, _, words, least_rows = cell
        what = buffer, ports, num_inputs, self._location, HOST, function, constants
        while True:
            scratch = self.scratch
            done = run_task(*what, scratch) if words is None else run_span_task(*what, words, least_rows, scratch)
            if done <= 0:
                return bool(done == DONE)
            self.scratch = np.empty(2 * done, np.uint8)

    def _run_module(self, cell_type: CellType, buffer: NDArray[np.int32]) -> list[Failure]:
        cell, failures = self._replica_of(cell_type), Failures()
        task = TaskView(buffer, len(cell.inputs), len(cell.outputs))

        def gather() -> list[CellInput]:
            if cell.has_spans:
                return self._gather_spans(task, cell_type)
            return [self._gather(task, kind, *words) for kind, words in zip(cell_type.input_kinds, task.inputs)]

        # Run the cell, and find the rows on which it fails.
        if self._mode is None:
            self._mode = CellMode("cpu")
        attempt: Attempt[CpuOutcome]
        if cell.has_spans:
            attempt = SpanAttempt(cell, task, gather, self._mode, cell_type.form)
        else:
            attempt = CpuAttempt(cell, task, gather, self._mode)
        outcome = run_or_blame(attempt, failures)
        if failures.split is not None:
            cell_type.retries.note(cell.name, failures.split, len(failures))
        failures += [_not_finite(cell, row, output) for row, output in outcome.not_finite.items()]
        if cell.has_spans:  # they fail as a whole
            failures[:] = [Failure(row, each.error) for each in failures for row in task.rows_of_span(each.row)]
        for failure in failures:
            task.has_failed[failure.row] = 1
        # Write the steps that rows of loops took, then store the outputs.
        if task.is_loop:
            task.done_steps[:] = outcome.done_steps
        elif task.stop_output >= 0:  # of the rows that are steps of loops
            stopped = outcome.outputs[task.stop_output][: task.num_rows].astype(bool)
            task.done_steps[:] = np.where(stopped, -task.lengths, task.lengths)
        for number, (kind, words) in enumerate(zip(cell_type.output_kinds, task.outputs)):
            self._store(task, outcome, number, kind, *words)
        return failures

    def _replica_of(self, cell_type: CellType) -> Cell:
        if cell_type.id not in self._replicas:
            try:
                made = cell_type.cell.replica()
            except Exception as error:
                made = cell_type.cell
                logging.getLogger("cellrt").warning(
                    "cell %r: its module cannot be copied for each worker, so they share it with what it notes on "
                    "itself: %s: %s",
                    made.name,
                    type(error).__name__,
                    error,
                )
            self._replicas[cell_type.id] = made
        return self._replicas[cell_type.id]

    def _gather(self, task: TaskView, kind: int, source: int, count: int, rows_at: int, offsets_at: int) -> CellInput:
        rows = task.buffer[rows_at : rows_at + count]
        if source == MIXED:
            values = self._gather_mixed(kind, rows)
        else:
            values = self._arenas[source if source >= 0 else self._location].get(kind, rows)
        if offsets_at < 0:
            return values
        # The offsets lie right before the rows.
        return RaggedRows(values, torch.from_numpy(task.buffer[offsets_at:rows_at].astype(np.int64)))

    def _gather_spans(self, task: TaskView, cell_type: CellType) -> list[CellInput]:
        """Return the inputs of a cell with spans or pages, which takes the rows of each node together."""
        count, spans, buffer = task.num_rows, task.spans, task.buffer
        offsets, (nodes, steps) = torch.from_numpy(spans.copy()), np.empty((2, count), np.int32)
        is_read = np.empty(count, np.bool_)
        # All inputs share the spans; pages are passed as tables and not copied.
        unpack_spans(buffer, len(task.inputs), len(task.outputs), nodes, steps, is_read)
        of_rows, read = torch.from_numpy(nodes), torch.from_numpy(is_read)
        inputs: list[CellInput] = []
        for number, (spec, kind) in enumerate(zip(cell_type.cell.inputs.values(), cell_type.input_kinds)):
            if spec.span:
                inputs.append(Spans(offsets, torch.from_numpy(steps), read))
            elif spec.page_size:
                tables = np.empty((len(spans) - 1, most_pages(buffer, number)), np.int32)
                lengths, positions = np.empty(len(tables), np.int32), np.zeros(count, np.int32)
                unpack_pages(buffer, number, tables, lengths, positions[: count if spec.appends else 0])
                inputs.append(
                    PagedRows(
                        self._arenas[self._location][kind],
                        torch.from_numpy(tables),
                        torch.from_numpy(lengths),
                        offsets,
                        of_rows,
                        torch.from_numpy(positions),
                        read,
                        spec.page_dim,
                    )
                )
            else:
                inputs.append(self._gather(task, kind, *task.inputs[number]))
        return inputs

    def _gather_mixed(self, kind: int, handles: NDArray[np.int32]) -> torch.Tensor:
        """Return rows from several locations, in the order of their handles."""
        own = self._arenas[self._location]
        values = own.empty_bits(kind, len(handles))
        for location, arenas in enumerate(self._arenas):
            arenas.get_into(kind, handles, location, self._location, values)
        return own.as_tensor(kind, values)

    def _store(
        self,
        task: TaskView,
        outcome: CpuOutcome,
        number: int,
        kind: int,
        stores: int,
        positions_at: int,
        rows_at: int,
        results: int,
        result_positions_at: int,
        result_rows_at: int,
        shows_every_step: int,
    ) -> None:
        """Copy one output's rows to its arena rows and its results to the host."""
        buffer, value = task.buffer, outcome.outputs[number]
        if stores:
            rows, positions = buffer[rows_at : rows_at + stores], buffer[positions_at : positions_at + stores]
            self._arenas[self._location].move(kind, rows, value, positions)
        if results:
            if shows_every_step:  # of some rows of a loop; the last steps of the others lie after these
                steps = outcome.every_step[number]
                value = np.concatenate([steps.reshape(-1, *value.shape[1:]), value])
            rows = buffer[result_rows_at : result_rows_at + results]
            positions = buffer[result_positions_at : result_positions_at + results]
            self._arenas[HOST].move(kind, rows, value, positions)


def _not_finite(cell: Cell, row: int, output: str) -> Failure:
    return Failure(row, CellError(f"cell {cell.name!r} returned a value that is not finite in output {output!r}"))
