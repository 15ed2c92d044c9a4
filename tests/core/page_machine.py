"""Growing states in the core: pages of integers that a fake worker reads, appends to and copies as it is told.

Every result is a sum over all rows so far, each weighted by its place: a page that is lost, late, lent or of another
request shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.requests.room import has_rows
from cellrt.core.state import task_layout as layout
from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MAX_KINDS, MIXED, NUM_PERMANENT, ROW_MASK, STUCK
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import (
    CARRY,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_LOOP,
    OP_PAGES,
    OP_RESULT,
    OP_RESULT_LAST,
    PAGED,
    STEP,
)
from tests.core.author import PRIME
from tests.limits import SMALL

NUMBERS, PAGES = 0, 1
READ, WRITE, PASS = 0, 1, 2
"""Cells: READ appends what comes with the request, or PASS hands on of it, a piece at a time; WRITE, in a loop, what it
made last, and reads the other's rows."""
PAGE_SIZE = 2


def weighted(rows: list[int]) -> int:
    return sum((k + 3) * row for k, row in enumerate(rows))


def read(so_far: list[int], x: int) -> int:
    so_far.append(x)
    return (weighted(so_far) + x) % PRIME


def write(so_far: list[int], memory: list[int], x: int) -> int:
    so_far.append(x)
    return (weighted(so_far) + 7 * weighted(memory) + 1) % PRIME


@dataclass
class Paged:
    """A request: reads ``numbers``, and then writes ``num_written`` beside them if any, from the first number on: only
    the pages say that it must wait."""

    numbers: list[int]
    num_written: int = 0
    passes: bool = False
    session: int = -1
    fails_after: int = 1 << 30
    """Rows that it takes before one fails."""
    so_far: list[int] = field(default_factory=list)
    """What its session read before."""
    id: int = -1
    results_at: int = -1
    end: int = -1
    """The notice that ended it."""

    @property
    def program(self) -> NDArray[np.int32]:
        count = len(self.numbers)
        passed = count if self.passes else 0
        program = [OP_EXTERNAL, NUMBERS, count, OP_PAGES, PAGES, PAGE_SIZE, int(self.session >= 0)]
        program += [OP_PAGES, PAGES, PAGE_SIZE, 0] if self.num_written else []
        program += [OP_CHAIN, PASS, count, STEP, 0, 1] if passed else []
        program += [OP_CHAIN, READ, count, STEP, passed, 1, PAGED, 0]
        if self.num_written:
            program += [OP_LOOP, WRITE, self.num_written, -1, CARRY, 0, PAGED, 1, PAGED, 0]
            program += [OP_RESULT_LAST, 2 * count + passed]
        return np.array([*program, OP_RESULT, count + passed, 1, count], np.int32)

    def expected(self) -> list[int]:
        """Its results, in order; what its session has read then is in ``so_far``."""
        made = [read(self.so_far, x) for x in self.numbers]
        last, written = self.numbers[0], list[int]()
        for _ in range(self.num_written):
            last = write(written, self.so_far, last)
        return [last, *made] if self.num_written else made


class PageMachine:
    """The core with fake workers that have ``pages`` each, and the host ``host_pages``."""

    def __init__(self, workers: int, pages: int, host_pages: int, max_rows: int = 4) -> None:
        self.processor = Processor(workers, SMALL, SchedulerSettings())
        self.processor.add_kind(1024, 1024)
        self.processor.add_kind(pages, host_pages, is_paged=True)
        grows = Port(PAGES, page_size=PAGE_SIZE, appends=True)
        self.processor.add_type([Port(NUMBERS), grows], [Port(NUMBERS)], max_batch=4, max_rows=max_rows)
        reads = Port(PAGES, page_size=PAGE_SIZE)
        self.processor.add_type([Port(NUMBERS, carry=0), grows, reads], [Port(NUMBERS)], max_batch=3)
        self.processor.add_type([Port(NUMBERS)], [Port(NUMBERS)], max_batch=1)
        self.rows = np.full((workers + 1, 1024 + NUM_PERMANENT), -999, np.int64)
        most = max(pages, host_pages) + NUM_PERMANENT
        self.pages = np.full((workers + 1, most, PAGE_SIZE), -999, np.int64)
        self.live: dict[int, Paged] = {}
        self.flights: list[list[tuple[int, NDArray[np.int32]]]] = [[] for _ in range(workers)]
        self.sequence = self.num_suspended = 0

    def submit(self, request: Paged) -> bool:
        """Admits a request if there is room."""
        request.id, request.results_at = self.admit(request.program, request.numbers, request.session)
        if request.id >= 0:
            self.live[request.id] = request
        return request.id >= 0

    def admit(self, program: NDArray[np.int32], given: list[int], session: int, **how: int) -> tuple[int, int]:
        """Admits a program if there is room, as is said before; returns its id (-1: there is none) and the place of its
        first result."""
        template = self.processor.compile(program)
        is_room = has_rows(self.processor.tables, template, session)
        admitted = self.processor.admit(template, self.sequence + 1, session=session, **how)
        assert is_room == (admitted is not None)
        if admitted is None:
            return -1, -1
        self.sequence += 1
        request, rows = admitted
        self.rows[HOST, rows[: len(given)]] = given
        return request, int(rows[-1])

    def schedule(self, worker: int) -> int:
        """As the engine does: where nobody who has pages can go on, the latest arrival lends its own."""
        tasks = self.processor.schedule(worker)
        flights = self.flights[worker - 1]
        while self.processor.starvation(worker) == STUCK and self.processor.suspend(worker):
            self.num_suspended += 1
            self.check()
            if tasks:
                break
            tasks = self.processor.schedule(worker)
        self.copy_pages()
        flights += [(task, self.processor.task_buffer(task)) for task in tasks]
        self.check()
        return len(tasks)

    def copy_pages(self) -> int:
        """Makes the copies that the core has written down; returns how many."""
        copies = views.take_copies(self.processor.tables)
        for kind, source, target in copies:
            assert kind == PAGES
            self.pages[target >> LOCATION_SHIFT, target & ROW_MASK] = self.pages[
                source >> LOCATION_SHIFT, source & ROW_MASK
            ]
        return len(copies)

    def used(self, location: int = 1) -> int:
        """Pages that are not free."""
        arena = self.processor.tables.arenas[location * MAX_KINDS + PAGES]
        return int(arena["capacity"]) - int(arena["num_free"])

    def finish(self, worker: int) -> None:
        task, buffer = self.flights[worker - 1].pop(0)
        self.run(task, buffer, worker)
        for id, what in self.processor.complete(task, 1000):
            request = self.live[id]
            request.end = what
            if what == NOTICE_DONE:
                places = self.processor.tables.places[request.results_at :][
                    : len(request.numbers) + (request.num_written > 0)
                ]
                assert self.rows[HOST, places].tolist() == request.expected()
                self.processor.release([id])
            if what in (NOTICE_DONE, NOTICE_RELEASED):
                del self.live[id]
            else:
                assert what == NOTICE_FAILED
        self.check()

    def run(self, task: int, buffer: NDArray[np.int32], worker: int) -> None:
        """Runs the steps of a task in order, reading only its buffer."""
        cell = int(self.processor.tables.tasks["cell_type"][task])
        view = TaskView(buffer, 1 if cell == PASS else 2 + cell, 1)
        requests = [self.live[id] for id, _ in self.processor.rows_in_flight(task)]
        stores, to_stores, rows, results, to_results, host_rows, _ = view.outputs[0]
        made = np.zeros(view.num_rows, np.int64)
        if cell == PASS:
            made[:] = [self.number(view, row, worker) for row in range(view.num_rows)]
        for span in range(0 if cell == PASS else len(view.spans) - 1):
            for row in view.rows_of_span(span):
                x = self.number(view, row, worker)
                so_far = self.state(view, 1, span, row, worker)
                made[row] = write(so_far, self.state(view, 2, span, row, worker), x) if cell else read(so_far, x)
                self.append(view, span, len(so_far) - 1, x, worker)
                requests[row].fails_after -= 1
                view.has_failed[row] = requests[row].fails_after < 0
        for k in range(stores):
            self.rows[worker, buffer[rows + k]] = made[buffer[to_stores + k]]
        for k in range(results):
            self.rows[HOST, buffer[host_rows + k]] = made[buffer[to_results + k]]

    def number(self, view: TaskView, row: int, worker: int) -> int:
        source, _, at, _ = view.inputs[0]
        number = int(view.buffer[at + row])
        if source == MIXED:
            source, number = number >> LOCATION_SHIFT, number & ROW_MASK
        assert self.rows[source, number] != -999, "read of a row that nobody wrote"
        return int(self.rows[source, number])

    def page(self, view: TaskView, port: int, span: int, number: int) -> int:
        at, offsets = view.inputs[port][layout.IN_ROWS], view.inputs[port][layout.IN_OFFSETS]
        first, end = view.buffer[offsets + span : offsets + span + 2].tolist()
        assert 0 <= number < end - first
        return int(view.buffer[at + first + number])

    def state(self, view: TaskView, port: int, span: int, row: int, worker: int) -> list[int]:
        """The rows of a growing state that are there before a row of the task."""
        offsets, spans = view.inputs[port][layout.IN_OFFSETS], len(view.spans) - 1
        length = int(view.buffer[offsets + spans + 1 + span])
        if port == 1:  # which it appends to
            before = int(view.buffer[offsets + 2 * spans + 1 + span])
            assert length == before + len(view.rows_of_span(span))
            length = before + row - view.rows_of_span(span).start
        found = [
            int(self.pages[worker, self.page(view, port, span, k // PAGE_SIZE), k % PAGE_SIZE]) for k in range(length)
        ]
        assert -999 not in found, "read of a page that nobody wrote"
        return found

    def append(self, view: TaskView, span: int, position: int, x: int, worker: int) -> None:
        self.pages[worker, self.page(view, 1, span, position // PAGE_SIZE), position % PAGE_SIZE] = x

    def check(self) -> None:
        assert broken_rules(self.processor.tables) == []

    def run_all(self, waiting: list[Paged], draw: random.Random) -> None:
        """Plays requests in a random order of events until all have ended."""
        workers = range(1, len(self.flights) + 1)
        for _ in range(5000):
            if not waiting and not self.live:
                return
            worker, event = draw.choice(workers), draw.random()
            if event < 0.3 and waiting:
                if self.submit(waiting[0]):
                    waiting.pop(0)
            elif event < 0.6 and len(self.flights[worker - 1]) < 3:
                self.schedule(worker)
            elif self.flights[worker - 1]:
                self.finish(worker)
        raise AssertionError("work is left that nobody can do")


def numbers(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, PRIME), k=count)


def play(machine: PageMachine, *requests: Paged) -> None:
    machine.run_all(list(requests), random.Random(3))
