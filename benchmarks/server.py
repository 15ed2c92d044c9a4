"""A server that batches whole requests, as the peers do: what waits, who takes it, and how it is answered.

No server waits for a batch to fill: when a worker is free, it takes what is there, up to ``max_batch``
(BatchMaker 2.7.1, which found this better than any time-out).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import torch

Runner = Callable[[Sequence[Any]], Iterable[tuple[int, Any]]]
"""Takes a batch of requests; yields (position in the batch, answer) for each, as soon as it is known."""

RunnerMaker = Callable[[int], Runner]
"""Makes what one worker runs its batches with, for this number of torch threads."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for a batch, and where its answer goes."""

    request: Any
    future: Future[Any] = field(default_factory=Future)


class Holder(Protocol):
    """A waiting request, and whatever its server keeps with it."""

    @property
    def request(self) -> Any:
        """The request itself."""


Held = TypeVar("Held", bound=Holder)


class Backlog(Protocol[Held]):
    """The requests that wait, and the order in which batches take them."""

    def __len__(self) -> int: ...

    def add(self, waiting: Held) -> None:
        """Put a request behind those that wait."""

    def take(self, limit: int) -> list[Held]:
        """Remove and return the next batch: at least one where any wait, at most ``limit``."""


class InOrder(Generic[Held]):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Held] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: Held) -> None:
        """Put a request behind those that wait."""
        self._queue.append(waiting)

    def take(self, limit: int) -> list[Held]:
        """Return the requests that wait longest."""
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]


class Buckets(Generic[Held]):
    """A queue for each range of lengths, in turn; bucket ``i`` holds ``(width * i, width * i + width]``.

    The number of buckets is not bounded: one exists while something waits in it.
    """

    def __init__(self, width: int, length: Callable[[Any], int] = len) -> None:
        """``length`` gives that of a request."""
        self._width, self._length = width, length
        self._queues: dict[int, deque[Held]] = {}
        self._last_served = -1
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, waiting: Held) -> None:
        """Put a request into the bucket of its length."""
        bucket = (self._length(waiting.request) - 1) // self._width
        self._queues.setdefault(bucket, deque()).append(waiting)
        self._num_waiting += 1

    def take(self, limit: int) -> list[Held]:
        """Return a batch from the first bucket after the one served last that is not empty."""
        if not self._queues:
            return []
        later = [bucket for bucket in self._queues if bucket > self._last_served]
        bucket = min(later or self._queues)
        queue = self._queues[bucket]
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        if not queue:
            del self._queues[bucket]
        self._last_served = bucket
        self._num_waiting -= len(batch)
        return batch


class BatchServer:
    """One backlog, and worker threads that each run one batch after another.

    The cores (``threads``, all of the machine by default) are divided among ``workers``; by default there
    is one worker a core, which was measured to be the stronger form under load. ``submit`` and ``close``
    may be called by any thread. Each worker sets torch's thread count for itself; torch also gives that
    count to threads that first use it later.
    """

    def __init__(
        self,
        make_runner: RunnerMaker,
        *,
        max_batch: int,
        backlog: Backlog[Waiting] | None = None,
        threads: int | None = None,
        workers: int | None = None,
        processes: bool = False,
    ) -> None:
        """Start the workers.

        With ``processes``, each worker's batches run in a process of its own: for libraries that keep one
        graph a process, or that hold Python's lock most of the time. ``make_runner`` must then be something
        that can be pickled. Raise ValueError for a number that is not positive.
        """
        threads = os.cpu_count() or 1 if threads is None else threads
        workers = threads if workers is None else workers
        if min(threads, workers, max_batch) < 1:
            raise ValueError("max_batch, threads and workers must be positive")
        self._max_batch = max_batch
        self._backlog: Backlog[Waiting] = InOrder() if backlog is None else backlog
        self._changed = threading.Condition()
        self._num_idle = 0
        self._is_closed = False
        threads_each = max(1, threads // workers)
        self._children = [Child(make_runner, threads_each) for _ in range(workers)] if processes else []
        for child in self._children:
            child.wait()
        runners: list[Runner] = [child.run for child in self._children]
        if not processes:
            runners = [make_runner(threads_each) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(runner, threads_each), daemon=True) for runner in runners
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Any) -> Future[Any]:
        """Queue a request. Raise RuntimeError after ``close``."""
        waiting = Waiting(request)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the server is closed")
            self._backlog.add(waiting)
            self._changed.notify()
        return waiting.future

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what waits, let running batches finish and end the workers; may be called twice.

        Raise TimeoutError where a worker has not ended after ``timeout_s``.
        """
        with self._changed:
            self._is_closed = True
            cancelled = [self._backlog.take(1)[0] for _ in range(len(self._backlog))]
            self._changed.notify_all()
        for waiting in cancelled:
            waiting.future.cancel()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"a worker is still busy after {timeout_s} s")
        for child in self._children:
            child.close(max(1.0, deadline - time.monotonic()))

    def _work(self, run: Runner, threads: int) -> None:
        """Run batches until the server is closed."""
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while batch := self._next_batch():
                _answer(run, batch)

    def _next_batch(self) -> list[Waiting]:
        """Wait for requests and take this worker's share of them; empty once the server is closed."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: len(self._backlog) > 0 or self._is_closed)
            share = math.ceil(len(self._backlog) / self._num_idle)
            self._num_idle -= 1
            return self._backlog.take(min(self._max_batch, share)) if not self._is_closed else []


class Child:
    """A runner in a process of its own; used by one thread at a time."""

    def __init__(self, make_runner: RunnerMaker, threads: int) -> None:
        """Start the process, which makes its runner."""
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make_runner, threads), daemon=True)
        self._process.start()
        other.close()

    def wait(self) -> None:
        """Wait until the runner is made. Raise what making it raised."""
        self._receive()

    def run(self, requests: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """Run a batch there: all answers come at its end. Raises what the batch raised."""
        self._connection.send(list(requests))
        return [(k, torch.from_numpy(array)) for k, array in self._receive()]

    def close(self, timeout_s: float) -> None:
        """End the process; kill it where it does not end in time."""
        self._connection.close()
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> list[tuple[int, Any]]:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("the worker process has ended") from None
        if isinstance(answer, Exception):
            raise answer
        received: list[tuple[int, Any]] = answer
        return received


def _serve(connection: Connection, make_runner: RunnerMaker, threads: int) -> None:
    """Run a child process: batches in, arrays or an exception out, until the other end is closed."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        try:
            run = make_runner(threads)
            connection.send([])
        except Exception as error:
            connection.send(error)
            return
        while True:
            try:
                requests = connection.recv()
            except EOFError:
                return
            try:
                connection.send([(k, answer.numpy()) for k, answer in run(requests)])
            except Exception as error:
                connection.send(error)


def _answer(run: Runner, batch: list[Waiting]) -> None:
    """Run a batch and complete its futures, with their results or with the error that the batch raised."""
    running = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
    if not running:
        return
    try:
        for position, answer in run([waiting.request for waiting in running]):
            running[position].future.set_result(answer)
    except Exception as error:
        for waiting in running:
            if not waiting.future.done():
                waiting.future.set_exception(error)
