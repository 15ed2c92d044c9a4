"""The time of requests that come one at a time, of whichever cellrt is imported; ``against.py`` runs this file.

Each is submitted and waited for before the next: a chain of 24 steps of a ready-made LSTM whose graph is known by a
key, alone and beside a thread that calculates in Python; a step of a session; and 8 steps of a plain torch module, once
it is compiled. At last four threads each do so with the chain. It asks for nothing but what every version since 2a12ad4
has; what a version lacks is not a number.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
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
COUNT, COUNT_BESIDE, NUM_THREADS = 1_000, 100, 4
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


def p50_us(call: Callable[[], object], count: int = COUNT) -> float:
    """Return the median microseconds of a call: the least of some samples."""
    medians = []
    for _ in range(REPEATS):
        times = []
        for _ in range(count):
            begin_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin_s)
        medians.append(1e6 * statistics.median(times))
    return min(medians)


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


def ready_made() -> tuple[float, float, float, float]:
    """Return the figures of an LSTM's chain alone, of a session's step, of a chain beside a busy thread, and in
    threads.
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

        alone, in_session = p50_us(of_chain), p50_us(lambda: session.submit([1]).result())
        with busy():
            beside = p50_us(of_chain, COUNT_BESIDE)
        return alone, in_session, beside, of_threads(of_chain)


def plain() -> float:
    """Return the figure of a user's own module, compiled before it is measured; not a number if none can be."""
    if not takes(cellrt.Engine, "compile"):
        return math.nan
    cell = cellrt.cell(Plain(), {"x": (WIDTH,), "h": (WIDTH,)})
    steps = torch.randn(SHORT, WIDTH)

    def unfold(graph: cellrt.Graph, request: Tensor) -> dict[str, object]:
        return {"h": graph.chain(cell, x=request).last.h}

    with cellrt.Engine(1, compile="wait") as engine:
        engine.register(cellrt.Unfolder("plain", unfold, steps))
        return p50_us(lambda: engine.submit("plain", steps).result())


if __name__ == "__main__":
    lone, in_session, beside, in_threads = ready_made()
    print(json.dumps([lone, in_session, beside, plain(), in_threads]))
