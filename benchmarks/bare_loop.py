"""A bare loop: one thread takes what has arrived, runs it, and notes when each answer was known.

There is no server, thread, future or queue around it: what a competent engineer measures first, and the least that any
server must be compared with. What the loop runs is its ``Work``: whole batches (``Batches``), or anything that goes on
in steps. Only the library that computes may use more than one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.server import Backlog, Runner
from benchmarks.workloads import Load, Seconds


class Work(Protocol):
    """The work that a loop runs, on the thread that calls."""

    def __len__(self) -> int:
        """Return the number of requests that were added and are not answered."""

    def add(self, index: int, request: Any) -> None:
        """Take a request; ``index`` comes back with its answer."""

    def advance(self) -> Iterable[tuple[int, Any]]:
        """Do some of the work, while it is iterated over; yields each index and answer as soon as they are known."""


class Numbered(NamedTuple):
    """A request that waits for a batch, and its number."""

    number: int
    request: Any


class Batches:
    """Work in whole batches: what waits, up to ``max_batch``, in the order of ``backlog``."""

    def __init__(self, run: Runner, backlog: Backlog[Numbered], max_batch: int) -> None:
        self._run, self._backlog, self._max_batch = run, backlog, max_batch
        self._num_running = 0

    def __len__(self) -> int:
        return self._num_running + len(self._backlog)

    def add(self, index: int, request: Any) -> None:
        """Let the request wait."""
        self._backlog.add(Numbered(index, request))

    def advance(self) -> Iterator[tuple[int, Any]]:
        """Run one batch."""
        batch = self._backlog.take(self._max_batch)
        self._num_running = len(batch)
        for place, answer in self._run([numbered.request for numbered in batch]):
            self._num_running -= 1
            yield batch[place].number, answer


class BareLoop:
    """Drives one work, with no more than one request's check of the clock between two pieces of it.

    Args:
        work: what to run; it must answer every request.
        threads: those that torch computes with meanwhile.
        clock: in seconds.
    """

    def __init__(self, work: Work, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = threads
        self._work, self._clock = work, clock

    def answers(self, requests: Sequence[Any]) -> list[Any]:
        """Return the answers to requests that all arrive at once, in their order."""
        found: dict[int, Any] = {}
        self._drive(requests, len(requests), lambda sent, done: True, found.__setitem__)
        return [found[index] for index in range(len(requests))]

    def closed_loop(self, requests: Sequence[Any], count: int, concurrency: int) -> Load:
        """Send as ``workloads.closed_loop`` does: ``count`` requests, ``concurrency`` of them in flight.

        The requests are used again where they do not suffice. Raise ValueError where the concurrency is not positive.
        """
        if concurrency < 1:
            raise ValueError(f"the concurrency is {concurrency}; it must be at least 1")
        start = self._clock()
        sent, done = self._drive(requests, count, lambda sent, done: sent - done < concurrency)
        return Load(done - sent, float(done.max(initial=start)) - start, 0.0)

    def open_loop(self, requests: Sequence[Any], arrivals: Seconds) -> Load:
        """Send as ``workloads.open_loop`` does: a latency runs from when its request was due, however late it was
        taken.

        The thread polls the clock where there is nothing to do.
        """
        start = self._clock()
        due = start + np.asarray(arrivals, dtype=np.float64)
        moments = due.tolist()
        sent, done = self._drive(requests, len(due), lambda sent, done: moments[sent] <= self._clock())
        delay = float((sent - due).max(initial=0.0))
        return Load(done - due, float(done.max(initial=start)) - start, delay)

    def close(self) -> None:
        """Nothing is left to end."""

    def _drive(
        self,
        requests: Sequence[Any],
        count: int,
        may_send: Callable[[int, int], bool],
        keep: Callable[[int, Any], object] = lambda index, answer: None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Run ``count`` requests; return when each was taken and when it was answered.

        ``may_send`` gets how many were taken and how many answered. Raise RuntimeError unless each is answered once.
        """
        sent, done = np.zeros(count), np.full(count, np.nan)
        num_sent = num_done = 0
        with _computing(self.threads):
            while num_done < count:
                while num_sent < count and may_send(num_sent, num_done):
                    sent[num_sent] = self._clock()
                    self._work.add(num_sent, requests[num_sent % len(requests)])
                    num_sent += 1
                if num_done < num_sent == count and not len(self._work):
                    raise RuntimeError(f"{count - num_done} of {count} requests were never answered")
                for index, answer in self._work.advance() if len(self._work) else ():
                    if not np.isnan(done[index]):
                        raise RuntimeError(f"request {index} was answered twice")
                    done[index] = self._clock()
                    keep(index, answer)
                    num_done += 1
        return sent, done


IN_FLIGHT, WORTH = 64, 1.1
"""A loop is tried with so many requests in flight; threads on all cores must be so much faster."""


def fastest(make: Callable[[int], BareLoop], requests: Sequence[Any], rounds: int = 3) -> BareLoop:
    """Return the loop of one thread, or of one a core where that answers these requests sooner: best of ``rounds``, in
    turns.

    ``make`` gets the number of threads. Small products gain little by a second core, and on a machine that others use,
    libraries whose threads wait for each other by spinning lose much: there one thread is the faster in the long run.
    """
    loops = [make(threads) for threads in sorted({1, os.cpu_count() or 1})]
    if len(loops) == 1:
        return loops[0]
    spent: list[list[float]] = [[] for _ in loops]
    for _ in range(rounds):
        for loop, times in zip(loops, spent, strict=True):
            times.append(loop.closed_loop(requests, min(IN_FLIGHT, len(requests)), len(requests)).duration_s)
    return loops[min(spent[0]) > WORTH * min(spent[1])]


@contextmanager
def _computing(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
