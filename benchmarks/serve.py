"""Servers over HTTP: one LSTM behind cellrt serve, Triton, LitServe, mosec and Ray Serve, and the engine in process.

"cellrt serve" has the ready-made LSTM, its embedding folded in; "own cell" an ``nn.LSTMCell`` in a plain module, which
the server compiles. LitServe, mosec and Ray Serve run ``nn.LSTM`` on a packed sequence, in batches of at most 64.

Requests have 5 to 100 steps (tokens; hidden 256), as JSON in each server's own protocol, sent by ``wrk`` (``apt install
wrk``) on the same cores. Each server is started, its answers are compared with torch's, and it is ended before the next
one starts: some take processor time while they are idle. Peers that are not installed, or do not start, are left out
and named: ``pip install litserve mosec 'ray[serve]'``; for Triton see ``benchmarks.http_triton``.

``rate``: requests/s and latency with 1 to 256 connections: medians of rounds in each of which every server has its
turn, and ratios of figures of one round. ``tiny``: requests of one step through one and two front ends. ``lm``: a
language model behind OpenAI's protocol, also of vLLM, transformers and llama.cpp (``benchmarks.lm_served``).
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

import cellrt
from benchmarks.http_classifier import VOCABULARY, Classifier
from benchmarks.http_load import measured
from benchmarks.http_model import classify
from benchmarks.http_peers import PEERS
from benchmarks.http_server import Command, DidNotStartError, Server, post, read, serving
from benchmarks.lm_served import run_served
from benchmarks.options import Options
from benchmarks.record import Recorder

PARTS = ("rate", "tiny", "lm")
MODEL, OWN_MODEL = "benchmarks.http_model:classify", "benchmarks.http_model:classify_own"
OURS, OURS_OWN, IN_PROCESS = "cellrt serve", "cellrt serve, own cell", "cellrt, in process"
OWN_SERVERS = OURS, OURS_OWN
NUM_REQUESTS, NUM_CHECKED = 512, 64
CLIENTS, GOAL_CLIENTS = (1, 16, 64, 256), 64
UNITS = {"rate": "requests/s", "p50": "ms", "p99": "ms", "mean rows of a task": "rows"}

Figures = dict[tuple[str, int, str], float]
"""The figures of one round, by server, clients and metric."""


def requests_of(longest: int) -> list[list[int]]:
    """Return tokens of requests with 5 to ``longest`` steps, or one if ``longest`` is 1."""
    random = np.random.default_rng(0)
    lengths = random.integers(min(5, longest), longest + 1, NUM_REQUESTS)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def ours(front_ends: int = 1, model: str = MODEL) -> Server:
    """``cellrt serve`` with one worker."""
    return Server(
        path="/v1/models/classify/infer",
        prepared=partial(_prepared, front_ends, model),
        missing=lambda: None,
        body=lambda tokens: {"request": list(tokens)},
        answered=lambda answer: int(answer["results"]["class"]),
        counts=_tasks_and_rows,
    )


@contextmanager
def _prepared(front_ends: int, model: str, port: int) -> Iterator[Command]:
    # Nothing compiles beside what is measured; ready-made cells bring their forms.
    compiles = "wait" if model == OWN_MODEL else "off"
    options = {"--port": port, "--device": "cpu:1", "--front-ends": front_ends, "--timeline": 0, "--compile": compiles}
    words = [word for option, value in options.items() for word in (option, str(value))]
    yield [sys.executable, "-m", "cellrt", "serve", model, *words], os.environ


def _tasks_and_rows(address: str) -> tuple[int, int]:
    """Return the tasks and rows of the LSTM so far, from the server's own statistics."""
    lstm = max(read(f"{address}/debug/statistics")["cells"].values(), key=lambda cell: cell["nodes"])
    return int(lstm["tasks"]), int(lstm["rows"])


def in_process(requests: Sequence[Sequence[int]], clients: int, seconds: float) -> float:
    """Return requests/s of the engine itself, with so many in flight."""
    with cellrt.Engine(1) as engine:
        engine.register(classify())
        end_s, count = time.perf_counter() + seconds, 0

        def endless() -> Iterator[Sequence[int]]:
            while time.perf_counter() < end_s:
                yield from requests

        begin_s = time.perf_counter()
        for _ in engine.map("classify", endless(), max_in_flight=clients, ordered=False):
            count += 1
            if time.perf_counter() > end_s:
                break
        return count / (time.perf_counter() - begin_s)


def run(recorder: Recorder, options: Options) -> None:
    """Measure and record."""
    if options.has("lm"):
        run_served(recorder, options)
    if not (options.has("rate") or options.has("tiny")):
        return
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark sends with wrk; on Debian and Ubuntu: apt install wrk")
    if options.has("rate"):
        clients, seconds, rounds = ((1, GOAL_CLIENTS), 3.0, 1) if options.quick else (CLIENTS, 3.0, 5)
        servers = {OURS: ours(), OURS_OWN: ours(model=OWN_MODEL), **_installed()}
        record_rounds(recorder, list(_rounds(servers, clients, seconds, rounds)))
    if options.has("tiny"):
        requests = requests_of(1)
        for front_ends in (1, 2):
            server = ours(front_ends)
            with serving(server) as address:
                found = _measured(server, address, requests, 64, 3.0 if options.quick else 15.0)
            for metric, value in found.items():
                recorder.add("tiny requests", f"{front_ends} front ends: {metric}", value, UNITS[metric])


def _installed() -> dict[str, Server]:
    """Return the peers that can run here; say why the others cannot."""
    missing = {name: server.missing() for name, server in PEERS.items()}
    for name, why in missing.items():
        if why is not None:
            print(f"{name} is left out: {why}")
    return {name: server for name, server in PEERS.items() if missing[name] is None}


def _rounds(
    servers: Mapping[str, Server], clients: Sequence[int], seconds: float, num_rounds: int
) -> Iterator[Figures]:
    """Yield the figures of each round, with every server in its turn, so that other work on the machine meets all
    alike.

    A peer that does not start has no further turn, which is said.
    """
    requests, left = requests_of(100), dict(servers)
    for _ in range(num_rounds):
        figures: Figures = {}
        for count in clients:
            figures[IN_PROCESS, count, "rate"] = in_process(requests, count, seconds)
        for name, server in list(left.items()):
            try:
                for (count, metric), value in _turn(name, server, requests, clients, seconds).items():
                    figures[name, count, metric] = value
            except DidNotStartError as error:
                if name in OWN_SERVERS:
                    raise
                print(f"{name} did not start: {error}")
                del left[name]
        yield figures


def _turn(
    name: str, server: Server, requests: Sequence[Sequence[int]], clients: Sequence[int], seconds: float
) -> dict[tuple[int, str], float]:
    """Return a server's figures by clients and metric, once its answers are those of torch."""
    with serving(server) as address:
        check(name, server, address, requests[:NUM_CHECKED])
        _measured(server, address, requests, 16, 1.0)  # until it is warm
        return {
            (count, metric): value
            for count in clients
            for metric, value in _measured(server, address, requests, count, seconds).items()
        }


def check(name: str, server: Server, address: str, requests: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError where a server, asked for all of these at once, answers something else than torch."""
    with ThreadPoolExecutor(len(requests)) as threads:
        found = list(threads.map(partial(post, server, address), requests))
    expected = Classifier().classes(requests)
    if found != expected:
        raise RuntimeError(f"{name} answers {found}, torch {expected}")


def _measured(
    server: Server, address: str, requests: Sequence[Sequence[int]], clients: int, seconds: float
) -> dict[str, float]:
    before = server.counts(address) if server.counts is not None else None
    found = measured(address + server.path, [server.body(tokens) for tokens in requests], clients, seconds)
    if server.counts is not None and before is not None:
        tasks, rows = np.subtract(server.counts(address), before)
        found["mean rows of a task"] = float(rows / max(1, tasks))
    return found


def record_rounds(recorder: Recorder, rounds: Sequence[Figures]) -> None:
    """Medians, the lowest and the highest; and how cellrt stands to the best other server and to itself in process.

    A server that did not start has the figures of the rounds before.
    """
    for key in dict.fromkeys(key for each in rounds for key in each):
        name, count, metric = key
        _add(recorder, f"{count} clients", f"{name}: {metric}", [each[key] for each in rounds if key in each])
    ratios: dict[str, list[float]] = defaultdict(list)
    for each in rounds:
        rates = {
            name: value for (name, count, metric), value in each.items() if (count, metric) == (GOAL_CLIENTS, "rate")
        }
        alone, our_rates = rates.pop(IN_PROCESS), {name: rates.pop(name) for name in OWN_SERVERS if name in rates}
        ratios[f"{OURS}: rate, of {IN_PROCESS}"].append(our_rates[OURS] / alone)
        for own, rate in our_rates.items() if rates else ():
            ratios[f"{own}: rate, of the best other's"].append(rate / max(rates.values()))
            lowest = min(each[name, GOAL_CLIENTS, "p99"] for name in rates)
            ratios[f"{own}: p99, of the lowest other's"].append(each[own, GOAL_CLIENTS, "p99"] / lowest)
    for metric, values in ratios.items():
        _add(recorder, f"{GOAL_CLIENTS} clients", metric, values)


def _add(recorder: Recorder, case: str, metric: str, values: Sequence[float]) -> None:
    unit = UNITS.get(metric.rpartition(": ")[2], "ratio")
    recorder.add(
        case, metric, statistics.median(values), unit, lowest=round(min(values), 2), highest=round(max(values), 2)
    )
