"""The simulated worker: the scheduler driven by a virtual clock and a model of what a task costs.

It uses no threads, no tensors and no clock of the machine: the same arrivals always give the same tasks at the same
times. It makes tests of the scheduler exact (Figure 2.5 of BatchMaker is one) and tells how many workers a trace needs,
and which deadlines it can keep.

Time is a whole number of nanoseconds inside, so that sums are exact. At one moment, completions come first, then
arrivals in order, then late requests are dropped if they are to be, then tasks are scheduled: a request that arrives
when a task ends may join the next task.

Where pages of growing states run out, requests are suspended as an engine's are (``suspension.py``). Copies of pages
take their time from the worker whose next task needs them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.record_layout import loop_limits, record_at
from cellrt.core.state.tables import LOOP, MAX_KINDS, NEVER, STUCK
from cellrt.core.state.task_layout import IN_OFFSETS, TaskView
from cellrt.core.state.views import note_copies, take_copies
from cellrt.core.templates.sized_template import SizedTemplate
from cellrt.errors import InternalError, RequestError, RequestTooLargeError

Cost = Callable[[int, int, int], float]
"""The seconds that a task takes: ``cost(cell_type, rows, steps)``, with the rows of the first step."""

ReadingCost = Callable[[int, int], float]
"""The seconds that a task takes longer for the rows of growing states that it reads: ``reading(cell_type, rows_read)``.

Each of these rows is counted once for every row that reads it.
"""


@dataclass(frozen=True, eq=False)
class Arrival:
    """One request of a trace.

    Attributes:
        time_s: when it arrives, in seconds, 0 or later.
        work: its cell graph: a program (``program.py``), or a template that the same processor compiled.
        loop_steps: steps each loop takes before it stops, in order of their subgraphs; to the limit if None.
        priority: the client's, 0 (lowest) to 3.
        deadline_s: when it must be done, in seconds as ``time_s``; None: any time.
        schedule_by_s: when its first task must be submitted, the same. Policies go by both; whether what is late is
            dropped is up to ``simulate``.
    """

    time_s: float
    work: SizedTemplate | NDArray[np.int32]
    loop_steps: tuple[int, ...] | None = None
    priority: int = 0
    deadline_s: float | None = None
    schedule_by_s: float | None = None


@dataclass(frozen=True)
class SimulatedTask:
    """One task: its rows, and when it ran. ``requests`` has the arrival's index for each row."""

    task: int
    worker: int
    cell_type: int
    start_s: float
    end_s: float
    rows: int
    steps: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class SimulatedRequest:
    """One request, by the index of its arrival; until its admission it waited for room in the tables.

    The finish of a dropped request is infinity; so is the admission of one that was dropped before it.
    """

    request: int
    arrival_s: float
    admission_s: float
    finish_s: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation: tasks in order of submission, requests in order of the arrivals given."""

    tasks: tuple[SimulatedTask, ...]
    requests: tuple[SimulatedRequest, ...]

    @property
    def finish_s(self) -> list[float]:
        """The times when requests were done, in order of the arrivals given; infinity for dropped ones."""
        return [request.finish_s for request in self.requests]


def _nothing(cell_type: int, rows_read: int) -> float:
    return 0.0


def simulate(
    processor: Processor,
    arrivals: Sequence[Arrival],
    cost: Cost,
    *,
    queue_depth: int = 1,
    reading: ReadingCost = _nothing,
    page_s: float = 0.0,
    drops_late: bool = False,
) -> Simulation:
    """Run a trace of arrivals on an idle processor with simulated workers, until every request is done or dropped.

    Args:
        processor: holds the cell types, the limits and the settings, and says how many workers there are.
        arrivals: the requests, in any order.
        cost: the seconds of a task. A loop's task takes as many steps as its longest row did before it stopped.
        queue_depth: a worker with fewer tasks outstanding is given more: 1 means only when it is idle.
        reading: the seconds that a task takes besides for the rows of growing states that it reads.
        page_s: seconds that copying a page takes, between a worker and the host.
        drops_late: whether a request ends, as an engine's does, when its deadline comes before it is done, or its time
            to begin before a task of it was submitted. Else it is done all the same.

    Raises:
        RequestTooLargeError: a request would not fit even if it were alone.
        RequestError: an arrival is earlier than 0, has no nodes, or its ``loop_steps`` do not fit its loops.
        ValueError: ``queue_depth`` is not positive, or the processor is not idle.
    """
    if queue_depth < 1 or processor.num_live:
        raise ValueError(f"need a queue depth of at least 1, not {queue_depth}, and an idle processor")
    return _Simulator(processor, arrivals, cost, queue_depth, reading, page_s, drops_late).run()


@dataclass(eq=False)
class _Worker:
    """Tasks outstanding in order of submission, as (task id, start, end), and when the last copies are done."""

    location: int
    tasks: deque[tuple[int, int, int]]
    copied: int = 0


class _Simulator:
    """The state of one simulation. Times are ns."""

    def __init__(
        self,
        processor: Processor,
        arrivals: Sequence[Arrival],
        cost: Cost,
        queue_depth: int,
        reading: ReadingCost,
        page_s: float,
        drops_late: bool,
    ) -> None:
        self.processor, self.arrivals, self.cost, self.queue_depth = processor, arrivals, cost, queue_depth
        self.reading, self.page_s = reading, page_s
        self.templates = [self._template(arrival) for arrival in arrivals]
        self.workers = [_Worker(k + 1, deque()) for k in range(processor.num_workers)]
        times = [round(arrival.time_s * 1e9) for arrival in arrivals]
        self.arriving = deque(sorted(zip(times, range(len(times)))))
        self.ends: list[tuple[int, int]] = []  # heap of (time, location of the worker)
        self.waiting: deque[int] = deque()
        self.late: list[tuple[int, int, bool]] | None = [] if drops_late else None
        """A heap of (time, arrival, whether it is the time to begin) of requests that have arrived.

        It is None if none is dropped.
        """
        self.arrival_of: dict[int, int] = {}
        self.id_of: dict[int, int] = {}
        """The id of each arrival that was admitted and has neither been done nor dropped."""
        self.taken: Counter[tuple[int, int]] = Counter()
        """The steps that loops have taken in tasks that were submitted, by arrival and subgraph."""
        self.admissions: list[float] = [math.inf] * len(arrivals)
        self.finishes: list[float] = [math.inf] * len(arrivals)
        self.tasks: list[SimulatedTask] = []

    def _template(self, arrival: Arrival) -> SizedTemplate:
        template = arrival.work if isinstance(arrival.work, SizedTemplate) else self.processor.compile(arrival.work)
        if reason := self.processor.why_too_large(template, [f"kind {k}" for k in range(MAX_KINDS)]):
            raise RequestTooLargeError(reason)
        if arrival.time_s < 0 or not template.num_steps:
            raise RequestError(f"arrival at {arrival.time_s} s, {template.num_steps} nodes: need 0 s and 1")
        limits = template.loop_limits()
        steps = limits if arrival.loop_steps is None else arrival.loop_steps
        if len(steps) != len(limits) or any(not 1 <= n <= limit for n, limit in zip(steps, limits)):
            raise RequestError(f"loops of at most {limits} steps cannot take {list(steps)}")
        return template

    def run(self) -> Simulation:
        while self.ends or self.arriving:
            now = min(queue[0][0] for queue in (self.ends, self.arriving, self.late) if queue)
            self.processor.clock.set(now)
            while self.ends and self.ends[0][0] == now:
                self._complete(self.workers[heapq.heappop(self.ends)[1] - 1], now)
            while self.arriving and self.arriving[0][0] == now:
                self._arrive(self.arriving.popleft()[1])
                self.processor.clock.note_arrivals([now])
            while self.late and self.late[0][0] <= now:
                self._drop(*heapq.heappop(self.late)[1:])
            self._admit(now)
            self._schedule(now)
        if self.processor.num_live or self.waiting:
            raise InternalError(f"{self.processor.num_live} requests are live and nothing is scheduled")
        return Simulation(tuple(self.tasks), tuple(map(self._request, range(len(self.arrivals)))))

    def _request(self, k: int) -> SimulatedRequest:
        arrival, admission, finish = self.arrivals[k], self.admissions[k], self.finishes[k]
        return SimulatedRequest(k, arrival.time_s, admission / 1e9, finish / 1e9)

    def _arrive(self, k: int) -> None:
        self.waiting.append(k)
        if self.late is not None:
            for is_begun, time_ns in enumerate(self._due_ns(k)):
                if time_ns < NEVER:
                    heapq.heappush(self.late, (time_ns, k, bool(is_begun)))

    def _due_ns(self, k: int) -> tuple[int, int]:
        """Return when a request must be done and have begun."""
        times_s = self.arrivals[k].deadline_s, self.arrivals[k].schedule_by_s
        done_ns, begun_ns = (NEVER if time_s is None else round(time_s * 1e9) for time_s in times_s)
        return done_ns, begun_ns

    def _drop(self, k: int, is_begun: bool) -> None:
        """End a request whose time has passed, unless it has ended, or has begun where that is the time to begin."""
        if k in self.id_of:
            if is_begun and self.processor.has_begun(self.id_of[k]):
                return
            request = self.id_of.pop(k)
            if self.processor.cancel(request):
                del self.arrival_of[request]
        elif k in self.waiting:
            self.waiting.remove(k)

    def _admit(self, now: int) -> None:
        """Admit waiting requests, in order of arrival, as far as there is room."""
        while self.waiting:
            k = self.waiting[0]
            how = self.arrivals[k].priority, False, -1, *self._due_ns(k)
            admitted = self.processor.admit(self.templates[k], k, *how)
            if admitted is None:
                return
            self.waiting.popleft()
            self.arrival_of[admitted[0]], self.id_of[k] = k, admitted[0]
            self.admissions[k] = now

    def _schedule(self, now: int) -> None:
        """Give tasks to the workers that can take some, always the one with the fewest outstanding."""
        willing = [worker for worker in self.workers if len(worker.tasks) < self.queue_depth]
        while willing:
            worker = min(willing, key=lambda worker: len(worker.tasks))
            idle_workers = sum(not worker.tasks for worker in self.workers)
            tasks = self.processor.schedule(worker.location, idle_workers)
            if self.processor.has_pages:
                tasks = self._relieve(worker.location, idle_workers, tasks)
                self._copy_pages(worker, now)
            for task in tasks:
                start = max(worker.copied, worker.tasks[-1][2] if worker.tasks else now)
                end = start + self._run(task, worker.location, start)
                worker.tasks.append((task, start, end))
                heapq.heappush(self.ends, (end, worker.location))
            if not tasks or len(worker.tasks) >= self.queue_depth:
                willing.remove(worker)

    def _relieve(self, location: int, idle_workers: int, tasks: list[int]) -> list[int]:
        """Suspend a request, as an engine does, if no request with pages can go on at a worker.

        Return the worker's tasks: if there were none, those that can be formed then.
        """
        while self.processor.starvation(location) == STUCK and self.processor.suspend(location) and not tasks:
            tasks = self.processor.schedule(location, idle_workers)
        return tasks

    def _copy_pages(self, worker: _Worker, now: int) -> None:
        """Let the pages that move be copied before the worker's next task."""
        if count := len(take_copies(self.processor.tables)):
            elapsed = round(count * self.page_s * 1e9)
            worker.copied = max(worker.copied, now) + elapsed
            note_copies(self.processor.tables, count, elapsed)

    def _run(self, task: int, location: int, start: int) -> int:
        """Write a worker's answers to a task's buffer, record the task, and return how long it takes."""
        tables, view = self.processor.tables, TaskView(self.processor.task_buffer(task))
        rows, steps = view.num_rows, view.num_steps
        in_flight = self.processor.rows_in_flight(task)
        if view.is_loop or view.stop_output >= 0:
            wanted = [self._steps_of(view, row, *ids) for row, ids in enumerate(in_flight)]
            leads = self._leads([subgraph for _, subgraph in in_flight])
            if view.is_loop and not view.goes_ahead:
                steps = min(max(wanted), max(min(wanted), view.least_steps))
            for row, ids in enumerate(in_flight):
                if not leads[row]:
                    self._end_steps(view, row, min(steps, wanted[row]), *ids)
        cell_type, number = int(tables.tasks["cell_type"][task]), int(tables.tasks["number"][task])
        elapsed = round(self.cost(cell_type, rows, steps) * 1e9)
        if tables.types["has_spans"][cell_type]:
            elapsed += round(self.reading(cell_type, self._rows_read(task, cell_type)) * 1e9)
        times = start / 1e9, (start + elapsed) / 1e9
        arrivals = tuple(self.arrival_of[request] for request, _ in in_flight)
        self.tasks.append(SimulatedTask(number, location, cell_type, *times, rows, steps, arrivals))
        return elapsed

    def _rows_read(self, task: int, cell_type: int) -> int:
        """Return how many rows of growing states a task reads; each row that it appends reads those before it."""
        tables, read = self.processor.tables, 0
        first, count = int(tables.types["first_port"][cell_type]), int(tables.types["num_inputs"][cell_type])
        view = TaskView(self.processor.task_buffer(task), count)
        rows = np.diff(view.spans).astype(np.int64)
        for words, port in zip(view.inputs, tables.ports[first : first + count]):
            if port["page_size"]:
                lengths_at = words[IN_OFFSETS] + rows.size + 1
                lengths = view.buffer[lengths_at : lengths_at + rows.size]
                read += int((rows * lengths - port["appends"] * (rows * (rows - 1) // 2)).sum())
        return read

    def _leads(self, subgraphs: Sequence[int]) -> list[bool]:
        """Return for each row of a task, by its subgraph, whether a loop's first step reads it before its last row."""
        tables, left, leads = self.processor.tables, Counter(subgraphs), list[bool]()
        for subgraph in subgraphs:
            record = record_at(tables.links, int(tables.subgraphs["record"][subgraph]))
            is_loop = tables.subgraphs["what"][subgraph] == LOOP
            row = record.position - left[subgraph]
            leads.append(bool(is_loop and row < record.unseen))
            left[subgraph] -= 1
        return leads

    def _steps_of(self, task: TaskView, row: int, request: int, subgraph: int) -> int:
        """Return how many steps a row of a task would take; for a loop, as far as task and loop go."""
        length, left = int(task.lengths[row]), self._left(request, subgraph)
        return length if left is None else min(left, length)

    def _end_steps(self, task: TaskView, row: int, steps: int, request: int, subgraph: int) -> None:
        """Write how many steps a row took."""
        left = self._left(request, subgraph)
        task.done_steps[row] = -steps if steps == left else steps
        self.taken[self.arrival_of[request], subgraph] += steps

    def _left(self, request: int, subgraph: int) -> int | None:
        """Return the steps that a loop takes before it stops; None if it never does."""
        arrival, loops = self.arrival_of[request], loop_limits(self.processor.tables, request)
        wanted = self.arrivals[arrival].loop_steps
        if wanted is None or subgraph not in loops:
            return None
        return wanted[list(loops).index(subgraph)] - self.taken[arrival, subgraph]

    def _complete(self, worker: _Worker, now: int) -> None:
        """Take out the oldest task of a worker, and the requests that end with it."""
        task, start, end = worker.tasks.popleft()
        for request, what in self.processor.complete(task, end - start):
            self._finish(request, what, now)

    def _finish(self, request: int, what: int, now: int) -> None:
        if what == NOTICE_DONE:
            self.finishes[self.arrival_of[request]] = now
            del self.id_of[self.arrival_of[request]]
            if self.processor.release([request]):
                return
        del self.arrival_of[request]
