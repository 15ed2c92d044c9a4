"""BatchMaker's figures on this device: cellrt beside padded, bucketed and level-batched torch (chapter 2).

======= ====================================================================================================
2.3     one LSTM step: time against throughput, batches of 2, 4, ..., 2048; CPU above, device below (2.2.2)
2.7     LSTM on Europarl's sentences: p90 latency against throughput; batches of at most 512 and 64 (2.7.2)
2.9     the same at a low load: distribution of queueing and of computation time (2.7.3)
2.11    LSTM on lengths of growing variance: 24 words, at most 50, at most 100 (2.7.3)
2.13    encoder and decoder, German to English, 30,000 words; encoder's and decoder's batches differ (2.7.4)
2.14    binary TreeLSTM on the treebank, batches of at most 64 (2.7.5)
2.15    the same on complete trees of 16 leaves, beside the hard-wired ideal (2.7.5)
======= ====================================================================================================

A batch of 64 trees has a thousand leaves, a task of cellrt 64 rows; of "larger tasks" 512.
Hidden size 1024 everywhere, as in 2.7.1; float32 multiplied in TF32 by all servers; random weights. What differs from
the paper: one device, also for figure 2.13, where the paper has two and four; lengths are draws with the facts that it
reports (``workloads.py``); where no treebank is given, trees are drawn that have about its lengths and depths. The
embedding is on the device and a request is word numbers: in "cellrt" the embedding is a cell of its own, "folded" cells
look the input half of a step up in a table. The peers are those of ``gpu_peers.py``.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import chain, gpu_peers, seq2seq, tree, workloads
from benchmarks.compare import Check
from benchmarks.gpu_kernels import step_call
from benchmarks.gpu_peers import Peer
from benchmarks.gpu_sweep import NUM_CHECKED, CellServer, Makers, Pace, Panel, opened, split, sweep
from benchmarks.gpu_timing import time_calls, time_captured
from benchmarks.record import Recorder
from benchmarks.seq2seq_peers import Model, dropping
from benchmarks.tree_peers import Weights, random_weights, recursion
from benchmarks.trees import Tree, complete_trees, treebank_trees

LEAVES = 16
QUICK = Pace(sample_s=0.3, loads=(0.2, 0.5, 0.8), open_s=0.4, most_s=30.0)
FULL = Pace(sample_s=1.0, loads=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9), open_s=1.2, most_s=90.0)
DRY = Pace(sample_s=0.02, loads=(0.3, 0.7), open_s=0.02, most_s=30.0)


@dataclass(frozen=True)
class Scale:
    """Sizes of all figures.

    Attributes:
        words: that the LSTM and the complete trees draw from.
        translated_words: those of the encoder and decoder.
        large, small: the batch limits.
        decoder_batch: the decoder's batch limit where it differs from ``large``.
        steps: batches of figure 2.3.
        num_requests: different ones of a workload.
        arena_bytes: of an engine, for each kind of row.
        tolerance: of answers, whose values are below 1.
    """

    hidden: int = 1024
    words: int = 10_000
    translated_words: int = 30_000
    large: int = 512
    small: int = 64
    decoder_batch: int = 256
    steps: tuple[int, ...] = tuple(2**power for power in range(1, 12))
    num_requests: int = 5_000
    arena_bytes: int = 1 << 30
    tolerance: float = 2e-2


TINY = Scale(8, 50, 50, 8, 4, 6, (2, 4), 100, 1 << 20, 1e-4)


@dataclass(frozen=True)
class Setting:
    """The settings that all figures share."""

    recorder: Recorder
    device: str
    scale: Scale
    pace: Pace
    treebank: Path | None
    is_whole: bool
    """True if the packed peer is measured too."""

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        return torch.device("cpu" if self.device == "dry" else self.device)

    def engine(self, trace: bool = False) -> dict[str, Any]:
        """Return options of every engine."""
        return {"workers": [self.device], "arena_bytes": self.scale.arena_bytes, "trace": trace}


def step_times(setting: Setting) -> None:
    """Figure 2.3: time and throughput of an LSTM step by batch: cellrt's kernel and cuDNN, and torch on the CPU."""
    hidden, device, cpu = setting.scale.hidden, setting.torch_device, torch.device("cpu")
    cudnn, on_cpu = nn.LSTM(hidden, hidden).to(device).eval(), nn.LSTMCell(hidden, hidden).eval()
    for rows in setting.scale.steps:
        x = torch.randn(rows, hidden)
        works: dict[tuple[str, str], Callable[[], float]] = {
            ("CPU", "torch"): partial(time_calls, partial(on_cpu, x), cpu, times=3),
            ("GPU", "cellrt"): partial(
                time_captured, step_call("lstm_step", torch.float32, hidden, rows, device)[0], device
            ),
            ("GPU", "cuDNN"): partial(time_captured, partial(cudnn, x[None].to(device)), device),
        }
        for (panel, name), time_of in works.items():
            with torch.inference_mode():
                seconds = time_of()
            extra = {"figure": "2.3", "panel": panel, "server": name, "batch": rows}
            extra["throughput"] = round(rows / seconds, 1)
            setting.recorder.add("Figure 2.3", f"{panel}, {name}: a step of {rows} rows", seconds * 1e3, "ms", **extra)


def batch_limits(setting: Setting) -> None:
    """Figure 2.7: p90 latency against throughput on Europarl-like sentences, batches of at most 512 and 64."""
    scale = setting.scale
    table, requests = _sentences(scale, workloads.europarl_lengths(scale.num_requests, seed=2))
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    check = _closeness(_lstm_answers(lstm, table, requests), scale.tolerance)
    for letter, batch in zip("ab", (scale.large, scale.small), strict=True):
        with opened(_lstm_servers(setting, lstm, table, batch), requests, check) as servers:
            panel = Panel("2.7", f"({letter}) batches of at most {batch}", requests, 4 * batch)
            sweep(setting.recorder, panel, servers, setting.pace)


def queueing_and_computation(setting: Setting) -> None:
    """Figure 2.9: distributions of queueing and computation time under a low load, as in figure 2.7 (a)."""
    scale = setting.scale
    table, requests = _sentences(scale, workloads.europarl_lengths(scale.num_requests, seed=2))
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    check = _closeness(_lstm_answers(lstm, table, requests), scale.tolerance)
    with opened(_lstm_servers(setting, lstm, table, scale.large, trace=True), requests, check) as servers:
        panel = Panel("2.9", f"low load, batches of at most {scale.large}", requests, 4 * scale.large)
        split(setting.recorder, panel, servers, setting.pace)


def length_variance(setting: Setting) -> None:
    """Figure 2.11: as figure 2.7 (a), with sentences of 24 words, of at most 50, of at most 100."""
    scale = setting.scale
    panels = {
        "24 words": workloads.fixed_lengths(scale.num_requests),
        "at most 50 words": workloads.europarl_lengths(scale.num_requests, seed=4, longest=50),
        "at most 100 words": workloads.europarl_lengths(scale.num_requests, seed=4, longest=100),
    }
    drawn = {title: _sentences(scale, lengths) for title, lengths in panels.items()}
    table, requests = drawn["24 words"]
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    check = _closeness(_lstm_answers(lstm, table, requests), scale.tolerance)
    with opened(_lstm_servers(setting, lstm, table, scale.large), requests, check) as servers:
        for title, (_, sentences) in drawn.items():
            panel = Panel("2.11", title, sentences, 4 * scale.large)
            sweep(setting.recorder, panel, servers, setting.pace)


def translation(setting: Setting) -> None:
    """Figure 2.13: p90 latency against throughput of encoder and decoder; "cellrt-512,256" names the batch limits.

    Decoding ends at the target's length, which no server uses for batching (2.7.4). All of cellrt's cells are folded.
    """
    scale, device, engine = setting.scale, setting.torch_device, setting.engine()
    model = Model(scale.translated_words, scale.hidden).eval().requires_grad_(False)
    pairs = seq2seq.draw_pairs(scale.num_requests, scale.translated_words, seed=2)
    with torch.inference_mode():
        expected = [next(iter(dropping(model, 1)([pair])))[1] for pair in pairs[:NUM_CHECKED]]
    small = scale.decoder_batch

    def ours(batches: tuple[int, int]) -> CellServer:
        return CellServer(seq2seq.Cellrt(model, max_batch=batches, **engine).engine, "translate")

    makers: Makers = {
        **{f"cellrt-{batch},{small}": partial(ours, (batch, small)) for batch in (scale.large, small)},
        "padded": lambda: Peer(gpu_peers.Translator(model, device).run_dropping, max_batch=small),
        "bucketed": lambda: Peer(
            gpu_peers.Translator(model, device).run_to_the_last, max_batch=small, length=lambda pair: len(pair.tokens)
        ),
    }
    # In TF32, words that are about equally likely may change places, and then all that follows differs.
    check = _same_words(expected, None if setting.device == "dry" else 2)
    with opened(makers, pairs, check) as servers:
        sweep(setting.recorder, Panel("2.13", "one device", pairs, 4 * small), servers, setting.pace)


def treebank(setting: Setting) -> None:
    """Figure 2.14: p90 latency against throughput of the binary TreeLSTM; level batches are of 64 trees at most."""
    scale = setting.scale
    title, trees, num_words = treebank_trees(setting.treebank, scale.num_requests)
    weights = random_weights(num_words, scale.hidden, scale.hidden)
    makers = _tree_servers(setting, weights)
    with opened(makers, trees, _closeness(_tree_answers(weights, trees), scale.tolerance)) as servers:
        sweep(setting.recorder, Panel("2.14", title, trees, 8 * scale.small), servers, setting.pace)


def identical_trees(setting: Setting) -> None:
    """Figure 2.15: as figure 2.14 with complete trees of 16 leaves, and the ideal, which executes their 31 cells in a
    row, each for one node of 64 trees."""
    scale, device = setting.scale, setting.torch_device
    weights = random_weights(scale.words, scale.hidden, scale.hidden)
    trees = complete_trees(scale.num_requests, scale.words, seed=1, leaves=LEAVES)
    makers: Makers = {
        **_tree_servers(setting, weights),
        "ideal": lambda: Peer(gpu_peers.HardWired(weights, LEAVES, scale.small, device), max_batch=scale.small),
    }
    with opened(makers, trees, _closeness(_tree_answers(weights, trees), scale.tolerance)) as servers:
        sweep(setting.recorder, Panel("2.15", f"{LEAVES} leaves", trees, 8 * scale.small), servers, setting.pace)


FIGURES: dict[str, Callable[[Setting], None]] = {
    "2.3": step_times,
    "2.7": batch_limits,
    "2.9": queueing_and_computation,
    "2.11": length_variance,
    "2.13": translation,
    "2.14": treebank,
    "2.15": identical_trees,
}


def measure_figures(
    recorder: Recorder,
    device: str,
    treebank: Path | None,
    *,
    quick: bool = False,
    names: Sequence[str] = tuple(FIGURES),
) -> None:
    """Measure figures on "cuda:0" or so; on "dry", with tiny sizes, what it runs on is the CPU.

    On a GPU all of them take about 8 minutes, 2 if ``quick``, once kernels are compiled. One that fails is shown, and
    the others go on. Raise RuntimeError at the end if one has.
    """
    is_dry = device == "dry"
    pace = DRY if is_dry else QUICK if quick else FULL
    setting = Setting(recorder, device, TINY if is_dry else Scale(), pace, treebank, is_dry or not quick)
    failed = []
    for name in names:
        torch.manual_seed(0)
        try:
            with _tf32():
                FIGURES[name](setting)
        except Exception:  # whatever it was, it is shown
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        if not is_dry:
            torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"figures that failed: {', '.join(failed)}")


def _lstm_servers(setting: Setting, lstm: nn.LSTM, table: Tensor, batch: int, trace: bool = False) -> Makers:
    """Return the servers of the LSTM's figures; requests are word numbers."""
    device = setting.torch_device

    def ours(fold: bool) -> CellServer:
        made = chain.Cellrt(lstm, table, fold=fold, max_batch=batch, **setting.engine(trace))
        return CellServer(made.engine, "lstm")

    def peer(make: Callable[..., Any], length: Callable[[Any], int] | None = None) -> Peer:
        return Peer(make(lstm, table, device), max_batch=batch, length=length, trace=trace)

    makers: dict[str, Callable[[], Any]] = {
        "cellrt": partial(ours, False),
        "cellrt, folded": partial(ours, True),
        "padded cuDNN": partial(peer, gpu_peers.padded_lstm),
        "bucketed cuDNN": partial(peer, gpu_peers.padded_lstm, len),
    }
    if setting.is_whole:
        makers["packed cuDNN"] = partial(peer, gpu_peers.packed_lstm)
    return makers


def _tree_servers(setting: Setting, weights: Weights) -> Makers:
    batch = setting.scale.small

    def ours(fold: bool, most: int) -> CellServer:
        return CellServer(tree.Cellrt(weights, fold, max_batch=most, **setting.engine()).engine, "tree")

    return {
        "cellrt": partial(ours, False, batch),
        "cellrt, folded": partial(ours, True, batch),
        "cellrt, folded, larger tasks": partial(ours, True, setting.scale.large),
        "level-batched": lambda: Peer(gpu_peers.level_batched(weights, setting.torch_device), max_batch=batch),
    }


def _sentences(scale: Scale, lengths: workloads.Lengths) -> tuple[Tensor, list[list[int]]]:
    """Return an embedding, and sentences of these lengths with random words of it."""
    random = np.random.default_rng(2)
    table = torch.randn(scale.words, scale.hidden, generator=torch.Generator().manual_seed(1))
    return table, [random.integers(0, scale.words, int(length)).tolist() for length in lengths]


@torch.inference_mode()
def _lstm_answers(lstm: nn.LSTM, table: Tensor, requests: Sequence[list[int]]) -> list[Tensor]:
    """Return the answers of ``nn.LSTM`` to the first requests, one at a time on the CPU."""
    return [lstm(table[words])[1][0][0] for words in requests[:NUM_CHECKED]]


@torch.inference_mode()
def _tree_answers(weights: Weights, trees: Sequence[Tree]) -> list[Tensor]:
    """Return the answers of plain recursion on the CPU to the first trees."""
    return [answer for _, answer in recursion(weights, 1)(trees[:NUM_CHECKED])]


def _closeness(expected: Sequence[Tensor], tolerance: float) -> Check:
    """Return a check of last states h; it raises AssertionError."""

    def check(name: str, answers: Sequence[Any]) -> None:
        for answer, right in zip(answers, expected, strict=True):
            h = answer["h"] if isinstance(answer, dict) else answer
            torch.testing.assert_close(h, right, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")

    return check


def _same_words(expected: Sequence[Tensor], count: int | None) -> Check:
    """Return a check that at least half of the answers have the right first ``count`` words (None: all of them)."""

    def check(name: str, answers: Sequence[Any]) -> None:
        given = [answer["tokens"] if isinstance(answer, dict) else answer for answer in answers]
        if [len(words) for words in given] != [len(words) for words in expected]:
            raise AssertionError(f"{name}: answers of other lengths than asked for")
        num_same = sum(torch.equal(a[:count], b[:count]) for a, b in zip(given, expected, strict=True))
        if 2 * num_same < len(expected):
            raise AssertionError(f"{name}: only {num_same} of {len(expected)} sentences are as decoded alone")

    return check


@contextmanager
def _tf32() -> Iterator[None]:
    """Compute products of float32 in TF32 inside the context, by torch, cuDNN and cellrt's kernels alike."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
