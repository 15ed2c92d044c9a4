"""Who has room for his pages: as they are admitted, and in a task's buffer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cellrt.core.processor import Processor
from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.ports import Port
from cellrt.core.state.tables import HOST, MAX_KINDS, ROW_MASK
from cellrt.core.templates.program import FIXED, OP_EXTERNAL, OP_LOOP, OP_PAGES, OP_RESULT_LAST, PAGED
from cellrt.errors import RequestTooLargeError
from tests.core.graphs import ONE_BY_ONE, admit
from tests.core.page_machine import NUMBERS, PAGE_SIZE, PAGES, Paged, PageMachine, numbers, play
from tests.limits import SMALL


@pytest.mark.parametrize(("pages", "fits"), [(4, False), (5, True)])
def test_what_needs_more_pages_than_a_worker_has_is_refused_and_what_needs_all_is_not(pages, fits):
    machine = PageMachine(1, pages, 0)
    session = machine.processor.open_session()
    so_far: list[int] = []
    play(machine, Paged(numbers(5, 1), session=session, so_far=so_far))
    more = Paged(numbers(5, 2), session=session, so_far=so_far)
    if fits:
        play(machine, more)
        assert more.end == NOTICE_DONE
    else:
        with pytest.raises(RequestTooLargeError):
            machine.submit(more)
        machine.check()


def test_as_many_are_admitted_as_all_pages_hold_of_them_grown_to_their_ends():
    machine = PageMachine(1, 10, 5)
    requests = [Paged(numbers(9, k)) for k in range(4)]
    assert [machine.submit(request) for request in requests] == [True, True, True, False]
    machine.check()


def with_sessions(machine: PageMachine, count: int, kept: int) -> list[Paged]:
    """Requests of 9 numbers, each of a session that has read ``kept`` before."""
    found = []
    for k in range(count):
        session, so_far = machine.processor.open_session(), list[int]()
        assert session is not None
        play(machine, Paged(numbers(kept, k), session=session, so_far=so_far))
        found.append(Paged(numbers(9, count + k), session=session, so_far=so_far))
    return found


@pytest.mark.parametrize(("host_pages", "fits"), [(5, True), (4, False)])
def test_of_sessions_that_have_pages_as_many_are_admitted_as_all_pages_hold_of_what_they_come_to(host_pages, fits):
    machine = PageMachine(1, 10, host_pages)
    requests = with_sessions(machine, 3, kept=1)  # a page each, and with what comes five
    assert [machine.submit(request) for request in requests] == [True, True, fits]
    machine.check()


def test_what_sessions_bring_is_admitted_as_far_as_it_has_room_at_the_host():
    machine = PageMachine(1, 30, 9)
    requests = with_sessions(machine, 3, kept=7)
    for request in requests:
        machine.processor.drop_states(request.session, bring=True)
        views.bring_pages(machine.processor.tables, request.session, 0, 7)
    assert [machine.submit(request) for request in requests] == [True, True, False]
    machine.check()


def test_what_comes_back_to_a_worker_leaves_a_tenth_of_its_pages_to_those_that_run():
    machine = PageMachine(1, 20, 20)
    (back,) = with_sessions(machine, 1, kept=11)
    machine.processor.drop_states(back.session, bring=True)
    views.bring_pages(machine.processor.tables, back.session, 0, 11)
    assert machine.submit(Paged(numbers(34)))
    arena = machine.processor.tables.arenas[MAX_KINDS + PAGES]
    while arena["num_free"] > 6:
        machine.schedule(1)
        machine.finish(1)
    back.numbers = numbers(1)  # so that its step comes before those of the long input
    assert machine.submit(back)
    for k, handle in enumerate(views.request_pages(machine.processor.tables, back.id)[0]):
        rows = back.so_far[k * PAGE_SIZE :][:PAGE_SIZE]
        machine.pages[HOST, handle & ROW_MASK, : len(rows)] = rows
    machine.schedule(1)  # it has six pages, for which there is room, and two stay free
    machine.finish(1)
    assert arena["num_free"] == 4 and machine.processor.tables.requests["pages_away"][back.id] == 6
    machine.run_all([], random.Random(3))
    assert back.end == NOTICE_DONE


def test_a_task_takes_no_more_requests_than_its_buffer_can_list_the_pages_of_that_they_may_come_to():
    processor = Processor(1, replace(SMALL, max_places=1 << 17), ONE_BY_ONE)
    processor.add_kind(16, 16)
    processor.add_kind(50_000, 50_000, is_paged=True)
    grows = Port(PAGES, page_size=1, appends=True)
    cell = processor.add_type([Port(NUMBERS), grows], [Port(NUMBERS)], max_batch=4)
    program = [OP_EXTERNAL, NUMBERS, 1, OP_PAGES, PAGES, 1, 0, OP_LOOP, cell, 25_000, -1, FIXED, 0, PAGED, 0]
    for _ in range(3):
        admit(processor, np.array([*program, OP_RESULT_LAST, 1], np.int32))
    (task,) = processor.schedule(1)
    assert len(processor.task_buffer(task)) == 1 << 16
    assert processor.tables.tasks["rows"][task] == 2


@pytest.mark.parametrize("sequences", [(5, 3), (3, 5)])
def test_the_latest_arrival_lends_its_pages_wherever_in_the_tables_it_is(sequences):
    machine = PageMachine(1, 20, 20)
    for sequence in sequences:
        machine.sequence = sequence
        assert machine.submit(Paged(numbers(2), num_written=9))
    for _ in range(4):
        machine.schedule(1)
        machine.finish(1)
    assert machine.processor.suspend(1)
    away = machine.processor.tables.requests["pages_away"][:2]
    assert (away > 0).tolist() == [sequence == 5 for sequence in sequences]


def test_who_is_new_takes_none_of_the_last_tenth_of_the_pages():
    machine = PageMachine(1, 20, 20)
    long, new = Paged(numbers(39)), Paged(numbers(1, 1))
    assert machine.submit(long)
    arena = machine.processor.tables.arenas[MAX_KINDS + PAGES]
    while arena["num_free"] > 2:
        machine.schedule(1)
        machine.finish(1)
    new_before = arena["num_free"]
    assert machine.submit(new)
    machine.schedule(1)
    task, _ = machine.flights[0][0]
    assert {id for id, _ in machine.processor.rows_in_flight(task)} == {long.id}
    assert arena["num_free"] <= new_before
    machine.run_all([], random.Random(3))
    assert (long.end, new.end) == (NOTICE_DONE, NOTICE_DONE)
