"""The cost of a turn beside ever more requests that are live, wait, or are kept.

The bystanders do nothing meanwhile: requests with deadlines that wait in a session behind one that is held up, and open
sessions with their state. What grows is then the cost of having them, not of serving them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import cellrt
from benchmarks.record import Recorder

NUMBERS = (1_000, 10_000, 100_000)
MANY = 250
WAIT_S = 60.0
HOUR_S = 3600.0


class Door:
    """A cell that a row with a 1 holds up until ``open`` is set, at most so long."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: dict[int, object]) -> Door:
        return self

    def __call__(self, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        """Hand the state on."""
        if x.device.type != "meta" and bool((x == 1).any()):
            self.entered.set()
            self.open.wait(WAIT_S)
        return {"h": h}


def make_engine(door: Door, most: int) -> cellrt.Engine:
    """Return an engine of two workers with room for that many; one worker may be held up at the door."""
    number = cellrt.rows(dtype=torch.int64)
    held = cellrt.cell(door, {"x": number, "h": (1,)}, name="held", max_batch=1)
    tiny = cellrt.cell(lambda x, h: {"h": h}, {"x": number, "h": (1,)}, name="tiny")

    def kept(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(held, keep=True, x=request).last.h}

    def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(tiny, x=request).last.h}

    def session(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(tiny, keep=True, x=request).last.h}

    engine = cellrt.Engine(
        2,
        max_queue=2 * most,
        limits=cellrt.Limits(max_sessions=2 * most),
        sessions=cellrt.SessionLimits(max_sessions=2 * most),
    )
    for name, function in (("kept", kept), ("chain", chain), ("session", session)):
        engine.register(cellrt.Unfolder(name, function, [0, 0]), warm_up=False)
    return engine


def request_us(engine: cellrt.Engine, rounds: int) -> float:
    """Return the median over rounds: microseconds of processor time, client's and engine's, of a tiny request, of many
    together.

    What else the machine does changes it little.
    """
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for future in engine.submit_many("chain", [[0, 0, 0]] * MANY):
            future.result(WAIT_S)
        times.append(1e6 * (time.process_time() - start) / MANY)
    return statistics.median(times)


def add_waiting(engine: cellrt.Engine, count: int) -> Any:
    """Let that many more requests with deadlines wait in the session whose first request is held up."""
    session = engine.session("kept", "held")
    return [session.submit([0], deadline=HOUR_S) for _ in range(count)]


def add_sessions(engine: cellrt.Engine, count: int) -> Any:
    """Open that many more sessions, and make a state in each."""
    sessions = [engine.session("session") for _ in range(count)]
    for first in range(0, count, MANY):
        for future in [session.submit([0]) for session in sessions[first : first + MANY]]:
            future.result(WAIT_S)
    return sessions


def run_live(recorder: Recorder, quick: bool) -> None:
    """Record the cost of a tiny request beside 1,000 to 100,000 bystanders of each kind."""
    numbers, rounds = (NUMBERS[:2], 20) if quick else (NUMBERS, 100)
    kinds: list[tuple[str, Callable[[cellrt.Engine, int], Any]]] = [
        ("requests with deadlines wait", add_waiting),
        ("sessions are open", add_sessions),
    ]
    for name, add in kinds:
        door = Door()
        with make_engine(door, numbers[-1]) as engine:
            if add is add_waiting:
                engine.session("kept", "held").submit([1])
                door.entered.wait(WAIT_S)
            request_us(engine, rounds)
            kept: list[Any] = []
            for number in numbers:
                kept.append(add(engine, number - sum(map(len, kept))))
                value = request_us(engine, rounds)
                recorder.add("live", f"processor time of a tiny request, while {name}", value, "us", live=number)
            door.open.set()
            kept.clear()
            engine.close()
