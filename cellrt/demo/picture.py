"""The demo's picture: some successive words of a busy moment, and who was batched with whom."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cellrt.view.timeline import TIMES, Timeline, _Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_REQUESTS = 16


def save_picture(timeline: Timeline, words: Sequence[str], path: Path) -> str:
    """Draws the busiest window of a run whose k-th request is ``words[k]`` into a .png or .svg file.

    Returns a line that says what was drawn, or that nothing was because matplotlib is not installed. Raises ValueError
    if there are no requests.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "No picture was drawn: it needs matplotlib (pip install 'cellrt[plot]')."
    window = busiest_window(label(timeline, words))
    WordsDrawing(window).figure().savefig(path, format=path.suffix[1:].lower(), dpi=150)
    return f"{len(window.requests)} words of a busy moment, and who was batched with whom: {path}"


def label(timeline: Timeline, words: Sequence[str]) -> Timeline:
    """The same run with each request labelled with its word."""
    ordered = sorted(timeline.requests, key=lambda span: span.request)
    return Timeline(timeline.tasks, [replace(span, label=word) for span, word in zip(ordered, words, strict=True)])


def busiest_window(timeline: Timeline, count: int = NUM_REQUESTS) -> Timeline:
    """The ``count`` successive requests that met each other most: in most tasks there are three of them or more; where
    that is equal, those that needed the fewest tasks."""
    tasks_of: dict[int, set[int]] = {}
    for number, task in enumerate(timeline.tasks):
        for request in task.requests:
            tasks_of.setdefault(request, set()).add(number)
    ordered = sorted(timeline.requests, key=lambda span: (span.arrival_s, span.request))

    def sharing(first: int) -> tuple[int, int]:
        met = Counter(task for span in ordered[first : first + count] for task in tasks_of.get(span.request, ()))
        return sum(words >= 3 for words in met.values()), met.total() - len(met)

    return timeline.window(max(range(max(1, len(ordered) - count + 1)), key=sharing), count)


class WordsDrawing(_Drawing):
    """The picture with its numbers explained below it."""

    axis_height = 0.85

    def caption(self) -> str:
        """The time axis, then what a column is and what is written over it."""
        return (
            f"{super().caption()}\n"
            "A column above is a task, one batch of a cell: as high as its rows (words not drawn here too).\n"
            f"8{TIMES}20 over it: 8 rows, each of up to 20 steps. Boxes that begin and end together are one task."
        )

    def draw_strip(self, axes: Axes, worker: int) -> None:
        """See the base: the axis says that its number counts rows."""
        super().draw_strip(axes, worker)
        most = max(task.rows for task in self.tasks)
        axes.set_yticks([most], [f"{most} rows" if most > 1 else "1 row"])
