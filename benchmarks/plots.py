"""Draws BatchMaker's figures from the rows that ``figures.py`` recorded, with the paper's axes.

``python -m benchmarks.plots FILE`` draws those of a JSON file beside it, for a machine that has no matplotlib.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compare import is_ours
from benchmarks.record import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = list[dict[str, Any]]


def can_draw() -> bool:
    """Return whether matplotlib is there; if not, say so."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print("no picture was drawn: matplotlib is not installed. python -m benchmarks.plots draws from the JSON file.")
    return False


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw a PNG for each figure that has rows, with its panels; return the files: none without matplotlib."""
    by_figure: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "figure" in row:
            by_figure.setdefault(str(row["figure"]), []).append(dict(row))
    if not by_figure or not can_draw():
        return []
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, own in by_figure.items():
        panels = list(dict.fromkeys(row["panel"] for row in own))
        figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
        figure.suptitle(f"BatchMaker's figure {number}")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            shown = [row for row in own if row["panel"] == panel]
            axes.set_title(panel)
            DRAWERS.get(number, draw_load)(axes, shown)
            axes.legend(fontsize=7)
        paths.append(folder / f"figure-{number}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def draw_load(axes: Axes, rows: Curve) -> None:
    """Draw the 90th percentile of the latency against throughput."""
    for name, curve in _curves([row for row in rows if row.get("quantile") == "p90"]).items():
        _plot(axes, name, [row["throughput"] for row in curve], [row["value"] for row in curve])
    axes.set(xlabel="throughput (requests/s)", ylabel="p90 latency (ms)", yscale="log")


def draw_steps(axes: Axes, rows: Curve) -> None:
    """Draw the time of a step against throughput, with the batch beside each marker (figure 2.3)."""
    for name, curve in _curves(rows).items():
        _plot(axes, name, [row["throughput"] for row in curve], [row["value"] for row in curve])
        for row in curve:
            axes.annotate(str(row["batch"]), (row["throughput"], row["value"]), fontsize=6)
    axes.set(xlabel="throughput (rows/s)", ylabel="time of a step (ms)", yscale="log")


def draw_shares(axes: Axes, rows: Curve) -> None:
    """Draw which share of the requests took at most so long, or has at most so many words (figures 2.9, 2.10)."""
    for name, curve in _curves(rows).items():
        _plot(axes, name, [row["value"] for row in curve], [row["quantile"] / 100 for row in curve])
    is_time = rows[0]["unit"] == "ms"
    axes.set(xlabel=f"time ({rows[0]['unit']})" if is_time else "words", ylabel="share of the requests")
    axes.set_xscale("log" if is_time else "linear")


def draw_lifetimes(axes: Axes, rows: Curve) -> None:
    """Draw each request's way from its arrival to its answer, dark from its first step on (figure 2.5)."""
    places = [row["request"] for row in rows]
    waits = [row["begun"] - row["arrival"] for row in rows]
    axes.barh(places, waits, left=[row["arrival"] for row in rows], color="0.85", label="waits")
    computes = [row["value"] - row["begun"] for row in rows]
    axes.barh(places, computes, left=[row["begun"] for row in rows], label="computes")
    axes.set(xlabel="steps", ylabel="request", xlim=(0, 13))
    axes.invert_yaxis()


DRAWERS: dict[str, Callable[[Axes, Curve], None]] = {
    "2.3": draw_steps,
    "2.5": draw_lifetimes,
    "2.9": draw_shares,
    "2.10": draw_shares,
}


def _curves(rows: Curve) -> dict[str, Curve]:
    return {name: [row for row in rows if row["server"] == name] for name in dict.fromkeys(r["server"] for r in rows)}


def _plot(axes: Axes, name: str, xs: list[float], ys: list[float]) -> None:
    axes.plot(xs, ys, marker="o", markersize=3, linewidth=2.5 if is_ours(name) else 1, label=name)


def main() -> None:
    """Draw the figures of the file that the command line names."""
    path = Path(sys.argv[1])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for drawn in draw_figures(rows, path.parent):
        print(drawn)


if __name__ == "__main__":
    main()
