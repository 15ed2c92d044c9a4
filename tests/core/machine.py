"""A machine of integers: runs the core's tasks on NumPy rows, late and in stream order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.requests.room import has_rows
from cellrt.core.scheduling.policy import Policy
from cellrt.core.state import task_layout as layout
from cellrt.core.state.moves import FREE
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MIXED, NEVER, NUM_PERMANENT, ROW_MASK
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.sized_template import SizedTemplate
from tests.core.author import CELLS, Cell, Graph, stops
from tests.core.door import TAKEN_STEPS, VALUE, Client, Submission
from tests.limits import SMALL

NOWHERE = -2
"""The location of an input that reads constants alone."""


@dataclass
class Request:
    """A request under test."""

    graph: Graph
    id: int = -1
    results_at: int = -1
    submission: Submission | None = None
    """What it came with, while compiled code has it."""
    ends: list[str] = field(default_factory=list)
    poisoned: bool = False
    good_tasks: int = 0
    """Rows of tasks that a poisoned request survives."""
    steps_done: Counter[int] = field(default_factory=Counter)
    """Steps of each cell that were done and did not fail."""


class Machine:
    """The core with fake workers. Each worker runs its tasks in order; a task runs only when its completion is
    reported."""

    def __init__(
        self,
        workers: int,
        max_batches: tuple[int, ...],
        settings: SchedulerSettings,
        rows: int = 1024,
        cells: tuple[Cell, ...] = CELLS,
        policy: Policy | None = None,
    ) -> None:
        self.cells = cells
        self.processor = Processor(workers, SMALL, settings, policy)
        num_kinds = 1 + max(max((*cell.input_kinds, *cell.output_kinds), default=0) for cell in cells)
        for _ in range(num_kinds):
            self.processor.add_kind(rows, rows)
        for number, (cell, max_batch) in enumerate(zip(cells, max_batches, strict=True)):
            ports = [
                Port(cell.kind_of_input(k), carry, ragged)
                for k, (carry, ragged) in enumerate(zip(cell.carry, cell.ragged, strict=True))
            ]
            outputs = [Port(cell.kind_of_output(k)) for k in range(cell.num_outputs)]
            self.processor.add_type(ports, outputs, max_batch=max_batch, priority=number)
            self.processor.set_step_time(number, 1, 1e-4)
        self.rows = np.full((num_kinds, workers + 1, rows + NUM_PERMANENT), -999, np.int64)
        """By kind, location and row."""
        self.rows[:, :, 0], self.rows[:, :, 1] = 0, 11
        self.flags = np.zeros((workers + 1, 2 + 2 * SMALL.max_subgraphs), np.bool_)
        """Of each worker, what it knows of rows that have stopped."""
        self.streams: list[deque[tuple[int, NDArray[np.int32]]]] = [deque() for _ in range(workers)]
        """Tasks that a worker has, each with its buffer: it knows nothing else of it."""
        self.live: dict[int, Request] = {}
        self.client = Client(self.processor, self.rows[:, HOST])
        self.by_row: dict[int, Request] = {}
        """Requests that compiled code has, by the row of their submission."""
        self.alive = [True] * workers
        self.sequence = 0
        self.largest = 1000
        self.task_types: list[tuple[int, int, int]] = []

    def submit(
        self,
        request: Request,
        priority: int = 0,
        session: int = -1,
        streamed: bool = False,
        deadline_ns: int = NEVER,
        schedule_by_ns: int = NEVER,
    ) -> bool:
        """Admits a request if there is room: every other one that is plain by the door."""
        template: SizedTemplate = self.processor.compile(np.array(request.graph.program, np.int32))
        self.sequence += 1
        is_room = has_rows(self.processor.tables, template, session)
        is_plain = session < 0 and not streamed and deadline_ns == schedule_by_ns == NEVER
        if is_plain and self.sequence % 2 and self._hand_in(request, template, priority):
            self.client.t = self.processor.tables
            assert is_room == self.processor.join()
            if is_room:
                (request.id,) = self.client.ids_of(request.submission)
                self.live[request.id] = request
            else:
                self.client.take_back()
                self._take_over(request)
            return is_room
        how = priority, streamed, session, deadline_ns, schedule_by_ns
        admitted = self.processor.admit(template, self.sequence, *how)
        assert is_room == (admitted is not None)
        if admitted is None:
            return False
        request.id, rows = admitted
        *external_rows, request.results_at = rows.tolist()
        self.rows_to_bring = external_rows[template.num_externals :]
        del external_rows[template.num_externals :]
        kinds = request.graph.external_kinds or [0] * len(external_rows)
        for kind, row, value in zip(kinds, external_rows, request.graph.externals, strict=True):
            if row >= 0:
                self.rows[kind, HOST, row] = value
        self.live[request.id] = request
        return True

    def _hand_in(self, request: Request, template: SizedTemplate, priority: int) -> bool:
        graph, tensors, at = request.graph, [], 0
        for count in template.arrays.externals[:, 0].tolist():
            kind = (graph.external_kinds or [0] * len(graph.externals))[at] if count else 0
            tensors.append((kind, np.array(graph.externals[at : at + count], np.int64)))
            at += count
        kinds = list(graph.result_kinds or [0] * len(graph.results))
        request.submission = self.client.hand_in(template, tensors, kinds, self.sequence, priority=priority)
        if request.submission is not None:
            self.by_row[request.submission.at] = request
        return request.submission is not None

    def _take_over(self, request: Request) -> None:
        if request.submission is not None:
            self.client.take_over(request.submission)
            del self.by_row[request.submission.at]
            request.submission = None

    def _take_answers(self) -> None:
        """Reads what compiled code has answered."""
        for row, number in self.client.told():
            request = self.by_row.pop(row)
            taken, got = request.submission.answers[:, number, [TAKEN_STEPS, VALUE]].T
            assert np.where(taken, got, -1).tolist() == request.graph.results
            request.ends.append("done")
            self.client.give_back(request.submission)
        for id, request in list(self.live.items()):
            is_answered = request.submission is not None and "done" in request.ends
            if is_answered and self.processor.tables.requests["state"][id] == FREE:  # nothing of it is in flight
                del self.live[id]

    def schedule(self, worker: int) -> int:
        """Lets the scheduler fill a worker's stream."""
        tasks = self.processor.schedule(worker)
        for task in tasks:
            row = self.processor.tables.tasks[task]
            self.task_types.append((worker, int(row["cell_type"]), int(row["rows"])))
        self.streams[worker - 1].extend((task, self.processor.task_buffer(task)) for task in tasks)
        return len(tasks)

    def finish(self, worker: int, elapsed_ns: int = 1000) -> None:
        """Runs and completes the oldest task of a worker."""
        task, buffer = self.streams[worker - 1].popleft()
        ran = self.run(task, buffer, worker)
        notices = self.processor.complete(task, elapsed_ns)
        assert int(self.processor.tables.tasks["positions"][task]) == ran
        self.take(notices)

    def take(self, notices) -> None:
        self._take_answers()
        for id, what in notices:
            request = self.live[id]
            self._take_over(request)
            if what == NOTICE_DONE:
                rows = self.processor.tables.places[request.results_at :][: len(request.graph.results)].tolist()
                kinds = request.graph.result_kinds or [0] * len(rows)
                got = [
                    int(self.rows[kind, HOST, row]) if row >= 0 else -1 for kind, row in zip(kinds, rows, strict=True)
                ]
                assert got == request.graph.results, (got, request.graph.results)
                request.ends.append("done")
                if not self.processor.release([id]):
                    del self.live[id]
            elif what == NOTICE_FAILED:
                request.ends.append("failed")
            elif what == NOTICE_RELEASED:
                del self.live[id]

    def cancel(self, request: Request) -> None:
        """Cancels a live request that has not ended."""
        request.ends.append("cancelled")
        self._take_over(request)
        if self.processor.cancel(request.id):
            del self.live[request.id]

    def grow(self) -> None:
        """Adds a kind, and a cell type with a larger batch than any before, whatever runs."""
        self.largest += 500
        kind = self.processor.add_kind(10, 20)
        self.processor.add_type([Port(kind)], [Port(kind)], max_batch=self.largest)

    def lose(self, worker: int) -> None:
        """A worker dies with all its tasks."""
        self.alive[worker - 1] = False
        self.streams[worker - 1].clear()
        self.take(self.processor.lose_worker(worker))

    def check(self) -> None:
        broken = broken_rules(self.processor.tables)
        assert not broken, broken

    def _read(self, kind: int, source: int, row: int, worker: int) -> int:
        if source == MIXED:
            source, row = row >> LOCATION_SHIFT, row & ROW_MASK
        if row < NUM_PERMANENT:
            return int(self.rows[kind, worker, row])
        value = int(self.rows[kind, source, row])
        assert value != -999, "read of a row that nobody wrote"
        return value

    def _inputs(self, buffer, cell: Cell, position: int, worker: int, carried: list[list[int]] | None, row: int):
        inputs: list[int | list[int]] = []
        for port, carry in enumerate(cell.carry):
            kind = cell.kind_of_input(port)
            record = layout.HEADER + port * layout.INPUT
            source, at = int(buffer[record + layout.IN_SOURCE]), int(buffer[record + layout.IN_ROWS])
            offsets = int(buffer[record + layout.IN_OFFSETS])
            if carry >= 0 and carried is not None:
                inputs.append(carried[row][carry])
            elif offsets >= 0:
                first, end = int(buffer[offsets + position]), int(buffer[offsets + position + 1])
                inputs.append([self._read(kind, source, int(buffer[at + k]), worker) for k in range(first, end)])
            else:
                inputs.append(self._read(kind, source, int(buffer[at + position]), worker))
        return inputs

    def _check_sources(self, buffer: NDArray[np.int32], num_inputs: int) -> None:
        """An input has a location that there is, or none if it reads constants alone, which are the same everywhere."""
        for source, count, at, _ in TaskView(buffer, num_inputs).inputs:
            is_anywhere = source != MIXED and (buffer[at : at + count] < NUM_PERMANENT).all()
            assert source == NOWHERE if is_anywhere else source == MIXED or HOST <= source <= len(self.streams)

    def run(self, task: int, buffer: NDArray[np.int32], worker: int) -> int:
        """Executes a task on the rows, reading only its buffer; returns the nodes that ran, rows that failed apart."""
        cell = self.cells[int(self.processor.tables.tasks["cell_type"][task])]
        self._check_sources(buffer, len(cell.carry))
        rows, steps, is_loop = (int(buffer[k]) for k in (layout.H_ROWS, layout.H_STEPS, layout.H_IS_LOOP))
        for row, (request_id, _) in enumerate(self.processor.rows_in_flight(task)):
            request = self.live[request_id]
            if request.poisoned and request.good_tasks == 0:
                buffer[int(buffer[layout.H_FAILED]) + row] = 1
            request.good_tasks = max(0, request.good_tasks - 1)
        outputs: list[list[int]]
        if is_loop:
            history = self._run_loop(buffer, cell, rows, worker)
            lengths = [len(steps_of_row) for steps_of_row in history]
            outputs = [(steps_of_row or [[-999] * cell.num_outputs])[-1] for steps_of_row in history]
        else:
            sizes = buffer[int(buffer[layout.H_BATCH_SIZES]) :][:steps].tolist()
            outputs, state, position, is_masked = [], None, 0, self._read_flags(buffer, rows, worker)
            for size in sizes:
                state = [
                    [-999] * cell.num_outputs
                    if position == 0 and is_masked[row]
                    else cell(self._inputs(buffer, cell, position + row, worker, state, row))
                    for row in range(size)
                ]
                outputs += state
                position += size
            lengths = [0 if is_masked[row] else sum(size > row for size in sizes) for row in range(rows)]
            history = [[outputs[row]] * (not is_masked[row]) for row in range(rows)] + [[[]]] * (len(outputs) - rows)
            self._answer(buffer, outputs, lengths, is_masked, worker)
        failed = buffer[int(buffer[layout.H_FAILED]) :][:rows].tolist()
        for row, (request_id, _) in enumerate(self.processor.rows_in_flight(task)):
            self._count_steps(buffer, cell, row, self.live[request_id], lengths[row])
        for output in range(cell.num_outputs):
            kind = cell.kind_of_output(output)
            record = layout.HEADER + len(cell.carry) * layout.INPUT + output * layout.OUTPUT
            count, positions, to = (
                int(buffer[record + k]) for k in (layout.OUT_STORES, layout.OUT_STORE_POSITIONS, layout.OUT_STORE_ROWS)
            )
            for k in range(count):
                self.rows[kind, worker, buffer[to + k]] = outputs[int(buffer[positions + k])][output]
            count, positions, to = (
                int(buffer[record + k])
                for k in (layout.OUT_RESULTS, layout.OUT_RESULT_POSITIONS, layout.OUT_RESULT_ROWS)
            )
            for k in range(count):
                if int(buffer[record + layout.OUT_RESULT_STEPS]):
                    row, step = divmod(int(buffer[positions + k]), steps)
                    if row >= rows:  # behind every step of all rows: the last of a row that shows no other
                        if not history[int(buffer[positions + k]) - rows * steps]:
                            continue
                        self.rows[kind, HOST, buffer[to + k]] = outputs[int(buffer[positions + k]) - rows * steps][
                            output
                        ]
                    elif step < len(history[row]):
                        self.rows[kind, HOST, buffer[to + k]] = history[row][step][output]
                elif history[int(buffer[positions + k])]:
                    self.rows[kind, HOST, buffer[to + k]] = outputs[int(buffer[positions + k])][output]
        return sum(length for length, has_failed in zip(lengths, failed) if not has_failed)

    def _answer(
        self,
        buffer: NDArray[np.int32],
        outputs: list[list[int]],
        lengths: list[int],
        is_masked: NDArray[np.bool_],
        worker: int,
    ) -> None:
        """Says which rows of a task that is no loop's say stop, to the core and to the next task."""
        stop, flags = int(buffer[layout.H_STOP_OUTPUT]), int(buffer[layout.H_FLAGS])
        for row, length in enumerate(lengths):
            has_stopped = stop >= 0 and not is_masked[row] and stops(outputs[row][stop])
            buffer[int(buffer[layout.H_DONE_STEPS]) + row] = -length if has_stopped else length
            if flags:
                has_failed = buffer[int(buffer[layout.H_FAILED]) + row] != 0
                is_over = is_masked[row] or has_stopped or has_failed
                self.flags[worker, buffer[flags + len(lengths) + row]] = is_over
        self.flags[worker, layout.NEVER_STOPPED] = False

    def _count_steps(self, buffer, cell: Cell, row: int, request: Request, steps: int) -> None:
        if not buffer[int(buffer[layout.H_FAILED]) + row]:
            request.steps_done[cell.number] += steps

    def _run_loop(self, buffer, cell: Cell, rows: int, worker: int) -> list[list[list[int]]]:
        stop, lengths = int(buffer[layout.H_STOP_OUTPUT]), int(buffer[layout.H_LENGTHS])
        history: list[list[list[int]]] = []
        has_stopped = self._read_flags(buffer, rows, worker)
        for row in range(rows):
            steps: list[list[int]] = []
            while not has_stopped[row] and len(steps) < int(buffer[lengths + row]):
                state = {row: steps[-1]} if steps else None
                steps.append(cell(self._inputs(buffer, cell, row, worker, state, row)))
                if stop >= 0 and stops(steps[-1][stop]):
                    break
            history.append(steps)
        most = max(int(buffer[layout.H_LEAST_STEPS]), min(map(len, history)))
        for row, steps in enumerate(history):
            del steps[most:]
            stopped = bool(steps) and stop >= 0 and stops(steps[-1][stop])
            has_stopped[row] |= stopped or buffer[int(buffer[layout.H_FAILED]) + row] != 0
            buffer[int(buffer[layout.H_DONE_STEPS]) + row] = -len(steps) if stopped else len(steps)
        if buffer[layout.H_FLAGS]:
            self.flags[worker, buffer[int(buffer[layout.H_FLAGS]) + rows :][:rows]] = has_stopped
        return history

    def _read_flags(self, buffer, rows: int, worker: int) -> NDArray[np.bool_]:
        """Which rows have stopped in a task before."""
        at = int(buffer[layout.H_FLAGS])
        return self.flags[worker, buffer[at : at + rows]] if at else np.zeros(rows, np.bool_)
