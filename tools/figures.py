"""The paper's figures as tables in docs/figures.md, with what agrees, from what the benchmarks left.

python -m tools.figures    # writes the part of docs/figures.md between its two marks
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- Made by python -m tools.figures: begin -->", "<!-- end -->"
DEVICES = {"cpu-2-cores": "CPU", "nvidia-h200": "H200"}
WORKLOADS = ("chains", "trees", "seq2seq")
OURS, IDEAL = "cellrt", "ideal"
LOAD = re.compile(r".+: p90 at (\d+)% of its peak")
Rows = Sequence[dict[str, Any]]


class Claim(NamedTuple):
    """A finding beside one of the paper's claims, and whether the claim holds here."""

    found: str
    holds: bool


class Figure(NamedTuple):
    """A figure: its title, the shape of the paper's curve, its table, and what is claimed of it."""

    number: str
    title: str
    paper: str
    table: Callable[[Rows], Iterator[Sequence[str]]]
    claims: Callable[[Rows], list[Claim]]


def read(device: str, name: str) -> Rows:
    """Return the rows of a device's file; none without it."""
    path = RESULTS / device / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def unique(rows: Rows, key: str) -> list[Any]:
    """Return the values of a column, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def of(rows: Rows, **columns: object) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in columns.items())]


def number(value: float) -> str:
    """Return a number as a reader wants it: three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# Figures of p90 latency against throughput.


class Sweep:
    """A panel: the peak of each server, and its p90 at each load."""

    def __init__(self, rows: Rows) -> None:
        self.peaks: dict[str, float] = {row["server"]: row["value"] for row in of(rows, unit="requests/s")}
        self._rows = of(rows, quantile="p90")

    @property
    def ours(self) -> list[str]:
        """The servers that are cellrt."""
        return [name for name in self.peaks if name.startswith(OURS)]

    @property
    def peers(self) -> list[str]:
        """The others, without the ideal."""
        return [name for name in self.peaks if name not in self.ours and name != IDEAL]

    def best(self, names: Sequence[str]) -> float:
        """Return the highest peak of some servers."""
        return max(self.peaks[name] for name in names)

    def loads(self, server: str) -> dict[int, float]:
        """Return p90 in ms by the load in percent of the server's own peak."""
        found = ((LOAD.fullmatch(row["metric"]), row["value"]) for row in of(self._rows, server=server))
        return {int(match[1]): value for match, value in found if match}

    def p90(self, server: str, rate: float) -> float:
        """Return p90 in ms at a rate, between what was measured; without end above the last load."""
        points = sorted((percent / 100 * self.peaks[server], value) for percent, value in self.loads(server).items())
        rates, values = zip(*points, strict=True)
        return float("inf") if rate > rates[-1] else float(np.interp(rate, rates, values))

    def least_p90(self, names: Sequence[str], rate: float) -> float:
        """Return the least p90 of some servers at a rate."""
        return min(self.p90(name, rate) for name in names)


def sweeps(rows: Rows) -> dict[str, Sweep]:
    """Return the panels by title."""
    return {panel: Sweep(of(rows, panel=panel)) for panel in unique(rows, "panel")}


def sweep_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the peaks, and p90 at parts of a server's own peak."""
    panels = sweeps(rows)
    percents = sorted({percent for panel in panels.values() for name in panel.peaks for percent in panel.loads(name)})
    several = len(panels) > 1
    yield [*["panel"][:several], "server", "peak, requests/s", *(f"p90 at {percent}%, ms" for percent in percents)]
    for title, panel in panels.items():
        for name, peak in panel.peaks.items():
            loads = panel.loads(name)
            yield [*[title][:several], name, number(peak), *(number(loads[percent]) for percent in percents)]


def ahead(panel: Sweep) -> list[Claim]:
    """Return the claims that hold of any sweep: a higher peak, and a lower p90 at half of the best peer's."""
    best = panel.best(panel.peers)
    peak = panel.best(panel.ours) / best
    p90 = panel.least_p90(panel.ours, best / 2) / panel.least_p90(panel.peers, best / 2)
    at_half = (
        "half of it is too much" if p90 == float("inf") else f"{number(p90)} of the peers' least p90 at half of that"
    )
    return [Claim(f"{number(peak)} times the best peer's peak", peak > 1), Claim(at_half, p90 < 1)]


def limits(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.7."""
    large, small = sweeps(rows).values()
    peak = large.best(large.ours) / small.best(small.ours)
    rate = small.best(small.ours) / 4
    p90 = large.least_p90(large.ours, rate) / small.least_p90(small.ours, rate)
    return [
        *ahead(large),
        Claim(f"a limit of 512 has {number(peak)} times the peak of 64", peak > 1),
        Claim(f"{number(p90)} of its p90 at low load", p90 < 1.25),
    ]


def widths(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.8."""
    (panel,) = sweeps(rows).values()
    narrow, _, wide = panel.peers
    rate = 0.3 * min(panel.peaks[name] for name in panel.peers)
    peak, p90 = panel.peaks[narrow] / panel.peaks[wide], panel.p90(wide, rate) / panel.p90(narrow, rate)
    return [
        Claim(f"width 1 has {number(peak)} times the peak of width 40", peak > 1),
        Claim(f"width 40 has {number(p90)} of its p90 at low load", p90 < 1),
    ]


def variance(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.11."""
    ratios = [panel.best(panel.ours) / panel.best(panel.peers) for panel in sweeps(rows).values()]
    peers = [panel.best(panel.peers) for panel in sweeps(rows).values()]
    shown = ", ".join(map(number, ratios))
    return [
        Claim(f"the peak is {shown} times the best peer's", ratios[0] < ratios[-1]),
        Claim(f"which falls to {number(peers[-1] / peers[0])} of what it was", peers[-1] < peers[0]),
    ]


def translation(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.13."""
    one, *more = sweeps(rows).values()
    different, same = (one.peaks[name] for name in one.ours)
    found = [*ahead(one), Claim(f"different limits give {number(different / same)} times the peak", different > same)]
    for two in more:
        gain = two.best(two.ours) / one.best(one.ours)
        found.append(Claim(f"two workers {number(gain)} times", gain > 1.5))
    return found


def beside_the_ideal(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.15."""
    (panel,) = sweeps(rows).values()
    best, rate = panel.best(panel.ours), 0.2 * panel.peaks[IDEAL]
    part, p90 = best / panel.peaks[IDEAL], panel.p90(IDEAL, rate) / panel.least_p90(panel.ours, rate)
    return [
        Claim(f"{number(part)} of the ideal's peak", part < 1),
        Claim(f"the ideal has {number(p90)} times the p90 at low load", p90 > 1),
        ahead(panel)[0],
    ]


def one_panel(rows: Rows) -> list[Claim]:
    """Return the claims of a figure that has one panel."""
    (panel,) = sweeps(rows).values()
    return ahead(panel)


# The others.


def step_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield times of a step by batch."""
    batches = unique(rows, "batch")
    yield ["ms by rows of a step", *(str(batch) for batch in batches)]
    for panel in unique(rows, "panel"):
        mine = of(rows, panel=panel)
        for server in unique(mine, "server"):
            times = {row["batch"]: row["value"] for row in of(mine, server=server)}
            yield [f"{server}, {panel}", *(number(times[batch]) for batch in batches)]


def steps(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.3: batches raise the throughput until it is flat."""
    mine = [row for row in rows if row["server"] == OURS]
    best = max(row["throughput"] for row in mine)
    gain = best / mine[0]["throughput"]
    enough = min(row["batch"] for row in mine if row["throughput"] > 0.9 * best)
    found = [Claim(f"{number(gain)} times the rows/s of a step of 2, most of it from {enough} rows on", gain > 2)]
    if mine[0]["panel"] == "GPU":
        flat = mine[5]["value"] / mine[0]["value"]
        found.append(Claim(f"a step of {mine[5]['batch']} rows takes {number(flat)} times that of 2", flat < 2))
    return found


def end_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the end of each request."""
    yield ["request ends at step", *map(str, unique(rows, "request"))]
    for server in unique(rows, "server"):
        yield [server, *(number(row["value"]) for row in of(rows, server=server))]


def ends(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.5, whose benchmark compares each end with the paper's."""
    ours, theirs = ([row["value"] for row in of(rows, server=name)] for name in unique(rows, "server"))
    holds = all(a <= b for a, b in zip(ours, theirs, strict=True))
    return [Claim("each request ends when it does in the paper", holds)]


def share_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield some quantiles."""
    shown = [quantile for quantile in (10, 50, 90, 95, 99, 100) if of(rows, quantile=quantile)]
    unit = rows[0]["unit"]
    yield ["panel", "", *(f"p{quantile}, {unit}" for quantile in shown)]
    for panel in unique(rows, "panel"):
        mine = of(rows, panel=panel)
        for server in unique(mine, "server"):
            yield [panel, server, *(number(of(mine, server=server, quantile=q)[0]["value"]) for q in shown)]


def times(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.9."""
    found = []
    for panel, name in zip(unique(rows, "panel"), ("queueing", "computation"), strict=True):
        p99 = {row["server"]: row["value"] for row in of(rows, panel=panel, quantile=99)}
        ours = min(value for server, value in p99.items() if server.startswith(OURS))
        ratio = ours / min(value for server, value in p99.items() if not server.startswith(OURS))
        found.append(Claim(f"p99 of {name} is {number(ratio)} of the lowest peer's", ratio < 1))
    return found


def lengths(rows: Rows) -> list[Claim]:
    """Return the claims of figure 2.10."""
    mine = {row["quantile"]: row["value"] for row in of(rows, server="Europarl-like")}
    return [
        Claim(f"p99 of the draws is {number(mine[99])} words", 90 <= mine[99] <= 105),
        Claim(f"the longest has {number(mine[100])}", mine[100] == 330),
    ]


FIGURES = (
    Figure(
        "2.3",
        "A step of an LSTM",
        "Batches raise the throughput of both devices; up to 64 rows a GPU's step takes about as long as one of 2.",
        step_table,
        steps,
    ),
    Figure("2.5", "Eight requests, batches of four", "No request ends later cell by cell.", end_table, ends),
    Figure(
        "2.7",
        "An LSTM over Europarl's lengths",
        "1.25 times the best peak, a low p90; a limit of 512 has the latency of 64 at low load, a higher peak.",
        sweep_table,
        limits,
    ),
    Figure(
        "2.8",
        "Widths of buckets",
        "Narrow buckets have the highest peak, wide ones the lowest latency at low load.",
        sweep_table,
        widths,
    ),
    Figure(
        "2.9",
        "Where the latency comes from",
        "p99 of queueing is 1.38 ms beside more than 100; computation is shorter too.",
        share_table,
        times,
    ),
    Figure(
        "2.10",
        "Lengths of sentences",
        "99% have fewer than 100 words, the longest 330.",
        share_table,
        lengths,
    ),
    Figure(
        "2.11",
        "Lengths of growing variance",
        "The more lengths vary, the slower are the peers, and the further ahead is BatchMaker.",
        sweep_table,
        variance,
    ),
    Figure(
        "2.13",
        "Sequence to sequence",
        "1.6 times the best peak, a flat p90; different limits add 3.5 to 6%, twice the GPUs double the peak.",
        sweep_table,
        translation,
    ),
    Figure(
        "2.14",
        "Trees of a treebank",
        "1.8 times DyNet's peak, 4 times that of TensorFlow Fold, and a lower p90.",
        sweep_table,
        one_panel,
    ),
    Figure(
        "2.15",
        "Complete trees of 16 leaves",
        "The peak is some 30% below the ideal's, whose latency is higher.",
        sweep_table,
        beside_the_ideal,
    ),
)


def told(claims: Sequence[Claim]) -> str:
    """Return what was found, with what does not agree marked."""
    parts = [claim.found if claim.holds else f"{claim.found} (**not as in the paper**)" for claim in claims]
    agreed = "agrees" if all(claim.holds for claim in claims) else "differs"
    return f"{agreed}. {'. '.join(part[0].upper() + part[1:] for part in parts)}."


def markdown(table: Iterator[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    head = next(table)
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in table:
        yield f"| {' | '.join(row)} |"


def wrapped(text: str) -> Iterator[str]:
    """Yield lines of at most 118 characters: an item of a list has two more."""
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > 118:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def figure_section(figure: Figure) -> Iterator[str]:
    """Yield a figure's lines: its table on each device, the paper's shape, and whether ours agrees."""
    measured = {title: rows for device, title in DEVICES.items() if (rows := read(device, f"figure-{figure.number}"))}
    if not measured:
        return
    yield f"### Figure {figure.number}: {figure.title[0].lower()}{figure.title[1:]}"
    for title, rows in measured.items():
        yield ""
        if len(measured) > 1:
            yield f"**{title}**"
            yield ""
        yield from markdown(figure.table(rows))
    yield ""
    yield from (f"- {line}" if k == 0 else f"  {line}" for k, line in enumerate(wrapped(f"Paper: {figure.paper}")))
    for title, rows in measured.items():
        text = f"{title} {told(figure.claims(rows))}"
        yield from (f"- {line}" if k == 0 else f"  {line}" for k, line in enumerate(wrapped(text)))
    yield ""


def ablation_table(device: str) -> Iterator[Sequence[str]]:
    """Yield what each switch is worth: ratios to everything on, and the rows and steps of a task."""
    found = {name: {row["metric"]: row for row in read(device, f"ablate-{name}")} for name in WORKLOADS}
    found = {name: rows for name, rows in found.items() if rows}
    yield ["off", *(text for name in found for text in (name, "task"))]
    for metric in next(iter(found.values())):
        line = [metric]
        for rows in found.values():
            row = rows[metric]
            line += [f"{row['value']:.2f}; {row['p90_ratio']:.2f}"]
            line += [f"{number(row['rows_a_task'])} x {number(row['steps_a_task'])}"]
        yield line


def ablation_section() -> Iterator[str]:
    """Yield the lines of the ablation, on each device that has one."""
    for device, title in DEVICES.items():
        if any(read(device, f"ablate-{name}") for name in WORKLOADS):
            yield f"### What each switch is worth: {title}"
            yield ""
            yield from markdown(ablation_table(device))
            yield ""
            yield from wrapped(
                "Each row has one switch off (`python -m benchmarks ablate`). Figures are ratios to everything on: of "
                "requests/s with 256 in flight, and of p90 at half of what everything on can do then. A task is the "
                "mean rows times steps. Each engine has two workers. Other work ran on the machine: a ratio between a "
                "half and two tells nothing."
            )
            yield ""


def section() -> str:
    """Return the part of the page between its marks."""
    lines = [
        BEGIN,
        "",
        "## BatchMaker's figures",
        "",
        *wrapped(
            "`python -m benchmarks figures` makes them, on a GPU or on a CPU. These are of 2 cores, hidden size 256, "
            "one worker with one thread. Servers took turns in two rounds, whose medians count. Loads are parts of a "
            "server's own peak. Plots and JSON lines are in `benchmarks/results/`."
        ),
        "",
        *wrapped(
            "**These runs show shapes, not sizes.** Much other work ran on the cores. Figures 2.7 (a) and 2.8 measure "
            "the same servers: folded, cellrt had 1.5 and 2.8 times bucketed torch's peak, and unfolded 0.9 and 1.6 "
            "times. So a ratio between a half and two tells nothing. Clients sent requests up to 0.4 s late, which "
            "their latency includes. `Agrees` compares the best of cellrt's forms with the best peer. Figure 2.3 takes "
            "processor time, and figures 2.5 and 2.10 need no machine."
        ),
        "",
    ]
    for figure in FIGURES:
        lines += figure_section(figure)
    lines += ablation_section()
    return "\n".join([*lines, END])


def page() -> str:
    """Return the text of the page, with its part made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + section() + rest.partition(END)[2]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
