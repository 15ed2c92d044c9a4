"""Three ways to serve the same words with the same weights: cellrt, one at a time, and padded batches.

A server takes a word and gives a future. All three live in this process and may use the same cores. Crossings between
threads: ``submit`` is called by the thread that sends; answers come in the servers' own threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from cellrt.core.state.settings import SchedulerSettings
from cellrt.demo.g2p import MAX_STEPS, START, STOP, Modules, letter_ids, make_g2p
from cellrt.engine.engine import Engine
from cellrt.view.timeline import Timeline

MAX_BATCH = 512
JOIN_BUDGET_S = 3e-3
"""The time that a word may wait to join a run: about that of computing a whole word among other threads."""


class Observed(NamedTuple):
    """The start of each word's computation, in the order of submission, and the rows of each batch."""

    starts_s: list[float]
    batches: list[int]


class Server(Protocol):
    """The interface of a server in the demo. ``name`` is for the table."""

    name: str

    def submit(self, word: str) -> Future[torch.Tensor]:
        """Submit a word; the future gives its phonemes, int64 ``[steps]``."""

    def observe(self) -> Observed:
        """Return the events since the last call. No word may be unfinished."""

    def close(self) -> None:
        """End the server's threads."""


class CellServer:
    """cellrt itself. ``last_timeline`` holds the tasks and requests that the last ``observe`` saw."""

    name = "cellrt"

    def __init__(self, workers: int, max_waiting: int) -> None:
        settings = SchedulerSettings(join_budget_s=JOIN_BUDGET_S)
        self._engine = Engine(workers, settings=settings, max_queue=max_waiting, freeze=True, trace=True, compile="off")
        self._engine.register(make_g2p(max_batch=MAX_BATCH))
        self._num_tasks = self._num_requests = 0
        self.last_timeline = Timeline([], [])

    def submit(self, word: str) -> Future[torch.Tensor]:
        """Submit a word, as ``Server.submit`` says."""
        answer: Future[torch.Tensor] = Future()
        self._engine.submit("g2p", word).add_done_callback(lambda done: _pass_on(done, answer))
        return answer

    def observe(self) -> Observed:
        """Return the events since the last call, as ``Server.observe`` says."""
        whole = self._engine.timeline()
        last = Timeline(whole.tasks[self._num_tasks :], whole.requests[self._num_requests :])
        self._num_tasks, self._num_requests = len(whole.tasks), len(whole.requests)
        self.last_timeline = last
        starts: dict[int, float] = {}
        for task in last.tasks:
            for request in task.requests:
                starts[request] = min(task.start_s, starts.get(request, task.start_s))
        return Observed([starts[request] for request in sorted(starts)], [task.rows for task in last.tasks])

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class _Waiting(NamedTuple):
    number: int
    word: str
    answer: Future[torch.Tensor]


class TorchServer:
    """Padded batches through torch's own GRU, as BatchMaker section 2.7.1 runs its baselines.

    A thread that is free takes whatever waits, up to ``max_batch`` words, and answers them all together.

    Args:
        name: for the table.
        modules: the model.
        max_batch: 1 serves one word at a time.
        num_servers: threads that serve, each with ``num_threads`` torch threads.
    """

    def __init__(self, name: str, modules: Modules, *, max_batch: int, num_servers: int, num_threads: int) -> None:
        self.name = name
        self.num_servers, self.num_threads = num_servers, num_threads
        self._modules, self._max_batch = modules, max_batch
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._begun: SimpleQueue[tuple[float, list[int]]] = SimpleQueue()
        self._num_submitted = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_servers)]
        for thread in self._threads:
            thread.start()

    def submit(self, word: str) -> Future[torch.Tensor]:
        """Submit a word, as ``Server.submit`` says."""
        answer: Future[torch.Tensor] = Future()
        self._waiting.put(_Waiting(self._num_submitted, word, answer))
        self._num_submitted += 1
        return answer

    def observe(self) -> Observed:
        """Return the events since the last call, as ``Server.observe`` says."""
        starts: dict[int, float] = {}
        batches = []
        while not self._begun.empty():
            start_s, indices = self._begun.get()
            starts.update((index, start_s) for index in indices)
            batches.append(len(indices))
        return Observed([starts[index] for index in sorted(starts)], batches)

    def close(self) -> None:
        """End the threads and wait for each."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(10.0)

    def _run(self) -> None:
        torch.set_num_threads(self.num_threads)
        while (first := self._waiting.get()) is not None:
            batch = [first, *self._take_waiting(self._max_batch - 1)]
            self._begun.put((time.perf_counter(), [waiting.number for waiting in batch]))
            try:
                phonemes = pronounce_padded(self._modules, [waiting.word for waiting in batch])
            except Exception as error:
                for waiting in batch:
                    waiting.answer.set_exception(error)
                continue
            for waiting, ids in zip(batch, phonemes, strict=True):
                waiting.answer.set_result(ids)

    def _take_waiting(self, most: int) -> list[_Waiting]:
        taken: list[_Waiting] = []
        try:
            while len(taken) < most:
                waiting = self._waiting.get_nowait()
                if waiting is None:
                    self._waiting.put(None)
                    break
                taken.append(waiting)
        except Empty:
            pass
        return taken


@torch.inference_mode()
def pronounce_padded(modules: Modules, words: Sequence[str]) -> list[torch.Tensor]:
    """Return the phonemes of some words as one batch: the encoder on padded letters, then the decoder step by step.

    A row that has stopped is dropped from the decoder's batch; the answers are there when all have stopped.
    """
    letters = [torch.tensor(letter_ids(word)) for word in words]
    lengths = torch.tensor([len(ids) for ids in letters])
    every, _ = modules.encoder(modules.letters(pad_sequence(letters)))
    h = every[lengths - 1, torch.arange(len(words))]
    token = torch.full((len(words),), START)
    chosen = torch.full((len(words), MAX_STEPS), STOP)
    rows = torch.arange(len(words))
    for step in range(MAX_STEPS):
        h = modules.decoder(modules.phonemes(token), h)
        token = modules.projection(h).argmax(dim=-1)
        chosen[rows, step] = token
        goes_on = token != STOP
        if not goes_on.all():
            rows, token, h = rows[goes_on], token[goes_on], h[goes_on]
            if not len(rows):
                break
    num_steps = (chosen != STOP).sum(dim=1).add(1).clamp(max=MAX_STEPS).tolist()
    return [ids[:steps].clone() for ids, steps in zip(chosen, num_steps, strict=True)]


def _pass_on(done: Future[dict[str, torch.Tensor]], answer: Future[torch.Tensor]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result()["phonemes"])
