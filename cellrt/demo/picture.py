"""The demo's picture: some successive words of a busy moment, and which were batched together."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cellrt.view.timeline import Timeline

NUM_WORDS = 16
TIMES = "\N{MULTIPLICATION SIGN}"
CAPTION = f"""\
A column above is a task, one batch of a cell: as high as its rows (words not drawn here too).
8{TIMES}20 over it: 8 rows, each of up to 20 steps. Boxes that begin and end together are one task."""


def save_picture(timeline: Timeline, words: Sequence[str], path: Path) -> str:
    """Draw the busiest moment of a run whose k-th request is ``words[k]`` into a .png or .svg file.

    Returns a line that says what was drawn, or that nothing was because matplotlib is not installed. Raise ValueError
    if there are no requests.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "No picture was drawn: it needs matplotlib (pip install matplotlib)."
    label(timeline, words).save(path, count=NUM_WORDS, caption=CAPTION)
    number = min(NUM_WORDS, len(timeline.requests))
    return f"{number} words of a busy moment, and which of them shared a batch: {path}"


def label(timeline: Timeline, words: Sequence[str]) -> Timeline:
    """Return the run with each request labelled with its word."""
    ordered = sorted(timeline.requests, key=lambda span: span.request)
    return Timeline(timeline.tasks, [replace(span, label=word) for span, word in zip(ordered, words, strict=True)])
