"""Sends words at given times and notes what comes back and when: the same for every server."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.demo.servers import Server

Progress = Callable[[int], None]
"""Called now and then with the number of words answered."""

STALL_S = 60.0
PROGRESS_EVERY_S = 0.25
FIRST_CHUNK = 32


class Served(NamedTuple):
    """The times and answers of a server for some words. Times are seconds of ``time.perf_counter``, by word."""

    phonemes: list[tuple[int, ...]]
    due_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    mean_batch: float

    @property
    def throughput(self) -> float:
        """Words per second, from the first arrival to the last answer."""
        return len(self.due_s) / float(self.finish_s.max() - self.due_s[0])

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """The time from when a word was due to be sent to its answer."""
        return self.finish_s - self.due_s

    @property
    def queueing_s(self) -> NDArray[np.float64]:
        """The time from when a word was due to be sent to the beginning of its first batch."""
        return self.start_s - self.due_s

    @property
    def computation_s(self) -> NDArray[np.float64]:
        """The time from the beginning of a word's first batch to its answer."""
        return self.finish_s - self.start_s


def poisson_arrivals(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Return arrival times ``[count]`` in seconds from the start: a Poisson process of ``rate`` words a second."""
    return np.random.default_rng(seed).exponential(1 / rate, count).cumsum()


def serve(server: Server, words: Sequence[str], arrivals_s: NDArray[np.float64], progress: Progress) -> Served:
    """Send word k at ``arrivals_s[k]`` seconds from now whatever the server does, and wait for all answers.

    The calling thread sends: it sleeps until a word is due and never spins. The latency of a word that is sent late
    counts from when it was due. Raise TimeoutError if nothing comes back for a minute, and a failed word's error.
    """
    server.observe()
    answers = _Answers(len(words), progress)
    due_s = time.perf_counter() + arrivals_s
    for index, (word, due) in enumerate(zip(words, due_s.tolist(), strict=True)):
        while (wait := due - time.perf_counter()) > 0:
            answers.show()
            time.sleep(min(wait, PROGRESS_EVERY_S))
        answers.watch(index, server.submit(word))
    answers.wait()
    observed = server.observe()
    return Served(
        answers.phonemes, due_s, np.array(observed.starts_s), answers.finish_s, float(np.mean(observed.batches))
    )


def measure_capacity(server: Server, words: Sequence[str], seconds: float) -> float:
    """Return the words per second when many wait; chunks of words double until one takes ``seconds``.

    A chunk counts by the better of two runs: the first may have met what happens once, such as loading code.
    """
    size = FIRST_CHUNK
    while True:
        chunk = [words[index % len(words)] for index in range(size)]
        throughput = max(serve(server, chunk, np.zeros(size), lambda _: None).throughput for _ in range(2))
        if size / throughput >= seconds:
            return throughput
        size *= 2


class _Answers:
    """Collects the answers. The sender calls everything but the callback, which runs in the server's threads."""

    def __init__(self, count: int, progress: Progress) -> None:
        self.phonemes: list[tuple[int, ...]] = [()] * count
        self.finish_s = np.zeros(count)
        self._progress = progress
        self._shown_s = time.perf_counter()
        self._num_answered = 0
        self._answered: queue.SimpleQueue[tuple[int, float, Future[torch.Tensor]]] = queue.SimpleQueue()

    def watch(self, index: int, future: Future[torch.Tensor]) -> None:
        future.add_done_callback(lambda done: self._answered.put((index, time.perf_counter(), done)))

    def show(self) -> None:
        """Report the progress, if it is time to."""
        now_s = time.perf_counter()
        if now_s - self._shown_s >= PROGRESS_EVERY_S:
            self._shown_s = now_s
            self._progress(self._num_answered + self._answered.qsize())

    def wait(self) -> None:
        """Take all answers."""
        while self._num_answered < len(self.phonemes):
            self.show()
            try:
                index, finish_s, done = self._answered.get(timeout=STALL_S)
            except queue.Empty:
                left = len(self.phonemes) - self._num_answered
                raise TimeoutError(f"{left} words unanswered, none in {STALL_S:.0f} s") from None
            self.finish_s[index] = finish_s
            self.phonemes[index] = tuple(done.result().tolist())
            self._num_answered += 1
        self._progress(self._num_answered)
