"""Models of users' own cells, each served by cellrt and by its peers, all in processes of their own.

The client is this process, idle but for sending, or with a thread that calculates in Python. Peers are the strongest
simple thing: a process of one thread a worker that batches what has arrived (``ProcessServer``), with the plain
modules, with their step through ``torch.compile``, and one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

import cellrt
from benchmarks import own_cell_decoder, own_chains, own_dags, own_trees
from benchmarks.client_load import Busy
from benchmarks.compare import FULL as LONG
from benchmarks.compare import NUM_CHECKED, Makers, Plan, Point, compare, draw, is_ours
from benchmarks.compare import QUICK as SHORT
from benchmarks.compiled_peer import has_compiler
from benchmarks.options import Options, tell
from benchmarks.process_server import ProcessServer
from benchmarks.record import Recorder
from benchmarks.server import Runner

QUICK = replace(SHORT, concurrencies=(1, 64))
FULL = replace(LONG, concurrencies=(1, 64, 512))
"""One in flight: a request alone."""
MAX_BATCH, NUM_REQUESTS = 64, 2000
MAX_DIFFERENT = 1
"""The part of ``NUM_CHECKED`` answers that must agree: two tokens may be as good as equally likely."""
COMPILED, EAGER, BUSY = "cellrt, compiled", "cellrt, eager", "busy client"


class Served(NamedTuple):
    """A model, and how each server gets it.

    ``path`` is where an engine imports it from, ``model`` its name there, ``result`` that of its result. ``runner``
    gets whether the step is compiled, and the number of threads; ``draw`` gives so many requests from a seed.
    ``forms`` are further ways to write it for cellrt: a name and a path each.
    """

    path: str
    model: str
    result: str
    runner: Callable[[bool, int], Runner]
    draw: Callable[[int, int], Sequence[Any]]
    forms: Mapping[str, str] = {}


MODELS = {
    "decoder": Served(
        "benchmarks.own_cell_decoder:whole",
        "decode",
        "tokens",
        own_cell_decoder.padded,
        own_cell_decoder.draw_requests,
        {"cellrt, decoder in parts": "benchmarks.own_cell_decoder:parts"},
    ),
    "lstm": Served(
        "benchmarks.own_chains:classify", "classify", "scores", own_chains.padded_lstm, own_chains.draw_words
    ),
    "mlp": Served("benchmarks.own_chains:fold", "fold", "h", own_chains.padded_mlp, own_chains.draw_words),
    "tree": Served("benchmarks.own_trees:compose", "compose", "h", own_trees.levels, own_trees.draw_trees),
    "dag": Served(
        "benchmarks.own_dags:settle",
        "settle",
        "h",
        own_dags.levels,
        own_dags.draw_circuits,
        {"cellrt, with a key": "benchmarks.own_dags:settle_known"},
    ),
}
"""The models by the benchmark's part."""


class Told(Recorder):
    """Says each row when it is there, since a run takes minutes."""

    def add(self, case: str, metric: str, value: float, unit: str, **extra: object) -> None:
        """Record a figure, and print it."""
        super().add(case, metric, value, unit, **extra)
        tell(f"{case}: {metric}: {value:,.4g} {unit}")


class Cellrt:
    """An engine in a process of its own, which serves one model; ``options`` are the engine's."""

    def __init__(self, served: Served, path: str, **options: Any) -> None:
        self._engine = cellrt.EngineProcess(max_queue=1 << 20, **options)
        self._model = served.model
        self._engine.register(path)

    def submit(self, request: Any) -> Future[Any]:
        """Submit a request; the future's result has its results by name."""
        return self._engine.submit(self._model, request)

    def close(self) -> None:
        """End the engine's process."""
        self._engine.close()


def servers(served: Served, workers: int) -> Makers:
    """Return makers of the servers by name; without a C++ compiler, what is compiled is left out."""
    eager, compiled = partial(served.runner, False), partial(served.runner, True)
    forms = {COMPILED: served.path, **served.forms} if has_compiler() else {}
    makers: dict[str, Callable[[], Any]] = {
        name: partial(Cellrt, served, path, workers=workers, compile="wait") for name, path in forms.items()
    }
    makers[EAGER] = partial(Cellrt, served, served.path, workers=workers, compile="off")
    makers["padded"] = partial(ProcessServer, eager, max_batch=MAX_BATCH, workers=workers)
    if has_compiler():
        makers["padded, torch.compile"] = partial(ProcessServer, compiled, max_batch=MAX_BATCH, workers=workers)
    makers["one at a time"] = partial(ProcessServer, eager, max_batch=1, workers=workers)
    return {name: partial(_start, name, make) for name, make in makers.items()}


def _start(name: str, make: Callable[[], Any]) -> Any:
    tell(f"starts {name}")
    return make()


def check(served: Served, requests: Sequence[Any], name: str, answers: Sequence[Any]) -> None:
    """Raise AssertionError where a server's answers are not those of the plain modules to each request alone."""
    run, num_different, allowed = served.runner(False, 1), 0, 0
    with torch.inference_mode():
        for request, answer in zip(requests[:NUM_CHECKED], answers, strict=True):
            ((_, expected),) = run([request])
            value = answer[served.result] if isinstance(answer, dict) else answer
            if value.shape != expected.shape or not torch.allclose(value, expected, rtol=1e-4, atol=1e-5):
                num_different += 1
            allowed = 0 if expected.is_floating_point() else MAX_DIFFERENT
    if num_different > allowed:
        raise AssertionError(f"{name}: {num_different} of {len(answers)} answers differ from those to a request alone")
    tell(f"{name} gives the right answers, and warms up")


def run_model(recorder: Recorder, part: str, workers: int, plan: Plan, is_busy: bool) -> list[Point]:
    """Measure one model behind each server, closed loop and open loop; record cellrt's lead over each peer."""
    served = MODELS[part]
    requests = served.draw(NUM_REQUESTS, 0)
    case = f"{part}, workers: {workers}" + (f", {BUSY}" if is_busy else "")
    tell(f"{case}: starts the servers; what is not yet compiled is compiled first, 10 to 40 s a cell")
    with Busy(is_busy):
        measured = compare(recorder, case, servers(served, workers), requests, plan, partial(check, served, requests))
    ours = COMPILED if COMPILED in measured.peaks else EAGER
    for name, peak in measured.peaks.items():
        if not is_ours(name):
            recorder.add(case, f"{ours} / {name}", measured.peaks[ours] / peak, "ratio")
    return measured.points


def run_served(recorder: Recorder, options: Options, plan: Plan) -> None:
    """Measure the models of the options, with 1 and 2 workers, the decoder also beside a busy client.

    The quick form has 1 worker alone.
    """
    points, told = list[Point](), Told(recorder.benchmark)
    for part in filter(options.has, MODELS):
        for workers in (1,) if options.quick else (1, 2):
            points += run_model(told, part, workers, plan, is_busy=False)
        if part == "decoder" and not options.quick:
            points += run_model(told, part, 1, plan, is_busy=True)
    recorder.rows += told.rows
    if options.plot is not None:
        draw(points, options.plot)
