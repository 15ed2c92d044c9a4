"""Clients that send at given times and note how long each answer took: threads here, or processes of their own."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cellrt
from benchmarks.client_models import SHORT_REQUEST

SPIN_ITEMS = 2000
WAIT_S = 120.0
WARM_UP = 50


@dataclass(frozen=True)
class Load:
    """The load of one client.

    Attributes:
        rate: requests a second, at random times (Poisson).
        seconds: how long.
        seed: of the times.
        is_busy: whether another thread of the client calculates in Python all the while.
    """

    rate: float
    seconds: float
    seed: int
    is_busy: bool

    def times(self) -> NDArray[np.float64]:
        """Return when each request is due, in seconds from the start."""
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, int(self.rate * self.seconds))
        return np.cumsum(gaps)


def send(engine: Any, load: Load, start_s: float) -> list[float]:
    """Send a load from ``start_s`` (of the monotonic clock) on; return seconds from when each was due to its answer.

    So what delays the sender counts too. Raise RuntimeError if a request has not ended well.
    """
    due = (start_s + load.times()).tolist()
    latencies = [0.0] * len(due)
    left = threading.Semaphore(0)

    def note(place: int) -> Callable[[Future[Any]], None]:
        def ended(future: Future[Any]) -> None:
            latencies[place] = time.monotonic() - due[place] if future.exception() is None else float("nan")
            left.release()

        return ended

    for place, moment in enumerate(due):
        wait_s = moment - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        engine.submit("chain", SHORT_REQUEST).add_done_callback(note(place))
    for _ in due:
        if not left.acquire(timeout=WAIT_S):
            raise RuntimeError("a request has not ended")
    if np.isnan(latencies).any():
        raise RuntimeError("a request failed")
    return latencies


class Busy:
    """Calculates in Python, in a thread, while one is inside."""

    def __init__(self, is_busy: bool) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True) if is_busy else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _spin(self) -> None:
        while not self._stop.is_set():
            sum(item * item for item in range(SPIN_ITEMS))


class Keeping:
    """Makes objects that stay, 40,000 a second in a thread, while one is inside: full collections fall due."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._kept: list[object] = []
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._kept.clear()

    def _keep(self) -> None:
        while not self._stop.wait(0.005):
            self._kept += [[number] for number in range(200)]


def send_from_threads(engine: Any, loads: Sequence[Load]) -> list[list[float]]:
    """Return the loads' latencies, of clients that are threads of this process."""
    latencies: list[list[float]] = [[] for _ in loads]
    start_s = time.monotonic() + 0.2

    def client(place: int) -> None:
        latencies[place] = send(engine, loads[place], start_s)

    threads = [threading.Thread(target=client, args=(place,)) for place in range(len(loads))]
    with Busy(any(load.is_busy for load in loads)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return latencies


def send_from_processes(address: str, loads: Sequence[Load]) -> list[list[float]]:
    """Return the loads' latencies, of clients that are processes of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.client_load"])
    running = []
    for load in loads:
        here, there = context.Pipe()
        process = context.Process(target=_client, args=(address, load, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    for _, here in running:
        _receive(here)
    start_s = time.monotonic() + 0.2
    for _, here in running:
        here.send(start_s)
    latencies = [_receive(here) for _, here in running]
    for process, here in running:
        process.join()
        here.close()
    return latencies


def _receive(here: Connection) -> Any:
    if not here.poll(WAIT_S + 700):
        raise RuntimeError("a client has not answered")
    return here.recv()


def _client(address: str, load: Load, there: Connection) -> None:
    """Run a client's process."""
    with cellrt.connect(address) as client:
        for future in client.submit_many("chain", [SHORT_REQUEST] * WARM_UP):
            future.result(WAIT_S)
        there.send("ready")
        start_s = there.recv()
        with Busy(load.is_busy):
            latencies = send(client, load, start_s)
    there.send(latencies)
