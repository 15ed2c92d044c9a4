"""Loops whose cell grows a state in pages, and go ahead of their stop: they come to what the oracle says, and their
sessions hold what was read and made up to the step that stopped, failed or was the last before a cancellation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state import task_layout as layout
from cellrt.core.state.moves import LEFT
from cellrt.core.state.notices import NOTICE_DONE, NOTICE_RELEASED
from cellrt.core.state.page_list import page_list_at
from cellrt.core.state.record_layout import Body, body_at, outputs_of, record_at
from cellrt.core.state.tables import LOOP, MAX_KINDS
from cellrt.core.state.task_layout import TaskView
from tests.core.page_machine import PAGES, numbers
from tests.core.policies import ANY_POLICY
from tests.core.talkers import AHEAD, Layers, Stage, Talk, Talkers, is_whole, turns_of
from tests.effort import examples


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(16))
@given(
    draw=st.randoms(use_true_random=False),
    workers=st.integers(1, 2),
    ahead=AHEAD,
    pages=st.sampled_from([8, 16, 60]),
    host_pages=st.sampled_from([0, 30, 100]),
    max_rows=st.integers(1, 6),
    count=st.integers(1, 5),
    keeps=st.booleans(),
    chaos=st.booleans(),
    how=st.fixed_dictionaries(
        {
            "suspension": st.sampled_from(["copy", "recompute"]),
            "policy": ANY_POLICY,
            "steps_first": st.booleans(),
            "joins": st.sampled_from([True, True, False]),
            "reserve_pages": st.sampled_from([False, False, True]),
            "prompts_apart": st.sampled_from([False, False, True]),
        }
    ),
)
def test_whatever_stops_fails_and_is_given_up_ahead_each_session_holds_what_counts(
    draw, workers, ahead, pages, host_pages, max_rows, count, keeps, chaos, how
):
    machine = Talkers(workers, pages, host_pages, ahead, max_rows, **how)
    sessions = [machine.processor.open_session() if keeps else -1 for _ in range(count)]
    turns = []
    for session in sessions:
        most = {8: 1, 16: 2, 60: 3}[pages]  # what a session keeps must fit in a worker's pages with what comes
        turns.append(turns_of(draw, -1 if session is None else session, draw.randint(1, most), chaos))
    Stage(machine, draw, turns).play()
    for session in sessions:
        if keeps:
            machine.processor.close_session(session)
    machine.check()
    assert is_whole(machine)


@pytest.mark.parametrize("ahead", [1, 3])
def test_pages_that_run_out_are_lent_by_the_latest_arrival_whatever_went_ahead(ahead):
    machine = Talkers(1, 20, 20, ahead)
    talks = [Talk(numbers(1, seed), limit=30, may_stop=False) for seed in range(2)]
    assert all(machine.begin(talk) for talk in talks)
    Stage(machine, random.Random(3), [[], []]).play()
    assert machine.num_suspended > 0
    assert [talk.ends[0] for talk in talks] == [NOTICE_DONE] * 2
    assert is_whole(machine)


def one_talk(ahead: int, **others: object) -> tuple[Talkers, Talk]:
    """A machine with one request of no prompt beside the loop's."""
    machine = Talkers(1, 40, 0, ahead)
    talk = Talk(**{"numbers": numbers(3, 5), "limit": 20, "may_stop": False, **others})  # type: ignore[arg-type]
    assert machine.begin(talk)
    return machine, talk


def send_all(machine: Talkers) -> int:
    """Submits whatever is ready."""
    sent = 0
    while count := machine.schedule(1):
        sent += count
    return sent


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("leading", [0, 1, 3])
def test_a_loop_has_one_step_more_in_flight_than_it_may_be_ahead(ahead, leading):
    machine, talk = one_talk(ahead, leading=leading)
    read_by_chain = len(talk.numbers) - leading
    for _ in range(5):
        send_all(machine)
        if read_by_chain:  # first a task with what is read, and until it is done perhaps nothing else
            machine.finish(1)
            read_by_chain = 0
            send_all(machine)
        assert len(machine.flights[0]) == ahead + 1
        machine.finish(1)


def test_the_rows_that_lead_a_loop_are_one_task_and_the_next_goes_ahead_of_it():
    machine, _ = one_talk(1, leading=3)
    send_all(machine)
    first, second = (TaskView(buffer, 2, 2) for _, buffer in machine.flights[0])
    assert (first.num_rows, second.num_rows) == (3, 1)


def flags_of(machine: Talkers) -> list[list[list[int]]]:
    return [TaskView(buffer, 2, 2).flags.tolist() for _, buffer in machine.flights[0]]


def test_a_step_reads_the_flag_of_the_one_before_and_writes_another():
    machine, _ = one_talk(2, numbers=numbers(2), leading=2, may_stop=True)
    send_all(machine)
    first, second, third = flags_of(machine)
    assert first[0] == [layout.NEVER_STOPPED] * 2 and first[1][0] == layout.NOBODYS
    assert (second[0], third[0]) == (first[1][1:], second[1])
    assert second[0] != second[1]


def test_loops_that_nobody_stops_have_no_flags():
    machine, _ = one_talk(2)
    send_all(machine)
    assert not any(TaskView(buffer, 2, 2).goes_ahead for _, buffer in machine.flights[0])


def stopping(talk: Talk, after: int) -> Talk:
    """A request that says so many numbers."""
    for seed in range(10_000):
        talk.numbers = numbers(len(talk.numbers), seed)
        if len(talk.story([])[0]) == len(talk.numbers) + after - bool(talk.leading):
            return talk
    raise AssertionError("no such numbers")


@pytest.mark.parametrize("ahead", [1, 3])
def test_pages_come_back_when_nothing_is_in_flight_and_not_at_the_stop(ahead):
    machine = Talkers(1, 40, 0, ahead)
    talk = stopping(Talk([0], 20), 4)
    assert machine.begin(talk)
    while NOTICE_DONE not in talk.ends:
        send_all(machine)
        machine.finish(1)
    arena = machine.processor.tables.arenas[MAX_KINDS + PAGES]
    assert int(machine.processor.tables.requests["state"][talk.id]) == LEFT
    assert int(arena["num_free"]) < int(arena["capacity"])
    for _ in range(ahead):
        machine.finish(1)
    assert talk.ends == [NOTICE_DONE, NOTICE_RELEASED]
    assert is_whole(machine)
    assert machine.num_masked == ahead


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_simulator_says_when_loops_with_pages_end(ahead):
    machine = Talkers(1, 60, 60, ahead, max_rows=8)
    arrivals = [Arrival(0, Talk(numbers(3), 20).program, loop_steps=(steps,)) for steps in (2, 9)]
    simulation = simulate(machine.processor, arrivals, lambda *_: 1.0, queue_depth=4)
    assert simulation.finish_s[1] - simulation.finish_s[0] == 7
    assert broken_rules(machine.processor.tables) == []
    assert machine.processor.num_live == 0


def last_of(machine: Talkers, what: int) -> np.void:
    subgraphs = machine.processor.tables.subgraphs
    found: np.void = subgraphs[np.flatnonzero((subgraphs["what"] == what) & (subgraphs["record"] >= 0))[-1]]
    return found


def last_body(machine: Talkers) -> Body:
    links = machine.processor.tables.links
    return body_at(links, record_at(links, int(last_of(machine, LOOP)["record"])).body)


def damages() -> dict[str, tuple[type[Talk], Callable[[Talkers, NDArray[np.int32]], None], str]]:
    """What the validator must find: of which request, how a table is damaged, and what it says."""

    def share_a_row(machine: Talkers, links: NDArray[np.int32]) -> None:
        (state, _), *_ = outputs_of(machine.processor.tables, last_of(machine, LOOP))
        state.first_row = state.second_row

    def count_a_row_too_many(machine: Talkers, links: NDArray[np.int32]) -> None:
        page_list_at(links, int(machine.processor.tables.requests["page_lists"][0])).rows += 1

    def lose_pages(machine: Talkers, links: NDArray[np.int32]) -> None:
        page_list_at(links, int(machine.processor.tables.requests["page_lists"][0])).held = 1

    def miscount_sent(machine: Talkers, links: NDArray[np.int32]) -> None:
        last_body(machine).to_send += 1

    def miscount_done(machine: Talkers, links: NDArray[np.int32]) -> None:
        last_body(machine).all_done += 1

    return {
        "a row of two steps": (Talk, share_a_row, "have rows"),
        "a row that is not done": (Talk, count_a_row_too_many, "rows are counted of"),
        "too few pages": (Talk, lose_pages, "rows were sent, 1 pages are held"),
        "members that sent": (Layers, miscount_sent, "that have not sent"),
        "steps that all did": (Layers, miscount_done, "that have not done"),
    }


@pytest.mark.parametrize("name", damages())
def test_the_validator_finds_what_is_wrong_with_what_went_ahead(name):
    kind, damage, said = damages()[name]
    machine = Talkers(1, 40, 0, 2)
    assert machine.begin(kind([5] * (1 if kind is Layers else 4), 20, may_stop=False))
    send_all(machine)
    machine.finish(1)
    send_all(machine)
    assert broken_rules(machine.processor.tables) == []
    damage(machine, machine.processor.tables.links)
    assert any(said in rule for rule in broken_rules(machine.processor.tables))


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_loop_that_begins_joins_the_tasks_of_its_worker_whatever_another_is_sent(ahead):
    machine = Talkers(2, 40, 0, ahead)
    first, second, third = (Talk(numbers(1, seed), limit=20, may_stop=False) for seed in range(3))
    for worker, talk in enumerate((first, second), start=1):
        assert machine.begin(talk)
        while machine.schedule(worker):
            assert len(machine.flights[worker - 1]) <= ahead + 1
    assert machine.begin(third)
    assert (machine.schedule(1), machine.schedule(2)) == (0, 0)
    machine.finish(1)
    assert machine.schedule(1) == 1
    (_, buffer) = machine.flights[0][-1]
    assert TaskView(buffer, 2, 2).num_rows == 2
