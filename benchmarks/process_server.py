"""A peer behind a process: what a competent engineer writes so that a client's Python never holds up the model.

Each worker is a process of one thread, a bare loop that a socket feeds: it takes what has arrived, runs a batch and
sends each answer as soon as it is known. The client gives a request to the worker with the fewest unanswered ones.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from benchmarks.bare_loop import Batches
from benchmarks.server import InOrder, RunnerMaker

START_S, END_S = 600.0, 30.0
MESSAGE_BYTES = 1 << 17
"""The most that a request or an answer may take."""


class ProcessServer:
    """A server with several workers, each with torch on one thread.

    ``submit`` and ``close`` are for one thread. ``make_runner`` must be something that can be pickled.
    """

    def __init__(self, make_runner: RunnerMaker, *, max_batch: int, workers: int) -> None:
        """Start the workers, one after the other. Raise what making their runners raised."""
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(make_runner, max_batch))
        except BaseException:
            self.close()
            raise

    def submit(self, request: Any) -> Future[Any]:
        """Send a request; the future has its answer, or end with RuntimeError where the worker has ended."""
        worker = min(self._workers, key=lambda worker: len(worker.unanswered))
        return worker.submit(next(self._numbers), request)

    def close(self) -> None:
        """End the workers; may be called twice."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A worker's process, seen from the client: a thread receives its answers."""

    def __init__(self, make_runner: RunnerMaker, max_batch: int) -> None:
        self.unanswered: dict[int, Future[Any]] = {}
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(other, make_runner, max_batch), daemon=True)
        self._process.start()
        other.close()
        self._socket.settimeout(START_S)
        if isinstance(outcome := self._receive(), Exception):
            self._process.join(END_S)
            self._socket.close()
            raise outcome
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def submit(self, number: int, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.unanswered[number] = future
        self._socket.send(pickle.dumps((number, request)))
        return future

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._thread.join(END_S)
        self._socket.close()

    def _answer(self) -> None:
        """Complete futures until the worker ends; those that are left fail."""
        with suppress(EOFError, OSError):
            while True:
                number, answer = self._receive()
                self.unanswered.pop(number).set_result(torch.from_numpy(answer))
        for future in list(self.unanswered.values()):
            future.set_exception(RuntimeError("the worker process has ended"))

    def _receive(self) -> Any:
        message = self._socket.recv(MESSAGE_BYTES)
        if not message:
            raise EOFError("the worker process has ended")
        return pickle.loads(message)


def _serve(link: socket.socket, make_runner: RunnerMaker, max_batch: int) -> None:
    """Run a worker's process until the other end is closed. A batch that fails ends the worker."""
    torch.set_num_threads(1)
    with torch.inference_mode(), suppress(EOFError, OSError):
        try:
            work = Batches(make_runner(1), InOrder(), max_batch)
        except Exception as error:
            link.send(pickle.dumps(error))
            return
        link.send(pickle.dumps(None))
        while True:
            _take(link, work)
            for number, answer in work.advance():
                link.send(pickle.dumps((number, answer.numpy())))


def _take(link: socket.socket, work: Batches) -> None:
    """Take all that has arrived; wait where there is nothing to do. Raise EOFError once the other end is closed."""
    with suppress(BlockingIOError):
        while True:
            message = link.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT if len(work) else 0)
            if not message:
                raise EOFError
            work.add(*pickle.loads(message))
