"""Pages that a suspended request drops: its loop reads again what it has read and made, and goes on as if nothing had
happened."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state import task_layout as layout
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.state.ports import Port
from cellrt.core.state.record_layout import Record, record_at
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.state.task_layout import TaskView
from cellrt.core.state.views import note_copies, take_copies
from cellrt.core.templates.program import (
    LEADS,
    NEXT,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_LOOP,
    OP_PAGES,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    PAGED,
    STEP,
)
from cellrt.errors import DefinitionError
from tests.core.page_machine import NUMBERS, PAGE_SIZE, PAGES, numbers
from tests.core.talkers import AHEAD, EMBED, SPEAK, Layers, Stage, Talk, Talkers, is_whole
from tests.effort import examples
from tests.limits import SMALL


def talkers(
    suspension: str = "recompute", ahead: int = 0, workers: int = 1, max_rows: int = 4, limits: Limits = SMALL
) -> Talkers:
    return Talkers(workers, 20, 40, ahead, max_rows, suspension=suspension, limits=limits)


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


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_pages_are_dropped_and_not_copied(ahead, carries):
    machine = talkers(ahead=ahead)
    count = 1 if carries else 2
    talks = [Talk(numbers(count, k), 30, leading=count, may_stop=False, carries=carries) for k in range(2)]
    play(machine, random.Random(3), *talks)
    assert machine.num_suspended > 0 and machine.num_again > 0
    assert int(machine.processor.tables.requests["pages_away"].max()) == 0


@pytest.mark.parametrize("others", [{"session": 0, "leading": 4}, {"leading": 1}, {"kind": Layers}])
def test_what_a_session_keeps_and_what_several_cells_touch_are_copied(others):
    machine = talkers()
    if "session" in others:
        assert machine.processor.open_session() == others["session"]
    kind = others.get("kind", Talk)
    given = {key: value for key, value in others.items() if key != "kind"}
    late = kind(numbers(1 if kind is Layers else 4, 2), limit=26, may_stop=False, **given)
    play(machine, random.Random(3), Talk(numbers(2, 1), limit=30, leading=2, may_stop=False), late)
    assert machine.num_suspended > 0
    assert late.ends[0] == NOTICE_DONE and machine.num_again == 0


def steps(machine: Talkers, count: int) -> None:
    for _ in range(count):
        assert machine.schedule(1)
        while machine.flights[0]:
            machine.finish(1)


def two_with_pages(machine: Talkers) -> list[Talk]:
    """Two requests, after seven tasks."""
    talks = [Talk(numbers(4, k), limit=14, leading=4, may_stop=False) for k in range(2)]
    assert all(machine.begin(talk) for talk in talks)
    steps(machine, 7)
    return talks


@pytest.mark.parametrize(("copy_ns", "is_dropped"), [(0, False), (390, False), (410, True)])
def test_what_takes_less_time_is_done_and_copies_that_were_never_measured_are_made(copy_ns, is_dropped):
    machine = talkers("cheaper", max_rows=8)
    two_with_pages(machine)  # ten rows each
    machine.processor.set_step_time(SPEAK, 8, 2e-6)
    if copy_ns:
        note_copies(machine.processor.tables, 1, copy_ns)
    assert machine.processor.suspend(1)  # five pages there and back, or two tasks
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


@pytest.mark.parametrize("steps_between", [1, 4])
def test_who_is_suspended_while_his_pages_are_computed_again_begins_once_more(steps_between):
    machine = talkers(max_rows=2)
    early, late = two_with_pages(machine)
    assert machine.processor.suspend(1)
    steps(machine, steps_between)
    assert 0 < loop_record(machine, late).done < late.taken
    assert machine.processor.suspend(1)
    assert loop_record(machine, late).unseen == late.taken
    machine.check()
    Stage(machine, random.Random(1), [[], []]).play()
    assert early.ends[0] == late.ends[0] == NOTICE_DONE
    assert is_whole(machine)


def loop_record(machine: Talkers, talk: Talk) -> Record:
    tables = machine.processor.tables
    return record_at(tables.links, int(tables.subgraphs["record"][tables.requests["first_subgraph"][talk.id]]))


def test_pages_are_computed_again_once_all_of_them_fit():
    machine = Talkers(1, 11, 40, 0, 4, suspension="recompute")
    early, late = two_with_pages(machine)  # who hold nearly all pages between them, and a tenth stays free
    assert machine.processor.suspend(1)
    taken = early.taken
    steps(machine, 1)
    assert early.taken == taken + 1
    assert loop_record(machine, late).position == 0
    Stage(machine, random.Random(1), [[], []]).play()
    assert early.ends[0] == late.ends[0] == NOTICE_DONE


def test_each_input_that_is_carried_reads_its_own_results_again():
    processor = talkers().processor
    ports = [Port(NUMBERS), Port(NUMBERS), Port(PAGES, page_size=PAGE_SIZE, appends=True)]
    cell = processor.add_type(ports, [Port(NUMBERS)] * 2, max_batch=4, max_rows=8)
    program = [OP_EXTERNAL, NUMBERS, 2, OP_PAGES, PAGES, PAGE_SIZE, 0, OP_LOOP, cell, 9, -1, NEXT, 0, 0, NEXT, 1, 1]
    program += [PAGED, 0, OP_RESULT_STEPS, 2, 9, OP_RESULT_STEPS, 3, 9]
    template = processor.compile(np.array(program, np.int32))
    _, (_, rows) = (processor.admit(template, sequence) for sequence in (1, 2))
    for _ in range(3):
        (task,) = processor.schedule(1)
        processor.complete(task, 1000)
    assert processor.suspend(1)
    (task,) = processor.schedule(1)  # a step of the early one, and what the late one has read, with its next
    view = TaskView(processor.task_buffer(task), 3, 2)
    for port in range(2):
        at, first = view.inputs[port][layout.IN_ROWS], rows[-1] + 9 * port
        read = view.buffer[at + 1 : at + 5].tolist()
        assert read == [rows[port], *processor.tables.places[first : first + 3].tolist()]


def programs() -> dict[str, list[int]]:
    """Requests whose pages are copied, as what their loops have read is not there, or nothing says in which order."""
    begin = [OP_EXTERNAL, NUMBERS, 9, OP_PAGES, PAGES, PAGE_SIZE, 0]
    loop = [OP_LOOP, SPEAK, 9, -1, LEADS, 0, 1, 2, 0, PAGED, 0]
    second = [OP_PAGES, PAGES, PAGE_SIZE, 0, OP_LOOP, SPEAK, 9, -1, LEADS, 2, 1, 2, 0, PAGED, 1]
    short = [OP_LOOP, SPEAK, 1, -1, LEADS, 0, 1, 2, 0, PAGED, 0, OP_RESULT_STEPS, 9, 1]
    return {
        "nobody sees its steps": [*begin, *loop, OP_RESULT_LAST, 9],
        "nobody sees what it carries": [*begin, *loop, OP_RESULT_STEPS, 10, 9],
        "two loops": [*begin, *loop, OP_RESULT_STEPS, 9, 9, *second, OP_RESULT_STEPS, 11, 9],
        "a chain": [*begin, OP_CHAIN, SPEAK, 9, STEP, 0, 1, PAGED, 0, OP_RESULT, 9, 2, 9],
        "a loop that is over": [*begin, *short, OP_CHAIN, EMBED, 9, STEP, 0, 1, OP_RESULT, 11, 1, 9],
    }


@pytest.mark.parametrize("name", programs())
def test_what_cannot_begin_anew_is_copied(name):
    machine = talkers(max_rows=6)
    processor = machine.processor
    assert machine.begin(Talk(numbers(2), limit=20, leading=2))
    assert processor.admit(processor.compile(np.array(programs()[name], np.int32)), sequence=2)
    processor.set_priority(SPEAK, 1)
    (task,) = processor.schedule(1)[:1]
    processor.complete(task, 1000)
    assert processor.suspend(1)
    assert take_copies(processor.tables)


def test_where_there_is_no_room_for_what_is_read_again_pages_are_copied():
    machine = talkers(limits=replace(SMALL, max_places=2 * (24 + 16) + 16))
    two_with_pages(machine)
    assert machine.processor.suspend(1)
    assert take_copies(machine.processor.tables)


def test_a_suspension_that_there_is_not_is_refused_by_name():
    with pytest.raises(DefinitionError, match="suspension: expected one of cheaper, copy, recompute, got 'swap'"):
        SchedulerSettings(suspension="swap")
