"""The processor time of submitted requests by thread, of whichever cellrt is imported; ``against.py`` runs this file.

Chains of 24 steps of a cell that does nothing, in process, one worker: each submitted by itself, without and with a
key, and 250 together; then those with a key on two workers. Of each kind the time of the client's thread until all are
submitted, and of all other threads together; lower quartiles of many rounds.
"""

from __future__ import annotations

import gc
import inspect
import json
import time
from typing import Any

import torch

import cellrt

LENGTH, COUNT, TOGETHER, ROUNDS = 24, 2_000, 250, 24


def nothing(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the cell."""
    return {"h": h}


CELL = cellrt.cell(nothing, {"x": cellrt.rows(dtype=torch.int64), "h": (1,)})
REQUESTS = [list(range(LENGTH)) for _ in range(COUNT)]


def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
    """Unfold a request."""
    return {"h": graph.chain(CELL, x=request).last.h}


def one_by_one(engine: cellrt.Engine, model: str) -> list[Any]:
    """Submit each request by itself."""
    return [engine.submit(model, request) for request in REQUESTS]


def together(engine: cellrt.Engine, model: str) -> list[Any]:
    """Submit requests in bulk."""
    bulks = [engine.submit_many(model, REQUESTS[k : k + TOGETHER]) for k in range(0, COUNT, TOGETHER)]
    return [future for bulk in bulks for future in bulk]


KINDS = ((one_by_one, "unkeyed"), (one_by_one, "keyed"), (together, "unkeyed"), (together, "keyed"))


def measure(num_workers: int, kinds: tuple[Any, ...]) -> list[float]:
    """Return microseconds a request: of the client's thread and of the others, for each kind."""
    key: dict[str, Any] = {"key": len} if "key" in inspect.signature(cellrt.Unfolder).parameters else {}
    found: list[float] = []
    with cellrt.Engine(num_workers, max_queue=1 << 20) as engine:
        engine.register(cellrt.Unfolder("unkeyed", chain, REQUESTS[0]))
        engine.register(cellrt.Unfolder("keyed", chain, REQUESTS[0], **key))
        for submit, model in kinds:
            rounds: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                gc.collect()
                gc.freeze()
                begin, whole = time.thread_time(), time.process_time()
                futures = submit(engine, model)
                submitted = time.thread_time() - begin
                for future in futures:
                    future.result()
                others = time.process_time() - whole - (time.thread_time() - begin)
                rounds.append((submitted, others))
            found += [1e6 * sorted(column)[ROUNDS // 4] / COUNT for column in zip(*rounds)]
    return found


if __name__ == "__main__":
    print(json.dumps([*measure(1, KINDS), *measure(2, KINDS[1::2])]))
