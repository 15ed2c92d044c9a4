"""Users' own cells: what AOTInductor's forms give, what an eager step costs, and four models beside padded torch.

Parts: ``modules`` (twenty modules in a bare loop, eager and compiled: microseconds a step at several numbers of rows),
``steps`` (what an eager step costs beyond the module's own call, in chains, loops and with ragged inputs), ``grain`` (a
character model as nodes, with a key and without, and as one coarse cell: ``own_grain.py``), and each a
model served by 1 and 2 workers, all servers in processes of their own: ``decoder`` (with attention), ``lstm`` (two
layers, with attention), ``mlp`` (a plain step), ``tree`` and ``dag``. The quick run has 1 worker, and no busy client.
What is not yet compiled is compiled first, 10 to 40 seconds each; the full run then takes about an hour on two cores.
How far it is goes to standard error.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch

import cellrt
from benchmarks import own_grain
from benchmarks.client_load import Busy
from benchmarks.compare import Plan, compare
from benchmarks.options import Options
from benchmarks.own_modules import MODULES
from benchmarks.own_served import FULL, MAX_BATCH, MODELS, QUICK, run_served
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.examples import random_inputs
from cellrt.definition.spec import plain

PARTS = ("modules", "steps", "grain", *MODELS)
ROWS = (1, 8, 64, 512)
QUICK_MODULES = ("MLP", "GRU stack", "ragged attention", "random")
WIDTH, STEPS, MOST_S = 64, 24, 1.0


def run_modules(recorder: Recorder, quick: bool) -> None:
    """Each module's step in a bare loop, one thread: as it is, and compiled."""
    store, before = LibraryStore(), torch.get_num_threads()
    torch.set_num_threads(1)
    for name in QUICK_MODULES if quick else MODULES:
        cell = MODULES[name].cell(name)
        form, reason = None, ""
        try:
            form = compile_cell(cell, store)
        except NotCompiledError as refused:
            reason = str(refused.reason)
        invariant = form is not None and form.is_batch_invariant
        recorder.add(name, "compiled", form is not None, "yes or no", reason=reason, invariant=invariant)
        for rows in ROWS:
            _time_module(recorder, name, cell, form, rows, 0.05 if quick else 0.3)
    torch.set_num_threads(before)


@torch.inference_mode()
def _time_module(
    recorder: Recorder, name: str, cell: cellrt.Cell, form: CompiledForm | None, rows: int, seconds: float
) -> None:
    inputs = random_inputs(cell.inputs.values(), rows, torch.Generator().manual_seed(rows))
    calls: dict[str, Callable[[], object]] = {"eager": partial(cell.run, *inputs)}
    if form is not None:
        calls["compiled"], _ = form.bind(rows, dict(zip(cell.inputs, map(plain, inputs))))
    times = medians_us(calls, seconds)
    for kind, value in times.items():
        recorder.add(name, f"{kind} step", value, "us", rows=rows)
    if form is not None:
        recorder.add(name, "eager / compiled", times["eager"] / times["compiled"], "ratio", rows=rows)


class TimedCalls:
    """A module that notes what each of its calls takes, and those of its copies: each worker has one."""

    def __init__(self, module: Callable[..., Any], calls_s: list[float]) -> None:
        self._module, self.calls_s = module, calls_s

    def __deepcopy__(self, memo: dict[int, Any]) -> TimedCalls:
        return TimedCalls(copy.deepcopy(self._module, memo), self.calls_s)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        start = time.perf_counter()
        result = self._module(*args, **kwargs)
        self.calls_s.append(time.perf_counter() - start)
        return result


def _step_models() -> Iterator[tuple[str, cellrt.Cell, cellrt.Unfolder, Any]]:
    """Yield a chain, a loop and a loop with a ragged input of one cell each: case, cell, model, request."""
    linear = torch.nn.Linear(WIDTH, WIDTH)

    def step(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(linear(x) + h)}

    def count(h: torch.Tensor, left: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(linear(h)), "left": left - 1, "stop": left <= 1}

    def attend(h: torch.Tensor, left: torch.Tensor, memory: cellrt.RaggedRows) -> dict[str, torch.Tensor]:
        mean = torch.segment_reduce(memory.values, "mean", offsets=memory.offsets)
        return {"h": torch.tanh(linear(h) + mean), "left": left - 1, "stop": left <= 1}

    state, words = {"h": (WIDTH,)}, torch.randn(STEPS, WIDTH)
    chain = cellrt.cell(step, {"x": (WIDTH,), **state}, name="chain")
    loop = cellrt.cell(count, {**state, "left": cellrt.token}, name="loop")
    ragged = cellrt.cell(attend, {**state, "left": cellrt.token, "memory": cellrt.ragged(WIDTH)}, name="ragged loop")
    given: dict[str, Any] = {"h": torch.zeros(WIDTH), "left": STEPS, "until": "stop", "max_steps": STEPS}
    models: dict[cellrt.Cell, Callable[[cellrt.Graph, Any], dict[str, object]]] = {
        chain: lambda graph, x: {"h": graph.chain(chain, x=x).last.h},
        loop: lambda graph, x: {"h": graph.loop(loop, **given).last.h},
        ragged: lambda graph, x: {"h": graph.loop(ragged, **given, memory=list(x[:8])).last.h},
    }
    for cell, function in models.items():
        yield cell.name, cell, cellrt.Unfolder(cell.name, function, words), words


def run_steps(recorder: Recorder, quick: bool) -> None:
    """Record the workers' time for tasks without that of the module's calls, by call."""
    for workers, is_busy in ((1, False), (2, False), (1, True)):
        beside = "a busy client" if is_busy else "a second worker" if workers == 2 else "nobody"
        for case, cell, model, request in _step_models():
            timed = cell.module = TimedCalls(cell.module, [])
            for rows in (1, 8):
                beyond, calls = [], []
                for _ in range(3 if quick else 9):
                    beyond_us, call_us = _time_steps(model, timed, [request] * rows, workers, is_busy)
                    beyond.append(beyond_us)
                    calls.append(call_us)
                extra = {"rows": rows, "beside": beside}
                recorder.add(case, "eager step beyond its module's call", statistics.median(beyond), "us", **extra)
                recorder.add(case, "module's call", statistics.median(calls), "us", **extra)


def run_grain(recorder: Recorder, quick: bool) -> None:
    """Throughput alone; what nodes with a key have of a coarse cell's."""
    plan = Plan(rounds=1 if quick else 5, sample_s=2.0, loads=(), open_s=0.0, concurrencies=(MAX_BATCH,))
    requests = own_grain.draw_requests()
    check = partial(own_grain.check, requests)
    peaks = compare(recorder, "grain", own_grain.servers(), requests, plan, check).peaks
    for name in peaks:
        if name != own_grain.COARSE:
            recorder.add("grain", f"{own_grain.COARSE} / {name}", peaks[own_grain.COARSE] / peaks[name], "ratio")


def _time_steps(
    model: cellrt.Unfolder, timed: TimedCalls, requests: Sequence[Any], workers: int, is_busy: bool
) -> tuple[float, float]:
    with cellrt.Engine(workers, trace=True, compile="off") as engine, Busy(is_busy):
        engine.register(model, warm_up=False)
        wait(engine.submit_many(model.name, requests))
        done = len(engine.timeline().tasks)
        timed.calls_s.clear()
        end_s = time.monotonic() + MOST_S
        for _ in range(20):
            wait(engine.submit_many(model.name, requests))
            if time.monotonic() > end_s:  # a module's call takes milliseconds where a client wants the interpreter
                break
        spent_s = sum(task.end_s - task.start_s for task in engine.timeline().tasks[done:])
        called_s, count = sum(timed.calls_s), len(timed.calls_s)
    return 1e6 * (spent_s - called_s) / count, 1e6 * called_s / count


def run(recorder: Recorder, options: Options) -> None:
    """Run the parts."""
    if options.has("modules"):
        run_modules(recorder, options.quick)
    if options.has("steps"):
        run_steps(recorder, options.quick)
    if options.has("grain"):
        run_grain(recorder, options.quick)
    run_served(recorder, options, QUICK if options.quick else FULL)
