"""The share of time in which loops keep a device busy that reports a stop late: by waiting for it, and by going ahead.

Without a GPU: the device "dry" runs tasks on a thread of the CPU, where each takes a given time longer, asleep. All
else is the worker's and the manager's own code. Eight loops of different lengths come together, one step a task; *busy*
is the share of the time, from the first submission to the last answer, during which a task ran. What is missing is the
host's time between two steps: that is what going ahead hides, whatever the device. The time of a step has more to it
here, as the device's thread and the host's share this machine and one interpreter.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.options import Options
from benchmarks.record import Recorder
from cellrt import LoopBody, Output, State
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import grows, rows
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.device import Work
from cellrt.worker.device.dry import DryDevice
from cellrt.worker.device.placement import Forms, Placements

PARTS = ("plain", "pages", "cells")
"""A loop of one cell, of one that grows a state in pages as language models do, and of two cells."""
STEP_MS = (0.1, 0.3, 1.0, 3.0)
LENGTHS = (40, 60, 80, 100, 120, 140, 160, 180)
AHEAD = (0, 1)
WIDTH, WAIT_S = 16, 120.0


class Handed(NamedTuple):
    """Output of a cell."""

    n: Tensor


class Made(NamedTuple):
    """Outputs of the cell."""

    n: Tensor
    stop: Tensor


def count_down(n: Tensor) -> Made:
    """``n`` is how many steps are left."""
    return Made(n - 1, n <= 1)


def count_in_pages(n: Tensor, seen: PagedRows) -> Made:
    """Return the same; each step appends a row."""
    seen.append(n[:, None].float())
    return Made(n - 1, n <= 1)


def hand_on(n: Tensor) -> Handed:
    """Return the number as it is."""
    return Handed(n + 0)


def counter(part: str) -> Unfolder:
    """Return the model; requests are numbers of steps."""
    number, most = rows(dtype=torch.int64), max(LENGTHS)
    made = cell(count_down, {"n": number}, max_batch=64)
    paged = cell(count_in_pages, {"n": number, "seen": grows(1)}, max_batch=64)
    hands_on = cell(hand_on, {"n": number}, max_batch=64)

    def step(_: LoopBody, state: State) -> dict[str, Output]:
        told = made(n=hands_on(n=state.n).n)
        return {"n": told.n, "stop": told.stop}

    def unfold(graph: Graph, steps: int) -> dict[str, object]:
        if part == "cells":
            return {"n": graph.loop(step, n=steps, until="stop", max_steps=most).last.n}
        if part == "pages":
            return {"n": graph.loop(paged, n=steps, seen=graph.pages(paged), until="stop", max_steps=most).last.n}
        return {"n": graph.loop(made, n=steps, until="stop", max_steps=most).last.n}

    return Unfolder("count", unfold, 3)


class SlowDevice(DryDevice):
    """A device on which each task takes so many seconds longer; ``spent_s`` is the time of all of them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.spent_s = seconds, 0.0
        self.placements = Placements(self.torch_device, Forms())

    def submit(self, work: Work, has_download: bool) -> None:
        """Submit work that takes ``seconds`` longer, asleep."""

        def slowly() -> None:
            start = time.perf_counter()
            work()
            time.sleep(self.seconds)
            self.spent_s += time.perf_counter() - start

        super().submit(slowly, has_download)


class Server:
    """An engine whose loops go so many tasks ahead."""

    def __init__(self, part: str, seconds: float, ahead: int) -> None:
        self.device = SlowDevice(seconds)
        settings = SchedulerSettings(runs=False, loops_ahead=ahead)
        with patch("cellrt.engine.engine.open_device", lambda name, options: self.device):
            self.engine = Engine(["dry"], settings=settings, freeze=False)
        self.engine.register(counter(part), warm_up=False)

    def serve(self) -> tuple[float, float]:
        """Serve the loops once: seconds a step of the longest, and the share of the time that the device was busy."""
        before, start = self.device.spent_s, time.perf_counter()
        for future in self.engine.submit_many("count", LENGTHS):
            future.result(WAIT_S)
        took_s = time.perf_counter() - start
        self.engine.drain(WAIT_S)
        return took_s / max(LENGTHS), min(1.0, (self.device.spent_s - before) / took_s)


def run(recorder: Recorder, options: Options) -> None:
    """Measure both, one after the other, several times; medians."""
    rounds = 1 if options.quick else 7
    cases = itertools.product(filter(options.has, PARTS), STEP_MS[:1] if options.quick else STEP_MS)
    for part, step_ms in cases:
        servers = {ahead: Server(part, step_ms / 1e3, ahead) for ahead in AHEAD}
        measured: dict[int, list[tuple[float, float]]] = {ahead: [] for ahead in AHEAD}
        for _ in range(rounds):
            for ahead, server in servers.items():
                measured[ahead].append(server.serve())
        for ahead, server in servers.items():
            server.engine.close(WAIT_S)
            step_s, busy = (statistics.median(values) for values in zip(*measured[ahead]))
            case = f"{part}, {step_ms} ms more a task, " + (f"{ahead} ahead" if ahead else "waiting")
            recorder.add(case, "time a step", step_s * 1e6, "us")
            recorder.add(case, "busy", 100 * busy, "%")
