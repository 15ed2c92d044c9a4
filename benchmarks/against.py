"""The cost of a request and a node beside another commit, in turns: ``python benchmarks/against.py CHECKOUT [ROUNDS]``.

Chains of 24 steps of a cell that does nothing, through an engine of one worker: one at a time, many submitted each, and
in bulk. Then what each version has for those in a hurry: with a key each, and in bulk with all results at once, and
steps of 200 sessions handed in together; a version without does the same one by one. Then the processor time of the
client and of the engine (``against_submits.py``), the time of requests that are waited for one at a time
(``against_lone.py``), of a client in another process (``against_process.py``) and of trees (``against_trees.py``). At
last what the scheduler costs a node (``against_core.py``). It asks for nothing else but what every version of cellrt
has, so that a checkout of any commit will do (``git worktree add ../before 2a12ad4``). A machine of few cores differs
more from run to run than two commits do: read the medians of many rounds. With ``taskset -c 1`` before it, no wake-up
crosses cores, and few rounds are enough.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

LENGTH, COUNT, MANY, SESSIONS, SAMPLES = 24, 4_000, 250, 200, 5
REQUEST_CASES = (
    "one at a time",
    "one submit each",
    f"submit_many of {MANY}",
    "one submit each, in a hurry",
    f"{MANY} in bulk, in a hurry",
    f"steps of {SESSIONS} sessions, in a hurry",
)
SUBMIT_CASES = tuple(
    f"{how}, {whose} processor time"
    for how in (
        "one submit each",
        "one submit each, with a key",
        f"{MANY} in bulk",
        f"{MANY} in bulk, with a key",
        "2 workers, one submit each, with a key",
        f"2 workers, {MANY} in bulk, with a key",
    )
    for whose in ("the client's", "the other threads'")
)
LONE_CASES = (
    "lone, known by a key",
    "lone session step",
    "lone beside a busy Python thread",
    "lone beside a busy Python thread, mean",
    "4 threads in a closed loop, a request",
    "a plain torch module, compiled, lone",
    "a plain torch module, compiled, one submit each",
    "a loop over the module itself, one request",
    "a loop over the module itself, 64 requests, a request",
)
OTHER_CASES = (
    "from another process, lone",
    "from another process, lone, processor time of both",
    "from another process, one submit each, the client's processor time",
    "from another process, one submit each, the engine's",
    "a tree of a treebank, the client's processor time",
    "a tree of a treebank, the engine's",
)
NODE_CASES = (
    *(f"chains of one layer, {batch} rows a task" for batch in (8, 64, 512, 4_096)),
    "two layers, every step streamed, 2 workers, 512 rows",
    "two layers that carry nothing, 512 rows",
    "trees, 64 rows",
    "trees, 512 rows",
)
CASES = (
    *((case, "us") for case in (*REQUEST_CASES, *SUBMIT_CASES, *LONE_CASES, *OTHER_CASES)),
    *((case, "ns a node") for case in NODE_CASES),
)
ROUNDS = 8
LIMIT_S = 300.0


def nothing(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the cell."""
    return {"h": h}


def take_all(futures: Any) -> None:
    """Wait for all results, and take them as fast as the version can."""
    _ = futures.results() if hasattr(futures, "results") else [future.result() for future in futures]


def each_of(model: str, requests: list[list[int]], engine: Any) -> float:
    """Return microseconds a request, each submitted by itself."""
    start = time.perf_counter()
    _ = [future.result() for future in [engine.submit(model, request) for request in requests]]
    return 1e6 * (time.perf_counter() - start) / COUNT


def measure() -> list[float]:
    """Return microseconds a request in each of ``REQUEST_CASES``, medians of some samples, of the cellrt that is
    imported.
    """
    import cellrt

    cell = cellrt.cell(nothing, {"x": cellrt.rows(dtype=torch.int64), "h": (1,)})

    def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(cell, x=request).last.h}

    requests = [list(range(LENGTH)) for _ in range(COUNT)]

    def alone(engine: cellrt.Engine) -> float:
        start = time.perf_counter()
        for request in requests[: COUNT // 4]:
            engine.submit("chain", request).result()
        return 4e6 * (time.perf_counter() - start) / COUNT

    def bulk(engine: cellrt.Engine) -> float:
        start = time.perf_counter()
        for futures in [engine.submit_many("chain", requests[k : k + MANY]) for k in range(0, COUNT, MANY)]:
            for future in futures:
                future.result()
        return 1e6 * (time.perf_counter() - start) / COUNT

    def step(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(cell, keep=True, x=request).last.h}

    key: dict[str, Any] = {"key": len} if "key" in inspect.signature(cellrt.Unfolder).parameters else {}

    def in_a_hurry(engine: cellrt.Engine) -> float:
        start = time.perf_counter()
        for futures in [engine.submit_many("known", requests[k : k + MANY]) for k in range(0, COUNT, MANY)]:
            take_all(futures)
        return 1e6 * (time.perf_counter() - start) / COUNT

    def sessions_in_a_hurry(engine: cellrt.Engine) -> float:
        can_go_together = "sessions" in inspect.signature(engine.submit_many).parameters
        start = time.perf_counter()
        for _ in range(COUNT // SESSIONS):
            if can_go_together:
                take_all(engine.submit_many("step", [[1]] * SESSIONS, sessions=sessions))
            else:
                take_all([session.submit([1]) for session in sessions])
        return 1e6 * (time.perf_counter() - start) / COUNT

    each, each_in_a_hurry = (partial(each_of, model, requests) for model in ("chain", "known"))
    hurried = each_in_a_hurry, in_a_hurry, sessions_in_a_hurry
    cases: list[Callable[[cellrt.Engine], float]] = [alone, each, bulk, *hurried]
    with cellrt.Engine(1, max_queue=1 << 20) as engine:
        engine.register(cellrt.Unfolder("chain", chain, requests[0]))
        engine.register(cellrt.Unfolder("known", chain, requests[0], **key))
        engine.register(cellrt.Unfolder("step", step, [1], **key))
        sessions = [engine.session("step") for _ in range(SESSIONS)]
        for case in cases:
            case(engine)
        gc.collect()
        gc.freeze()
        samples = [[case(engine) for case in cases] for _ in range(SAMPLES)]
    return [statistics.median(column) for column in zip(*samples)]


def run_in(checkout: Path) -> list[float]:
    """Return all of ``CASES``, in processes that import cellrt from a checkout."""
    parts = ("submits", "lone", "process", "trees", "core")
    files = (["against.py", "--measure"], *([f"against_{part}.py"] for part in parts))
    return [number for name, *options in files for number in run_file(checkout, name, *options)]


def run_file(checkout: Path, name: str, *options: str) -> list[float]:
    """Return the numbers that a file beside this one prints, which imports cellrt from a checkout."""
    # No version compiles the cell beside what is measured: some do by default, in the background.
    environment = {"CELLRT_COMPILE": "off", **os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve().with_name(name)), *options]
    made = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if made.returncode:
        raise RuntimeError(f"{checkout}: {made.stderr[-2000:]}")
    found: list[float] = json.loads(made.stdout.splitlines()[-1])
    return found


def main(other: Path, rounds: int) -> None:
    """Measure both in turns, and print medians and the ratio of the other's to this one's."""
    own = Path(__file__).resolve().parents[1]
    for checkout in (own, other):
        run_in(checkout)  # compiles what is not
    pairs: list[tuple[list[float], list[float]]] = []
    for number in range(rounds):
        made = {checkout: run_in(checkout) for checkout in ((own, other) if number % 2 else (other, own))}
        pairs.append((made[other], made[own]))
    for k, (case, unit) in enumerate(CASES):
        theirs, ours = (statistics.median(values[k] for values in column) for column in zip(*pairs))
        ratio = statistics.median(there[k] / here[k] for there, here in pairs)
        print(f"{case}: {theirs:.1f} {unit} there, {ours:.1f} here; there / here {ratio:.2f}, of {rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
