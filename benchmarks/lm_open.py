"""A language model whose requests arrive by a Poisson process, as in ORCA's section 6.2: latency against throughput.

Prompts of U(32, 512) tokens and answers of U(1, 128), a quarter of each here, of random weights. The latency of a
request is divided by the tokens that it makes; the figure is the median over requests, against the requests answered a
second. Iterations (requests join and leave between steps), the same strictly in order and with all pages reserved, as
ORCA has it, with prompts in tasks of their own, which go first, as vLLM had it (Pensieve section 3.4.2), whole requests
(nobody joins), and transformers' continuous batching.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks.lm_peers import Asked, Continuous, make_reference
from benchmarks.options import Options, are_there, tell
from benchmarks.record import Recorder
from benchmarks.workloads import Seconds, open_loop, poisson_arrivals
from cellrt.cells.language_models import language_model
from cellrt.cells.llama import Llama
from cellrt.core.state.settings import SchedulerSettings
from cellrt.unfolders.completion import complete

PROMPTS, ANSWERS = (8, 128), (1, 32)
NO_END, PAGE_SIZE, MOST_IN_A_TASK = -1, 16, 16
LOADS = (0.3, 0.6, 0.9, 1.2)
WAYS: dict[str, SchedulerSettings] = {
    "iterations": SchedulerSettings(),
    "iterations, ORCA's": SchedulerSettings(steps_first=False, reserve_pages=True),
    "prompts apart": SchedulerSettings(prompts_apart=True),
    "whole requests": SchedulerSettings(joins=False),
}
Serve = Callable[[Sequence[Asked], Seconds], tuple[Seconds, float]]
"""Returns the latency of each request, in seconds, and how long it all took."""


def draw_requests(count: int, vocabulary: int, seed: int) -> list[Asked]:
    """Random prompts and how many tokens to make of each."""
    draw = np.random.default_rng(seed)
    sizes = zip(draw.integers(PROMPTS[0], PROMPTS[1] + 1, count), draw.integers(ANSWERS[0], ANSWERS[1] + 1, count))
    return [Asked(draw.integers(0, vocabulary, int(read)).tolist(), int(steps)) for read, steps in sizes]


def serve_by_engine(engine: cellrt.Engine, requests: Sequence[Asked], arrivals: Seconds) -> tuple[Seconds, float]:
    """By cellrt."""
    given = [{"prompt": torch.tensor(asked.prompt), "max_tokens": asked.steps} for asked in requests]
    load = open_loop(lambda k: engine.submit("lm", given[k]), arrivals, timeout_s=120)
    return load.latencies_s, load.duration_s


def serve_by_peer(peer: Continuous, requests: Sequence[Asked], arrivals: Seconds) -> tuple[Seconds, float]:
    """By transformers; an answer counts when it is taken from its queue, by a thread of its own."""
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
        servers: dict[str, Serve] = {}
        cell = language_model(model, NO_END, page_size=PAGE_SIZE, max_batch=MOST_IN_A_TASK)
        for name, settings in WAYS.items():
            engine = ends.enter_context(cellrt.Engine(1, page_bytes=1 << 28, settings=settings))
            engine.register(complete("lm", cell, max_tokens=ANSWERS[1]))
            servers[f"cellrt, {name}"] = partial(serve_by_engine, engine)
        if are_there("transformers' continuous batching", "transformers"):
            peer = Continuous(make_reference(model), ANSWERS[1])
            ends.callback(peer.close)
            servers["transformers, continuous"] = partial(serve_by_peer, peer)
        count = 24 if options.quick else 80
        requests = draw_requests(count, model.sizes.vocabulary, seed=1)
        for serve in servers.values():
            serve(requests[:8], np.zeros(8))
        latencies_s, seconds = servers["cellrt, iterations"](requests, np.zeros(count))
        recorder.add("random, open", "iterations, at most", count / seconds, "requests/s")
        for load in LOADS[2:3] if options.quick else LOADS:
            arrivals = poisson_arrivals(load * count / seconds, count, seed=round(10 * load))
            for name, serve in servers.items():
                latencies_s, took_s = serve(requests, arrivals)
                each_ms = 1e3 * latencies_s / np.array([asked.steps for asked in requests])
                which = {"server": name, "load": load}
                recorder.add("random, open", "latency a token", float(np.median(each_ms)), "ms", **which)
                recorder.add("random, open", "throughput", count / took_s, "requests/s", **which)
                tell(f"load {load}: {name}")
