"""Whoever hands in, runs tasks or keeps time, and however they come between each other: nothing is lost.

Threads take steps one at a time, in an order that Hypothesis draws: at each word that they read or write, at each queue
that they look at. It runs where nothing is compiled (``make interpreted``), as compiled code cannot be stopped there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty
from random import Random
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cellrt
from cellrt.core import turn
from cellrt.core.processor import Processor
from cellrt.engine import turns as turns_module
from cellrt.engine.turns import Turns
from cellrt.errors import EngineClosedError
from cellrt.native.row_types import new_table
from cellrt.worker import base
from cellrt.worker.cpu import run_tasks as loop
from cellrt.worker.cpu import worker as worker_module
from cellrt.worker.cpu.worker import CpuWorker
from cellrt.worker.turn_words import TURN, make_words
from tests.core.door import Client
from tests.core.graphs import ONE_BY_ONE, SMALL, add_step, chain
from tests.engine.helpers import small_engine

pytestmark = pytest.mark.skipif(not numba.config.DISABLE_JIT, reason="compiled code takes no steps")

WAIT_S = 20.0
MOST_STEPS = 20_000


class OneByOne:
    """Threads that take steps in a drawn order: after so large a share of its steps one gives way to another."""

    def __init__(self, random: Random, switches: float) -> None:
        self._random, self._switches = random, switches
        self._back = threading.Semaphore(0)
        self._mine = threading.local()
        self._actors: dict[str, tuple[threading.Semaphore, Callable[[], bool]]] = {}
        self.errors: list[BaseException] = []

    def add(self, name: str, run: Callable[[], object]) -> None:
        """Adds a thread, which begins when it is chosen."""
        gate = threading.Semaphore(0)
        self._actors[name] = gate, _always

        def begin() -> None:
            self._mine.name = name
            gate.acquire()
            try:
                run()
            except BaseException as error:
                self.errors.append(error)
            del self._actors[name]
            self._back.release()

        threading.Thread(target=begin, daemon=True).start()

    def switch(self, can_go_on: Callable[[], bool] | None = None) -> None:
        """Lets others take steps, until ``can_go_on`` and this thread is chosen."""
        name = getattr(self._mine, "name", None)
        if name is None or (can_go_on is None and self._random.random() > self._switches):
            return
        gate, _ = self._actors[name]
        self._actors[name] = gate, can_go_on or _always
        self._back.release()
        assert gate.acquire(timeout=WAIT_S)

    def run(self) -> list[str]:
        """Lets threads take steps until none can; returns who waits then."""
        for _ in range(MOST_STEPS):
            ready = sorted(name for name, (_, can_go_on) in self._actors.items() if can_go_on())
            if not ready:
                return sorted(self._actors)
            gate, _ = self._actors[self._random.choice(ready)]
            gate.release()
            assert self._back.acquire(timeout=WAIT_S)
        raise AssertionError("they go round in circles")


def _always() -> bool:
    return True


class Queue:
    """Stands in for ``SimpleQueue``."""

    def __init__(self, threads: OneByOne) -> None:
        self._threads, self._items = threads, list[Any]()

    def put(self, item: object) -> None:
        self._threads.switch()
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        self._threads.switch(lambda: bool(self._items))
        if not self._items:
            raise Empty
        return self._items.pop(0)

    def empty(self) -> bool:
        self._threads.switch()
        return not self._items


class Words(np.ndarray[Any, Any]):
    """Words of which each look and each change is a step."""

    threads: OneByOne

    def __getitem__(self, at: Any) -> Any:
        self.threads.switch()
        return super().__getitem__(at)

    def __setitem__(self, at: Any, value: Any) -> None:
        self.threads.switch()
        super().__setitem__(at, value)


class Executor:
    """Runs tasks that do nothing."""

    def __init__(self, threads: OneByOne) -> None:
        self.cells, self.scratch, self._threads = new_table(8, loop.RUNNABLE_CELL), np.empty(1, np.uint8), threads

    def execute(self, type_id: int, buffer: object) -> list[object]:
        self._threads.switch()
        return []


class World:
    """An engine of one worker: the real turns, worker and scheduler; a step of the manager in a few lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, random: Random, switches: float) -> None:
        self.threads = OneByOne(random, switches)
        make_queue = partial(Queue, self.threads)
        for module in (turns_module, base):
            monkeypatch.setattr(module, "SimpleQueue", make_queue)
        words = make_words(1).view(Words)
        words.threads = self.threads
        steps = (loop, ("load", "store", "replace", "exchange")), (turns_module, ("replaced", "stored"))
        for module, names in (*steps, (worker_module, ("woken", "roused"))):
            for name in names:
                monkeypatch.setattr(module, name, self._stepping(getattr(module, name)))
        monkeypatch.setattr(turn, "load", self._stepping(turn.load))
        monkeypatch.setattr(loop, "sleep", self._sleep)
        for name in ("take_in", "let_in", "form_tasks"):
            monkeypatch.setattr(loop, name, self._alone(getattr(loop, name)))
        self.processor = Processor(1, SMALL, ONE_BY_ONE)
        self.processor.add_kind(256, 256)
        self.template = self.processor.compile(chain(add_step(self.processor, 8), 3))
        self.workers: list[Any] = []
        self.client = Client(self.processor, np.zeros((1, 64 + 256), np.int64))
        asked = self.step, self.tell, self.has_arrivals, lambda: None
        self.turns = Turns(self.workers, words, *asked, lambda error: None, lambda: None)
        turns = self.turns.take, self.turns.has_news, lambda: None
        rings = new_table(32, loop.LAUNCHED_TASK)
        self.worker = CpuWorker(Executor(self.threads), self.processor, words, 1, 1, rings, *turns, 1, "worker")  # type: ignore[arg-type]
        self.workers.append(self.worker)
        self.words, self.num_done, self.num_in_turn = words, 0, 0

    def _stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(words: Words, *arguments: int) -> Any:
            self.threads.switch()
            return function(words.view(np.ndarray), *arguments)

        return stepping

    def _sleep(self, words: Words, index: int, known: int, limit_ns: int) -> None:
        plain = words.view(np.ndarray)
        self.threads.switch(lambda: limit_ns >= 0 or plain[index] != known)

    def _alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a turn, which no other thread may have meanwhile."""

        def alone(*arguments: Any) -> Any:
            self.num_in_turn += 1
            assert self.num_in_turn == 1
            self.threads.switch()
            returned = function(*arguments)
            self.threads.switch()
            self.num_in_turn -= 1
            return returned

        return alone

    def step(self) -> None:
        """One turn in Python."""
        self._alone(self._step)()

    def _step(self) -> None:
        """Takes in, admits, completes and launches."""
        if (notices := self.worker.take_notices()) is not None:
            self._finish(notices.done())
        for number in self.turns.take_messages():
            assert self.processor.admit(self.template, number) is not None  # type: ignore[arg-type]
        assert self.processor.join()
        for done in self.worker.poll():
            self._finish(self.processor.complete(done.task, 1).done())
        if not self.worker.num_outstanding:
            for task in self.processor.schedule(1):
                self.worker.launch(task, self.processor.counts_of(task)[0], self.processor.task_buffer(task))
        self._tell()

    def tell(self) -> None:
        """As much of a turn as tells clients."""
        self._alone(self._tell)()

    def _tell(self) -> None:
        self.num_done += len(self.client.told())

    def has_arrivals(self) -> bool:
        self.threads.switch()
        return self.processor.has_arrivals

    def _finish(self, done: list[int]) -> None:
        if done:
            self.num_done += len(done)
            self.processor.finish(np.array(done, np.int32))

    def hand_in(self, numbers: range, is_urgent: bool) -> None:
        """A client: each by itself."""
        for number in numbers:
            self.threads.switch()
            self.turns.hand_in([number], is_urgent)

    def hand_in_by_door(self, numbers: range) -> None:
        """A client of the door: each by itself."""
        for number in numbers:
            self.threads.switch()
            self.client.hand_in(self.template, [(0, np.zeros(4, np.int64))], [0], number)
            self.threads.switch()
            self.turns.wake_a_worker()

    def keep_time(self) -> None:
        """The timekeeper."""
        while self.turns.stopped is None:
            self.turns._alarm.get()
            self.turns.take()


@given(seed=st.integers(0, (1 << 32) - 1), is_urgent=st.booleans(), switches=st.sampled_from([0.05, 0.3, 1.0]))
def test_every_request_ends_and_the_last_to_rest_finds_nothing_to_do(seed: int, is_urgent: bool, switches: float):
    for number in range(10):
        with pytest.MonkeyPatch.context() as monkeypatch:
            run(World(monkeypatch, random.Random(seed + number), switches), is_urgent)


def run(world: World, is_urgent: bool) -> None:
    """Three clients hand in, one by the door, a worker works, somebody keeps time; then all ends."""
    world.threads.add("worker", world.worker._serve)
    world.threads.add("timekeeper", world.keep_time)
    for name, numbers in (("client", range(1, 4)), ("other client", range(4, 7))):
        world.threads.add(name, partial(world.hand_in, numbers, is_urgent))
    world.threads.add("client of the door", partial(world.hand_in_by_door, range(7, 11)))
    resting = world.threads.run()
    assert not world.threads.errors
    assert resting == ["timekeeper", "worker"]
    assert world.num_done == 10 and not world.processor.num_live and not world.turns.has_news()
    assert world.words.view(np.ndarray)[TURN] == 0
    world.turns.stopped = EngineClosedError("the end")
    world.worker.end()
    world.turns._alarm.put(None)
    assert world.threads.run() == [] and not world.threads.errors


def test_an_engine_runs_where_nothing_is_compiled():
    module = torch.nn.GRUCell(3, 3)
    cell = cellrt.cell(lambda x, h: {"h": module(x, h)}, {"x": (3,), "h": (3,)}, name="gru")

    def chain(graph: cellrt.Graph, request: torch.Tensor) -> dict[str, object]:
        return {"h": graph.chain(cell, x=request).last.h}

    requests = [torch.randn(1 + k % 4, 3) for k in range(12)]
    with torch.no_grad(), small_engine(compile="off", debug=True) as engine:
        engine.register(cellrt.Unfolder("chain", chain, requests[0]))
        for request, future in zip(requests, engine.submit_many("chain", requests)):
            h = torch.zeros(1, 3)
            for x in request:
                h = module(x[None], h)
            assert torch.allclose(future.result(WAIT_S)["h"], h[0], atol=1e-6)
