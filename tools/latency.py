"""Latency against load, cellrt beside its peers, from the measurements that the benchmarks left.

python -m tools.latency    # writes docs/images/latency.svg
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools import svg

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "cpu-2-cores", ROOT / "docs" / "images" / "latency.svg"
OURS = "cellrt"
OUR_COLOURS = dict(zip(("cellrt", "cellrt, folded"), svg.COLOURS, strict=False))
PEER_COLOURS = (*svg.COLOURS[2:], svg.PALE)
Curves = dict[str, list[tuple[float, float]]]
"""Server to its points: the load in requests/s, and the 90th percentile of the latency in ms."""
OPEN_LOOP = re.compile(r"(?P<server>.+): p90 at (?P<percent>\d+)% of the best peer's peak")
CLOSED_LOOP = re.compile(r"(?P<server>.+): closed loop of \d+")


class Panel(NamedTuple):
    """One of the benchmarks' cases, and the servers of it that are drawn, all if none are named."""

    file: str
    case: str
    title: str
    servers: tuple[str, ...] = ()


PANELS = (
    Panel(
        "chain",
        "H=256, Europarl-like",
        "LSTM over sentences",
        ("cellrt", "cellrt, folded", "padded", "bucketed", "onnxruntime bucketed", "onnxruntime bucketed, bare loop"),
    ),
    Panel(
        "tree",
        "H=256, treebank",
        "Tree-LSTM over parse trees",
        ("cellrt", "cellrt, folded", "level-batched", "level-batched, folded", "level-batched, packed, bare loop"),
    ),
    Panel(
        "seq2seq",
        "H=256, 2k words",
        "sequence to sequence",
        ("cellrt", "padded", "bucketed", "dropped, packed, bare loop", "slots, packed, bare loop"),
    ),
)


def read(panel: Panel) -> list[dict[str, Any]]:
    """Return the rows of the panel's file."""
    return [json.loads(line) for line in (RESULTS / f"{panel.file}.jsonl").read_text().splitlines()]


def curves(panel: Panel, rows: list[dict[str, Any]]) -> Curves:
    """Return the curves of the panel's servers; a load is a part of the best peer's throughput in a closed loop."""
    mine = [row for row in rows if row["case"] == panel.case]
    peaks = [
        row["value"]
        for row in mine
        if (found := CLOSED_LOOP.fullmatch(row["metric"])) and not found["server"].startswith(OURS)
    ]
    points: Curves = {}
    for row in mine:
        found = OPEN_LOOP.fullmatch(row["metric"])
        if found and (not panel.servers or found["server"] in panel.servers):
            load = int(found["percent"]) / 100 * max(peaks)
            points.setdefault(found["server"], []).append((load, row["value"]))
    return {server: sorted(found) for server, found in points.items()}


def draw(axes: Axes, panel: Panel, measured: Curves, colours: dict[str, str]) -> None:
    """One panel: ours thick, peers thin."""
    for server, points in measured.items():
        is_ours = server.startswith(OURS)
        loads, latencies = zip(*points, strict=True)
        (line,) = axes.plot(loads, latencies, color=colours[server], marker="o", markersize=4, label=server)
        line.set(linewidth=2.6 if is_ours else 1.2, zorder=3 if is_ours else 2)
    axes.set(title=panel.title, xlabel="load (requests/s)", yscale="log", xlim=(0, None), ylim=(1, 5000))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e3e5ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def main() -> None:
    """Write the picture."""
    measured = {panel: curves(panel, read(panel)) for panel in PANELS}
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    for axes, (panel, found) in zip(panels, measured.items(), strict=True):
        peers = [server for server in found if not server.startswith(OURS)]
        draw(axes, panel, found, OUR_COLOURS | dict(zip(peers, PEER_COLOURS, strict=False)))
    panels[0].set_ylabel("p90 latency (ms)")
    with matplotlib.rc_context({"svg.hashsalt": "cellrt", "svg.fonttype": "none"}):
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
