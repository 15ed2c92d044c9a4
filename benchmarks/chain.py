"""LSTM over sentences: cellrt beside the libraries' ways of batching, in one run.

Every server gets the same sentences (random vectors of the real lengths) and answers with the last hidden
state. Rounds are interleaved, server after server, and medians are reported, so that a slow moment of the
machine does not fall on one of them.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import cellrt
from benchmarks import peers, workloads
from benchmarks.record import Recorder, percentiles
from cellrt.cells.lstm import EmbeddingLSTMCell, LSTMCell

Server = Any
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
VOCABULARY = 10_000
QUICK = ("cellrt", "cellrt, folded", "bucketed", "onnxruntime bucketed")
ALL = (
    *("cellrt", "cellrt, folded", "cellrt, no runs", "one at a time", "padded", "bucketed"),
    *("packed", "onnxruntime padded", "onnxruntime bucketed"),
)


class Sentence(NamedTuple):
    """One request: word numbers ``[words]`` and their embeddings ``[words, input]``."""

    tokens: list[int]
    x: torch.Tensor


class Cellrt:
    """cellrt behind the peers' interface.

    Args:
        lstm: trained module; its weights go into the cells. table: the embedding ``[words, input]``. If given,
        requests are word numbers, and the embedding and the input half
            of the step are folded into one table; else they are the embedded words, as the peers get them.
        options: for the engine.
    """

    def __init__(self, lstm: torch.nn.LSTM, table: torch.Tensor | None = None, **options: Any) -> None:
        size, hidden = lstm.input_size, lstm.hidden_size
        state = {"h": (hidden,), "c": (hidden,)}
        self._is_folded = table is not None
        if table is None:
            step = cellrt.cell(LSTMCell.from_torch(lstm), {"x": (size,), **state}, name="lstm")
        else:
            module = EmbeddingLSTMCell.from_torch(torch.nn.Embedding.from_pretrained(table), lstm, fold=True)
            step = cellrt.cell(module, {"token": cellrt.rows(dtype=torch.int64), **state}, name="folded lstm")

        @cellrt.unfold("lstm", example=[0, 0] if self._is_folded else torch.zeros(2, size))
        def model(graph: cellrt.Graph, words: Any) -> dict[str, object]:
            inputs = {"token": words} if self._is_folded else {"x": words}
            return {"h": graph.chain(step, **inputs).last.h}

        self.engine = cellrt.Engine(max_queue=1 << 20, **options)
        self.engine.register(model)

    def submit(self, sentence: Sentence) -> Future[Any]:
        """Submits one sentence; the future's result has the last hidden state as "h"."""
        return self.engine.submit("lstm", sentence.tokens if self._is_folded else sentence.x)

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()


class Peer:
    """One of ``peers`` behind the same interface."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def submit(self, sentence: Sentence) -> Future[Any]:
        """Submits one sentence."""
        future: Future[Any] = self._server.submit(sentence.x)
        return future

    def close(self) -> None:
        """Ends the server."""
        self._server.close()


def servers(lstm: torch.nn.LSTM, table: torch.Tensor, names: tuple[str, ...]) -> dict[str, Callable[[], Server]]:
    """Makers of the servers by name."""
    makers: dict[str, Callable[[], Server]] = {
        "cellrt": lambda: Cellrt(lstm),
        "cellrt, folded": lambda: Cellrt(lstm, table),
        "cellrt, no runs": lambda: Cellrt(lstm, settings=cellrt.SchedulerSettings(runs=False)),
        "one at a time": lambda: Peer(peers.OneAtATime(lstm)),
        "padded": lambda: Peer(peers.Padded(lstm)),
        "bucketed": lambda: Peer(peers.Bucketed(lstm)),
        "packed": lambda: Peer(peers.Packed(lstm)),
        "onnxruntime padded": lambda: Peer(peers.OnnxPadded(lstm)),
        "onnxruntime bucketed": lambda: Peer(peers.OnnxBucketed(lstm)),
    }
    return {name: makers[name] for name in names}


def draw_sentences(lengths: Any, table: torch.Tensor, seed: int) -> list[Sentence]:
    """Sentences of these lengths with random words of the table."""
    random = np.random.default_rng(seed)
    words = [random.integers(0, len(table), int(length)) for length in lengths]
    return [Sentence(tokens.tolist(), table[torch.from_numpy(tokens)]) for tokens in words]


def ideal_throughput(lstm: torch.nn.LSTM, steps: int, batch: int, seconds: float) -> float:
    """Requests/s of the cell in a bare loop at full batch, one loop a core, nothing else going on."""
    cell = LSTMCell.from_torch(lstm).eval()
    counts = [0] * (os.cpu_count() or 1)
    end = time.perf_counter() + seconds

    def loop(worker: int) -> None:
        torch.set_num_threads(1)
        x = torch.randn(steps, batch, lstm.input_size)
        with torch.inference_mode():
            while time.perf_counter() < end:
                h, c = torch.zeros(batch, lstm.hidden_size), torch.zeros(batch, lstm.hidden_size)
                for step in range(steps):
                    h, c = cell(x[step], h, c)
                counts[worker] += batch

    threads = [threading.Thread(target=loop, args=(k,)) for k in range(len(counts))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def closed(server: Server, sentences: list[Sentence], concurrency: int) -> workloads.Load:
    """Drives a server with a fixed number of requests in flight."""
    return workloads.closed_loop(lambda k: server.submit(sentences[k]), len(sentences), concurrency)


def run(recorder: Recorder, quick: bool, plot: Path | None) -> None:
    """Runs the benchmark: fixed lengths against the ideal, then variable lengths closed and open loop."""
    torch.manual_seed(0)
    points: list[dict[str, Any]] = []
    for hidden in (256,) if quick else (256, 1024):
        lstm = torch.nn.LSTM(hidden, hidden).eval()
        _fixed(recorder, lstm, quick)
        for name, lengths in (("Europarl-like", workloads.europarl_lengths), ("Brown", workloads.brown_lengths)):
            if quick and name == "Brown":
                continue
            points += _variable(recorder, lstm, name, lengths, quick)
    if plot is not None:
        _plot(points, plot)


def _fixed(recorder: Recorder, lstm: torch.nn.LSTM, quick: bool) -> None:
    """Throughput on sentences of 24 words, all there at once, against the ideal."""
    hidden, rounds = lstm.hidden_size, 3
    count = 4096 * 256 // hidden
    sentences = draw_sentences(workloads.fixed_lengths(count), torch.randn(VOCABULARY, lstm.input_size), seed=1)
    server = Cellrt(lstm)
    try:
        closed(server, sentences[: count // 4], count)
        pairs = []
        for _ in range(rounds):
            ideal = ideal_throughput(lstm, 24, 512, 1.0 if quick else 3.0)
            pairs.append((closed(server, sentences, 1024).throughput, ideal))
        ratios = [mine / ideal for mine, ideal in pairs]
        case = f"H={hidden}, 24 words"
        recorder.add(case, "cellrt throughput", statistics.median(p[0] for p in pairs), "requests/s")
        recorder.add(case, "ideal throughput", statistics.median(p[1] for p in pairs), "requests/s")
        recorder.add(case, "cellrt / ideal", statistics.median(ratios), "ratio")
    finally:
        server.close()


def _variable(
    recorder: Recorder, lstm: torch.nn.LSTM, workload: str, draw: Callable[..., Any], quick: bool
) -> list[dict[str, Any]]:
    """All servers on one distribution of lengths: closed loop, then open loop at fractions of the best peer's peak."""
    names = QUICK if quick else ALL
    hidden, rounds = lstm.hidden_size, 1 if quick else 3
    case = f"H={hidden}, {workload}"
    count = (600 if quick else 3000) * 256 // hidden
    table = torch.randn(VOCABULARY, lstm.input_size)
    sentences = draw_sentences(draw(count, seed=2), table, seed=2)
    made = {name: make() for name, make in servers(lstm, table, names).items()}
    points: list[dict[str, Any]] = []
    try:
        for server in made.values():
            closed(server, sentences[: count // 8], 64)
        peaks: dict[str, float] = {}
        for concurrency in (64, 512):
            samples: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(rounds):
                for name, server in made.items():
                    samples[name].append(closed(server, sentences, concurrency).throughput)
            for name, values in samples.items():
                recorder.add(case, f"{name}: closed loop of {concurrency}", statistics.median(values), "requests/s")
                peaks[name] = max(peaks.get(name, 0.0), statistics.median(values))
        best = max(rate for name, rate in peaks.items() if not name.startswith("cellrt"))
        for load in (0.3, 0.7) if quick else LOADS:
            points += _open(recorder, made, sentences, case, load, load * best, 2.0 if quick else 6.0)
    finally:
        for server in made.values():
            server.close()
    return points


def _open(
    recorder: Recorder,
    made: dict[str, Server],
    sentences: list[Sentence],
    case: str,
    load: float,
    rate: float,
    seconds: float,
) -> list[dict[str, Any]]:
    count = max(50, int(rate * seconds))
    arrivals = workloads.poisson_arrivals(rate, count, seed=3)
    points = []
    for name, server in made.items():

        def submit(k: int, server: Server = server) -> Future[Any]:
            future: Future[Any] = server.submit(sentences[k % len(sentences)])
            return future

        outcome = workloads.open_loop(submit, arrivals)
        figures = percentiles(np.asarray(outcome.latencies_s) * 1e3)
        for quantile in ("p50", "p90", "p99"):
            recorder.add(case, f"{name}: {quantile} at {load:.0%} of the best peer's peak", figures[quantile], "ms")
        points.append({"case": case, "server": name, "rate": rate, "throughput": outcome.throughput, **figures})
    return points


def _plot(points: list[dict[str, Any]], path: Path) -> None:
    """90th-percentile latency against throughput, a panel a case (as BatchMaker's Figure 2.7)."""
    from matplotlib.figure import Figure

    cases = sorted({point["case"] for point in points})
    figure = Figure(figsize=(6 * len(cases), 4.5), layout="constrained")
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases):
        for name in dict.fromkeys(point["server"] for point in points):
            mine = [p for p in points if p["case"] == case and p["server"] == name]
            panel.plot(
                [p["throughput"] for p in mine],
                [p["p90"] for p in mine],
                marker="o",
                linewidth=2.5 if name.startswith("cellrt") else 1,
                label=name,
            )
        panel.set(title=case, xlabel="throughput (requests/s)", ylabel="p90 latency (ms)", yscale="log")
        panel.legend(fontsize=7)
    figure.savefig(path)
