"""Every part of every benchmark that compares servers runs to its end, with tiny cells and loads."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import Plan
from benchmarks.options import Options
from benchmarks.record import Recorder
from examples.models.treebank import ADDRESS

pytest.importorskip("onnxruntime")
pytest.importorskip("matplotlib")

TINY = Plan(rounds=1, sample_s=0.01, loads=(0.2, 0.5), open_s=0.02, concurrencies=(4, 16))
PARTS = [
    ("chain", "fixed"),
    ("chain", "europarl"),
    ("chain", "brown"),
    ("chain", "rates"),
    ("seq2seq", "2k"),
    ("seq2seq", "30k"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(("name", "part"), [*PARTS, ("tree", "identical"), ("tree", "treebank")])
def test_part_runs(name: str, part: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treebank, plot = tmp_path / "trees.txt", tmp_path / "figure.png"
    treebank.write_text("(1 (2 a) (3 (2 b) (2 a)))\n(1 (2 (2 b) (2 a)) (3 c))\n" * 10)
    benchmark = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(benchmark, "QUICK", TINY)
    monkeypatch.setattr(benchmark, "FULL", TINY)
    recorder = Recorder(name)
    benchmark.run(recorder, Options(quick, plot, only=(part,), hidden=(8,), treebank=treebank))
    assert recorder.rows
    assert all(row["value"] > 0 for row in recorder.rows)
    assert plot.exists() == (part not in ("fixed", "identical", "rates"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["modules", "steps", "grain", "decoder", "lstm", "mlp", "tree"])
def test_own_cell_runs(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cell = importlib.import_module("benchmarks.own_cell")
    if part == "modules":  # the others start processes, which find the compiled scheduler in the usual place
        monkeypatch.setenv("CELLRT_CACHE", str(tmp_path))
    monkeypatch.setattr(own_cell, "QUICK", TINY)
    monkeypatch.setattr(own_cell, "QUICK_MODULES", ("integers", "random"))
    if part != "mlp":  # compiling each would take minutes
        monkeypatch.setattr("benchmarks.own_served.has_compiler", lambda: False)
    recorder = Recorder("own_cell")
    own_cell.run(recorder, Options(quick=True, only=(part,)))
    assert recorder.rows
    assert all(row["value"] > 0 or row["metric"] == "compiled" for row in recorder.rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["heads", "encoder", "stack"])
def test_attention_runs(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("benchmarks.attention")
    monkeypatch.setattr(attention, "SMOLLM", replace(attention.SMOLLM, vocabulary=50, layers=2))
    monkeypatch.setattr(attention, "CASES", {"few": [(1, 40), (3, 9)]})
    recorder = Recorder("attention")
    attention.run(recorder, Options(quick=True, only=(part,)))
    assert recorder.rows
    assert all(row["value"] > 0 for row in recorder.rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["lstm", "cells"])
def test_cell_kernels_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell_kernels = importlib.import_module("benchmarks.cell_kernels")
    monkeypatch.setenv("CELLRT_CACHE", str(tmp_path))
    monkeypatch.setattr(cell_kernels, "QUICK_ROWS", (1, 3))
    if part == "cells":  # compiling one is enough
        made = {"GRU": cell_kernels.make_cases(8)["GRU"]}
        monkeypatch.setattr(cell_kernels, "make_cases", lambda hidden: made)
    recorder = Recorder("cell_kernels")
    cell_kernels.run(recorder, Options(quick=True, only=(part,), hidden=(8,)))
    assert recorder.rows
    assert all(row["value"] > 0 or row["unit"] == "yes or no" for row in recorder.rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_treebank_trees_are_drawn_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = importlib.import_module("benchmarks.tree")
    monkeypatch.setattr(tree, "FULL", TINY)
    recorder = Recorder("tree")
    tree.run(recorder, Options(only=("treebank",), hidden=(8,)))
    assert {row["case"] for row in recorder.rows} == {"H=8, drawn trees, like the treebank's"}
    assert ADDRESS in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_language_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = importlib.import_module("benchmarks.lm")
    monkeypatch.setattr(lm, "IN_FLIGHT", (1, 3))
    recorder = Recorder("lm")
    lm.run(recorder, Options(quick=True, only=("random",)))
    assert {row.get("in_flight") for row in recorder.rows} == {1, 3, None}, "None: what a suspended request pays"
    assert all(row["value"] > 0 for row in recorder.rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "part"), [("encoder", "rows"), ("encoder", "cost"), ("lm", "open")])
def test_what_is_measured_under_deadlines_and_open_loads_runs(name: str, part: str) -> None:
    recorder = Recorder(name)
    importlib.import_module(f"benchmarks.{name}").run(recorder, Options(quick=True, only=(part,), hidden=(8,)))
    assert recorder.rows
