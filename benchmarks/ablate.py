"""The worth of each switch of the engine: three workloads with one switched off in turn, beside everything on.

Parts: ``chains`` (an LSTM over Europarl's lengths, with an embedding cell), ``trees`` (a binary TreeLSTM over a
treebank's trees), ``seq2seq`` (encoder and decoder). Each engine has as many workers as there are cores or GPUs, at
most two, and its first answers are checked. Rounds are interleaved, engine after engine. A row's value is its
requests/s in a closed loop of ``CONCURRENCY``, and ``p90_ratio`` its p90 under Poisson arrivals at ``LOAD`` of what
everything on had in that loop: medians over rounds of the ratio to everything on. Beside it are rows and steps a task.

"Algorithm 1" has all of the scheduler's switches off (``SchedulerSettings.algorithm_1``), "all off" also the forms.
``loops ahead`` and ``captures`` are switches of a GPU: a CPU knows a loop's stop with the task, and captures nothing.
``compiled forms`` runs the modules themselves: on a CPU without their form and without a compiler's, on a GPU without
fused kernels. That a CPU's hand-written kernels run at all is no setting of an engine, but of a process
(``CELLRT_HAND_WRITTEN=off``), so the modules still call them.

As figures do, a part goes to ``ablate-chains.jsonl`` or so in the folder of the machine's results, and is not measured
again unless ``--again`` asks for it. A part takes about a minute and a half on two idle cores.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cellrt
from benchmarks import chain, seq2seq, tree, workloads
from benchmarks.figures import (
    KINDS,
    Setting,
    closeness,
    find_device,
    frozen,
    is_kept,
    lstm_answers,
    recorder_on,
    results_of,
    same_words,
    sentences,
    tree_answers,
)
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.seq2seq_peers import Model, dropping
from benchmarks.sweep import NUM_CHECKED, CellServer, Pace, Panel, Turns, latencies_at, opened, sample_peak, warm_up
from benchmarks.tree_peers import random_weights
from benchmarks.trees import treebank_trees
from cellrt.core.state.settings import SchedulerSettings

ON = "everything on"
LOAD = 0.5
CONCURRENCY, TINY_CONCURRENCY = 256, 8
FULL = Pace(sample_s=0.5, loads=(), open_s=1.0, most_s=300.0, rounds=3)
QUICK = replace(FULL, sample_s=0.1, open_s=0.2, rounds=1)


def without_form(module: nn.Module, *arguments: Any, **options: Any) -> cellrt.Cell:
    """Return a cell that runs as its module: with a hook it may compute something else than its hand-written form."""
    module.register_forward_hook(lambda *_: None)
    return cellrt.cell(module, *arguments, **options)


@dataclass(frozen=True)
class Switch:
    """A switch that is off.

    Attributes:
        settings: of the scheduler that differ from the usual ones.
        device: options of GPU workers that differ.
        has_forms: whether cells have their compiled forms on a CPU.
        needs: the kind of device that has the switch; "": any.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    has_forms: bool = True
    needs: str = ""

    def options(self, device: str) -> dict[str, Any]:
        """Return the options of a server on a device."""
        options: dict[str, Any] = {"settings": SchedulerSettings(**self.settings)}
        if device != "cpu":
            return {**options, "device_options": cellrt.DeviceOptions(**self.device)}
        return options if self.has_forms else {**options, "compile": "off", "make_cell": without_form}


PLAIN = SchedulerSettings.algorithm_1()
ALGORITHM_1 = {name: value for name, value in vars(PLAIN).items() if value != getattr(SchedulerSettings(), name)}
NO_FORMS = {"fused": False, "chains": False}
SWITCHES = {
    ON: Switch(),
    "runs": Switch({"runs": False}),
    "early release": Switch({"early_release": False}),
    "early ends of runs": Switch({"min_run_s": PLAIN.min_run_s}),
    "split": Switch({"split": False}),
    "gather": Switch({"gather": False}),
    "large batches": Switch({"large_batches": False}),
    "loops ahead": Switch({"loops_ahead": 0}, needs="gpu"),
    "captures": Switch(device={"graph_bytes": 0}, needs="gpu"),
    "compiled forms": Switch(device=NO_FORMS, has_forms=False),
    "Algorithm 1": Switch(ALGORITHM_1),
    "all off": Switch(ALGORITHM_1, {**NO_FORMS, "graph_bytes": 0}, has_forms=False),
}


def chains(setting: Setting) -> Workload:
    """Return sentences of Europarl's lengths through an embedding and an LSTM."""
    scale = setting.scale
    table, requests = sentences(scale, workloads.europarl_lengths(scale.num_requests, seed=2))
    lstm = nn.LSTM(scale.hidden, scale.hidden)
    check = closeness(lstm_answers(lstm, table, requests), scale.tolerance)

    def make(**options: Any) -> CellServer:
        return CellServer(chain.Cellrt(lstm, table, fold=False, **options).engine, "lstm")

    return Workload("chains", requests, make, check)


def trees(setting: Setting) -> Workload:
    """Return a treebank's trees, or trees like them, through a binary TreeLSTM."""
    scale = setting.scale
    _, requests, num_words = treebank_trees(setting.treebank, scale.num_requests)
    weights = random_weights(num_words, scale.hidden, scale.hidden)

    def make(**options: Any) -> CellServer:
        return CellServer(tree.Cellrt(weights, False, **options).engine, "tree")

    return Workload("trees", requests, make, closeness(tree_answers(weights, requests), scale.tolerance))


def translation(setting: Setting) -> Workload:
    """Return pairs of lengths like Europarl's through an encoder and a decoder."""
    scale = setting.scale
    model = Model(scale.translated_words, scale.hidden).eval().requires_grad_(False)
    pairs = seq2seq.draw_pairs(scale.num_requests, scale.translated_words, seed=2)
    with torch.inference_mode():
        expected = [next(iter(dropping(model, 1)([pair])))[1] for pair in pairs[:NUM_CHECKED]]

    def make(**options: Any) -> CellServer:
        return CellServer(seq2seq.Cellrt(model, **options).engine, "translate")

    return Workload("seq2seq", pairs, make, same_words(expected, 2 if setting.device.startswith("cuda") else None))


@dataclass(frozen=True)
class Workload:
    """Requests, the model that serves them, and a check of the first answers."""

    name: str
    requests: Sequence[Any]
    make: Callable[..., CellServer]
    check: Callable[[str, Sequence[Any]], None]


WORKLOADS: dict[str, Callable[[Setting], Workload]] = {"chains": chains, "trees": trees, "seq2seq": translation}
PARTS = tuple(WORKLOADS)


def run(recorder: Recorder, options: Options) -> None:
    """Measure each workload; what was measured on the device "dry" is kept only where ``out`` says so."""
    device = find_device(options.device)
    kind, pace = KINDS[device.partition(":")[0]], QUICK if options.quick else FULL
    scale = replace(kind.scale, hidden=options.hidden[0]) if options.hidden else kind.scale
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or (Path(scratch) if device == "dry" else results_of(device))
        for name in filter(options.has, WORKLOADS):
            path = folder / f"ablate-{name}.jsonl"
            if is_kept(recorder, path, options):
                continue
            own = recorder_on("ablate", device, options.quick)
            torch.manual_seed(0)
            setting = Setting(own, device, scale, pace, options.treebank, True)
            with frozen():
                ablate(setting, WORKLOADS[name](setting))
            own.write(path)
            recorder.rows += own.rows


def ablate(setting: Setting, workload: Workload) -> None:
    """Record what each switch is worth for a workload."""
    switches = {name: switch for name, switch in SWITCHES.items() if not switch.needs or not setting.is_cpu}
    engine = setting.engine(min(2, setting.most_workers))
    makers = {
        name: lambda switch=switch: workload.make(**{**engine, **switch.options(setting.device)})
        for name, switch in switches.items()
    }
    concurrency = TINY_CONCURRENCY if setting.device == "dry" else CONCURRENCY
    panel = Panel("", workload.name, workload.requests, concurrency)
    with opened(makers, workload.requests, workload.check) as servers:
        turns = Turns(servers, panel, setting.pace)
        rates = turns.once(lambda name, server: warm_up(server, panel))
        before = {name: _counts(server) for name, server in servers.items()}
        rounds = []
        for k in range(setting.pace.rounds):
            peaks = turns.once(lambda name, server: sample_peak(server, panel, rates[name], setting.pace.sample_s))
            loaded = turns.once(
                lambda name, server, rate, k: latencies_at(server, panel, rate, setting.pace.open_s, k),
                LOAD * peaks[ON],
                k,
            )
            rounds.append({name: (peaks[name], loaded[name]["p90"]) for name in servers})
        counted = {name: _counts(server) - before[name] for name, server in servers.items()}
    for name in servers:
        tasks, rows, nodes = counted[name].tolist()
        ratios = [statistics.median(found[name][k] / found[ON][k] for found in rounds) for k in (0, 1)]
        extra = {
            "p90_ratio": round(ratios[1], 3),
            "throughput": round(statistics.median(found[name][0] for found in rounds), 1),
            "p90_ms": round(statistics.median(found[name][1] for found in rounds), 3),
            "rows_a_task": round(rows / max(1, tasks), 2),
            "steps_a_task": round(nodes / max(1, rows), 2),
        }
        setting.recorder.add(workload.name, name, ratios[0], "ratio", **extra)


def _counts(server: Any) -> Any:
    """Return the tasks, rows and nodes of all cells so far."""
    cells = server.engine.statistics()["cells"].values()
    return np.array([sum(cell[key] for cell in cells) for key in ("tasks", "rows", "nodes")])
