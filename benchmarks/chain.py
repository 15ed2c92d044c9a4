"""LSTM over sentences: cellrt beside the libraries' ways of batching, in one run.

Every server gets the same sentences (random vectors of the real lengths) and answers with the last hidden state. Rounds are
interleaved, server after server, and medians are reported, so that a slow moment of the machine does not fall on one of them.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks import peers, workloads
from benchmarks.record import Recorder, percentiles
from cellrt.cells.lstm import LSTMCell, LSTMInput, LSTMRecurrent

Server = Any
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Cellrt:
    """cellrt behind the peers' interface.

    Args:
        lstm: trained module; its weights go into the cells.
        inputs_apart: the input half is a cell of its own, batched over all steps of all requests at once.
        options: for the engine.
    """

    def __init__(self, lstm: torch.nn.LSTM, *, inputs_apart: bool = False, max_batch: int = 512, **options: Any) -> None:
        size, hidden = lstm.input_size, lstm.hidden_size
        if inputs_apart:
            half = cellrt.cell(LSTMInput.from_torch(lstm), {"x": (size,)}, name="input", max_batch=4096)
            step = cellrt.cell(
                LSTMRecurrent.from_torch(lstm),
                {"gates": (4 * hidden,), "h": (hidden,), "c": (hidden,)},
                name="recurrent",
                max_batch=max_batch,
            )
        else:
            step = cellrt.cell(
                LSTMCell.from_torch(lstm), {"x": (size,), "h": (hidden,), "c": (hidden,)}, name="lstm", max_batch=max_batch
            )

        @cellrt.unfold("lstm", example=torch.zeros(3, size))
        def model(graph: cellrt.Graph, x: torch.Tensor) -> dict[str, object]:
            if inputs_apart:
                gates = [half(x=row).gates for row in x]
                return {"h": graph.chain(step, gates=gates).last.h}
            return {"h": graph.chain(step, x=x).last.h}

        self.engine = cellrt.Engine(max_queue=1 << 20, **options)
        self.engine.register(model)

    def submit(self, x: torch.Tensor) -> Future[Any]:
        """Submits one sentence ``[words, input]``; the future's result has the last hidden state as "h"."""
        return self.engine.submit("lstm", x)

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()


def servers(lstm: torch.nn.LSTM, names: tuple[str, ...]) -> dict[str, Callable[[], Server]]:
    """Makers of the servers by name."""
    makers: dict[str, Callable[[], Server]] = {
        "cellrt": lambda: Cellrt(lstm),
        "cellrt, no runs": lambda: Cellrt(lstm, settings=cellrt.SchedulerSettings(runs=False)),
        "one at a time": lambda: peers.OneAtATime(lstm),
        "padded": lambda: peers.Padded(lstm),
        "bucketed": lambda: peers.Bucketed(lstm),
        "packed": lambda: peers.Packed(lstm),
        "onnxruntime padded": lambda: peers.OnnxPadded(lstm),
        "onnxruntime bucketed": lambda: peers.OnnxBucketed(lstm),
    }
    return {name: makers[name] for name in names}


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


def closed(server: Server, sentences: list[torch.Tensor], concurrency: int) -> workloads.Load:
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
    count = (1024 if quick else 4096) * 256 // hidden
    sentences = workloads.sentences(workloads.fixed_lengths(count), lstm.input_size, seed=1)
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
    names = ("cellrt", "bucketed", "packed", "onnxruntime bucketed") if quick else tuple(servers(lstm, ()) or _ALL)
    hidden, rounds = lstm.hidden_size, 1 if quick else 3
    case = f"H={hidden}, {workload}"
    count = (600 if quick else 3000) * 256 // hidden
    sentences = workloads.sentences(draw(count, seed=2), lstm.input_size, seed=2)
    made = {name: make() for name, make in servers(lstm, names).items()}
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
    recorder: Recorder, made: dict[str, Server], sentences: list[torch.Tensor], case: str, load: float, rate: float, seconds: float
) -> list[dict[str, Any]]:
    count = max(50, int(rate * seconds))
    arrivals = workloads.poisson_arrivals(rate, count, seed=3)
    points = []
    for name, server in made.items():
        def submit(k: int, server: Server = server) -> Future[Any]:
            return server.submit(sentences[k % len(sentences)])

        outcome = workloads.open_loop(submit, arrivals)
        figures = percentiles(np.asarray(outcome.latencies_s) * 1e3)
        for quantile in ("p50", "p90", "p99"):
            recorder.add(case, f"{name}: {quantile} at {load:.0%} of the best peer's peak", figures[quantile], "ms")
        points.append({"case": case, "server": name, "rate": rate, "throughput": outcome.throughput, **figures})
    return points


_ALL = (
    *("cellrt", "cellrt, no runs", "one at a time", "padded", "bucketed"),
    *("packed", "onnxruntime padded", "onnxruntime bucketed"),
)


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
                linewidth=2.5 if name == "cellrt" else 1,
                label=name,
            )
        panel.set(title=case, xlabel="throughput (requests/s)", ylabel="p90 latency (ms)", yscale="log")
        panel.legend(fontsize=7)
    figure.savefig(path)
