"""Pages that several sessions have in common: held once, never written to, and free when nobody names them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MAX_KINDS, NUM_PERMANENT
from tests.core.page_machine import PAGE_SIZE, PAGES, Paged, PageMachine, numbers, play
from tests.core.policies import ANY_POLICY
from tests.core.talkers import AHEAD, Stage, Talkers, is_whole, turns_of
from tests.core.test_kept_pages import TwoStates
from tests.effort import examples


class Family:
    """Sessions of which the first has read some numbers, and the others have what it has."""

    def __init__(self, machine: PageMachine, rows: int, others: int, sharing: bool = True) -> None:
        self.machine, self.processor = machine, machine.processor
        self.ids = [self.processor.open_session() or 0 for _ in range(1 if sharing else 1 + others)]
        self.texts: list[list[int]] = [[] for _ in range(1 + others)]
        self.go_on(0, rows)
        for other in range(1, 1 + others) if sharing else ():
            assert self.share(other)

    def share(self, other: int, of: int = 0) -> bool:
        """Has one have what another has; whether it could."""
        made = self.processor.copy_session(self.ids[of], 1)
        if made is not None:
            if other < len(self.ids):
                self.processor.close_session(self.ids.pop(other))
            self.ids.insert(other, made)
            self.texts[other] = list(self.texts[of])
        self.machine.copy_pages()
        self.machine.check()
        return made is not None

    def cut_back(self, each: int, rows: int) -> bool:
        can = self.processor.cut_back(self.ids[each], 1, rows)
        del self.texts[each][rows if can else len(self.texts[each]) :]
        self.machine.copy_pages()
        self.machine.check()
        return can

    def request(self, each: int, rows: int = 3, written: int = 0) -> Paged:
        return Paged(numbers(rows, each), written, session=self.ids[each], so_far=self.texts[each])

    def go_on(self, each: int, rows: int = 3) -> None:
        """Has one read more: what comes of it is that of all its own rows."""
        request = self.request(each, rows)
        play(self.machine, request)
        assert request.end == NOTICE_DONE

    def end(self, each: int) -> None:
        self.processor.close_session(self.ids[each])
        self.machine.check()


@pytest.mark.parametrize(("rows", "copied"), [(9, 1), (8, 0), (1, 1)])
def test_whole_pages_are_held_once_and_the_last_is_copied(rows, copied):
    machine = PageMachine(1, 20, 60)
    Family(machine, rows, 3)
    assert machine.used() == -(-rows // PAGE_SIZE) + 3 * copied


def test_each_goes_on_by_itself():
    machine = PageMachine(1, 30, 60)
    family = Family(machine, 9, 3)
    for each in (2, 0, 3, 1, 2, 0):
        family.go_on(each)
    assert len({tuple(text) for text in family.texts}) == 4


def test_requests_that_share_pages_are_in_one_task():
    machine = PageMachine(1, 30, 60)
    family = Family(machine, 8, 2)
    before = machine.used()
    requests = [family.request(each, rows=1) for each in range(3)]
    assert all(machine.submit(request) for request in requests)
    machine.schedule(1)
    assert len({id for id, _ in machine.processor.rows_in_flight(machine.flights[0][0][0])}) == 3
    assert machine.used() == before + 3
    machine.finish(1)
    assert [request.end for request in requests] == [NOTICE_DONE] * 3


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_a_page_is_free_when_the_last_who_had_it_is_gone(order):
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 2)
    for number, each in enumerate(order):
        assert machine.used() == 4 + 3 - number
        family.end(each)
    assert is_whole(machine)
    assert not machine.processor.tables.holders.any()


def test_a_session_that_is_given_another_state_gives_up_its_own():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 1, sharing=False)
    family.go_on(1, 6)
    assert family.share(1)
    assert machine.used() == 6
    family.go_on(1)


@pytest.mark.parametrize(("rows", "used"), [(9, 6), (8, 5), (7, 6), (4, 5), (1, 6)])
def test_who_is_cut_back_copies_the_page_that_it_will_write_to_if_others_have_it(rows, used):
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 1)
    assert family.cut_back(1, rows)
    assert machine.used() == used
    for each in (1, 0, 1):
        family.go_on(each)


def test_who_found_no_page_looks_again_when_a_session_was_cut_back():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 0)
    machine.processor.tables.types["starved_at"][0] = 1 << 1
    assert family.cut_back(0, 3)
    assert machine.processor.tables.types["starved_at"][0] == 0


def test_a_state_that_comes_with_the_next_request_is_not_cut_back():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 0)
    machine.processor.drop_states(family.ids[0], bring=True)
    views.bring_pages(machine.processor.tables, family.ids[0], 0, 9)
    assert not family.cut_back(0, 3)


def test_who_is_alone_is_cut_back_in_its_pages():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 0)
    assert family.cut_back(0, 3)
    assert machine.used() == 2
    family.go_on(0)
    family.end(0)
    assert is_whole(machine)


@pytest.mark.parametrize("state", ["at a worker", "in host memory", "none"])
def test_a_state_that_is_elsewhere_is_not_shared(state):
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 1, sharing=False)
    if state != "at a worker":
        machine.processor.drop_states(family.ids[0], bring=state == "in host memory")
        views.bring_pages(machine.processor.tables, family.ids[0], 0, 9 if state == "in host memory" else 0)
    family.go_on(1, 2)
    assert family.share(1) == (state != "in host memory")
    assert machine.used() == {"at a worker": 6, "in host memory": 1, "none": 0}[state]


def test_a_row_that_does_not_grow_is_not_shared():
    machine = PageMachine(1, 20, 60)
    session = machine.processor.open_session() or 0
    play(machine, TwoStates(numbers(7), session=session, keeps_a_row=True))
    used = machine.used()
    assert machine.processor.copy_session(session, 2) is None
    assert machine.used() == used
    machine.check()


def test_all_growing_states_of_a_session_are_shared():
    machine = PageMachine(1, 20, 60)
    session = machine.processor.open_session() or 0
    play(machine, TwoStates(numbers(7), session=session))
    sessions = session, machine.processor.copy_session(session, 2) or 0
    assert machine.copy_pages() == 1
    first, second = (views.session_pages(machine.processor.tables, session, 0, 2) for session in sessions)
    assert [its.length for its in second] == [4, 3]
    assert first[0].handles == second[0].handles and first[1].handles[0] == second[1].handles[0]
    assert first[1].handles[1] != second[1].handles[1]
    assert machine.processor.cut_back(sessions[1], 2, 1)
    machine.check()


@pytest.mark.parametrize(
    ("pages", "host_pages", "has_room"), [(5, 60, False), (6, 60, True), (9, 0, False), (10, 0, True)]
)
def test_without_room_nothing_is_shared_and_nothing_is_lost(pages, host_pages, has_room):
    """For the copy of a page; or because what each may come to must fit, as if nothing were shared."""
    machine = PageMachine(1, pages, host_pages)
    family = Family(machine, 9, 1, sharing=False)
    assert family.share(1) == has_room
    assert machine.used() == 5 + has_room
    family.end(0)
    family.end(1)
    assert is_whole(machine)


def test_without_room_for_all_states_nothing_is_to_be_copied():
    machine = PageMachine(1, 5, 60)
    session = machine.processor.open_session() or 0
    request = TwoStates(numbers(7), session=session)
    play(machine, request)
    views.bring_pages(machine.processor.tables, session, 0, 3)  # now the last page of either is not full
    assert machine.used() == 4
    assert machine.processor.copy_session(session, 2) is None
    assert (machine.copy_pages(), machine.used()) == (0, 4)
    machine.check()


def test_a_session_that_was_in_host_memory_is_shared_when_it_is_back():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 4, 1, sharing=False)
    machine.processor.drop_states(family.ids[0], bring=True)
    family.texts[0].clear()
    family.go_on(0, 4)
    assert family.share(1)


def test_without_room_for_a_copy_a_session_is_not_cut_back_in_a_shared_page():
    machine = PageMachine(1, 4, 60)
    family = Family(machine, 8, 1)
    assert not family.cut_back(1, 3)
    assert family.cut_back(1, 4)
    assert machine.used() == 4


def test_a_request_that_is_suspended_leaves_shared_pages_to_the_others():
    machine = PageMachine(1, 10, 40)
    family = Family(machine, 8, 1)
    early, late = family.request(0, 1, written=9), family.request(1, 1, written=9)
    assert machine.submit(early) and machine.submit(late)
    while early.end < 0:
        machine.schedule(1)
        machine.finish(1)
    assert machine.num_suspended == 1 and machine.used(HOST) > 4 and machine.used() == 5
    family.end(0)
    play(machine)
    assert (early.end, late.end) == (NOTICE_DONE, NOTICE_DONE)
    family.go_on(1, 1)
    family.end(1)
    assert is_whole(machine)


def test_who_shares_pages_at_a_lost_worker_loses_them():
    machine = PageMachine(2, 20, 60)
    family = Family(machine, 8, 2)
    worker = views.session_pages(machine.processor.tables, family.ids[0], 0, 1)[0].handles[0] >> LOCATION_SHIFT
    request = family.request(2, 1)
    assert machine.submit(request)
    machine.processor.lose_worker(worker)
    assert views.sessions_at(machine.processor.tables, worker) == sorted(family.ids)  # its request's end left it there
    for each in range(3):
        family.end(each)
    assert is_whole(machine)


@pytest.mark.parametrize("num_kinds", [1, 3])
def test_who_holds_pages_is_known_when_there_are_more_kinds(num_kinds):
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 2)
    for _ in range(num_kinds):
        machine.processor.add_kind(50, 50, is_paged=True)
    machine.check()
    for each in range(3):
        family.end(each)
    assert is_whole(machine)


def damages() -> dict[str, tuple[Callable[[Family], None], str]]:
    """How the tables of a family are damaged, and what the validator says."""

    def holders(family: Family) -> np.ndarray:
        tables = family.processor.tables
        first = int(tables.arenas["first"][MAX_KINDS + PAGES])
        found: np.ndarray = tables.holders[first : first + 20]
        return found

    def count_too_many(family: Family) -> None:
        holders(family)[0] += 1

    def count_a_free_one(family: Family) -> None:
        holders(family)[19] = 1

    def share_the_last(family: Family) -> None:
        places, (one, other) = family.processor.tables.places, family.processor.tables.slots["place"][[0, 64]]
        places[other + 4] = places[one + 4]

    def cut_back(family: Family) -> None:
        family.processor.tables.slots["length"][64] = 7

    return {
        "a holder too many": (count_too_many, f"page {NUM_PERMANENT} has 3 holders, 2 page tables name it"),
        "a free page with one": (count_a_free_one, f"page {NUM_PERMANENT + 19} has 1 holders, 0 page tables name it"),
        "a page of two": (share_the_last, "has 1 holders, 2 page tables name it"),
        "a row that is to be written": (cut_back, "session 1: the page of its next row is shared"),
    }


@pytest.mark.parametrize("name", damages())
def test_the_validator_finds_pages_whose_holders_are_wrong(name):
    damage, said = damages()[name]
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 9, 1)
    damage(family)
    assert any(said in rule for rule in broken_rules(machine.processor.tables))


def test_the_validator_finds_a_request_that_writes_to_a_shared_page():
    machine = PageMachine(1, 20, 60)
    family = Family(machine, 8, 1)
    assert machine.submit(family.request(0))
    machine.schedule(1)
    tables = machine.processor.tables
    first = int(tables.arenas["first"][MAX_KINDS + PAGES])
    tables.holders[first + 4] += 1
    assert any("request 0: a page that it writes to is shared" in rule for rule in broken_rules(tables))


class Meddlers(Stage):
    """Sessions that between their turns are given what others have, cut back, evicted, and dropped."""

    def __init__(self, machine: Talkers, draw: random.Random, count: int, most_turns: int, chaos: bool) -> None:
        self.sessions = [machine.processor.open_session() or 0 for _ in range(count)]
        turns = [turns_of(draw, session, draw.randint(1, most_turns), chaos) for session in self.sessions]
        super().__init__(machine, draw, turns)

    def begin(self, k: int) -> None:
        machine, running = self.machine, self.running[k]
        if running is not None and machine.talking.get(running.id) is running:
            return
        for _ in range(self.draw.randint(0, 3)):
            idle = self.idle()
            with_rows = [session for session in idle if machine.held.get(session)]
            self.meddle(self.draw.choice(with_rows or idle), self.draw.choice(idle))
        session, most = self.turns[k][0].session, PAGE_SIZE * int(machine.processor.tables.kinds["worker_rows"][PAGES])
        # What it keeps must fit in a worker's pages with what comes.
        self.cut_back(session, min(len(machine.held.get(session, [])), max(0, most - 16)))
        super().begin(k)

    def idle(self) -> list[int]:
        busy = {talk.session for talk in self.machine.talking.values()}
        return [turns[0].session for turns in self.turns if turns and turns[0].session not in busy]

    def meddle(self, session: int, other: int) -> None:
        machine, event, held = self.machine, self.draw.random(), self.machine.held.get(session, [])
        if event < 0.75 and other != session:
            self.share(session, other)
        elif event < 0.9:
            self.cut_back(session, self.draw.randint(len(held) // 2, len(held)))
        elif event < 0.95 and held and session not in machine.saved:
            machine.evict(session)
        else:
            self.drop(session)
        machine.check()

    def drop(self, session: int) -> None:
        self.machine.processor.drop_states(session)
        self.machine.held[session] = []
        self.machine.saved.discard(session)

    def share(self, session: int, other: int) -> None:
        machine, held = self.machine, self.machine.held.get(session, [])
        made = None if session in machine.saved else machine.processor.copy_session(session, 1)
        self.drop(other)
        if made is None:
            machine.held[other] = list(held)
            if held:
                machine.evict(other)  # a copy in host memory, if there is any
            return
        assert machine.copy_pages() == (len(held) % PAGE_SIZE > 0)
        machine.processor.close_session(other)
        del machine.held[other]
        machine.held[made] = list(held)
        for talk in [talk for turns in self.turns for talk in turns if talk.session == other]:
            talk.session = made
        self.sessions[self.sessions.index(other)] = made

    def cut_back(self, session: int, rows: int) -> None:
        machine, held = self.machine, self.machine.held.get(session, [])
        if rows == len(held):
            return
        if rows == 0:
            self.drop(session)
            return
        machine.held[session] = held[:rows]
        if session in machine.saved:
            views.bring_pages(machine.processor.tables, session, 0, rows)
        elif not machine.processor.cut_back(session, 1, rows):
            machine.evict(session)
        machine.copy_pages()


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(16))
@given(
    draw=st.randoms(use_true_random=False),
    workers=st.integers(1, 2),
    ahead=AHEAD,
    pages=st.sampled_from([10, 16, 24, 60]),
    host_pages=st.sampled_from([0, 30, 100]),
    count=st.integers(2, 6),
    chaos=st.booleans(),
    how=st.fixed_dictionaries(
        {
            "policy": ANY_POLICY,
            "joins": st.sampled_from([True, True, False]),
            "reserve_pages": st.sampled_from([False, False, True]),
        }
    ),
)
def test_whatever_is_copied_cut_back_evicted_and_ended_each_session_has_its_own_rows(
    draw, workers, ahead, pages, host_pages, count, chaos, how
):
    machine = Talkers(workers, pages, host_pages, ahead, **how)
    stage = Meddlers(machine, draw, count, 4, chaos)
    stage.play()
    for session in stage.sessions:
        machine.processor.close_session(session)
        machine.check()
    assert is_whole(machine)
    assert not machine.processor.tables.holders.any()


def test_what_is_drawn_shares_pages_and_suspends_who_does():
    """The property above would say little if nothing came of what it draws."""
    machine = Talkers(1, 16, 100, 1)
    most = 0

    class Watching(Meddlers):
        def share(self, session: int, other: int) -> None:
            nonlocal most
            super().share(session, other)
            most = max(most, int(machine.processor.tables.holders.max()))

    Watching(machine, random.Random(5), 6, 4, False).play()
    assert most >= 3 and machine.num_suspended > 0
