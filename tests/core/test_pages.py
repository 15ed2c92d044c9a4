"""Growing states in the core: who has pages, lends them and gets them back, and what their rows sum to."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.ports import Port
from cellrt.core.state.tables import STARVED, STUCK
from cellrt.core.state.views import sessions_at
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
from tests.core.graphs import ONE_BY_ONE, admit
from tests.core.page_machine import NUMBERS, PAGE_SIZE, PAGES, PASS, READ, WRITE, Paged, PageMachine, numbers, play
from tests.effort import examples
from tests.limits import SMALL


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(8))
@given(
    draw=st.randoms(use_true_random=False),
    workers=st.integers(1, 2),
    host_pages=st.sampled_from([0, 5, 60]),
    max_rows=st.integers(1, 6),
    count=st.integers(1, 5),
)
def test_whoever_lends_pages_each_sum_is_that_of_all_its_own_rows(draw, workers, host_pages, max_rows, count):
    machine = PageMachine(workers, 15, host_pages, max_rows)
    requests = [
        Paged(
            numbers(draw.randint(1, 14), seed),
            draw.choice([0, 2, 9]),
            draw.random() < 0.5,
            fails_after=draw.choice([1 << 30, 5]),
        )
        for seed in range(count)
    ]
    machine.run_all(list(requests), draw)
    for request in requests:
        takes = len(request.numbers) + request.num_written
        assert (request.end == NOTICE_DONE) == (takes <= 5 or request.fails_after > 1000)
    machine.check()


def test_pages_that_run_out_are_lent_by_the_latest_arrival():
    machine = PageMachine(1, 20, 20)
    early, late = Paged(numbers(1, 1), num_written=30), Paged(numbers(1, 2), num_written=30)
    play(machine, early, late)
    assert machine.num_suspended > 0
    assert (early.end, late.end) == (NOTICE_DONE, NOTICE_DONE)


def test_nobody_lends_pages_that_no_other_asks_for():
    machine = PageMachine(1, 20, 20)
    machine.submit(Paged(numbers(1), num_written=9))
    for _ in range(3):
        machine.schedule(1)
        machine.finish(1)
    assert any(views.request_pages(machine.processor.tables, 0).values())
    assert not machine.processor.suspend(1)
    machine.check()


def test_the_only_one_with_pages_lends_them_to_an_earlier_arrival_that_has_none():
    machine = PageMachine(1, 20, 20)
    machine.sequence = 5
    machine.submit(Paged(numbers(1), num_written=9))
    for _ in range(3):
        machine.schedule(1)
        machine.finish(1)
    machine.sequence = 0
    machine.submit(Paged(numbers(1)))
    assert machine.processor.suspend(1)
    machine.check()


def test_what_was_lent_in_part_does_not_come_back_before_the_earlier_one_took_of_it():
    machine = PageMachine(1, 20, 6, max_rows=40)
    machine.processor.set_priority(WRITE, 1)  # so that the later one asks first
    early, late = Paged(numbers(26, 1)), Paged(numbers(1, 2), num_written=20)
    machine.sequence = 5
    assert machine.submit(late)
    for _ in range(15):
        machine.schedule(1)
        machine.finish(1)
    machine.sequence = 0
    assert machine.submit(early)
    machine.schedule(1)
    machine.finish(1)  # it has all pages that the other has not, and wants one more
    machine.schedule(1)
    assert (machine.num_suspended, late.end) == (1, -1)
    machine.finish(1)
    assert early.end == NOTICE_DONE
    while machine.live:
        assert machine.schedule(1)
        machine.finish(1)
    assert (machine.num_suspended, late.end) == (1, NOTICE_DONE)


def test_pages_are_lent_though_cells_without_any_keep_the_worker_busy():
    machine = PageMachine(1, 20, 20)
    program = np.array([OP_EXTERNAL, NUMBERS, 1, OP_CHAIN, PASS, 1, STEP, 0, 1, OP_RESULT, 1, 1, 1], np.int32)
    plain, _ = machine.admit(program, [7], -1)
    (busy,) = machine.processor.schedule(1)
    early, late = Paged(numbers(1, 1), num_written=30), Paged(numbers(1, 2), num_written=30)
    play(machine, early, late)
    assert machine.num_suspended > 0
    assert (early.end, late.end) == (NOTICE_DONE, NOTICE_DONE)
    assert list(machine.processor.complete(busy, 1000)) == [(plain, NOTICE_DONE)]


def test_a_request_that_is_later_and_in_flight_is_waited_for_and_none_before_it_lends():
    machine = PageMachine(1, 20, 20)
    early, late = Paged(numbers(1, 1), num_written=9), Paged(numbers(4, 2))
    assert machine.submit(early)
    for _ in range(3):
        machine.schedule(1)
        machine.finish(1)
    assert machine.submit(late)
    machine.processor.set_priority(READ, 1)
    machine.schedule(1)
    while len(machine.flights[0]) > 1:
        machine.finish(1)
    assert late.id in [id for id, _ in machine.processor.rows_in_flight(machine.flights[0][0][0])]
    assert not machine.processor.suspend(1)
    machine.check()


def test_pages_of_one_kind_are_lent_however_busy_cells_with_another_kind_are():
    machine = PageMachine(1, 4, 64)
    processor, kind = machine.processor, machine.processor.add_kind(64, 64, is_paged=True)
    programs = []
    for its_kind, count in ((PAGES, 7), (kind, 5)):
        grows = Port(its_kind, page_size=PAGE_SIZE, appends=True)
        made = processor.add_type([Port(NUMBERS, carry=0), grows], [Port(NUMBERS)], max_batch=4)
        program = [
            OP_EXTERNAL,
            NUMBERS,
            1,
            OP_PAGES,
            its_kind,
            PAGE_SIZE,
            0,
            OP_LOOP,
            made,
            count,
            -1,
            CARRY,
            0,
            PAGED,
            0,
        ]
        programs.append(np.array([*program, OP_RESULT_LAST, 1], np.int32))
    scarce = {machine.admit(programs[0], [1], -1)[0] for _ in range(2)}  # together they need more than there are
    others: set[int] = set()
    flights: list[int] = []
    for turn in range(200):
        while len(others) < 3:
            others.add(machine.admit(programs[1], [1], -1)[0])
        processor.clock.set(turn * 1_000_000)
        while len(flights) < 2:
            tasks = processor.schedule(1)
            while processor.starvation(1) == STUCK and processor.suspend(1) and not tasks:
                tasks = processor.schedule(1)
            views.take_copies(processor.tables)
            flights += tasks
            if not tasks:
                break
        for id in processor.complete(flights.pop(0), 1000).done():
            processor.release([id])
            scarce.discard(id)
            others.discard(id)
        if not scarce:
            return
    raise AssertionError("who came first waits for those of another kind")


def test_what_found_no_page_is_stuck_only_if_nothing_that_has_pages_goes_on():
    machine = PageMachine(1, 20, 20)
    starved = machine.processor.tables.types["starved_at"]
    assert machine.submit(Paged(numbers(8)))
    machine.schedule(1)
    starved[WRITE] = 1 << 1
    assert machine.processor.starvation(1) == STARVED  # rows of it are in flight
    machine.finish(1)
    assert machine.processor.starvation(1) == STARVED  # and others are ready
    starved[READ] = 1 << 1
    assert machine.processor.starvation(1) == STUCK
    starved[:] = 0
    assert machine.processor.starvation(1) == 0


def test_a_session_goes_on_in_its_pages():
    machine = PageMachine(1, 12, 12)
    session = machine.processor.open_session()
    so_far: list[int] = []
    for k in range(4):
        play(machine, Paged(numbers(3, k), session=session, so_far=so_far))
    (pages,) = views.session_pages(machine.processor.tables, session, 0, 1)
    assert (pages.kind, pages.length, len(pages.handles)) == (PAGES, 12, 6)
    machine.processor.close_session(session)
    machine.check()


def test_who_found_no_page_at_one_worker_may_begin_at_another():
    machine = PageMachine(2, 10, 10)
    early, late = Paged(numbers(20, 1)), Paged(numbers(4, 2))
    assert machine.submit(early)
    for _ in range(5):
        machine.schedule(1)
    assert machine.submit(late)
    assert machine.schedule(1) == 0
    assert machine.schedule(2) == 1


def test_a_failed_request_leaves_its_session_the_rows_before_the_one_that_failed():
    machine = PageMachine(1, 12, 0)
    session = machine.processor.open_session()
    kept, lost = numbers(3, 1), numbers(4, 2)
    play(machine, Paged(kept, session=session))
    play(machine, Paged(lost, session=session, fails_after=1))
    last = Paged(numbers(3, 3), session=session, so_far=[*kept, *lost[:1]])
    play(machine, last)
    assert last.end == NOTICE_DONE


def test_a_chain_that_grows_while_a_task_is_formed_is_taken_once():
    processor = Processor(1, SMALL, ONE_BY_ONE)
    processor.add_kind(1024, 1024)
    processor.add_kind(16, 16, is_paged=True)
    numbered = processor.add_type([Port(NUMBERS)], [Port(NUMBERS)], max_batch=1, priority=1)
    grows = Port(PAGES, page_size=PAGE_SIZE, appends=True)
    reader = processor.add_type([Port(NUMBERS), grows], [Port(NUMBERS)], max_batch=4, max_rows=4)
    program = [OP_EXTERNAL, NUMBERS, 3, OP_CHAIN, numbered, 3, STEP, 0, 1, OP_PAGES, PAGES, PAGE_SIZE, 0]
    program += [OP_CHAIN, reader, 3, STEP, 3, 1, PAGED, 0, OP_RESULT, 6, 1, 3]
    admit(processor, np.array(program, np.int32))
    first, second = processor.schedule(1), processor.schedule(1)
    processor.complete(first[0], 1000)
    third = processor.schedule(1)
    read = processor.schedule(1)  # one step is there, two are on their way to the worker that gets the pages
    assert broken_rules(processor.tables) == []
    assert processor.tables.tasks["rows"][read[0]] == 1
    for task in (*second, *third, *read):
        processor.complete(task, 1000)
    rest = processor.schedule(1)
    assert processor.tables.tasks["rows"][rest[0]] == 2
    assert list(processor.complete(rest[0], 1000)) == [(0, NOTICE_DONE)]


def test_a_token_that_somebody_waits_for_does_not_wait_for_a_long_input_that_came_before():
    machine = PageMachine(1, 20, 0, max_rows=4)
    long, short = Paged(numbers(9, 1)), Paged(numbers(1, 2))
    assert machine.submit(long) and machine.submit(short)
    machine.schedule(1)
    machine.finish(1)
    assert (long.end, short.end) == (-1, NOTICE_DONE)


def test_a_session_is_at_the_worker_where_any_of_its_pages_is():
    machine = PageMachine(1, 6, 2)
    session = machine.processor.open_session()
    kept = Paged(numbers(6, 1), session=session)
    play(machine, kept)
    assert sessions_at(machine.processor.tables, 1) == [session]
    assert machine.submit(Paged(numbers(8, 2)))
    for _ in range(2):
        machine.schedule(1)
        machine.finish(1)
    lender = Paged(numbers(2, 3), session=session, so_far=list(kept.so_far))
    assert machine.submit(lender)
    machine.schedule(1)
    assert machine.num_suspended == 1  # the first two of its three pages went to the host
    while machine.flights[0]:
        machine.finish(1)
    machine.processor.cancel(lender.id)
    assert sessions_at(machine.processor.tables, 1) == [session]


def test_a_worker_is_lost_with_the_requests_whose_pages_it_has():
    machine = PageMachine(2, 20, 0)
    request, other = Paged(numbers(9, 1)), Paged(numbers(9, 2))
    for worker, its in enumerate((request, other), start=1):
        assert machine.submit(its)
        machine.schedule(worker)
        machine.finish(worker)  # nothing of it is in flight, and no row of it but those in pages is there
    lost = list(machine.processor.lose_worker(1))
    assert lost == [(request.id, NOTICE_FAILED), (request.id, NOTICE_RELEASED)]
    machine.check()
    del machine.live[request.id]
    machine.run_all([], random.Random(1))
    assert other.end == NOTICE_DONE
