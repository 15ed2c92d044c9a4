"""The throughput of a GPU, and the cost of captures: cellrt in a process of its own beside batches of cuDNN and torch.

``python -m benchmarks.gpu --only serving``: sentences of Europarl's lengths through an LSTM and parse trees through a
TreeLSTM, 1,024 units, float32 in TF32, embeddings folded in. Each server has a closed loop of 512 requests, and then
Poisson arrivals at 20, 50 and 80% of the best peer's peak. At each rate requests are served for a while that counts
apart ("first"), and then for a while that counts ("later"): what cellrt captures in either is told beside it. Requests
in one bulk of 512 after the other show what the client's own loop costs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cellrt
from benchmarks import device_peers, tree, workloads
from benchmarks.device_peers import Peer
from benchmarks.record import Recorder, percentiles
from benchmarks.sweep import Panel, find_peak, open_load
from benchmarks.tree_peers import Weights, random_weights
from benchmarks.trees import TREEBANK_WORDS, Tree, complete_trees, treebank_trees
from cellrt.cells.lstm import EmbeddingLSTMCell

CONCURRENCY = 512
LOADS = (0.2, 0.5, 0.8)
WORDS = 10_000
HIDDEN, TINY_HIDDEN = 1024, 8
WAIT_S = 120.0


def sentences(hidden: int = HIDDEN) -> cellrt.Unfolder:
    """Return an LSTM over word numbers; its result is the last state."""
    _multiply_in_tf32()
    table, lstm = _lstm(hidden)
    module = EmbeddingLSTMCell.from_torch(nn.Embedding.from_pretrained(table), lstm, fold=True)
    inputs = {"token": cellrt.rows(dtype=torch.int64), "h": (hidden,), "c": (hidden,)}
    step = cellrt.cell(module, inputs, name="folded lstm", max_batch=CONCURRENCY)

    @cellrt.unfold("model", example=[0, 0], key=len)
    def model(graph: cellrt.Graph, words: Any) -> dict[str, object]:
        return {"h": graph.chain(step, token=words).last.h}

    return model


def tiny_sentences() -> cellrt.Unfolder:
    """Return the same, small."""
    return sentences(TINY_HIDDEN)


def trees(hidden: int = HIDDEN, num_words: int = TREEBANK_WORDS) -> cellrt.Unfolder:
    """Return a binary TreeLSTM; its result is the root's state."""
    _multiply_in_tf32()
    weights = _tree_weights(hidden, num_words)
    states = ("h_left", "c_left", "h_right", "c_right")
    token = {"token": cellrt.rows(dtype=torch.int64)}
    leaf = cellrt.cell(tree.leaf_module(weights, True), token, name="leaf", max_batch=CONCURRENCY)
    inner = cellrt.cell(
        tree.inner_module(weights), dict.fromkeys(states, (hidden,)), name="inner", max_batch=CONCURRENCY
    )

    @cellrt.unfold("model", example=complete_trees(1, num_words, seed=0)[0])
    def model(graph: cellrt.Graph, request: Tree) -> dict[str, object]:
        root = graph.tree(request.parents, leaf=leaf, inner=inner, leaf_inputs={"token": request.tokens})
        return {"h": root.h}

    return model


def tiny_trees() -> cellrt.Unfolder:
    """Return the same, small."""
    return trees(TINY_HIDDEN)


class Apart:
    """An engine in a process of its own, with one model."""

    def __init__(self, device: str, model: str, arena_bytes: int) -> None:
        options = cellrt.DeviceOptions(ring_bytes=64 << 20)
        self.engine = cellrt.EngineProcess([device], device_options=options, arena_bytes=arena_bytes, max_queue=1 << 16)
        self.engine.register(f"benchmarks.gpu_serving:{model}")

    def submit(self, request: Any) -> Future[Any]:
        """Submit one request."""
        return self.engine.submit("model", request)

    def captures(self) -> int:
        """Return how many captures were made so far."""
        return sum(int(worker.get("captures", 0)) for worker in self.engine.statistics()["workers"].values())

    def starts(self) -> list[float]:
        """Nothing is traced."""
        return []

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


@dataclass(frozen=True)
class Workload:
    """Requests, the model that serves them, and its peers, each with the largest batch that suits it."""

    title: str
    model: str
    requests: Sequence[Any]
    peers: Mapping[str, Callable[[], Peer]]


def workloads_on(device: torch.device, is_dry: bool, treebank: Path | None) -> list[Workload]:
    """Both workloads."""
    hidden, count = (TINY_HIDDEN, 200) if is_dry else (HIDDEN, 5_000)
    table, lstm = _lstm(hidden)
    random = np.random.default_rng(2)
    lengths = workloads.europarl_lengths(count, seed=2)
    title, parsed, num_words = treebank_trees(treebank, count)
    if num_words > TREEBANK_WORDS:
        raise ValueError(f"the treebank has {num_words} words; at most {TREEBANK_WORDS} are served")
    weights, prefix = _tree_weights(hidden, TREEBANK_WORDS), "tiny_" if is_dry else ""
    return [
        Workload(
            "sentences",
            f"{prefix}sentences",
            [random.integers(0, WORDS, int(length)).tolist() for length in lengths],
            {
                "padded cuDNN": lambda: Peer(device_peers.padded_lstm(lstm, table, device), max_batch=CONCURRENCY),
                "bucketed cuDNN": lambda: Peer(
                    device_peers.padded_lstm(lstm, table, device), max_batch=CONCURRENCY, length=len
                ),
                "packed cuDNN": lambda: Peer(device_peers.packed_lstm(lstm, table, device), max_batch=CONCURRENCY),
            },
        ),
        Workload(
            title,
            f"{prefix}trees",
            parsed,
            {f"level-batched, {batch}": partial(_level_batched, weights, device, batch) for batch in (64, CONCURRENCY)},
        ),
    ]


def measure_serving(recorder: Recorder, device: str, treebank: Path | None, quick: bool = False) -> None:
    """Record peaks, latencies and captures of both workloads, ours last."""
    is_dry = device == "dry"
    on = torch.device("cpu" if is_dry else device)
    _multiply_in_tf32()
    gc.collect()
    gc.freeze()  # a collection goes through all that was imported for 0.16 s, whoever is measured
    for workload in workloads_on(on, is_dry, treebank):
        panel = Panel("serving", workload.title, workload.requests, CONCURRENCY if not is_dry else 8)
        seconds = 0.05 if is_dry else 1.0 if quick else 2.0
        best = 0.0
        rates: dict[str, float] = {}
        with ExitStack() as stack:
            peers = {name: make() for name, make in workload.peers.items()}
            for name, peer in peers.items():
                stack.callback(peer.close)
                rates[name] = find_peak(peer, panel, seconds)
                recorder.add(panel.case, f"{name}: closed loop", rates[name], "requests/s")
            best = max(rates.values())
            winner = max(rates, key=lambda name: rates[name])
            _latencies(recorder, panel, winner, peers[winner], best, seconds)
        ours = Apart(device, workload.model, (1 << 20) if is_dry else 1 << 30)
        with ExitStack() as stack:
            stack.callback(ours.close)
            peak = find_peak(ours, panel, seconds)
            recorder.add(panel.case, "cellrt: closed loop", peak, "requests/s", captures=ours.captures())
            recorder.add(panel.case, f"cellrt: of {winner}'s", peak / best, "ratio")
            _bulks(recorder, panel, ours, best, seconds)
            _latencies(recorder, panel, "cellrt", ours, best, seconds)


def _bulks(recorder: Recorder, panel: Panel, ours: Apart, best: float, seconds: float) -> None:
    """Record what two bulks in flight reach, first and later."""
    size = panel.concurrency
    bulks = [panel.requests[k : k + size] for k in range(0, len(panel.requests) - size + 1, size)]
    for when in ("first", "later"):
        before, start, count = ours.captures(), time.perf_counter(), 0
        waiting: list[Any] = []
        while time.perf_counter() < start + seconds or waiting:
            if time.perf_counter() < start + seconds:
                waiting.append(ours.engine.submit_many("model", bulks[count % len(bulks)]))
                count += 1
            if len(waiting) > 2 or time.perf_counter() >= start + seconds:
                waiting.pop(0).results(WAIT_S)
        rate = count * size / (time.perf_counter() - start)
        extra = {"captures": ours.captures() - before}
        recorder.add(panel.case, f"cellrt: bulks of {size}, {when}", rate, "requests/s", **extra)
        recorder.add(panel.case, f"cellrt: bulks of {size}, {when}, of the best peer's", rate / best, "ratio")


def _latencies(recorder: Recorder, panel: Panel, name: str, server: Any, peak: float, seconds: float) -> None:
    """Record latencies at fractions of a rate, and what was captured meanwhile."""
    for load in LOADS:
        for when in ("first", "later"):
            before = server.captures() if isinstance(server, Apart) else 0
            outcome = open_load(server.submit, panel, load * peak, seconds)
            figures = percentiles(np.asarray(outcome.latencies_s) * 1e3)
            extra = {
                "captures": server.captures() - before if isinstance(server, Apart) else 0,
                "throughput": round(outcome.throughput, 1),
                "late_ms": round(outcome.max_send_delay_s * 1e3, 3),
            }
            for quantile in ("p50", "p90", "p99"):
                metric = f"{name}: {quantile} at {load:.0%} of the best peer's peak, {when}"
                recorder.add(panel.case, metric, figures[quantile], "ms", **extra)
            shown = ", ".join(f"{quantile} {figures[quantile]:.2f}" for quantile in ("p50", "p90", "p99"))
            print(f"{panel.case}: {name}: {load:.0%} {when}: {shown} ms {extra}", flush=True)


def _level_batched(weights: Weights, device: torch.device, batch: int) -> Peer:
    return Peer(device_peers.level_batched(weights, device), max_batch=batch)


def _multiply_in_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _lstm(hidden: int) -> tuple[torch.Tensor, nn.LSTM]:
    """Return the same embedding and weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(WORDS, hidden), nn.LSTM(hidden, hidden)


def _tree_weights(hidden: int, num_words: int) -> Weights:
    """Return the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return random_weights(num_words, hidden, hidden)
