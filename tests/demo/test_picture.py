"""The demo's picture shows a moment in which words were batched, and explains its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellrt.demo.picture import TIMES, save_picture
from cellrt.view.timeline import Timeline
from cellrt.view.timeline_spans import RequestSpan, TaskSpan

ALONE, TOGETHER = range(10), range(10, 20)


def a_run() -> Timeline:
    """Ten requests each in tasks of their own, then ten of which each task holds five."""
    tasks = [TaskSpan(k, k % 2, "cell", float(k), k + 0.5, 1, 1, (k,)) for k in ALONE]
    tasks += [
        TaskSpan(10 + k, k % 2, "cell", 10.0 + k, 10.5 + k, 5, 20, tuple(range(10 + 5 * (k % 2), 15 + 5 * (k % 2))))
        for k in range(6)
    ]
    requests = [RequestSpan(k, "", float(k) if k in ALONE else 10 + 0.01 * k, 20.0) for k in (*ALONE, *TOGETHER)]
    return Timeline(tasks, requests)


def test_the_picture_shows_words_that_were_batched(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_picture(a_run(), [f"word-{k}" for k in range(20)], tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert sum(f"label-{k}" in text for k in TOGETHER) == len(TOGETHER)
    assert "requests: 16, " in text


def test_the_picture_names_words_workers_and_what_its_numbers_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [f"word-{k}" for k in range(20)]
    assert str(tmp_path / "picture.svg") in save_picture(a_run(), words, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    for expected in ("worker 1", "5 rows", f"8{TIMES}20 over it", "(s)", "word-15"):
        assert expected in text


def test_without_matplotlib_a_line_says_that_nothing_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = save_picture(a_run(), ["word"] * 20, tmp_path / "picture.png")
    assert line == "No picture was drawn: it needs matplotlib (pip install matplotlib)."
    assert not list(tmp_path.iterdir())
