"""Pictures of plans: a step's time against its rows (BatchMaker, Figure 2.3), and latency against load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cellrt.planning.profile import Profile
from cellrt.planning.simulation import Outcome
from cellrt.view.paper import CELL_COLOURS, DOTS_PER_INCH, NEEDS_MATPLOTLIB, PICTURES, known_suffix


def check_picture(path: Path) -> None:
    """Raise what the functions below would raise for a path, before anything is measured."""
    _axes(path, 1)


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw the time and throughput of each cell against rows.

    Raise ImportError without matplotlib, and ValueError for an unknown suffix.
    """
    figure, (left, right) = _axes(path, 2)
    for colour, cell in zip(CELL_COLOURS * 9, profile.cells.values()):
        left.plot(cell.rows, [1e6 * seconds for seconds in cell.step_s], marker="o", color=colour, label=cell.name)
        rates = [rows / seconds for rows, seconds in zip(cell.rows, cell.step_s)]
        right.plot(cell.rows, rates, marker="o", color=colour, label=cell.name)
        right.axvline(cell.max_batch, color=colour, linestyle=":")
    for axes, what in ((left, "one step, microseconds"), (right, "rows a second; dotted: max_batch")):
        axes.set(xscale="log", yscale="log", xlabel="rows", ylabel=what)
        axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_load(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw p50, p90 and p99 against load, for each number of workers. Raise as ``draw_profile`` does."""
    figure, (axes,) = _axes(path, 1)
    for colour, workers in zip(CELL_COLOURS * 9, sorted({one.workers for one in outcomes})):
        shown = sorted((one for one in outcomes if one.workers == workers), key=lambda one: one.rate)
        for name, style in (("p50_s", ":"), ("p90_s", "--"), ("p99_s", "-")):
            label = f"{workers} workers, {name.removesuffix('_s')}"
            times_ms = [1e3 * (getattr(one, name) or math.nan) for one in shown]
            axes.plot([one.rate for one in shown], times_ms, style, marker="o", color=colour, label=label)
    axes.set(yscale="log", xlabel="requests a second", ylabel="latency, ms")
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _axes(path: Path, count: int) -> tuple[Any, Any]:
    known_suffix(path, PICTURES)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NEEDS_MATPLOTLIB) from error
    figure = Figure(figsize=(5 * count, 4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]
