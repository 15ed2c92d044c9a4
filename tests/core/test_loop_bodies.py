"""Loops of several cells in the core: who may take a step when, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state import task_layout as layout
from cellrt.core.state.notices import Notices
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.task_layout import TaskView
from cellrt.core.templates.program import FIXED, LAST, OP_EXTERNAL, OP_MEMBER, OP_RESULT_LAST, SAME
from cellrt.core.templates.program_operations import rename_types
from tests.core.graphs import ONE_BY_ONE, SMALL, add_step, admit, make_processor, run

LOWER, UPPER = 0, 1


def stacked(limit: int, stop: int = -1) -> NDArray[np.int32]:
    """Two layers of ``add_step``, of which the lower reads what the upper made at the step before."""
    program = [OP_EXTERNAL, 0, 1, OP_MEMBER, LOWER, limit, -1, 1, LAST, 0, 2, LAST, 0, 1]
    program += [OP_MEMBER, UPPER, limit, stop, 0, SAME, 1, LAST, 0, 2]
    return np.array([*program, OP_RESULT_LAST, 2], np.int32)


def layers(*cell_types: int, stop: int = -1) -> NDArray[np.int32]:
    """A loop whose steps are of these types."""
    program = [OP_EXTERNAL, 0, 1, OP_MEMBER, cell_types[0], len(cell_types), stop, -len(cell_types), *cell_types]
    return np.array([*program, FIXED, 0, LAST, 0, 1, OP_RESULT_LAST, 1], np.int32)


def two_cells(workers: int = 1, early_release: bool = True, ahead: int = 0) -> Processor:
    processor = make_processor(workers, settings=replace(ONE_BY_ONE, early_release=early_release, loops_ahead=ahead))
    add_step(processor, 4)
    add_step(processor, 4)
    return processor


def complete_oldest(processor: Processor, stops: bool = False) -> Notices:
    tasks = processor.tables.tasks
    task = min(np.flatnonzero(tasks["in_use"]).tolist(), key=lambda task: int(tasks["number"][task]))
    if stops:
        TaskView(processor.task_buffer(task)).done_steps[:] = -1
    notices = processor.complete(task, 0)
    assert broken_rules(processor.tables) == []
    return notices


def test_a_body_of_one_cell_takes_one_step_a_task_as_no_task_knows_what_it_reads_of_itself():
    processor = make_processor(settings=SchedulerSettings(loops_ahead=0))
    cell = add_step(processor, 4)
    processor.set_step_time(cell, 1, 1e-6)
    alone = np.array(
        [OP_EXTERNAL, 0, 1, OP_MEMBER, cell, 9, -1, 0, LAST, 0, 1, LAST, 0, 1, OP_RESULT_LAST, 1], np.int32
    )
    admit(processor, np.array(alone, np.int32))
    for _ in range(9):
        (task,) = processor.schedule(1)
        view = TaskView(processor.task_buffer(task))
        assert (view.lengths.tolist(), view.is_loop) == ([1], False)
        complete_oldest(processor)
    assert processor.schedule(1) == []


def test_a_member_follows_the_one_it_reads_and_the_next_step_waits_for_all():
    processor = two_cells()
    admit(processor, stacked(3))
    for _ in range(3):
        assert [run(processor) for _ in range(3)] == [[LOWER], [UPPER], []]
        complete_oldest(processor)
        assert run(processor) == []
        complete_oldest(processor)
    assert run(processor) == []


def test_without_early_release_a_member_waits_until_what_it_reads_is_done():
    processor = two_cells(early_release=False)
    admit(processor, stacked(2))
    assert [run(processor), run(processor)] == [[LOWER], []]
    complete_oldest(processor)
    assert run(processor) == [UPPER]


def test_another_worker_takes_a_member_only_when_what_it_reads_is_done():
    processor = two_cells(workers=2)
    admit(processor, stacked(2))
    assert [run(processor, 1), run(processor, 2)] == [[LOWER], []]
    complete_oldest(processor)
    assert run(processor, 2) == [UPPER]


def test_it_is_over_when_one_says_stop():
    processor = two_cells()
    request = admit(processor, stacked(9, stop=0))
    for step in range(4):
        assert [run(processor), run(processor)] == [[LOWER], [UPPER]]
        complete_oldest(processor)
        notices = complete_oldest(processor, stops=step == 3)
    assert [what[0] for what in notices] == [request]
    processor.release([request])
    assert processor.num_live == 0
    assert broken_rules(processor.tables) == []


def test_members_of_several_requests_at_different_steps_are_rows_of_one_task():
    processor = two_cells()
    admit(processor, stacked(5))
    assert [run(processor), run(processor)] == [[LOWER], [UPPER]]
    complete_oldest(processor)
    complete_oldest(processor)
    admit(processor, stacked(5))
    (task,) = processor.schedule(1)
    assert int(processor.tables.tasks["rows"][task]) == 2


def test_no_step_has_a_row_in_any_table():
    processor = two_cells()
    short, long = (processor.compile(stacked(limit)) for limit in (2, 5_000))
    assert short.template is long.template
    assert short.num_places == long.num_places


def test_each_step_of_a_loop_over_cell_types_waits_in_the_queue_of_its_own():
    processor = make_processor(limits=SMALL)
    for _ in range(3):
        add_step(processor, 4)
    admit(processor, layers(0, 2, 1))
    ran = []
    for _ in range(3):
        ran += run(processor)
        assert run(processor) == []
        complete_oldest(processor)
    assert ran == [0, 2, 1]


def test_a_loop_over_cell_types_may_end_before_the_last():
    processor = make_processor()
    for _ in range(3):
        add_step(processor, 4)
    arrivals = [Arrival(0, layers(0, 1, 2, stop=0), loop_steps=(steps,)) for steps in (1, 3, 2)]
    simulation = simulate(processor, arrivals, lambda *_: 1.0)
    assert simulation.finish_s == [1.0, 3.0, 2.0]
    assert [task.rows for task in simulation.tasks] == [3, 2, 1]


def test_types_are_renamed_wherever_they_are_named():
    renamed = rename_types(layers(0, 2, 1), [2, 2, 2], [5, 6, 7])
    assert renamed.tolist() == layers(5, 7, 6).tolist()
    assert rename_types(stacked(4), [2, 2], [3, 9])[4] == 3


def test_where_loops_go_ahead_the_next_step_begins_when_all_have_sent_this_one():
    processor = two_cells(ahead=1)
    admit(processor, stacked(9, stop=0))
    assert [run(processor) for _ in range(5)] == [[LOWER], [UPPER], [LOWER], [UPPER], []]
    complete_oldest(processor)
    assert run(processor) == []
    complete_oldest(processor)
    assert [run(processor) for _ in range(3)] == [[LOWER], [UPPER], []]


def test_what_goes_ahead_goes_where_the_step_before_was_sent():
    processor = two_cells(workers=2, ahead=1)
    admit(processor, stacked(9, stop=0))
    assert [run(processor, 1), run(processor, 1)] == [[LOWER], [UPPER]]
    assert [run(processor, 2), run(processor, 1)] == [[], [LOWER]]


def test_a_step_of_which_two_workers_have_members_is_waited_for():
    processor = two_cells(workers=2, ahead=1)
    admit(processor, stacked(9, stop=0))
    assert run(processor, 1) == [LOWER]
    complete_oldest(processor)
    assert run(processor, 2) == [UPPER]
    assert [run(processor, 1), run(processor, 2)] == [[], []]
    complete_oldest(processor)
    assert run(processor, 1) == [LOWER]


def test_members_read_the_flag_of_the_one_that_says_stop_and_only_that_one_writes_it():
    processor = two_cells(ahead=1)
    admit(processor, stacked(9, stop=0))
    flags = []
    for _ in range(4):
        (task,) = processor.schedule(1)
        view = TaskView(processor.task_buffer(task))
        flags.append(view.flags[:, 0].tolist() if view.goes_ahead else None)
    nobody, first = layout.NOBODYS, flags[1][1]
    assert flags[:2] == [None, [layout.NEVER_STOPPED, first]]
    assert flags[2:] == [[first, nobody], [first, flags[3][1]]]
    assert flags[3][1] not in (first, nobody)


def test_steps_behind_a_stop_count_nothing_and_the_request_ends_at_once():
    processor = two_cells(ahead=1)
    request = admit(processor, stacked(9, stop=0))
    for _ in range(4):
        run(processor)
    complete_oldest(processor)
    assert [id for id, _ in complete_oldest(processor, stops=True)] == [request]
    assert run(processor) == []
    assert processor.release([request]) == [request]
    assert not complete_oldest(processor)
    assert [id for id, _ in complete_oldest(processor)] == [request]
    assert processor.num_live == 0


def test_no_member_takes_a_step_behind_the_first_if_that_is_known_to_be_the_last():
    processor = two_cells(ahead=1)
    program = [OP_EXTERNAL, 0, 1]
    for k, (cell, stop) in enumerate([(LOWER, 0), (UPPER, -1), (UPPER, -1)]):
        program += [OP_MEMBER, cell, 9, stop, 2 - k, FIXED, 0, LAST, 0, 1 + k]
    admit(processor, np.array([*program, OP_RESULT_LAST, 3], np.int32))
    assert [run(processor), run(processor)] == [[LOWER], [UPPER]]
    complete_oldest(processor, stops=True)
    assert run(processor) == []


def test_a_list_of_cells_goes_ahead_from_one_queue_to_the_next():
    processor = make_processor(limits=SMALL, settings=replace(ONE_BY_ONE, loops_ahead=1))
    for _ in range(3):
        add_step(processor, 4)
    admit(processor, layers(0, 2, 1))
    assert [run(processor) for _ in range(3)] == [[0], [2], []]
    complete_oldest(processor)
    assert [run(processor) for _ in range(2)] == [[1], []]


def test_a_step_that_was_not_sent_ahead_may_begin_anywhere_and_others_go_ahead_of_it_there():
    processor = two_cells(workers=2, ahead=1)
    admit(processor, stacked(9, stop=0))
    assert [run(processor, 1), run(processor, 1)] == [[LOWER], [UPPER]]
    for _ in range(2):
        complete_oldest(processor)
    assert [run(processor, 2) for _ in range(4)] == [[LOWER], [UPPER], [LOWER], [UPPER]]
