"""A worker by itself: what it leaves behind when it dies, and who may go on with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest

from cellrt.core.processor import Processor
from cellrt.core.state.task_layout import H_GOES_ON, HEADER
from cellrt.native.row_types import new_table
from cellrt.worker.base import NOT_HELD, WAKE, Worker
from cellrt.worker.cpu.run_tasks import LAUNCHED_TASK, RUNNABLE_CELL
from cellrt.worker.cpu.worker import TURN_EVERY_NS, CpuWorker
from cellrt.worker.turn_words import ALWAYS, ASLEEP, AWAY, BY_HAND, NEWS, REST, TURN, line_of, make_words
from tests.engine.helpers import WAIT_S
from tests.waiting import until

DEADLY = 1


class Tasks:
    """Stands in for an executor: notes the tasks that it runs, and once fails the worker at task DEADLY."""

    def __init__(self) -> None:
        self.cells = new_table(8, RUNNABLE_CELL)  # none: each task is run in Python
        self.scratch = np.empty(1, np.uint8)
        self.ran: list[int] = []
        self.seconds = 0.0

    def execute(self, type_id, buffer):
        task = int(buffer[0])
        time.sleep(self.seconds)
        self.ran.append(task)
        if self.ran == [0, DEADLY]:
            raise MemoryError("the worker's own fault")
        return []


def worker_of(tasks: Tasks, turn: Callable[[], object], ended: Callable[[], object] = bool) -> CpuWorker:
    """A worker that takes each turn in Python: by calling ``turn``."""
    words = make_words(1)
    words[BY_HAND] = ALWAYS

    def take(is_held: bool) -> bool:
        words[NEWS] = 0
        turn()
        words[TURN] = 0
        return True

    rings = new_table(32, LAUNCHED_TASK)
    return CpuWorker(tasks, Processor(1), words, 1, 1, rings, take, lambda: False, ended, 1, "worker")


def make(tasks: Tasks) -> tuple[CpuWorker, threading.Event]:
    ended = threading.Event()
    return worker_of(tasks, bool, ended.set), ended


def rests(worker: CpuWorker, how: int) -> bool:
    return bool(worker._words[line_of(1) + REST] == how)


def launch(worker: CpuWorker, tasks: list[int], goes_on: bool = False) -> None:
    for task in tasks:
        buffer = np.zeros(HEADER, np.int32)
        buffer[0], buffer[H_GOES_ON] = task, goes_on
        worker.launch(task, 7, buffer)


def test_a_worker_that_died_says_what_it_finished_what_it_began_and_what_waits():
    tasks = Tasks()
    worker, ended = make(tasks)
    launch(worker, [0, DEADLY, 2, 3])
    worker.wake()
    worker.start()
    assert ended.wait(WAIT_S)
    assert not worker.is_alive() and type(worker.error) is MemoryError
    assert [done.task for done in worker.poll()] == [0]
    begun, waiting = worker.take_unfinished()
    assert [(task.task, task.type_id, task.buffer[0]) for task in begun] == [(DEADLY, 7, DEADLY)]
    assert [(task.task, task.type_id, task.buffer[0]) for task in waiting] == [(2, 7, 2), (3, 7, 3)]
    assert worker.num_outstanding == 0 and worker.take_unfinished() == ([], [])


def test_another_worker_goes_on_with_what_one_left_behind():
    tasks = Tasks()
    worker, ended = make(tasks)
    launch(worker, [0, DEADLY, 2])
    worker.start()
    assert ended.wait(WAIT_S)
    assert [done.task for done in worker.poll()] == [0]
    other, _ = make(tasks)
    begun, waiting = worker.take_unfinished()
    for task in [*begun, *waiting]:
        other.launch(*task)
    other.start()
    other.end()
    assert other.join(WAIT_S)
    assert [done.task for done in other.poll()] == [DEADLY, 2]
    assert tasks.ran == [0, DEADLY, DEADLY, 2]


def test_a_worker_that_died_before_it_began_leaves_all_of_it():
    worker, _ = make(Tasks())
    launch(worker, [4, 5])
    begun, waiting = worker.take_unfinished()
    assert begun == [] and [task.task for task in waiting] == [4, 5]


class QueueWorker(Worker):
    """A worker whose tasks come by the queue, as those of devices do; it runs nothing."""

    def _serve(self):
        while self._next() is not None:
            self._take_turns(NOT_HELD)


def test_a_worker_that_wakes_and_waits_again_while_it_is_woken_can_be_woken_again():
    """The client that wakes it is slow: before it goes on, the worker has taken its turn and has nothing to do."""
    turns: list[int] = []
    worker = QueueWorker(lambda how: turns.append(len(turns)) or True, lambda: False, bool, "worker")
    worker.start()

    class SlowQueue(SimpleQueue):
        def put(self, item):
            before = len(turns)
            super().put(item)
            until(lambda: len(turns) > before and worker._idle, "the worker waits again")

    until(lambda: worker._idle, "the worker waits")
    queue, worker._queue = worker._queue, SlowQueue()
    queue.put(WAKE)  # it waits at the other queue from now on
    until(lambda: turns and worker._idle, "the worker waits")
    assert worker.wake()
    assert worker.wake()
    assert len(turns) == 3
    SimpleQueue.put(worker._queue, None)
    assert worker.join(WAIT_S)


def resting(seconds: float) -> tuple[CpuWorker, list[int], Tasks]:
    """A worker that waits, and is then told to rest; the turns that it takes."""
    turns: list[int] = []
    tasks = Tasks()
    worker = worker_of(tasks, lambda: turns.append(len(turns)))
    worker.start()
    until(lambda: rests(worker, ASLEEP), "the worker waits")
    worker.rest(seconds)
    until(lambda: rests(worker, AWAY), "the worker rests")
    return worker, turns, tasks


def end(worker: CpuWorker) -> None:
    worker.end()
    assert worker.join(WAIT_S)


def test_a_worker_that_rests_is_woken_by_a_task_alone():
    worker, turns, tasks = resting(WAIT_S)
    before = len(turns)
    assert not worker.wake()
    launch(worker, [3])
    until(lambda: tasks.ran == [3], "the task is run")
    until(lambda: len(turns) > before, "a turn follows the task")
    end(worker)


def test_a_worker_that_has_rested_takes_a_turn_and_may_be_woken_again():
    worker, turns, _ = resting(0.05)
    until(lambda: turns and rests(worker, ASLEEP), "the worker waits for clients again")
    assert len(turns) == 1
    assert worker.wake()
    end(worker)


@pytest.mark.parametrize(("short_ns", "expected"), [(10**12, 1), (0, 3)])
def test_short_tasks_that_were_given_together_have_one_turn_behind_them_and_others_one_each(
    monkeypatch, short_ns, expected
):
    monkeypatch.setattr("cellrt.worker.cpu.worker.TURN_EVERY_NS", short_ns)
    turns: list[int] = []
    tasks = Tasks()
    worker = worker_of(tasks, lambda: turns.append(len(turns)))
    launch(worker, [4, 5, 6])
    worker.start()
    until(lambda: len(turns) == expected, "the turns are taken")
    assert [done.task for done in worker.poll()] == tasks.ran == [4, 5, 6]
    end(worker)
    assert len(turns) == expected


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_takes_no_turn_between_a_long_task_and_the_short_one_that_follows_it(goes_on):
    tasks = Tasks()
    tasks.seconds = 2 * TURN_EVERY_NS / 1e9
    ran_at_turns: list[list[int]] = []

    def turn() -> None:
        ran_at_turns.append(list(tasks.ran))

    worker = worker_of(tasks, turn)
    launch(worker, [2], goes_on)
    launch(worker, [3])
    worker.start()
    worker.end()
    assert worker.join(WAIT_S)
    assert ([2] in ran_at_turns) is not goes_on
    assert ran_at_turns[-1] == [2, 3]
