"""Loops that go ahead of their stop: they come to the same as loops that wait, and their worker never runs dry."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state import task_layout as layout
from cellrt.core.state.moves import LEFT
from cellrt.core.state.notices import NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.ports import Port
from cellrt.core.state.record_layout import loop_limits
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import MAX_KINDS, ROW_MASK
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import CARRY, FIXED, LIST, OP_EXTERNAL, OP_LOOP, OP_NODE, OP_RESULT
from tests.core.author import CELLS, Author
from tests.core.graphs import ONE_BY_ONE, SMALL, add_step, add_tree, admit, loop, make_processor
from tests.core.machine import Machine, Request
from tests.core.test_properties import CONFIGURATIONS, interleave
from tests.core.test_session_state import CELLS as KEEPING_CELLS
from tests.core.test_session_state import Conversation, KeepingAuthor, Play
from tests.effort import examples

AHEAD = st.integers(1, 4)


class Looper(Author):
    """Draws loops, and nodes that read what they came to."""

    KINDS = "lllln"


class Bodies(Author):
    """Draws loops of several cells, lists of cells among them."""

    KINDS = "bbbbln"


AUTHORS = st.sampled_from([Looper, Bodies])


DRAWN = {"draw": st.randoms(use_true_random=False), "configuration": CONFIGURATIONS, "ahead": AHEAD}


def is_whole(machine: Machine) -> bool:
    """Whether all rows are free and nothing is reserved."""
    tables = machine.processor.tables
    used = tables.arenas["capacity"] - tables.arenas["num_free"]
    kinds = tables.kinds
    return not used.any() and not kinds["reserved_worker"].any() and not kinds["reserved_host"].any()


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(12))
@given(
    **DRAWN,
    workers=st.integers(1, 2),
    count=st.integers(1, 6),
    operations=st.integers(1, 5),
    author=AUTHORS,
)
def test_loops_that_go_ahead_come_to_what_the_oracle_says(
    draw, configuration, ahead, workers, count, operations, author
):
    requests = [Request(author(draw).graph(operations)) for _ in range(count)]
    machine = Machine(workers, (4,) * len(CELLS), replace(configuration, loops_ahead=ahead))
    interleave(machine, draw, requests, chaos=False)
    assert [request.ends for request in requests] == [["done"]] * count
    assert is_whole(machine)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(12))
@given(
    **DRAWN,
    workers=st.integers(1, 3),
    rows=st.sampled_from([150, 1024]),
    count=st.integers(1, 6),
    author=AUTHORS,
)
def test_nothing_is_left_of_loops_that_fail_or_are_given_up_ahead(
    draw, configuration, ahead, workers, rows, count, author
):
    requests = [Request(author(draw).graph(3)) for _ in range(count)]
    for request in requests:
        request.poisoned, request.good_tasks = draw.random() < 0.4, draw.randint(0, 4)
    machine = Machine(workers, (4,) * len(CELLS), replace(configuration, loops_ahead=ahead), rows=rows)
    interleave(machine, draw, requests, chaos=True)
    assert all(len(request.ends) == 1 for request in requests)
    assert is_whole(machine)


def processor_with_a_loop(ahead: int, limit: int, **others: object) -> Processor:
    """A processor with one request: ``limit`` steps at most, one a task."""
    processor = make_processor(settings=replace(ONE_BY_ONE, loops_ahead=ahead, **others))  # type: ignore[arg-type]
    admit(processor, loop(add_step(processor, 4), limit))
    return processor


def answer(processor: Processor, task: int, done: int) -> list[tuple[int, int]]:
    """Completes a task of one row that took so many steps, negative if it stopped."""
    TaskView(processor.task_buffer(task)).done_steps[0] = done
    notices = processor.complete(task, 1000)
    assert broken_rules(processor.tables) == []
    return list(notices)


def send_all(processor: Processor) -> list[int]:
    """Submits whatever is ready."""
    sent: list[int] = []
    while tasks := processor.schedule(1):
        sent += tasks
        assert broken_rules(processor.tables) == []
    return sent


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_loop_has_one_task_more_in_flight_than_it_may_be_ahead(ahead):
    processor = processor_with_a_loop(ahead, 20)
    sent = send_all(processor)
    assert len(sent) == ahead + 1
    for _ in range(4):
        answer(processor, sent.pop(0), 1)
        sent += send_all(processor)
        assert len(sent) == ahead + 1


def test_without_a_word_of_it_loops_wait():
    assert len(send_all(processor_with_a_loop(0, 9))) == len(send_all(processor_with_a_loop(None, 9))) == 1  # type: ignore[arg-type]


class Sent(NamedTuple):
    """A task of one row: its number, the rows and the flags that it reads and writes."""

    task: int
    read: int
    written: int
    flags: list[int]


def send(processor: Processor) -> list[Sent]:
    """As ``send_all``."""
    found = []
    for task in send_all(processor):
        view = TaskView(processor.task_buffer(task), 2, 1)
        rows = view.inputs[1][layout.IN_ROWS], view.outputs[0][layout.OUT_STORE_ROWS]
        found.append(Sent(task, *(int(view.buffer[at]) for at in rows), view.flags[:, 0].tolist()))
    return found


def test_a_task_reads_the_row_and_the_flag_of_the_one_before_and_writes_others():
    first, second, third = send(processor_with_a_loop(2, 20))
    assert (second.read, third.read) == (first.written, second.written)
    assert [task.flags[0] for task in (first, second, third)] == [
        layout.NEVER_STOPPED,
        first.flags[1],
        second.flags[1],
    ]
    assert second.flags[0] != second.flags[1]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_task_in_flight_writes_the_row_after_the_last_step_that_is_done(ahead):
    processor = processor_with_a_loop(ahead, 40)
    sent = send(processor)
    for _ in range(12):
        done = sent.pop(0)
        answer(processor, done.task, 1)
        sent += send(processor)
        assert len({done.written, *(task.written for task in sent)}) == ahead + 2


def test_after_a_pause_a_task_reads_the_state_and_writes_another_row():
    processor = processor_with_a_loop(2, 40)
    for _ in range(3):
        sent = send(processor)
        assert sent[0].flags[0] == layout.NEVER_STOPPED
        for one in sent:
            answer(processor, one.task, 1)
        (after, *_) = sent = send(processor)
        assert after.written != after.read == one.written
        for one in sent:
            answer(processor, one.task, 1)


def test_a_loop_that_moves_to_another_worker_leaves_nothing_at_the_first():
    processor = make_processor(2, replace(ONE_BY_ONE, loops_ahead=2))
    admit(processor, loop(add_step(processor, 4), 20))
    at_first, at_second = processor.tables.arenas[MAX_KINDS], processor.tables.arenas[2 * MAX_KINDS]
    for task in send_all(processor):
        answer(processor, task, 1)
    sent: list[int] = []
    while tasks := processor.schedule(2):
        sent += tasks
    assert int(at_first["capacity"] - at_first["num_free"]) == 1
    answer(processor, sent[0], 1)
    assert int(at_first["capacity"] - at_first["num_free"]) == 0
    for task, done in zip(sent[1:], (-1, 0)):
        answer(processor, task, done)
    assert int(at_second["capacity"] - at_second["num_free"]) == 0


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("good", [1, 2, 3])
def test_a_session_keeps_the_step_before_the_task_that_failed_with_others_behind_it(ahead, good):
    machine = Machine(
        1, (4,) * len(KEEPING_CELLS), SchedulerSettings(loops_ahead=ahead, runs=False), cells=KEEPING_CELLS
    )
    session = machine.processor.open_session()
    draw, history = random.Random(3), []
    while len(history) < 6:
        author = KeepingAuthor(draw, None)
        author.start = lambda kind: (-1, 0)  # no task before the loop's
        graph, history = author.loop()
    request = Request(graph, poisoned=True, good_tasks=good)
    assert machine.submit(request, session=session)
    while machine.live:
        machine.schedule(1)
        machine.finish(1)
        machine.check()
    assert request.ends == ["failed"] and request.steps_done[1] >= good
    ((handle, _),) = machine.processor.session_rows(session, 1)
    assert int(machine.rows[0, 1, handle & ROW_MASK]) == history[request.steps_done[1] - 1][0]


def test_a_loop_that_waits_goes_on_where_its_run_was_cut():
    processor = make_processor(settings=SchedulerSettings(loops_ahead=0))
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 1, 1e-4)
    request = admit(processor, loop(cell, 20))
    for done in (1, 3):
        (task,) = send_all(processor)
        assert TaskView(processor.task_buffer(task)).lengths[0] > 3
        answer(processor, task, done)
    ((_, taken),) = loop_limits(processor.tables, request).values()
    assert taken == 4


def test_a_row_for_each_task_ahead_is_reserved():
    needs = []
    for ahead in (0, 3):
        processor = processor_with_a_loop(ahead, 20)
        needs.append(int(processor.tables.kinds["reserved_worker"][0]))
    assert needs[1] - needs[0] == 3


def test_a_request_is_done_when_its_stop_is_known_and_gone_when_nothing_of_it_is_in_flight():
    processor = processor_with_a_loop(2, 20)
    (request,) = np.flatnonzero(processor.tables.requests["state"]).tolist()
    first, second, third = send_all(processor)
    assert [id for id, _ in answer(processor, first, -1)] == [request]
    assert send_all(processor) == []
    assert processor.release([request]) == [request]
    assert int(processor.tables.requests["state"][request]) == LEFT
    assert answer(processor, second, 0) == []
    assert processor.num_live == 1
    assert [id for id, _ in answer(processor, third, 0)] == [request]
    assert processor.num_live == 0


def test_what_a_loop_reads_is_held_until_no_task_in_flight_reads_it():
    processor = processor_with_a_loop(1, 20)
    host = processor.tables.arenas[0]
    free = []
    first, second = send_all(processor)
    for task, done in ((first, -1), (second, 0)):
        answer(processor, task, done)
        free.append(int(host["num_free"]))
    assert free[1] - free[0] == 2
    (request,) = np.flatnonzero(processor.tables.requests["state"]).tolist()
    assert processor.release([request]) == []


def test_a_task_behind_a_stop_that_fails_does_no_harm():
    processor = processor_with_a_loop(1, 20)
    first, second = send_all(processor)
    ((request, _),) = answer(processor, first, -1)
    TaskView(processor.task_buffer(second)).has_failed[0] = 1
    assert answer(processor, second, 0) == []
    assert processor.release([request]) == []
    assert processor.num_live == 0


def test_a_worker_is_lost_with_a_request_that_is_to_read_what_its_loop_came_to():
    processor = make_processor(2, settings=replace(ONE_BY_ONE, loops_ahead=1))
    cell, reader = add_step(processor, 4), add_tree(processor, 4)
    program = [OP_EXTERNAL, 0, 2, OP_LOOP, cell, 9, 0, FIXED, 0, CARRY, 1, OP_NODE, reader, LIST, 1, 2]
    request = admit(processor, np.array([*program, OP_RESULT, 3, 1, 1], np.int32))
    first, _ = send_all(processor)
    assert answer(processor, first, -1) == [], "stopped, and a step behind that in flight"
    assert list(processor.lose_worker(1)) == [(request, NOTICE_FAILED), (request, NOTICE_RELEASED)]
    assert broken_rules(processor.tables) == []


def test_steps_behind_a_stop_are_not_counted():
    processor = processor_with_a_loop(1, 20)
    first, second = send_all(processor)
    answer(processor, first, -1)
    answer(processor, second, 0)
    assert processor.tables.tasks["positions"][[first, second]].tolist() == [1, 0]


def test_loops_of_cells_that_see_spans_go_ahead_too():
    processor = Processor(1, SMALL, SchedulerSettings(loops_ahead=3))
    kind = processor.add_kind(64, 64)
    plain = processor.add_type([Port(kind), Port(kind, carry=0)], [Port(kind)], max_batch=4)
    spanned = processor.add_type([Port(kind), Port(kind, is_span=True)], [Port(kind)], max_batch=4)
    assert processor.tables.types["ahead"][[plain, spanned]].tolist() == [3, 3]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_worker_has_its_next_task_before_the_last_one_ends(ahead):
    processor = make_processor(settings=SchedulerSettings(loops_ahead=ahead, runs=False))
    cell = add_step(processor, 4)
    arrivals = [Arrival(0, loop(cell, 30), loop_steps=(steps,)) for steps in (10, 20)]
    outstanding: list[int] = []

    def cost(_cell: int, _rows: int, steps: int) -> float:
        outstanding.append(processor.num_running)
        return float(steps)

    simulation = simulate(processor, arrivals, cost, queue_depth=4)
    assert simulation.finish_s == [10, 20]
    assert len(simulation.tasks) == 20 + ahead
    assert min(outstanding[1:]) == ahead + 1
    assert all(task.end_s == after.start_s for task, after in zip(simulation.tasks, simulation.tasks[1:]))


@given(st.data())
def test_the_simulator_says_when_loops_end_that_go_ahead(data):
    steps = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ahead = data.draw(st.integers(0, 3))
    processor = make_processor(settings=SchedulerSettings(loops_ahead=ahead, runs=False))
    cell = add_step(processor, 4)
    arrivals = [Arrival(0, loop(cell, 9), loop_steps=(count,)) for count in steps]
    simulation = simulate(processor, arrivals, lambda _cell, _rows, taken: float(taken), queue_depth=4)
    assert simulation.finish_s == steps
    assert broken_rules(processor.tables) == []
    assert processor.num_live == 0


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(12))
@given(
    **DRAWN,
    workers=st.integers(1, 2),
    count=st.integers(1, 4),
    chaos=st.booleans(),
)
def test_a_session_goes_on_from_the_step_that_stopped(draw, configuration, ahead, workers, count, chaos):
    settings = replace(configuration, loops_ahead=ahead)
    machine = Machine(workers, (4,) * len(KEEPING_CELLS), settings, cells=KEEPING_CELLS)
    conversations = []
    for session in range(count):
        assert machine.processor.open_session() == session
        conversations.append(Conversation(session, "loop", draw.randint(1, 4)))
    Play(machine, draw, conversations, chaos).play()
    assert is_whole(machine)


def test_each_loop_has_flags_of_its_own_of_which_none_is_nobodys():
    processor = make_processor(settings=replace(ONE_BY_ONE, loops_ahead=1))
    cell = add_step(processor, 4)
    for _ in range(2):
        admit(processor, loop(cell, 9))
    first, second = (TaskView(processor.task_buffer(task)).flags.tolist() for task in send_all(processor))
    assert first[0] == [layout.NEVER_STOPPED] * 2
    assert second[0] == first[1], "it reads what the task before writes"
    assert len({*first[1], *second[1], layout.NEVER_STOPPED, layout.NOBODYS}) == 6
