"""Pages that a suspended request drops: its loop reads again what it has read and made, and goes on as if nothing had
happened."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.completion import NOTICE_DONE
from cellrt.core.page_view import note_copies, take_copies
from cellrt.core.processor import Processor
from cellrt.core.program import LEADS, OP_EXTERNAL, OP_LOOP, OP_PAGES, OP_RESULT_LAST, PAGED
from cellrt.core.settings import SchedulerSettings
from cellrt.errors import DefinitionError
from tests.core.talkers import AHEAD, SPEAK, Stage, Talk, Talkers, is_whole
from tests.core.test_pages import NUMBERS, PAGE_SIZE, PAGES, numbers
from tests.effort import examples


def talkers(suspension: str = "recompute", ahead: int = 0, workers: int = 1, max_rows: int = 4) -> Talkers:
    return Talkers(workers, 20, 40, ahead, max_rows, suspension=suspension)


def play(machine: Talkers, draw: random.Random, *talks: Talk) -> None:
    assert all(machine.begin(talk) for talk in talks)
    Stage(machine, draw, [[] for _ in talks]).play()


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(16))
@given(
    draw=st.randoms(use_true_random=False),
    ahead=AHEAD,
    workers=st.integers(1, 2),
    max_rows=st.integers(1, 9),
    prompts=st.lists(st.integers(1, 9), min_size=2, max_size=3),
)
def test_whoever_drops_pages_says_what_the_oracle_says(draw, ahead, workers, max_rows, prompts):
    machine = talkers(ahead=ahead, workers=workers, max_rows=max_rows)
    talks = [Talk(numbers(n, k), limit=20, leading=n, may_stop=False) for k, n in enumerate(prompts)]
    play(machine, draw, *talks)  # which compares
    assert [talk.ends[0] for talk in talks] == [NOTICE_DONE] * len(talks)
    assert is_whole(machine)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_pages_are_dropped_and_not_copied(ahead):
    machine = talkers(ahead=ahead)
    play(machine, random.Random(3), *[Talk(numbers(2, k), limit=30, leading=2, may_stop=False) for k in range(2)])
    assert machine.num_suspended > 0 and machine.num_again > 0
    assert int(machine.processor.tables.requests["pages_away"].max()) == 0


@pytest.mark.parametrize("others", [{"session": 0}, {"leading": 1}])
def test_what_a_session_keeps_and_what_another_cell_has_read_are_copied(others):
    machine = talkers()
    if "session" in others:
        others = {"session": machine.processor.open_session()}
    late = Talk(numbers(4, 2), limit=26, may_stop=False, **others)
    play(machine, random.Random(3), Talk(numbers(2, 1), limit=30, leading=2, may_stop=False), late)
    assert machine.num_suspended > 0
    assert late.ends[0] == NOTICE_DONE and machine.num_again == 0


def steps(machine: Talkers, count: int) -> None:
    for _ in range(count):
        assert machine.schedule(1)
        while machine.flights[0]:
            machine.finish(1)


def two_with_pages(machine: Talkers) -> list[Talk]:
    """Two requests that have read nine rows each."""
    talks = [Talk(numbers(4, k), limit=20, leading=4, may_stop=False) for k in range(2)]
    assert all(machine.begin(talk) for talk in talks)
    steps(machine, 7)
    return talks


@pytest.mark.parametrize(("copy_ns", "is_dropped"), [(0, False), (10, False), (1_000, True)])
def test_what_takes_less_time_is_done_and_what_was_never_measured_is_copied(copy_ns, is_dropped):
    machine = talkers("cheaper", max_rows=8)
    two_with_pages(machine)
    machine.processor.set_step_time(SPEAK, 8, 2e-6)
    if copy_ns:
        note_copies(machine.processor.tables, 1, copy_ns)
    assert machine.processor.suspend(1)
    assert (take_copies(machine.processor.tables) == []) == is_dropped
    machine.check()


def test_as_many_rows_of_a_dropped_state_as_fit_are_one_task():
    machine = talkers(max_rows=8)
    early, late = two_with_pages(machine)
    taken = late.taken
    assert machine.processor.suspend(1)
    early.gives_up = True
    machine.cancel(early)
    steps(machine, -(-(taken + 1) // 8))
    assert late.taken == taken + 1


def test_who_gives_up_while_his_pages_are_computed_again_leaves_nothing():
    machine = talkers(max_rows=2)
    early, late = two_with_pages(machine)
    assert machine.processor.suspend(1)
    machine.cancel(early)
    steps(machine, 1)
    machine.cancel(late)
    assert is_whole(machine)


def test_who_is_suspended_while_his_pages_are_computed_again_begins_once_more():
    machine = talkers(max_rows=2)
    early, late = two_with_pages(machine)
    assert machine.processor.suspend(1)
    steps(machine, 2)
    assert machine.processor.suspend(1)
    machine.check()
    Stage(machine, random.Random(1), [[], []]).play()
    assert early.ends[0] == late.ends[0] == NOTICE_DONE
    assert is_whole(machine)


def admit_twice(processor: Processor, program: NDArray[np.int32]) -> None:
    for sequence in (1, 2):
        assert processor.admit(processor.compile(program), sequence)


def test_a_loop_that_nobody_sees_every_step_of_is_copied():
    machine = talkers()
    program = [OP_EXTERNAL, NUMBERS, 2, OP_PAGES, PAGES, PAGE_SIZE, 0]
    program += [OP_LOOP, SPEAK, 9, -1, LEADS, 0, 1, 2, 0, PAGED, 0, OP_RESULT_LAST, 2]
    admit_twice(machine.processor, np.array(program, np.int32))
    (task,) = machine.processor.schedule(1)
    machine.processor.task_buffer(task)
    machine.processor.complete(task, 1000)
    assert machine.processor.suspend(1)
    assert take_copies(machine.processor.tables)


def test_a_suspension_that_there_is_not_is_refused_by_name():
    with pytest.raises(DefinitionError, match="suspension: expected one of cheaper, copy, recompute, got 'swap'"):
        SchedulerSettings(suspension="swap")
