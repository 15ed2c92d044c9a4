"""LSTM encoder-decoder (BatchMaker 2.7.4): cellrt beside whole-request batching in torch, in one run.

Every server gets the same sentences of random words, with source and target lengths like those of German and English
Europarl, decodes to the target's length, and answers with the tokens. None uses that length for batching.
Parts: ``2k`` and ``30k`` words (the quick run has the first, unless asked). In "cellrt" the embeddings and the input
halves of both LSTMs are folded into tables, as in the bare loops, which have no server around them and packed weights;
in "cellrt, unfolded" they are not. The full run takes about half an
hour on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

import cellrt
from benchmarks import workloads
from benchmarks.bare_loop import fastest
from benchmarks.compare import FULL, NUM_CHECKED, QUICK, MakeCell, Makers, Server, compare, draw, is_ours
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.seq2seq_loops import LOOPS, make_loop
from benchmarks.seq2seq_peers import GO, PEERS, Model, Pair, dropping, make_peer
from cellrt.cells.decoder import EmbeddingLSTMDecoder
from cellrt.cells.lstm import EmbeddingLSTMCell

PARTS = ("2k", "30k")
NUM_WORDS = {"2k": 2_000, "30k": 30_000}
MAX_DIFFERENT = 1
"""The part of the ``NUM_CHECKED`` answers that must agree.

Two words may be as good as equally likely. Then rounding decides, and all that follows differs.
"""
NUM_TRIED = 64
"""Pairs that a bare loop is tried with."""
QUICK_SERVERS = ("cellrt", "padded", "bucketed", *LOOPS)
ALL_SERVERS = ("cellrt", "cellrt, unfolded", *PEERS, *LOOPS)


class Cellrt:
    """cellrt behind the peers' interface.

    Args:
        model: its weights go into the cells.
        fold: the embeddings and the input halves of both LSTMs are folded into tables.
        max_batch: most rows of a task of the encoder, and of the decoder.
        make_cell: makes the cells, as ``cellrt.cell`` does.
        options: for the engine.
    """

    def __init__(
        self,
        model: Model,
        fold: bool = True,
        *,
        max_batch: tuple[int, int] = (512, 256),
        make_cell: MakeCell = cellrt.cell,
        **options: Any,
    ) -> None:
        state = {"h": (model.encoder.hidden_size,), "c": (model.encoder.hidden_size,)}
        inputs = {"token": cellrt.rows(dtype=torch.int64), **state}
        encoder = EmbeddingLSTMCell.from_torch(model.source, model.encoder, fold=fold)
        decoder = EmbeddingLSTMDecoder.from_torch(
            model.target, model.decoder, model.projection, end_token=-1, fold=fold
        )
        encode = make_cell(encoder, inputs, name="encoder", max_batch=max_batch[0])
        decode = make_cell(decoder, inputs, name="decoder", max_batch=max_batch[1])

        @cellrt.unfold("translate", example=Pair([1, 2], 2), key=lambda pair: (len(pair.tokens), pair.steps))
        def translate(graph: cellrt.Graph, pair: Pair) -> dict[str, object]:
            source = graph.chain(encode, token=pair.tokens).last
            target = graph.loop(decode, max_steps=pair.steps, token=graph.constant(GO), h=source.h, c=source.c)
            return {"tokens": target.token}

        self.engine = cellrt.Engine(max_queue=1 << 20, **options)
        self.engine.register(translate)

    def submit(self, pair: Pair) -> Future[Any]:
        """Submit one sentence; the future's result has the chosen tokens as "tokens"."""
        return self.engine.submit("translate", pair)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def servers(model: Model, pairs: Sequence[Pair], names: Sequence[str]) -> Makers:
    """Return makers of the servers by name."""
    ours: dict[str, Callable[[], Server]] = {
        "cellrt": lambda: Cellrt(model),
        "cellrt, unfolded": lambda: Cellrt(model, fold=False),
    }
    loops: Makers = {name: partial(fastest, partial(make_loop, name, model), pairs[:NUM_TRIED]) for name in LOOPS}
    known: Makers = {**ours, **loops}
    return {name: known.get(name) or partial(make_peer, name, model) for name in names}


def draw_pairs(count: int, num_words: int, seed: int) -> list[Pair]:
    """Return random words, with lengths like Europarl's."""
    random = np.random.default_rng(seed)
    lengths = zip(*workloads.translation_lengths(count, seed), strict=True)
    return [Pair(random.integers(0, num_words, int(source)).tolist(), int(target)) for source, target in lengths]


def check(model: Model, pairs: Sequence[Pair], name: str, answers: Sequence[Any]) -> None:
    """Raise AssertionError where a server's tokens are not those of a sentence decoded alone."""
    decode = dropping(model, 1)
    num_different = 0
    with torch.inference_mode():
        for pair, answer in zip(pairs[:NUM_CHECKED], answers, strict=True):
            tokens = answer["tokens"] if isinstance(answer, dict) else answer
            ((_, expected),) = decode([pair])
            num_different += not torch.equal(tokens, expected)
    if num_different > MAX_DIFFERENT:
        raise AssertionError(f"{name}: {num_different} of {len(answers)} sentences differ from those decoded alone")


def run(recorder: Recorder, options: Options) -> None:
    """Run the benchmark: each vocabulary at each hidden size, closed loop and open loop."""
    torch.manual_seed(0)
    points = []
    for hidden in options.hidden_sizes:
        for part, num_words in NUM_WORDS.items():
            if not options.has(part) or (options.quick and not options.only and part != "2k"):
                continue
            model = Model(num_words, hidden).eval().requires_grad_(False)
            pairs = draw_pairs(2000, num_words, seed=2)
            made = servers(model, pairs, QUICK_SERVERS if options.quick else ALL_SERVERS)
            case = f"H={hidden}, {part} words"
            plan = QUICK if options.quick else FULL
            comparison = compare(recorder, case, made, pairs, plan, partial(check, model, pairs))
            points += comparison.points
            for name, peak in comparison.peaks.items():
                if not is_ours(name):
                    recorder.add(case, f"cellrt / {name}", comparison.peaks["cellrt"] / peak, "ratio")
    if options.plot is not None:
        draw(points, options.plot)
