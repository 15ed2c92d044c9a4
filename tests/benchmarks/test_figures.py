"""A dry run and a run on the CPU give every figure with its panels; its servers answer and time as they say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import figures, gpu, plots, sweep, workloads
from benchmarks.chain import Cellrt
from benchmarks.device_peers import HardWired, Peer, Translator, folded_lstm, level_batched, packed_lstm, padded_lstm
from benchmarks.figures import FIGURES, KINDS, Kind, Scale, find_device, make_figures
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.seq2seq_peers import Model, Pair, dropping
from benchmarks.sweep import CellServer, Pace, Panel, Turns, split
from benchmarks.tree_peers import random_weights, recursion
from benchmarks.trees import Tree, complete_trees, parse_like_trees
from tests.benchmarks.test_workloads import Clock

LSTM_SERVERS = {
    "dry": {"cellrt", "cellrt, folded", "padded cuDNN", "bucketed cuDNN", "packed cuDNN"},
    "cpu": {"cellrt", "cellrt, folded", "padded torch", "bucketed torch", "packed, folded"},
}
TREE_SERVERS = {"cellrt", "cellrt, folded", "cellrt, folded, larger tasks", "level-batched"}
WIDTHS = {f"bucketed, width {width}" for width in (1, 10, 40)}
EXPECTED = {
    "2.3": ({"CPU", "GPU"}, {"torch", "cellrt", "cuDNN"}),
    "2.5": ({"cellrt", "graph batching"}, {"cellrt", "graph batching"}),
    "2.7": ({"(a) batches of at most 4", "(b) batches of at most 2"}, "lstm"),
    "2.8": ({"batches of at most 4"}, {"cellrt", "cellrt, folded"} | WIDTHS),
    "2.9": ({"(a) queueing time", "(b) computation time"}, "lstm"),
    "2.10": ({"lengths"}, {"Europarl-like", "Brown"}),
    "2.11": ({"24 words", "at most 50 words", "at most 100 words"}, "lstm"),
    "2.13": ({"one worker", "two workers"}, {"cellrt-4,3", "cellrt-3,3", "padded", "bucketed"}),
    "2.14": ({"drawn trees, like the treebank's"}, "trees"),
    "2.15": ({"16 leaves"}, "trees"),
}
CPU = torch.device("cpu")
WAIT_S = 30.0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of device with as little to do as can be."""
    pace = Pace(sample_s=0.001, loads=(0.5,), open_s=0.001, most_s=60.0)
    scale = Scale(4, 20, 20, 4, 2, 3, 2, 4, (2, 4), 6, 1 << 20, 1e-4)
    for name in KINDS:
        monkeypatch.setitem(KINDS, name, Kind(scale, pace, pace))
    monkeypatch.setattr(sweep, "LEAST_REQUESTS", 4)


def answers(run: Callable[[Sequence[Any]], Any], requests: Sequence[Any]) -> list[torch.Tensor]:
    with torch.inference_mode():
        given = dict(run(requests))
    return [given[k] for k in range(len(requests))]


def assert_all_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("device", ["dry", "cpu"])
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.slow
def test_a_figure_has_its_panels_and_servers(name: str, device: str, tmp_path: Path) -> None:
    recorder = Recorder("figures")
    make_figures(recorder, device, tmp_path, Options(only=(name,)))
    panels, servers = EXPECTED[name]
    if servers == "trees":
        servers = TREE_SERVERS | ({"ideal"} if name == "2.15" else set())
        servers |= {"level-batched, folded"} if device == "cpu" else set()
    if (name, device) == ("2.3", "cpu"):
        panels, servers = {"CPU"}, {"torch", "cellrt"}
    if (name, device) == ("2.13", "cpu") and recorder.machine["cores"] == 1:
        panels = {"one worker"}
    assert {row["figure"] for row in recorder.rows} == {name}
    assert {row["panel"] for row in recorder.rows} == panels
    assert {row["server"] for row in recorder.rows} == (LSTM_SERVERS[device] if servers == "lstm" else servers)
    assert all(float(str(row["value"])) > 0 for row in recorder.rows)
    assert rows_of(tmp_path / f"figure-{name}.jsonl") == recorder.rows


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device of each time that figure 2.5 is made; each has one row, with their number."""
    made: list[str] = []

    def make(setting: figures.Setting) -> None:
        made.append(setting.device)
        setting.recorder.add("case", "metric", len(made), "steps", figure="2.5")

    monkeypatch.setitem(FIGURES, "2.5", make)
    monkeypatch.setattr(figures, "draw_figures", lambda *_: [])
    return made


def test_a_figure_that_is_there_is_made_again_only_if_asked_to(tmp_path: Path, counted: list[str]) -> None:
    once = Options(only=("2.5",))
    values = []
    for options in (once, once, replace(once, again=True)):
        recorder = Recorder("figures")
        make_figures(recorder, "cpu", tmp_path, options)
        values += [row["value"] for row in recorder.rows]
    assert values == [1, 1, 2]
    assert counted == ["cpu", "cpu"]


def test_a_quick_figure_does_not_stand_for_a_full_one(tmp_path: Path, counted: list[str]) -> None:
    for is_quick in (True, True, False, True):
        make_figures(Recorder("figures"), "cpu", tmp_path, Options(quick=is_quick, only=("2.5",)))
    assert len(counted) == 2
    assert rows_of(tmp_path / "figure-2.5.jsonl")[0]["machine"]["pace"] == "full"


@pytest.mark.usefixtures("tiny", "counted")
def test_a_figure_that_fails_is_named_at_the_end_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(setting: figures.Setting) -> None:
        setting.recorder.add("case", "before", 1.0, "s", figure="2.3")
        raise ValueError("no such luck")

    monkeypatch.setitem(FIGURES, "2.3", fail)
    recorder = Recorder("figures")
    with pytest.raises(RuntimeError, match=r"failed: 2\.3$"):
        make_figures(recorder, "dry", tmp_path, Options(only=("2.3", "2.5")))
    assert {row["figure"] for row in recorder.rows} == {"2.3", "2.5"}
    assert "no such luck" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"figure-2.3-partial.jsonl", "figure-2.5.jsonl"}
    assert rows_of(tmp_path / "figure-2.3-partial.jsonl")[0]["metric"] == "before"


@pytest.mark.parametrize("given", ["tpu", "cpu2"])
def test_a_device_of_another_name_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=given):
        find_device(given)


def test_without_a_gpu_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert find_device(None) == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert find_device(None) == "cuda:0"


def test_what_was_measured_before_a_failure_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(recorder: Recorder, options: Options, device: str) -> None:
        recorder.add("case", "metric", 1.0, "s")
        raise RuntimeError("then it broke")

    monkeypatch.setattr(gpu, "measure", measure)
    with pytest.raises(RuntimeError, match="then it broke"):
        gpu.measure_and_write(Options(), "dry", tmp_path, "gpu")
    assert json.loads((tmp_path / "gpu.json").read_text())["metric"] == "metric"


@pytest.mark.parametrize("make", [padded_lstm, packed_lstm, folded_lstm])
def test_an_lstm_peer_answers_as_alone(make: Any) -> None:
    torch.manual_seed(1)
    lstm, table = nn.LSTM(5, 6), torch.randn(9, 5)
    sentences = [[1, 2, 3], [4], [8, 7, 6, 5, 4, 3, 2], [0, 0, 0]]
    with torch.inference_mode():
        expected = [lstm(table[words])[1][0][0] for words in sentences]
    assert_all_close(answers(make(lstm, table, CPU), sentences), expected)


@pytest.mark.parametrize("way", ["run_to_the_last", "run_dropping"])
def test_a_translator_chooses_the_words_of_a_sentence_decoded_alone(way: str) -> None:
    torch.manual_seed(2)
    model = Model(30, 12).requires_grad_(False)
    pairs = [Pair([3, 1, 4], 5), Pair([1], 1), Pair([5, 9, 2, 6], 9), Pair([2, 2], 9), Pair([7], 5)]
    alone = dropping(model, 1)
    expected = [answers(alone, [pair])[0].tolist() for pair in pairs]
    assert [words.tolist() for words in answers(getattr(Translator(model, CPU), way), pairs)] == expected


def test_tree_peers_answer_as_recursion() -> None:
    torch.manual_seed(3)
    weights = random_weights(20, 6, 6)
    trees: list[Tree] = complete_trees(3, 20, seed=1, leaves=4)
    assert_all_close(answers(HardWired(weights, 4, 8, CPU), trees), answers(recursion(weights, 1), trees))
    trees += parse_like_trees(5, 20, seed=2)
    assert_all_close(answers(level_batched(weights, CPU), trees), answers(recursion(weights, 1), trees))


def test_the_hard_wired_tree_refuses_others() -> None:
    weights = random_weights(20, 6, 6)
    with pytest.raises(ValueError, match="8 leaves, not 4"):
        HardWired(weights, 4, 8, CPU)(complete_trees(1, 20, seed=1, leaves=8))


def test_servers_tell_when_each_request_began() -> None:
    lstm, table = nn.LSTM(4, 4), torch.randn(9, 4)
    ours = Cellrt(lstm, table, workers=["dry"], arena_bytes=1 << 20, trace=True)
    made = [
        CellServer(ours.engine, "lstm"),
        Peer(padded_lstm(lstm, table, CPU), max_batch=2, length=len, trace=True),
    ]
    for server in made:
        try:
            for _ in range(2):
                before_s = time.perf_counter()
                ends: dict[int, float] = {}
                futures = [server.submit([1] * length) for length in (12, 1, 25)]
                for k, future in enumerate(futures):
                    future.result(WAIT_S)
                    ends[k] = time.perf_counter()
                starts = server.starts()
                assert len(starts) == 3
                assert all(before_s < start < ends[k] for k, start in enumerate(starts))
        finally:
            server.close()


class OneByOne:
    """Queues a request for 0.2 s, computes it for 0.3 s, on a clock that only it moves."""

    def __init__(self, clock: Clock, num_forgotten: int = 0) -> None:
        self._clock, self._num_forgotten = clock, num_forgotten
        self._begun: list[float] = []

    def submit(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._clock.sleep(0.2)
        self._begun.append(self._clock.now)
        self._clock.sleep(0.3)
        future.set_result(request)
        return future

    def starts(self) -> list[float]:
        begun, self._begun = self._begun[self._num_forgotten :], []
        return begun

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workloads, "time", made)
    monkeypatch.setattr(sweep, "time", made)
    return made


def split_one_by_one(monkeypatch: pytest.MonkeyPatch, clock: Clock, num_forgotten: int = 0) -> Recorder:
    recorder = Recorder("gpu")
    monkeypatch.setattr(workloads, "poisson_arrivals", lambda rate, count, seed: np.arange(1.0, 1.0 + count))
    panel = Panel("2.9", "low load", ["request"], 1)
    split(
        recorder,
        panel,
        {"server": OneByOne(clock, num_forgotten)},
        Pace(sample_s=1.0, loads=(), open_s=1.0, most_s=60.0),
    )
    return recorder


def test_queueing_and_computation_are_told_apart(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    recorder = split_one_by_one(monkeypatch, clock)
    for panel, expected_ms in (("(a) queueing time", 200.0), ("(b) computation time", 300.0)):
        values = [row["value"] for row in recorder.rows if row["panel"] == panel]
        np.testing.assert_allclose(values, expected_ms)


def test_a_server_that_forgets_when_requests_began_is_refused(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    with pytest.raises(RuntimeError, match="began"):
        split_one_by_one(monkeypatch, clock, num_forgotten=1)


def test_a_panel_that_takes_too_long_ends(clock: Clock) -> None:
    recorder = Recorder("figures")
    servers = {"first": OneByOne(clock), "second": OneByOne(clock)}
    panel = Panel("2.7", "slow", ["request"], 1)
    with pytest.raises(TimeoutError, match="first and what follows"):
        sweep.sweep(recorder, panel, servers, Pace(1.0, (0.5,), 1.0, most_s=4.0))
    assert [row["unit"] for row in recorder.rows] == ["requests/s"] * 2, "their peaks were found in time"


def test_servers_take_turns_and_medians_count(clock: Clock) -> None:
    servers, asked = {"first": OneByOne(clock), "second": OneByOne(clock)}, []

    def measure(name: str, server: object, seed: int) -> dict[str, float]:
        asked.append((seed, name))
        return {"value": (7.0, 1.0, 3.0)[seed]}

    found = Turns(servers, Panel("2.7", "a", [], 1), Pace(1.0, (), 1.0, 9.0, rounds=3)).medians(measure)
    assert found == {"first": {"value": 3.0}, "second": {"value": 3.0}}
    assert asked == [(seed, name) for seed in range(3) for name in servers]


def test_drawn_trees_are_about_as_long_and_as_deep_as_the_treebanks() -> None:
    trees = parse_like_trees(2000, 50, seed=1)
    leaves = np.array([len(tree.tokens) for tree in trees])
    depths = np.array([tree.levels.max() for tree in trees])
    assert abs(leaves.mean() - 19.2) < 0.7
    assert leaves.min() >= 2
    assert 40 < leaves.max() <= 52
    long = (leaves >= 20) & (leaves < 30)
    assert abs(depths[long].mean() - 11.8) < 0.8


def test_rows_are_drawn_figure_by_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorder = Recorder("gpu")
    for name, quantile in (("2.3", None), ("2.7", "p90"), ("2.9", 50)):
        for panel in ("left", "right"):
            common = {"figure": name, "panel": panel, "server": "cellrt", "quantile": quantile, "batch": 2}
            recorder.add("case", "metric", 1.0, "ms", throughput=5.0, **common)
    recorder.add("lstm", "steps", 1.0, "steps/s")
    drawn = plots.draw_figures(recorder.rows, tmp_path / "folder")
    assert [path.name for path in drawn] == ["figure-2.3.png", "figure-2.7.png", "figure-2.9.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_without_matplotlib_a_line_says_that_nothing_was_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recorder = Recorder("gpu")
    recorder.add("lstm", "steps", 1.0, "steps/s", figure="2.7", panel="one", server="cellrt")
    assert plots.draw_figures(recorder.rows, tmp_path) == []
    gpu.draw(recorder, tmp_path / "gpu.png")
    assert capsys.readouterr().out.count("no picture was drawn") == 2
    assert not list(tmp_path.iterdir())


def test_without_rich_rows_are_printed_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recorder = Recorder("gpu")
    recorder.add("Padded", "throughput", 1234.0, "requests/s", batch=64)
    recorder.table()
    assert capsys.readouterr().out == "Padded: throughput: 1,234 requests/s batch=64\n"
