"""A worker by itself: what it leaves behind when it dies, and who may go on with it."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np

from cellrt.worker.cpu.worker import CpuWorker
from tests.engine.helpers import WAIT_S

DEADLY = 1


class Tasks:
    """Stands in for an executor: notes the tasks that it runs, and once fails the worker at task DEADLY."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def execute(self, type_id, buffer):
        task = int(buffer[0])
        self.ran.append(task)
        if self.ran == [0, DEADLY]:
            raise MemoryError("the worker's own fault")
        return []


def make(tasks: Tasks) -> tuple[CpuWorker, threading.Event]:
    ended = threading.Event()
    return CpuWorker(tasks, lambda: True, lambda: False, ended.set, 1, "worker"), ended


def launch(worker: CpuWorker, tasks: list[int]) -> None:
    for task in tasks:
        worker.launch(task, 7, np.array([task], np.int32))


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


def test_a_worker_that_waits_again_before_its_waker_goes_on_can_be_woken_again():
    looks: SimpleQueue[None] = SimpleQueue()

    class Hasty(SimpleQueue):
        """Lets the thread that puts go on once the worker has run and looked for news a last time."""

        def put(self, item) -> None:
            super().put(item)
            looks.get(timeout=WAIT_S)

    def has_news() -> bool:
        looks.put(None)
        return False

    worker = CpuWorker(Tasks(), lambda: True, has_news, lambda: None, 1, "worker")
    worker._queue = Hasty()
    worker.start()
    looks.get(timeout=WAIT_S)
    for _ in range(3):
        assert worker.wake()
    SimpleQueue.put(worker._queue, None)
    assert worker.join(WAIT_S)
