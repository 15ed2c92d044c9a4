"""BatchMaker's figures on this machine: cellrt beside padded, bucketed and level-batched torch (chapter 2).

======= ====================================================================================================
2.3     one LSTM step: time against throughput, batches of 2, 4, ..., 2048; on the CPU, and on the device (2.2.2)
2.5     eight requests, padded and cell by cell, by a virtual clock whose unit is a step (2.3.2)
2.7     LSTM on Europarl's sentences: p90 latency against throughput; batches of at most 512 and 64 (2.7.2)
2.8     the same with buckets of width 1, 10 and 40 (2.7.2)
2.9     the same at a low load: distribution of queueing and of computation time (2.7.3)
2.10    lengths of the sentences (2.7.3)
2.11    LSTM on lengths of growing variance: 24 words, at most 50, at most 100 (2.7.3)
2.13    encoder and decoder, German to English; encoder's and decoder's batches differ; one and two workers (2.7.4)
2.14    binary TreeLSTM on the treebank, batches of at most 64 (2.7.5)
2.15    the same on complete trees of 16 leaves, beside the hard-wired ideal (2.7.5)
======= ====================================================================================================

Each figure goes to ``figure-2.7.jsonl`` and ``figure-2.7.png`` or so in the folder of the machine's results. One that
is there is not measured again unless ``--again`` asks for it, or it came from a ``--quick`` run and this one is not.
``python -m tools.figures`` writes the tables of ``docs/figures.md`` from them.

A batch of 64 trees has a thousand leaves, a task of cellrt 64 rows; of "larger tasks" 512. Weights are random. A GPU
has the paper's hidden size of 1024, float32 multiplied in TF32 by all servers. A CPU has 256 (``KINDS``), one thread a
worker, as its peers have, and two rounds in which servers take turns. What differs from the paper: lengths are draws
with the facts that it reports (``workloads.py``); where no treebank is given, trees are drawn that have about its
lengths and depths; figure 2.13 has as many workers as there are, at most two. The embedding is on the device and a
request is word numbers: in "cellrt" the embedding is a cell of its own, "folded" cells look the input half of a step up
in a table. The peers are those of ``device_peers.py``; on a CPU padded batches are small, as large ones would be mostly
padding, and level batches have packed weights (``packed.py``).
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import chain, device_peers, seq2seq, tree, workloads
from benchmarks.compare import Check
from benchmarks.device_peers import BUCKET_WIDTH, Peer
from benchmarks.gpu_kernels import step_call
from benchmarks.gpu_run import RESULTS, folder_of
from benchmarks.gpu_timing import time_calls, time_captured, wake
from benchmarks.options import Options, tell
from benchmarks.plots import draw_figures
from benchmarks.record import Recorder, Row, machine
from benchmarks.seq2seq_peers import Model, dropping
from benchmarks.server import Runner
from benchmarks.sweep import NUM_CHECKED, CellServer, Makers, Pace, Panel, opened, split, sweep
from benchmarks.timing import medians_us
from benchmarks.tree_peers import Weights, packed_levels, random_weights, recursion
from benchmarks.trees import Tree, complete_trees, treebank_trees
from cellrt.cells.lstm import LSTMCell
from cellrt.core.processor import Processor
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.definition.modes import torch_threads
from cellrt.engine.cell_compiler import MODE_VARIABLE

LEAVES = 16
BUCKET_WIDTHS = 1, BUCKET_WIDTH, 40
TIMELINE = (0.0, 2), (0.0, 3), (0.0, 3), (0.0, 5), (1.5, 5), (2.5, 7), (2.5, 3), (4.5, 1)
"""Arrival and length of figure 2.5's requests; where in its unit of time one arrives is our choice."""
TIMELINE_ENDS = {"graph batching": (5, 5, 5, 5, 12, 12, 12, 12), "cellrt": (2, 3, 3, 5, 7, 10, 6, 6)}
"""The paper's ends of them."""


@dataclass(frozen=True)
class Scale:
    """Sizes of all figures.

    Attributes:
        words: that the LSTM and the complete trees draw from.
        translated_words: those of the encoder and decoder.
        large, small: the batch limits.
        decoder_batch: the decoder's batch limit where it differs from ``large``.
        padded_batch: the limit of padded batches in order of arrival, where that is lower.
        in_flight: requests for each row of the largest batch, which fill every server's batches.
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
    padded_batch: int = 512
    in_flight: int = 4
    steps: tuple[int, ...] = tuple(2**power for power in range(1, 12))
    num_requests: int = 5_000
    arena_bytes: int = 1 << 30
    tolerance: float = 2e-2


@dataclass(frozen=True)
class Kind:
    """The sizes of a kind of device, and how long its panels take."""

    scale: Scale
    full: Pace
    quick: Pace


DRY_PACE = Pace(sample_s=0.02, loads=(0.3, 0.7), open_s=0.02, most_s=30.0)
KINDS = {
    "cuda": Kind(
        Scale(),
        Pace(sample_s=1.0, loads=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9), open_s=1.2, most_s=90.0),
        Pace(sample_s=0.3, loads=(0.2, 0.5, 0.8), open_s=0.4, most_s=30.0),
    ),
    "cpu": Kind(
        Scale(
            hidden=256,
            translated_words=2_000,
            padded_batch=16,
            in_flight=1,
            num_requests=2_000,
            arena_bytes=1 << 28,
            tolerance=1e-4,
        ),
        Pace(sample_s=0.4, loads=(0.2, 0.4, 0.6, 0.8), open_s=1.0, most_s=150.0, rounds=2),
        Pace(sample_s=0.1, loads=(0.2, 0.5, 0.8), open_s=0.2, most_s=110.0),
    ),
    "dry": Kind(Scale(8, 50, 50, 8, 4, 6, 8, 4, (2, 4), 100, 1 << 20, 1e-4), DRY_PACE, DRY_PACE),
}


@dataclass(frozen=True)
class Setting:
    """The settings that all figures share.

    ``is_whole`` is True if the packed peer of a GPU is measured too.
    """

    recorder: Recorder
    device: str
    scale: Scale
    pace: Pace
    treebank: Path | None
    is_whole: bool

    @property
    def is_cpu(self) -> bool:
        """True on a CPU that is measured as such, not as a stand-in for a GPU."""
        return self.device == "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        return self.torch_devices(1)[0]

    def torch_devices(self, workers: int) -> list[torch.device]:
        """Return the device of tensors of each worker."""
        return [torch.device("cpu" if name == "dry" else name) for name in self.workers(workers)]

    def workers(self, count: int) -> list[str]:
        """Return the devices of so many workers."""
        return [f"cuda:{k}" for k in range(count)] if self.device.startswith("cuda") else [self.device] * count

    @property
    def most_workers(self) -> int:
        """The number of workers for which this machine has a device or a core each."""
        if self.device.startswith("cuda"):
            return torch.cuda.device_count()
        return int(self.recorder.machine["cores"]) if self.is_cpu else 2

    def engine(self, workers: int = 1, trace: bool = False) -> dict[str, Any]:
        """Return options of every engine; cells are compiled before they are measured."""
        options = {"workers": self.workers(workers), "arena_bytes": self.scale.arena_bytes, "trace": trace}
        return options if MODE_VARIABLE in os.environ else {**options, "compile": "wait"}


def step_times(setting: Setting) -> None:
    """Figure 2.3: time and throughput of an LSTM step by batch: cellrt's step beside cuDNN's, and torch's on the CPU.

    On a CPU each has one thread, whose processor time is taken, so that others on the machine do not count. Raise
    AssertionError where cellrt's step gives something else there.
    """
    hidden, device, cpu = setting.scale.hidden, setting.torch_device, torch.device("cpu")
    lstm, on_cpu = nn.LSTM(hidden, hidden).eval(), nn.LSTMCell(hidden, hidden).eval()
    on_cpu.load_state_dict({name.removesuffix("_l0"): value for name, value in lstm.state_dict().items()})
    ours = LSTMCell.from_torch(lstm).eval()
    cudnn = None if setting.is_cpu else lstm.to(device)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if setting.is_cpu:
            stack.enter_context(torch_threads(1))
        for rows in setting.scale.steps:
            x, h, c = torch.randn(3, rows, hidden).unbind()
            torchs = partial(on_cpu, x, (h, c))
            if cudnn is None:
                for given, right in zip(ours(x, h, c), torchs(), strict=True):
                    torch.testing.assert_close(given, right, rtol=0, atol=setting.scale.tolerance)
                calls: dict[str, Callable[[], object]] = {"torch": torchs, "cellrt": partial(ours, x, h, c)}
                times_us = medians_us(calls, setting.pace.sample_s / 2, time.thread_time_ns)
                found = {("CPU", name): value / 1e6 for name, value in times_us.items()}
            else:
                step = step_call("lstm_step", torch.float32, hidden, rows, device)[0]
                found = {
                    ("CPU", "torch"): time_calls(torchs, cpu, times=3),
                    ("GPU", "cellrt"): time_captured(step, device),
                    ("GPU", "cuDNN"): time_captured(partial(cudnn, x[None].to(device)), device),
                }
            for (panel, name), seconds in found.items():
                extra = {"figure": "2.3", "panel": panel, "server": name, "batch": rows}
                extra["throughput"] = round(rows / seconds, 1)
                metric = f"{panel}, {name}: a step of {rows} rows"
                setting.recorder.add("Figure 2.3", metric, seconds * 1e3, "ms", **extra)


def timeline(setting: Setting) -> None:
    """Figure 2.5: when each of eight requests begins and ends, whatever the device: the scheduler has a virtual clock.

    Raise AssertionError where a request ends at another time than in the paper.
    """
    batch = 4
    processor = Processor(1, settings=SchedulerSettings.algorithm_1(max_tasks_to_submit=1))
    processor.add_kind(1000, 1000)
    cell = processor.add_type([Port(0), Port(0, carry=0)], [Port(0)], max_batch=batch)
    arrivals = []
    for time_s, length in TIMELINE:
        program = [OP_EXTERNAL, 0, length + 1, OP_CHAIN, cell, length, STEP, 0, 1, CARRY, length]
        arrivals.append(Arrival(time_s, np.array([*program, OP_RESULT, 2 * length, 1, 1], np.int32)))
    played = simulate(processor, arrivals, lambda cell_type, rows, steps: float(steps))
    begun_s = [min(task.start_s for task in played.tasks if k in task.requests) for k in range(len(TIMELINE))]
    lifetimes = {"cellrt": list(zip(begun_s, played.finish_s, strict=True)), "graph batching": []}
    now = 0.0
    for first in range(0, len(TIMELINE), batch):
        begun = max(now, *(time_s for time_s, _ in TIMELINE[first : first + batch]))
        now = begun + max(length for _, length in TIMELINE[first : first + batch])
        lifetimes["graph batching"] += [(begun, now)] * batch
    for name, spans in lifetimes.items():
        if tuple(end for _, end in spans) != TIMELINE_ENDS[name]:
            raise AssertionError(f"{name}: requests begin and end at {spans}, not as in the paper")
        for k, ((arrival, _), (begun, end)) in enumerate(zip(TIMELINE, spans, strict=True), start=1):
            extra = {"figure": "2.5", "panel": name, "server": name, "request": k, "arrival": arrival, "begun": begun}
            setting.recorder.add("Figure 2.5", f"{name}: end of request {k}", end, "steps", **extra)


def batch_limits(setting: Setting) -> None:
    """Figure 2.7: p90 latency against throughput on Europarl-like sentences, batches of at most 512 and 64."""
    scale = setting.scale
    lstm, table, requests, check = _europarl(scale)
    for letter, batch in zip("ab", (scale.large, scale.small), strict=True):
        with opened(_lstm_servers(setting, lstm, table, batch), requests, check) as servers:
            panel = Panel("2.7", f"({letter}) batches of at most {batch}", requests, scale.in_flight * batch)
            sweep(setting.recorder, panel, servers, setting.pace)


def bucket_widths(setting: Setting) -> None:
    """Figure 2.8: as figure 2.7 (a), with buckets of width 1, 10 and 40."""
    scale = setting.scale
    lstm, table, requests, check = _europarl(scale)
    made = _lstm_servers(setting, lstm, table, scale.large)
    padded = partial(device_peers.padded_lstm, lstm, table, setting.torch_device)

    def bucketed(width: int) -> Peer:
        return Peer(padded(), max_batch=scale.large, length=len, width=width)

    makers: Makers = {
        **{name: made[name] for name in ("cellrt", "cellrt, folded")},
        **{f"bucketed, width {width}": partial(bucketed, width) for width in BUCKET_WIDTHS},
    }
    with opened(makers, requests, check) as servers:
        panel = Panel("2.8", f"batches of at most {scale.large}", requests, scale.in_flight * scale.large)
        sweep(setting.recorder, panel, servers, setting.pace)


def queueing_and_computation(setting: Setting) -> None:
    """Figure 2.9: distributions of queueing and computation time under a low load, as in figure 2.7 (a)."""
    scale = setting.scale
    lstm, table, requests, check = _europarl(scale)
    with opened(_lstm_servers(setting, lstm, table, scale.large, trace=True), requests, check) as servers:
        title = f"low load, batches of at most {scale.large}"
        split(setting.recorder, Panel("2.9", title, requests, scale.in_flight * scale.large), servers, setting.pace)


def lengths(setting: Setting) -> None:
    """Figure 2.10: the distribution of the drawn lengths, and of the Brown corpus's.

    Raise AssertionError where the draws have other facts than the paper reports.
    """
    drawn = {"Europarl-like": workloads.europarl_lengths(100_000, seed=2), "Brown": workloads.brown_lengths(100_000, 2)}
    mine = drawn["Europarl-like"]
    share = float((mine < 100).mean())
    if abs(mine.mean() - workloads.EUROPARL_MEAN) > 0.5 or abs(share - 0.99) > 0.002 or mine.max() > 330:
        raise AssertionError(f"lengths of mean {mine.mean():.1f}, longest {mine.max()}, {share:.1%} below 100")
    for name, values in drawn.items():
        for quantile in (1, *range(5, 100, 5), 99, 99.5, 99.9, 100):
            extra = {"figure": "2.10", "panel": "lengths", "server": name, "quantile": quantile}
            value = float(np.percentile(values, quantile))
            setting.recorder.add("Figure 2.10", f"{name}: p{quantile}", value, "words", **extra)


def length_variance(setting: Setting) -> None:
    """Figure 2.11: as figure 2.7 (a), with sentences of 24 words, of at most 50, of at most 100."""
    scale = setting.scale
    panels = {
        "24 words": workloads.fixed_lengths(scale.num_requests),
        "at most 50 words": workloads.europarl_lengths(scale.num_requests, seed=4, longest=50),
        "at most 100 words": workloads.europarl_lengths(scale.num_requests, seed=4, longest=100),
    }
    drawn = {title: sentences(scale, given) for title, given in panels.items()}
    table, requests = drawn["24 words"]
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    check = closeness(lstm_answers(lstm, table, requests), scale.tolerance)
    with opened(_lstm_servers(setting, lstm, table, scale.large), requests, check) as servers:
        for title, (_, own) in drawn.items():
            panel = Panel("2.11", title, own, scale.in_flight * scale.large)
            sweep(setting.recorder, panel, servers, setting.pace)


def translation(setting: Setting) -> None:
    """Figure 2.13: p90 latency against throughput of encoder and decoder; "cellrt-512,256" names the batch limits.

    Decoding ends at the target's length, which no server uses for batching (2.7.4). All of cellrt's cells are folded.
    """
    scale = setting.scale
    model = Model(scale.translated_words, scale.hidden).eval().requires_grad_(False)
    pairs = seq2seq.draw_pairs(scale.num_requests, scale.translated_words, seed=2)
    with torch.inference_mode():
        expected = [next(iter(dropping(model, 1)([pair])))[1] for pair in pairs[:NUM_CHECKED]]
    small = scale.decoder_batch

    def ours(batches: tuple[int, int], workers: int) -> CellServer:
        return CellServer(seq2seq.Cellrt(model, max_batch=batches, **setting.engine(workers)).engine, "translate")

    def peer(run: Callable[[device_peers.Translator], Runner], workers: int, **options: Any) -> Peer:
        translators = [device_peers.Translator(model, device) for device in setting.torch_devices(workers)]
        return Peer(*map(run, translators), max_batch=small, **options)

    # In TF32, words that are about equally likely may change places, and then all that follows differs.
    check = same_words(expected, 2 if setting.device.startswith("cuda") else None)
    for workers in range(1, 1 + min(2, setting.most_workers)):
        makers: Makers = {
            **{f"cellrt-{batch},{small}": partial(ours, (batch, small), workers) for batch in (scale.large, small)},
            "padded": partial(peer, lambda made: made.run_dropping, workers),
            "bucketed": partial(peer, lambda made: made.run_to_the_last, workers, length=lambda pair: len(pair.tokens)),
        }
        title = "one worker" if workers == 1 else "two workers"
        with opened(makers, pairs, check) as servers:
            panel = Panel("2.13", title, pairs, scale.in_flight * small)
            sweep(setting.recorder, panel, servers, setting.pace)


def treebank(setting: Setting) -> None:
    """Figure 2.14: p90 latency against throughput of the binary TreeLSTM; level batches are of 64 trees at most."""
    scale = setting.scale
    title, trees, num_words = treebank_trees(setting.treebank, scale.num_requests)
    weights = random_weights(num_words, scale.hidden, scale.hidden)
    makers = _tree_servers(setting, weights)
    with opened(makers, trees, closeness(tree_answers(weights, trees), scale.tolerance)) as servers:
        panel = Panel("2.14", title, trees, 2 * scale.in_flight * scale.small)
        sweep(setting.recorder, panel, servers, setting.pace)


def identical_trees(setting: Setting) -> None:
    """Figure 2.15: as figure 2.14 with complete trees of 16 leaves, and the ideal, which executes their 31 cells in a
    row, each for one node of 64 trees."""
    scale, device = setting.scale, setting.torch_device
    weights = random_weights(scale.words, scale.hidden, scale.hidden)
    trees = complete_trees(scale.num_requests, scale.words, seed=1, leaves=LEAVES)
    makers: Makers = {
        **_tree_servers(setting, weights),
        "ideal": lambda: Peer(device_peers.HardWired(weights, LEAVES, scale.small, device), max_batch=scale.small),
    }
    with opened(makers, trees, closeness(tree_answers(weights, trees), scale.tolerance)) as servers:
        panel = Panel("2.15", f"{LEAVES} leaves", trees, 2 * scale.in_flight * scale.small)
        sweep(setting.recorder, panel, servers, setting.pace)


FIGURES: dict[str, Callable[[Setting], None]] = {
    "2.3": step_times,
    "2.5": timeline,
    "2.7": batch_limits,
    "2.8": bucket_widths,
    "2.9": queueing_and_computation,
    "2.10": lengths,
    "2.11": length_variance,
    "2.13": translation,
    "2.14": treebank,
    "2.15": identical_trees,
}
PARTS = tuple(FIGURES)


def run(recorder: Recorder, options: Options) -> None:
    """Make the figures; those of the device "dry" are kept only where ``out`` says so."""
    device = find_device(options.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or (Path(scratch) if device == "dry" else results_of(device))
        make_figures(recorder, device, folder, options)


def make_figures(recorder: Recorder, device: str, folder: Path, options: Options) -> None:
    """Make figures on "cpu", "cuda:0" or so; on "dry", with tiny sizes, what it runs on is the CPU.

    One that fails is shown, what it had measured is kept under another name, and the others go on. Raise RuntimeError
    at the end if one has.
    """
    if device.startswith("cuda"):
        wake(torch.device(device))
    kind = KINDS[device.partition(":")[0]]
    scale = replace(kind.scale, hidden=options.hidden[0]) if options.hidden else kind.scale
    pace = kind.quick if options.quick else kind.full
    failed = []
    for name in filter(options.has, FIGURES):
        path = folder / f"figure-{name}.jsonl"
        if is_kept(recorder, path, options):
            continue
        own = recorder_on("figures", device, options.quick)
        is_done = False
        torch.manual_seed(0)
        try:
            with _tf32(), frozen():
                FIGURES[name](Setting(own, device, scale, pace, options.treebank, not options.quick))
            is_done = True
        except Exception:  # whatever it was, it is shown
            traceback.print_exc()
            failed.append(name)
        finally:
            partial_path = folder / f"figure-{name}-partial.jsonl"
            partial_path.unlink(missing_ok=True)
            own.write(path if is_done else partial_path)
        recorder.rows += own.rows
        draw_figures(own.rows, folder)
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"figures that failed: {', '.join(failed)}")


def find_device(name: str | None) -> str:
    """Return the device that was asked for, or the first GPU, or the CPU. Raise ValueError for another name."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in KINDS:
        raise ValueError(f"no device {name!r}; there are: {', '.join(KINDS)}")
    return "cuda:0" if name == "cuda" else name


def results_of(device: str) -> Path:
    """Return the folder of a device's results."""
    if device.startswith("cuda"):
        return folder_of(torch.cuda.get_device_name(device))
    return RESULTS / f"cpu-{machine()['cores']}-cores"


def recorder_on(benchmark: str, device: str, is_quick: bool) -> Recorder:
    """Return an empty recorder whose machine has the GPU, and whether the run is quick."""
    made = Recorder(benchmark)
    made.machine["pace"] = "quick" if is_quick else "full"
    if device.startswith("cuda"):
        made.machine["gpu"] = torch.cuda.get_device_name(device)
    return made


def is_kept(recorder: Recorder, path: Path, options: Options) -> bool:
    """Return whether a file is there and not to be measured again; then its rows are the recorder's, too."""
    rows = [] if options.again else made_before(path, options.quick)
    if rows:
        tell(f"{path.stem} is there: {path}")
        recorder.rows += rows
    return bool(rows)


def made_before(path: Path, is_quick: bool) -> list[Row]:
    """Return the rows of a file, unless they are of a quick run and this is none."""
    if not path.exists():
        return []
    rows: list[Row] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    is_enough = is_quick or all(row["machine"].get("pace") != "quick" for row in rows)  # type: ignore[attr-defined]
    return rows if is_enough else []


def _europarl(scale: Scale) -> tuple[nn.LSTM, Tensor, list[list[int]], Check]:
    """Return an LSTM, its embedding, sentences of Europarl's lengths, and a check of the answers."""
    table, requests = sentences(scale, workloads.europarl_lengths(scale.num_requests, seed=2))
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    return lstm, table, requests, closeness(lstm_answers(lstm, table, requests), scale.tolerance)


def _lstm_servers(setting: Setting, lstm: nn.LSTM, table: Tensor, batch: int, trace: bool = False) -> Makers:
    """Return the servers of the LSTM's figures; requests are word numbers."""
    device, small = setting.torch_device, min(batch, setting.scale.padded_batch)

    def ours(fold: bool) -> CellServer:
        made = chain.Cellrt(lstm, table, fold=fold, max_batch=batch, **setting.engine(trace=trace))
        return CellServer(made.engine, "lstm")

    def peer(make: Callable[..., Any], most: int, length: Callable[[Any], int] | None = None) -> Peer:
        return Peer(make(lstm, table, device), max_batch=most, length=length, trace=trace)

    makers: dict[str, Callable[[], Any]] = {
        "cellrt": partial(ours, False),
        "cellrt, folded": partial(ours, True),
        _named(setting, "padded"): partial(peer, device_peers.padded_lstm, small),
        _named(setting, "bucketed"): partial(peer, device_peers.padded_lstm, batch, len),
    }
    if setting.is_cpu:
        makers["packed, folded"] = partial(peer, device_peers.folded_lstm, batch)
    elif setting.is_whole:
        makers["packed cuDNN"] = partial(peer, device_peers.packed_lstm, batch)
    return makers


def _named(setting: Setting, way: str) -> str:
    """Return a peer's name, with the library that it runs."""
    return f"{way} torch" if setting.is_cpu else f"{way} cuDNN"


def _tree_servers(setting: Setting, weights: Weights) -> Makers:
    batch = setting.scale.small

    def ours(fold: bool, most: int) -> CellServer:
        return CellServer(tree.Cellrt(weights, fold, max_batch=most, **setting.engine()).engine, "tree")

    def levels(fold: bool) -> Peer:
        run = packed_levels(weights, fold) if setting.is_cpu else None
        return Peer(run or device_peers.level_batched(weights, setting.torch_device), max_batch=batch)

    makers: dict[str, Callable[[], Any]] = {
        "cellrt": partial(ours, False, batch),
        "cellrt, folded": partial(ours, True, batch),
        "cellrt, folded, larger tasks": partial(ours, True, setting.scale.large),
        "level-batched": partial(levels, False),
    }
    if setting.is_cpu:
        makers["level-batched, folded"] = partial(levels, True)
    return makers


def sentences(scale: Scale, lengths: workloads.Lengths) -> tuple[Tensor, list[list[int]]]:
    """Return an embedding, and sentences of these lengths with random words of it."""
    random = np.random.default_rng(2)
    table = torch.randn(scale.words, scale.hidden, generator=torch.Generator().manual_seed(1))
    return table, [random.integers(0, scale.words, int(length)).tolist() for length in lengths]


@torch.inference_mode()
def lstm_answers(lstm: nn.LSTM, table: Tensor, requests: Sequence[list[int]]) -> list[Tensor]:
    """Return the answers of ``nn.LSTM`` to the first requests, one at a time on the CPU."""
    return [lstm(table[words])[1][0][0] for words in requests[:NUM_CHECKED]]


@torch.inference_mode()
def tree_answers(weights: Weights, trees: Sequence[Tree]) -> list[Tensor]:
    """Return the answers of plain recursion on the CPU to the first trees."""
    return [answer for _, answer in recursion(weights, 1)(trees[:NUM_CHECKED])]


def closeness(expected: Sequence[Tensor], tolerance: float) -> Check:
    """Return a check of last states h; it raises AssertionError."""

    def check(name: str, answers: Sequence[Any]) -> None:
        for answer, right in zip(answers, expected, strict=True):
            h = answer["h"] if isinstance(answer, dict) else answer
            torch.testing.assert_close(h, right, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")

    return check


def same_words(expected: Sequence[Tensor], count: int | None) -> Check:
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


@contextmanager
def frozen() -> Iterator[None]:
    """Leave what there is out of collections inside the context: one goes through all that was imported for 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
