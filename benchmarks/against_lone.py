"""The time of requests that come one at a time, of whichever cellrt is imported; ``against.py`` runs this file.

Each is submitted and waited for before the next: a chain of 24 steps of a ready-made LSTM whose graph is known by a
key; a step of a session; the chain beside a thread that calculates in Python; the chain from each of four threads; and
8 steps of a plain torch module, once it is compiled, beside a loop over the module itself. It asks for nothing but what
every version since 2a12ad4 has.
"""

from __future__ import annotations

import gc
import inspect
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import cellrt
from cellrt.cells import EmbeddingLSTMCell

LENGTH, SHORT, WIDTH, VOCABULARY = 24, 8, 32, 100
COUNT, NUM_THREADS, BATCH = 1_000, 4, 64
REPEATS = 3


class Plain(nn.Module):
    """A recurrent step of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step."""
        return {"h": self.norm(self.gru(x, h))}


def takes(function: Callable[..., Any], option: str) -> bool:
    """Return whether this version's function has an option."""
    return option in inspect.signature(function).parameters


def p50_and_mean_us(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the mean microseconds of a call: each the least of some samples."""
    medians, means = [], []
    for _ in range(REPEATS):
        times = []
        for _ in range(COUNT):
            begin_s = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin_s))
        medians.append(statistics.median(times))
        means.append(statistics.mean(times))
    return min(medians), min(means)


@contextmanager
def busy() -> Iterator[None]:
    """Have a thread calculate in Python meanwhile."""
    is_over = threading.Event()

    def calculate() -> None:
        while not is_over.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=calculate)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def of_threads(call: Callable[[], object]) -> float:
    """Return microseconds a request while ``NUM_THREADS`` threads call it over and over: the least of some samples."""
    found = []
    for _ in range(REPEATS):
        threads = [threading.Thread(target=lambda: [call() for _ in range(COUNT)]) for _ in range(NUM_THREADS)]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(1e6 * (time.perf_counter() - begin_s) / (NUM_THREADS * COUNT))
    return min(found)


def ready_made() -> list[float]:
    """Return the figures of an LSTM's chain alone, of a session's step, of a chain beside a busy thread (median and
    mean: it has the lock for a while and then not), and in threads.
    """
    shape = (WIDTH,)
    inputs = {"token": cellrt.rows(dtype=torch.int64), "h": shape, "c": shape}
    lstm = cellrt.cell(EmbeddingLSTMCell(VOCABULARY, WIDTH, WIDTH), inputs)
    key: dict[str, Any] = {"key": len} if takes(cellrt.Unfolder, "key") else {}
    tokens = list(range(LENGTH))

    def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(lstm, token=request).last.h}

    def step(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(lstm, keep=True, token=request).last.h}

    with cellrt.Engine(1) as engine:
        engine.register(cellrt.Unfolder("chain", chain, tokens, **key))
        engine.register(cellrt.Unfolder("step", step, [1], **key))
        session = engine.session("step")
        gc.collect()
        gc.freeze()

        def of_chain() -> object:
            return engine.submit("chain", tokens).result()

        found = [p50_and_mean_us(of_chain)[0], p50_and_mean_us(lambda: session.submit([1]).result())[0]]
        with busy():
            found += p50_and_mean_us(of_chain)
        return [*found, of_threads(of_chain)]


def plain() -> list[float]:
    """Return the figures of a user's own module, compiled before it is measured: alone, and of many submitted one by
    one; and of what one would write instead with the module as it is: a loop over one request, and over ``BATCH``.
    """
    module = Plain()
    cell = cellrt.cell(module, {"x": (WIDTH,), "h": (WIDTH,)})
    steps = torch.randn(SHORT, WIDTH)
    key: dict[str, Any] = {"key": len} if takes(cellrt.Unfolder, "key") else {}
    compiled: dict[str, Any] = {"compile": "wait"} if takes(cellrt.Engine, "compile") else {}

    def unfold(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
        return {"h": graph.chain(cell, x=request).last.h}

    def loop(rows: Tensor) -> None:
        h = torch.zeros(rows.shape[0], WIDTH)
        for step in range(SHORT):
            h = module(rows[:, step], h)["h"]

    with cellrt.Engine(1, max_queue=1 << 20, **compiled) as engine:
        engine.register(cellrt.Unfolder("plain", unfold, steps, **key))
        gc.collect()
        gc.freeze()
        many = [
            submitted_us(lambda: [future.result() for future in [engine.submit("plain", steps) for _ in range(COUNT)]])
            for _ in range(REPEATS)
        ]
        lone = p50_and_mean_us(lambda: engine.submit("plain", steps).result())[0]
    one, batch = steps[None], torch.randn(BATCH, SHORT, WIDTH)
    with torch.inference_mode():
        return [lone, min(many), p50_and_mean_us(lambda: loop(one))[0], p50_and_mean_us(lambda: loop(batch))[0] / BATCH]


def submitted_us(call: Callable[[], object]) -> float:
    """Return microseconds a request of a call that serves ``COUNT``."""
    begin_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin_s) / COUNT


if __name__ == "__main__":
    print(json.dumps([*ready_made(), *plain()]))
