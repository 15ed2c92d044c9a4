"""Requests that read and say numbers, by loops that grow a state in pages and go ahead of their stop, and a machine of
integers that serves them. What a worker makes of a row behind a stop is garbage here, and lies in the rows that the
task was given for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.scheduling.policy import Policy
from cellrt.core.state import task_layout as layout
from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED, Notices
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.state.tables import HOST, ROW_MASK
from cellrt.core.state.tables import NEVER as NO_TIME
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import (
    LAST,
    LEADS,
    NEXT,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_LOOP,
    OP_MEMBER,
    OP_PAGES,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    PAGED,
    SAME,
    STEP,
)
from tests.core.author import PRIME
from tests.core.page_machine import NUMBERS, PAGE_SIZE, PAGES, PageMachine, read
from tests.limits import SMALL

SPEAK, EMBED = 0, 1
GARBAGE = -777
AHEAD = st.integers(0, 3)
NEVER = 1 << 30


def says_stop(made: int) -> bool:
    return made % 5 == 0


@dataclass
class Talk:
    """A request: reads ``numbers``, of which the last ``leading`` are those of the loop's first step, and says at most
    ``limit`` more."""

    numbers: list[int]
    limit: int
    leading: int = 1
    may_stop: bool = True
    fails_after: int = NEVER
    """Rows that it takes before one fails."""
    gives_up: bool = False
    carries: bool = False
    """Its loop's first number is a value, no row of a sequence; there is one that leads."""
    session: int = -1
    id: int = -1
    results_at: int = -1
    ends: list[int] = field(default_factory=list)
    taken: int = 0
    """Rows that were taken, in order, without a failure before them."""
    has_failed: bool = False

    @property
    def program(self) -> NDArray[np.int32]:
        count, read_by_chain = len(self.numbers), len(self.numbers) - self.leading
        program = [OP_EXTERNAL, NUMBERS, count, OP_PAGES, PAGES, PAGE_SIZE, int(self.session >= 0)]
        if read_by_chain:
            program += [OP_CHAIN, SPEAK, read_by_chain, STEP, 0, 1, PAGED, 0]
        made = count + 2 * read_by_chain
        begin = [LEADS, read_by_chain, 1, self.leading, 0] if self.leading else [NEXT, made - 2, 0]
        begin = [NEXT, read_by_chain, 0] if self.carries else begin
        program += [OP_LOOP, SPEAK, self.limit, 1 if self.may_stop else -1, *begin, PAGED, 0]
        return np.array([*program, OP_RESULT_STEPS, made, self.limit, OP_RESULT_LAST, made + 1], np.int32)

    def story(self, so_far: list[int]) -> tuple[list[int], list[int]]:
        """All rows that it appends to those of its session, and its results."""
        rows = list(so_far)
        for x in self.numbers:
            last = read(rows, x)
        made = [last] if self.leading else []
        while len(made) < self.limit and not (made and self.may_stop and says_stop(made[-1])):
            last = read(rows, last)
            made.append(last)
        return rows[len(so_far) :], [*made, *[-1] * (self.limit - len(made)), last + 1]


@dataclass
class Layers(Talk):
    """The same by a loop of two cells, the first of which adds one to what the second appends; it reads one number."""

    @property
    def program(self) -> NDArray[np.int32]:
        program = [OP_EXTERNAL, NUMBERS, 1, OP_PAGES, PAGES, PAGE_SIZE, int(self.session >= 0)]
        program += [OP_MEMBER, EMBED, self.limit, -1, 1, LAST, 0, 2]
        program += [OP_MEMBER, SPEAK, self.limit, 1 if self.may_stop else -1, 0, SAME, 1, PAGED, 0]
        return np.array([*program, OP_RESULT_STEPS, 2, self.limit, OP_RESULT_LAST, 3], np.int32)

    def story(self, so_far: list[int]) -> tuple[list[int], list[int]]:
        rows, made, last = list(so_far), list[int](), self.numbers[0]
        while len(made) < self.limit and not (made and self.may_stop and says_stop(made[-1])):
            made.append(last := read(rows, last + 1))
        return rows[len(so_far) :], [*made, *[-1] * (self.limit - len(made)), last + 1]


class Talkers(PageMachine):
    """The core with fake workers whose loops go ``ahead``. Each session has a list of what it must hold."""

    def __init__(
        self,
        workers: int,
        pages: int,
        host_pages: int,
        ahead: int,
        max_rows: int = 4,
        max_batch: int = 4,
        suspension: str = "copy",
        limits: Limits = SMALL,
        policy: Policy | None = None,
        **others: bool,
    ) -> None:
        settings = SchedulerSettings(loops_ahead=ahead, suspension=suspension, **others)  # type: ignore[arg-type]
        self.processor = Processor(workers, limits, settings, policy)
        self.processor.add_kind(1024, 1024)
        self.processor.add_kind(pages, host_pages, is_paged=True)
        grows = Port(PAGES, page_size=PAGE_SIZE, appends=True)
        ports = [Port(NUMBERS)] * 2
        self.processor.add_type([Port(NUMBERS), grows], ports, max_batch=max_batch, max_rows=max_rows)
        self.processor.add_type([Port(NUMBERS)], [Port(NUMBERS)], max_batch=max_batch)
        self.rows = np.full((workers + 1, 1088), -999, np.int64)
        self.pages = np.full((workers + 1, max(pages, host_pages) + 64, PAGE_SIZE), -999, np.int64)
        self.stopped = np.zeros((workers + 1, 2 + 2 * SMALL.max_subgraphs), np.bool_)
        self.talking: dict[int, Talk] = {}
        self.flights: list[list[tuple[int, NDArray[np.int32]]]] = [[] for _ in range(workers)]
        self.sequence = self.num_suspended = self.num_masked = self.num_again = 0
        self.held: dict[int, list[int]] = {}
        self.saved: set[int] = set()

    def begin(self, talk: Talk, **how: int) -> bool:
        """Admits a request if there is room."""
        talk.id, talk.results_at = self.admit(talk.program, talk.numbers, talk.session, **how)
        if talk.id < 0:
            return False
        self.talking[talk.id] = talk
        if talk.session in self.saved:
            self.saved.remove(talk.session)
            self._bring(talk)
        return True

    def _bring(self, talk: Talk) -> None:
        """Copies what the session held to the pages at the host that its request has for it."""
        so_far = self.held[talk.session]
        (handles,) = views.request_pages(self.processor.tables, talk.id).values()
        for k, row in enumerate(so_far):
            self.pages[HOST, handles[k // PAGE_SIZE] & ROW_MASK, k % PAGE_SIZE] = row

    def evict(self, session: int) -> None:
        """Takes the pages from a session without a request; they come with the next one, if the host has any."""
        if not self.processor.tables.kinds["host_rows"][PAGES]:
            self.processor.drop_states(session)
            self.held[session] = []
            return
        self.processor.drop_states(session, bring=True)
        views.bring_pages(self.processor.tables, session, 0, len(self.held[session]))
        self.saved.add(session)

    def schedule(self, worker: int) -> int:
        """As the engine does: who finds no page gets those of idle sessions, whatever runs."""
        count = super().schedule(worker)
        while self.processor.starvation(worker) and self.evict_any() and not count:
            count = super().schedule(worker)
        return count

    def evict_any(self) -> bool:
        """Evicts a session that has pages and no request, if there is one."""
        busy = {talk.session for talk in self.talking.values()} | self.saved
        for session in [session for session in self.held if session not in busy and self.held[session]][:1]:
            self.evict(session)
            return True
        return False

    def finish(self, worker: int) -> None:
        task, buffer = self.flights[worker - 1].pop(0)
        ran = self.run(task, buffer, worker)
        notices = self.processor.complete(task, 1000)
        assert int(self.processor.tables.tasks["positions"][task]) == ran
        self.take(notices)
        self.check()

    def take(self, notices: Notices) -> None:
        for id, what in notices:
            talk = self.talking[id]
            talk.ends.append(what)
            if what == NOTICE_DONE:
                places = self.processor.tables.places[talk.results_at :][: talk.limit + 1].tolist()
                found = [int(self.rows[HOST, row]) if row >= 0 else -1 for row in places]
                assert found == talk.story(self.held.get(talk.session, []))[1]
                if not self.processor.release([id]):
                    self.end(talk)
            elif what == NOTICE_RELEASED:
                self.end(talk)
            else:
                assert what == NOTICE_FAILED

    def end(self, talk: Talk) -> None:
        """It is gone: its session holds the rows of the steps that count, and no page more."""
        del self.talking[talk.id]
        if talk.session < 0:
            return
        so_far = self.held.setdefault(talk.session, [])
        rows, _ = talk.story(so_far)
        if NOTICE_DONE in talk.ends:
            assert talk.taken == len(rows)
        so_far += rows[: talk.taken]
        (kept,) = views.session_pages(self.processor.tables, talk.session, 0, 1)
        assert (kept.length, len(kept.handles)) == (len(so_far), -(-len(so_far) // PAGE_SIZE))

    def cancel(self, talk: Talk) -> None:
        talk.gives_up = False
        if self.processor.cancel(talk.id):
            self.end(talk)
        self.check()

    def run(self, task: int, buffer: NDArray[np.int32], worker: int) -> int:
        """Runs the rows of a task in order, reading only its buffer; returns how many were taken without failing."""
        is_embed = int(self.processor.tables.tasks["cell_type"][task]) == EMBED
        view, ran = TaskView(buffer, 1, 1) if is_embed else TaskView(buffer, 2, 2), 0
        talks = [self.talking[id] for id, _ in self.processor.rows_in_flight(task)]
        flags = view.flags if view.goes_ahead else np.ones((2, view.num_rows), np.int32)
        is_masked = self.stopped[worker, flags[0]] if view.goes_ahead else np.zeros(view.num_rows, np.bool_)
        made, has_stopped = np.full(view.num_rows, GARBAGE, np.int64), is_masked.copy()
        spans = [range(row, row + 1) for row in range(view.num_rows)]
        if not is_embed:
            spans = [view.rows_of_span(span) for span in range(len(view.spans) - 1)]
        for span, its in enumerate(spans):
            for row in its:
                if is_masked[row]:
                    self.num_masked += 1
                    view.done_steps[row] = 0
                    continue
                talk, x = talks[row], self.number(view, row, worker)
                assert x != GARBAGE or talk.has_failed, "a row behind a stop was read"
                if is_embed:
                    made[row] = x + 1
                else:
                    made[row] = read(so_far := self.state(view, 1, span, row, worker), x)
                    self.append(view, span, len(so_far) - 1, x, worker)
                talk.fails_after -= 1
                view.has_failed[row] = talk.fails_after < 0
                talk.has_failed = talk.has_failed or talk.fails_after < 0
                if not (talk.has_failed or is_embed):
                    taken = len(so_far) - len(self.held.get(talk.session, []))
                    self.num_again += taken <= talk.taken
                    talk.taken = max(talk.taken, taken)
                ran += not view.has_failed[row]
                has_stopped[row] = view.stop_output >= 0 and says_stop(made[row])
                if view.stop_output >= 0:
                    view.done_steps[row] = -1 if has_stopped[row] else 1
                has_stopped[row] |= view.has_failed[row] != 0
        self.stopped[worker, flags[1]] = has_stopped
        self.stopped[worker, : layout.NOBODYS] = False
        self._deliver(view, made, is_masked, worker)
        return ran

    def _deliver(self, view: TaskView, made: NDArray[np.int64], is_masked: NDArray[np.bool_], worker: int) -> None:
        for output, words in enumerate(view.outputs):
            stores, to_stores, rows, results, to_results, host_rows, _ = words
            for k in range(stores):
                self.rows[worker, view.buffer[rows + k]] = made[view.buffer[to_stores + k]] + output
            for k in range(results):
                row = view.buffer[to_results + k]
                if not is_masked[row]:
                    self.rows[HOST, view.buffer[host_rows + k]] = made[row] + output


class Stage:
    """Plays sessions, each with turns that follow one another, in a random order of events."""

    def __init__(self, machine: Talkers, draw: random.Random, turns: list[list[Talk]]) -> None:
        self.machine, self.draw, self.turns = machine, draw, turns
        self.running: list[Talk | None] = [None for _ in turns]

    def play(self) -> None:
        machine, draw, workers = self.machine, self.draw, range(1, len(self.machine.flights) + 1)
        for moment in range(1, 20_000):
            machine.processor.clock.set(moment * 10_000_000)
            if not machine.talking and not any(self.turns):
                return
            worker, event, k = draw.choice(workers), draw.random(), draw.randrange(len(self.turns))
            if event < 0.25 and self.turns[k]:
                self.begin(k)
            elif event < 0.6 and len(machine.flights[worker - 1]) < 4:
                machine.schedule(worker)
            elif event < 0.95 and machine.flights[worker - 1]:
                machine.finish(worker)
            elif event > 0.96 and machine.talking:
                talk = draw.choice(list(machine.talking.values()))
                if talk.gives_up and not talk.ends:
                    machine.cancel(talk)
        raise AssertionError("work is left that nobody can do")

    def begin(self, k: int) -> None:
        running, talk, machine = self.running[k], self.turns[k][0], self.machine
        if running is not None and machine.talking.get(running.id) is running:
            return
        is_kept = talk.session not in machine.saved and machine.held.get(talk.session)
        if is_kept and self.draw.random() < 0.3:
            machine.evict(talk.session)
        times_ns = [self.draw.choice([NO_TIME, self.draw.randrange(1 << 34)]) for _ in range(2)]
        if machine.begin(
            talk, deadline_ns=times_ns[0], schedule_by_ns=times_ns[1], priority=self.draw.choice([0, 0, 3])
        ):
            self.running[k] = self.turns[k].pop(0)
        elif not machine.talking:
            machine.evict_any()


def is_whole(machine: Talkers) -> bool:
    """Whether all rows and pages are free and nothing is reserved."""
    tables = machine.processor.tables
    used = tables.arenas["capacity"] - tables.arenas["num_free"]
    return not used.any() and not tables.kinds["reserved_worker"].any() and not tables.kinds["reserved_host"].any()


def turns_of(draw: random.Random, session: int, count: int, chaos: bool) -> list[Talk]:
    found = []
    for _ in range(count):
        length = draw.randint(1, 6)
        kind, length = draw.choice([(Talk, length), (Talk, length), (Layers, 1)])
        talk = kind(draw.choices(range(1, PRIME), k=length), draw.randint(1, 9), draw.randint(0, length))
        talk.may_stop, talk.session = draw.random() < 0.8, session
        if chaos:
            talk.fails_after = draw.choice([NEVER, NEVER, draw.randint(0, 8)])
            talk.gives_up = draw.random() < 0.3
        found.append(talk)
    return found
