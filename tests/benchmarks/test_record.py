"""Rows are written with all that makes them traceable, and the table shows the same numbers."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import benchmark_names, main
from benchmarks.checkout import commit
from benchmarks.options import Options
from benchmarks.record import Recorder, percentiles


def filled() -> Recorder:
    recorder = Recorder("chain")
    recorder.add("Padded", "throughput", 1234.0, "requests/s", batch=64)
    recorder.add("Padded", "p50", 0.25, "s", shape="[2]")
    return recorder


def test_rows_are_written_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "results" / "chain.jsonl"
    filled().write(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["value"] for row in rows] == [1234.0, 0.25]
    assert rows[0]["batch"] == 64
    for row in rows:
        assert {"benchmark", "case", "metric", "value", "unit", "commit", "machine"} <= row.keys()
        assert row["benchmark"] == "chain"
        assert {"cpu", "cores", "python", "torch", "numba"} == row["machine"].keys()


def test_table_shows_the_rows() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    filled().table(console)
    shown = console.export_text()
    for text in ("chain", "Padded", "throughput", "1,234", "requests/s", "0.25", "batch", "64", "[2]"):
        assert text in shown


def test_an_extra_column_may_not_hide_a_common_one() -> None:
    with pytest.raises(ValueError, match="machine"):
        Recorder("chain").add("Padded", "p50", 1.0, "s", machine="mine")


def test_percentiles() -> None:
    summary = percentiles([float(value) for value in range(101)])
    assert summary == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0, "max": 100.0}
    with pytest.raises(ValueError, match="no latencies"):
        percentiles([])


def test_commit_is_the_hash_and_whether_it_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    git("init", "--quiet")
    assert commit(tmp_path) == "unknown"
    tracked = tmp_path / "tracked"
    tracked.write_text("one")
    git("add", "tracked")
    git("commit", "--quiet", "--no-verify", "--message", "one")
    short = git("rev-parse", "--short", "HEAD")
    assert commit(tmp_path) == short
    tracked.write_text("two")
    assert commit(tmp_path) == f"{short}-dirty"
    assert commit(tmp_path / "absent") == "unknown"


def test_benchmarks_are_the_modules_that_run(tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text("def run(recorder, options): ...\n")
    (tmp_path / "shared.py").write_text("class Shared:\n    def run(self): ...\n")
    assert benchmark_names(tmp_path) == ["chain"]


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of arguments that it refuses, in one line."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    return " ".join(capsys.readouterr().err.replace("'", "").split())


def test_an_unknown_name_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.__main__.benchmark_names", lambda folder: ["chain", "overhead"])
    assert "chain, overhead" in refusal_of(["absent"], capsys)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A benchmark that records the options it got."""

    def run(recorder: Recorder, options: Options) -> None:
        parts = [part for part in ("one", "two") if options.has(part)]
        recorder.add("case", "quick", float(options.quick), "bool", plot=str(options.plot), parts=parts)

    module = type("Module", (), {"run": staticmethod(run), "PARTS": ("one", "two")})
    (tmp_path / "small.py").write_text("def run(recorder, options): ...\n")
    monkeypatch.setattr("benchmarks.__main__.FOLDER", tmp_path)
    monkeypatch.setattr("benchmarks.__main__.importlib.import_module", lambda name: module)


@pytest.mark.usefixtures("small")
def test_a_benchmark_runs_and_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    main(["small", "--quick", "--json", str(path), "--plot", "figure.svg"])
    row = json.loads(path.read_text())
    assert (row["benchmark"], row["value"], row["plot"], row["parts"]) == ("small", 1.0, "figure.svg", ["one", "two"])


@pytest.mark.usefixtures("small")
def test_parts_can_run_alone_and_add_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    for part in ("one", "two"):
        main(["small", "--only", part, "--json", str(path), "--append"])
    assert [json.loads(line)["parts"] for line in path.read_text().splitlines()] == [["one"], ["two"]]
    assert "one, two" in refusal_of(["small", "--only", "three"], capsys)
