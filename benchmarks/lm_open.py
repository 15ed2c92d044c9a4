"""A language model whose requests arrive whatever the server does, as in ORCA's section 6.2: latency and throughput.

"random": a Poisson process, prompts of U(32, 512) tokens and answers of U(1, 128), a quarter of each here. "Azure": a
stretch of the conversations that Azure published (2023), with their lengths by ``AZURE_SCALE`` and the gaps between
them, stretched to the rate, so that bursts stay bursts. Weights are random. The latency of a request is divided by the
tokens that it makes; the figure is the median over requests, against the requests answered a second. Iterations
(requests join and leave between steps), the same strictly in order and with all pages reserved, as ORCA has it, with
prompts in tasks of their own, which go first, as vLLM had it (Pensieve section 3.4.2), whole requests (nobody joins),
transformers' continuous batching and llama.cpp (``pip install xllamacpp gguf``), all with the same weights in float32
and one thread. Loads are in parts of what iterations do at most, all requests having arrived before; a server that
answered less than ``OVERWHELMED`` of what arrived gets no higher one.

The trace is a file that ``CELLRT_AZURE_TRACE`` names, or lies beside the repository in ``shared/data``; else "Azure" is
left out: AzureLLMInferenceTrace_conv.csv of https://github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import csv
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import cellrt
from benchmarks.compare import is_ours
from benchmarks.lm_llama_cpp import LlamaCpp, write_gguf
from benchmarks.lm_peers import Asked, Continuous, make_reference
from benchmarks.options import Options, are_there, tell
from benchmarks.plots import can_draw
from benchmarks.record import Recorder, Row
from benchmarks.workloads import Seconds, open_loop, poisson_arrivals
from cellrt.cells.language_models import language_model
from cellrt.cells.llama import Llama
from cellrt.core.state.settings import SchedulerSettings
from cellrt.unfolders.completion import complete

PROMPTS, ANSWERS = (8, 128), (1, 32)
NO_END, PAGE_SIZE, MOST_IN_A_TASK = -1, 16, 16
AZURE_SCALE, AZURE_LONGEST, AZURE_FIRST = 16, (256, 64), 1000
"""Lengths are divided by this, and cut to these many tokens of a prompt and of an answer; the first of the stretch."""
TRACE_VARIABLE = "CELLRT_AZURE_TRACE"
TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "azure_llm_conv_2023.csv"
LOADS = (0.3, 0.6, 0.9, 1.2)
MOST, AT_ONCE = 400, 80
"""Requests that are drawn, and those that find how many iterations do at most."""
SECONDS, FEWEST = 7.0, 24
"""The time for which requests arrive at each load, and the fewest of them."""
OVERWHELMED = 0.6
LATENCY, THROUGHPUT = "latency a token", "throughput"
WAYS: dict[str, SchedulerSettings] = {
    "iterations": SchedulerSettings(),
    "iterations, ORCA's": SchedulerSettings(steps_first=False, reserve_pages=True),
    "prompts apart": SchedulerSettings(prompts_apart=True),
    "whole requests": SchedulerSettings(joins=False),
}
Serve = Callable[[Sequence[Asked], Seconds], tuple[Seconds, float]]
"""Returns the latency of each request, in seconds, and how long it all took."""


def draw_requests(count: int, vocabulary: int, seed: int) -> list[Asked]:
    """Return random prompts and how many tokens to make of each."""
    draw = np.random.default_rng(seed)
    sizes = zip(draw.integers(PROMPTS[0], PROMPTS[1] + 1, count), draw.integers(ANSWERS[0], ANSWERS[1] + 1, count))
    return [Asked(draw.integers(0, vocabulary, int(read)).tolist(), int(steps)) for read, steps in sizes]


class Arriving(NamedTuple):
    """Requests, and given how many shall arrive a second, when the first ``count`` do, in seconds from the start."""

    requests: list[Asked]
    at_rate: Callable[[float, int], Seconds]


def random_requests(count: int, vocabulary: int) -> Arriving:
    """Return requests with the lengths of ORCA's."""
    return Arriving(draw_requests(count, vocabulary, seed=1), partial(poisson_arrivals, seed=2))


def traced_requests(trace: Path, count: int, vocabulary: int) -> Arriving:
    """Return a stretch of Azure's; the words of the prompts are drawn.

    Raise ValueError where the trace has fewer requests.
    """
    draw = np.random.default_rng(1)
    with trace.open(encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), AZURE_FIRST, AZURE_FIRST + count))
    if len(rows) < count:
        raise ValueError(f"{trace} has fewer than {AZURE_FIRST + count} requests")
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    offsets_s = np.array([(each - times[0]).total_seconds() for each in times])
    requests = []
    for row in rows:
        given = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        read, steps = (min(max(1, size // AZURE_SCALE), most) for size, most in zip(given, AZURE_LONGEST))
        requests.append(Asked(draw.integers(0, vocabulary, read).tolist(), steps))
    return Arriving(requests, lambda rate, count: offsets_s[:count] * (count / rate / offsets_s[count - 1]))


def find_trace() -> Path | None:
    """Return the file of Azure's trace, if it is there."""
    path = Path(os.environ.get(TRACE_VARIABLE, TRACE))
    if not path.is_file():
        tell(f"Azure's arrivals are left out: {TRACE_VARIABLE} names no file (see benchmarks/lm_open.py)")
        return None
    return path


def serve_by_engine(engine: cellrt.Engine, requests: Sequence[Asked], arrivals: Seconds) -> tuple[Seconds, float]:
    """Serve by cellrt; return latencies and duration in seconds."""
    given = [{"prompt": torch.tensor(asked.prompt), "max_tokens": asked.steps} for asked in requests]
    load = open_loop(lambda k: engine.submit("lm", given[k]), arrivals, timeout_s=120)
    return load.latencies_s, load.duration_s


def serve_by_peer(peer: Continuous, requests: Sequence[Asked], arrivals: Seconds) -> tuple[Seconds, float]:
    """Serve by transformers; an answer counts when a thread takes it from the queue."""
    manager: Any = peer._manager
    ends: dict[str, float] = {}

    def take() -> None:
        while len(ends) < len(requests):
            result = manager.get_result(timeout=60)
            if result is None:
                return
            ends[result.request_id] = time.perf_counter()

    taking = threading.Thread(target=take)
    taking.start()
    start, names = time.perf_counter(), []
    for asked, arrival_s in zip(requests, arrivals.tolist()):
        time.sleep(max(0.0, start + arrival_s - time.perf_counter()))
        names.append(manager.add_request(asked.prompt, max_new_tokens=asked.steps))
    taking.join(120)
    if len(ends) < len(requests):
        raise RuntimeError("transformers' continuous batching did not answer all")
    found = np.array([ends[name] for name in names]) - start
    return found - arrivals, float(found.max())


def run_open(recorder: Recorder, model: Llama, options: Options) -> None:
    """Every way under every load, in parts of what iterations do at most."""
    with ExitStack() as ends:
        servers = start_servers(model, ends)
        count = FEWEST if options.quick else MOST
        arriving = {"random, open": random_requests(count, model.sizes.vocabulary)}
        if (trace := find_trace()) is not None:
            arriving["Azure, open"] = traced_requests(trace, count, model.sizes.vocabulary)
        for case, its in arriving.items():
            compare_open(recorder, case, servers, its, LOADS[2:3] if options.quick else LOADS)
    if options.plot is not None:
        draw(recorder.rows, options.plot)


def start_servers(model: Llama, ends: ExitStack) -> dict[str, Serve]:
    """Return every way that is installed; ``ends`` closes them."""
    servers: dict[str, Serve] = {}
    cell = language_model(model, NO_END, page_size=PAGE_SIZE, max_batch=MOST_IN_A_TASK)
    for name, settings in WAYS.items():
        engine = ends.enter_context(cellrt.Engine(1, page_bytes=1 << 28, settings=settings))
        engine.register(complete("lm", cell, max_tokens=AZURE_LONGEST[1]))
        servers[f"cellrt, {name}"] = partial(serve_by_engine, engine)
    if are_there("transformers' continuous batching", "transformers"):
        peer = Continuous(make_reference(model), AZURE_LONGEST[1])
        ends.callback(peer.close)
        servers["transformers, continuous"] = partial(serve_by_peer, peer)
    if are_there("llama.cpp", "xllamacpp", "gguf"):
        path = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
        write_gguf(model, path)
        other = LlamaCpp(path, MOST_IN_A_TASK, sum(AZURE_LONGEST))
        ends.callback(other.close)
        servers["llama.cpp"] = other.serve
    return servers


def compare_open(
    recorder: Recorder, case: str, servers: Mapping[str, Serve], arriving: Arriving, loads: Sequence[float]
) -> None:
    """Every way under every load with the same requests."""
    requests = arriving.requests
    for serve in servers.values():
        serve(requests[:8], np.zeros(8))
    first = requests[:AT_ONCE]
    _, seconds = servers["cellrt, iterations"](first, np.zeros(len(first)))
    most, overwhelmed = len(first) / seconds, set[str]()
    recorder.add(case, "iterations, at most", most, "requests/s")
    for load in loads:
        rate = load * most
        own = requests[: max(FEWEST, round(rate * SECONDS))]
        arrivals = arriving.at_rate(rate, len(own))
        for name, serve in servers.items():
            if name in overwhelmed:
                continue
            latencies_s, took_s = serve(own, arrivals)
            each_ms = 1e3 * latencies_s / np.array([asked.steps for asked in own])
            which = {"server": name, "load": load}
            recorder.add(case, LATENCY, float(np.median(each_ms)), "ms", **which)
            recorder.add(case, THROUGHPUT, len(own) / took_s, "requests/s", **which)
            if len(own) / took_s < OVERWHELMED * len(own) / max(arrivals[-1], 1e-9):
                overwhelmed.add(name)
            tell(f"{case}: load {load}: {name}")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the latency of a token against the requests answered a second, a panel for each kind of arrivals."""
    own = [row for row in rows if row["metric"] in (LATENCY, THROUGHPUT)]
    cases = list(dict.fromkeys(str(row["case"]) for row in own))
    if not cases or not can_draw():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(cases), 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases):
        for server in dict.fromkeys(str(row["server"]) for row in own):
            its = [row for row in own if (row["case"], row["server"]) == (case, server)]
            at, ms = ([float(str(row["value"])) for row in its if row["metric"] == m] for m in (THROUGHPUT, LATENCY))
            axes.plot(at, ms, marker="o", markersize=3, lw=2 if is_ours(server) else 1, label=server)
        axes.set(title=case, xlabel="requests answered a second", ylabel="median latency a token, ms", yscale="log")
    figure.axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72)
