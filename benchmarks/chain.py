"""LSTM over sentences: cellrt beside the libraries' ways of batching, in one run.

Every server gets the same sentences (random vectors of the real lengths) and answers with the last hidden
state; two peers are bare loops, without a server. Parts: ``fixed`` (sentences of 24 words against the bare
cell), ``europarl`` and ``brown`` (real lengths).
Peers that are not installed are left out: ``pip install onnx onnxruntime``.
The full run takes about half an hour on two cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import cellrt
from benchmarks import workloads
from benchmarks.bare_loop import BareLoop, Batches, Numbered, fastest
from benchmarks.chain_peers import BUCKET_WIDTH, make_peer, onnx_padded
from benchmarks.compare import (
    FULL,
    NUM_CHECKED,
    QUICK,
    MakeCell,
    Makers,
    Plan,
    Server,
    answers,
    closed,
    compare,
    draw,
    loops_per_second,
    opened,
    progress,
)
from benchmarks.options import Options, are_there
from benchmarks.packed import PackedLSTM
from benchmarks.record import Recorder, percentiles
from benchmarks.server import Buckets, InOrder
from cellrt.cells.lstm import EmbeddingLSTMCell, LSTMCell

PARTS = ("fixed", "europarl", "brown", "rates")
RATES = 1000, 2000, 3000
"""Requests/s of the part of that name, which only runs if it is asked for: cellrt beside bare loops."""
VOCABULARY = 10_000
NUM_SENTENCES = 2_000
WORKLOADS: dict[str, tuple[str, Callable[[int, int], workloads.Lengths]]] = {
    "europarl": ("Europarl-like", workloads.europarl_lengths),
    "brown": ("Brown", workloads.brown_lengths),
}
ONNX = "onnxruntime"
ONNX_LOOP, PACKED_LOOP = f"{ONNX} bucketed, bare loop", "folded, packed, bare loop"
NUM_TRIED = 256
"""Sentences that a bare loop is tried with."""
QUICK_SERVERS = ("cellrt", "cellrt, folded", "bucketed", "onnxruntime bucketed", ONNX_LOOP, PACKED_LOOP)
ALL_SERVERS = (
    *("cellrt", "cellrt, folded", "cellrt, no runs", "one at a time", "padded", "bucketed"),
    *("packed", "onnxruntime padded", "onnxruntime bucketed", ONNX_LOOP, PACKED_LOOP),
)


class Sentence(NamedTuple):
    """One request: word numbers ``[words]`` and their embeddings ``[words, input]``."""

    tokens: list[int]
    x: torch.Tensor


class Cellrt:
    """cellrt behind the peers' interface.

    Args:
        lstm: trained module; its weights go into the cells.
        table: the embedding ``[words, input]``. If given, requests are word numbers; else they are the embedded words,
            as the peers get them.
        fold: the embedding and the input half of the step are folded into one table; else the embedding is a cell of
            its own.
        max_batch: most rows of a task.
        make_cell: makes the cells, as ``cellrt.cell`` does.
        options: for the engine.
    """

    def __init__(
        self,
        lstm: torch.nn.LSTM,
        table: torch.Tensor | None = None,
        *,
        fold: bool = True,
        max_batch: int = 512,
        make_cell: MakeCell = cellrt.cell,
        **options: Any,
    ) -> None:
        size, state = lstm.input_size, {"h": (lstm.hidden_size,), "c": (lstm.hidden_size,)}
        token = cellrt.rows(dtype=torch.int64)
        embedding = None if table is None else torch.nn.Embedding.from_pretrained(table)
        embed = None
        if embedding is not None and fold:
            module = EmbeddingLSTMCell.from_torch(embedding, lstm, fold=True)
            step = make_cell(module, {"token": token, **state}, name="folded lstm", max_batch=max_batch)
        else:
            step = make_cell(LSTMCell.from_torch(lstm), {"x": (size,), **state}, name="lstm", max_batch=max_batch)
            if embedding is not None:
                embed = make_cell(embedding, {"input": token}, name="embedding")

        @cellrt.unfold("lstm", example=torch.zeros(2, size) if table is None else [0, 0], key=len)
        def model(graph: cellrt.Graph, words: Any) -> dict[str, object]:
            if embed is not None:
                words = graph.chain(embed, input=words).output
            inputs = {"token" if "token" in step.inputs else "x": words}
            return {"h": graph.chain(step, **inputs).last.h}

        self._has_table = table is not None
        self.engine = cellrt.Engine(max_queue=1 << 20, **options)
        self.engine.register(model)

    def submit(self, sentence: Sentence) -> Future[Any]:
        """Submit one sentence; the future's result has the last hidden state as "h"."""
        return self.engine.submit("lstm", sentence.tokens if self._has_table else sentence.x)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class Peer:
    """One of ``chain_peers`` behind the same interface."""

    def __init__(self, name: str, lstm: torch.nn.LSTM) -> None:
        self._server = make_peer(name, lstm)

    def submit(self, sentence: Sentence) -> Future[Any]:
        """Submit one sentence; the future's result is the last hidden state."""
        return self._server.submit(sentence.x)

    def close(self) -> None:
        """End the server."""
        self._server.close()


def onnx_loop(lstm: torch.nn.LSTM, threads: int) -> BareLoop:
    """Return the strongest of the peers without a server: what waits is sorted into buckets, and one is run."""
    run = onnx_padded(lstm, threads)
    backlog: Buckets[Numbered] = Buckets(BUCKET_WIDTH, lambda sentence: len(sentence.tokens))
    return BareLoop(Batches(lambda batch: run([sentence.x for sentence in batch]), backlog, max_batch=512), threads)


def packed_loop(lstm: torch.nn.LSTM, table: torch.Tensor, threads: int) -> BareLoop:
    """Return torch by hand: the table folded as in "cellrt, folded", packed weights, and batches that shrink."""
    packed = PackedLSTM(torch.nn.Embedding.from_pretrained(table), lstm)

    def run(batch: Sequence[Sentence]) -> Iterable[tuple[int, torch.Tensor]]:
        return enumerate(packed.run([sentence.tokens for sentence in batch])[0].unbind())

    return BareLoop(Batches(run, InOrder(), max_batch=512), threads)


def servers(lstm: torch.nn.LSTM, table: torch.Tensor, sentences: Sequence[Sentence], names: Sequence[str]) -> Makers:
    """Return makers of the servers by name, of those that are installed."""
    if any(name.startswith(ONNX) for name in names) and not are_there(ONNX, "onnx", ONNX):
        names = [name for name in names if not name.startswith(ONNX)]
    ours: dict[str, Callable[[], Server]] = {
        "cellrt": lambda: Cellrt(lstm),
        "cellrt, folded": lambda: Cellrt(lstm, table),
        "cellrt, no runs": lambda: Cellrt(lstm, settings=cellrt.SchedulerSettings(runs=False)),
        ONNX_LOOP: lambda: fastest(partial(onnx_loop, lstm), sentences[:NUM_TRIED]),
        PACKED_LOOP: lambda: fastest(partial(packed_loop, lstm, table), sentences[:NUM_TRIED]),
    }
    return {name: ours.get(name) or partial(Peer, name, lstm) for name in names}


def draw_sentences(lengths: workloads.Lengths, table: torch.Tensor, seed: int) -> list[Sentence]:
    """Return sentences of these lengths with random words of the table."""
    random = np.random.default_rng(seed)
    words = [random.integers(0, len(table), int(length)) for length in lengths]
    return [Sentence(tokens.tolist(), table[torch.from_numpy(tokens)]) for tokens in words]


def ideal_throughput(lstm: torch.nn.LSTM, steps: int, batch: int, seconds: float) -> float:
    """Return requests/s of the cell in a bare loop at full batch, one loop a core, nothing else going on."""
    cell = LSTMCell.from_torch(lstm).eval()
    x = torch.randn(steps, batch, lstm.input_size)

    def once() -> None:
        h, c = torch.zeros(batch, lstm.hidden_size), torch.zeros(batch, lstm.hidden_size)
        for step in range(steps):
            h, c = cell(x[step], h, c)

    return batch * loops_per_second(once, seconds)


def run(recorder: Recorder, options: Options) -> None:
    """Run the benchmark: fixed lengths against the ideal, then variable lengths closed and open loop."""
    torch.manual_seed(0)
    plan = QUICK if options.quick else FULL
    points = []
    for hidden in options.hidden_sizes:
        lstm = torch.nn.LSTM(hidden, hidden).eval()
        if options.has("fixed"):
            fixed(recorder, lstm, plan)
        for part, (title, lengths) in WORKLOADS.items():
            if options.has(part) and (part != "brown" or not options.quick or options.only):
                table = torch.randn(VOCABULARY, hidden)
                sentences = draw_sentences(lengths(NUM_SENTENCES, 2), table, seed=2)
                made = servers(lstm, table, sentences, QUICK_SERVERS if options.quick else ALL_SERVERS)
                case = f"H={hidden}, {title}"
                points += compare(recorder, case, made, sentences, plan, partial(check, lstm, sentences)).points
        if options.has("rates") and options.only:
            at_rates(recorder, lstm, plan)
    if options.plot is not None:
        draw(points, options.plot)


def at_rates(recorder: Recorder, lstm: torch.nn.LSTM, plan: Plan) -> None:
    """Latencies over Europarl's lengths at fixed rates, the same arrivals for each server of a round."""
    table, names = torch.randn(VOCABULARY, lstm.input_size), ("cellrt", "cellrt, folded", ONNX_LOOP, PACKED_LOOP)
    sentences = draw_sentences(workloads.europarl_lengths(NUM_SENTENCES, 2), table, seed=2)
    made = {name: make() for name, make in servers(lstm, table, sentences, names).items()}
    try:
        for name, server in made.items():
            check(lstm, sentences, name, answers(server, sentences[:NUM_CHECKED]))
            closed(server, sentences, NUM_SENTENCES, 64)
        for rate in RATES:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
            for seed in range(plan.rounds):
                arrivals = workloads.poisson_arrivals(rate, int(rate * plan.open_s), seed)
                for name, server in made.items():
                    latencies = opened(server, sentences, arrivals).latencies_s
                    found[name].append(percentiles(np.asarray(latencies) * 1e3))
            for name, rounds in found.items():
                for quantile in ("p50", "p90", "p99"):
                    value = statistics.median(each[quantile] for each in rounds)
                    recorder.add(f"H={lstm.hidden_size}, rates", f"{name}: {quantile} at {rate}/s", value, "ms")
    finally:
        for server in made.values():
            server.close()


def check(lstm: torch.nn.LSTM, sentences: Sequence[Sentence], name: str, answers: Sequence[Any]) -> None:
    """Raise AssertionError where a server's last states are not those of ``nn.LSTM``."""
    with torch.inference_mode():
        for sentence, answer in zip(sentences[:NUM_CHECKED], answers, strict=True):
            h = answer["h"] if isinstance(answer, dict) else answer
            torch.testing.assert_close(h, lstm(sentence.x)[1][0][0], rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


def fixed(recorder: Recorder, lstm: torch.nn.LSTM, plan: Plan) -> None:
    """Throughput on sentences of 24 words, 1024 in flight, against the ideal."""
    hidden, rounds = lstm.hidden_size, 3
    count = min(4096, 4096 * 256 // hidden)
    sentences = draw_sentences(workloads.fixed_lengths(count), torch.randn(VOCABULARY, lstm.input_size), seed=1)
    case = f"H={hidden}, 24 words"
    server = Cellrt(lstm)
    with progress(case, rounds) as advance:
        try:
            closed(server, sentences, max(1, count // 4), count)
            pairs = []
            for _ in range(rounds):
                advance("cellrt and the ideal")
                ideal = ideal_throughput(lstm, 24, 512, plan.sample_s)
                pairs.append((closed(server, sentences, count, 1024).throughput, ideal))
        finally:
            server.close()
    recorder.add(case, "cellrt throughput", statistics.median(p[0] for p in pairs), "requests/s")
    recorder.add(case, "ideal throughput", statistics.median(p[1] for p in pairs), "requests/s")
    recorder.add(case, "cellrt / ideal", statistics.median(mine / ideal for mine, ideal in pairs), "ratio")
