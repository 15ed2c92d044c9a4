"""What a run did and when: the tasks, the requests they served, numbers about both, and a picture.

The picture is the one of Figure 2.5 of the BatchMaker paper: each request is a row, each task a column.
Times are seconds on one clock, wherever its zero is. Nothing here knows the runtime; drawing needs
matplotlib, which the extra `cellrt[plot]` brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from cellrt.core.simulate import Simulation

CELL_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#a88400", "#9d755d")
Corners = tuple[tuple[float, float], ...]  # of one box
WORKER_HATCHES = ("", "////", "....", "xxxx", "||||", "oooo", "----", "++++")
LIFE_COLOUR = "#e3e5ea"
INK = "#33363d"
TIMES = "\N{MULTIPLICATION SIGN}"
LONGEST_LABEL = 28  # characters
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class TaskSpan:
    """One task: `rows` rows of one cell type, for `steps` successive steps, on one worker.

    `requests` holds the request of each node; a request with several nodes in the task may stand there
    several times, and the picture then writes their number into its box.
    """

    task: int
    worker: int
    cell: str
    start_s: float
    end_s: float
    rows: int
    steps: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class RequestSpan:
    """One request from its arrival until its result (or error) was handed back."""

    request: int
    label: str
    arrival_s: float
    finish_s: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """Tasks and requests of one run, or of a part of it, in any order."""

    tasks: list[TaskSpan]
    requests: list[RequestSpan]

    def __repr__(self) -> str:
        return f"Timeline({len(self.tasks)} tasks, {len(self.requests)} requests)"

    def window(self, first: int, count: int) -> Timeline:
        """At most `count` requests, by arrival from number `first` on, and the tasks that touch them.

        The tasks are kept whole: their rows count those of requests outside the window too.

        Raises:
            ValueError: `first` is negative or `count` is not positive.
        """
        if first < 0 or count < 1:
            raise ValueError(f"a window needs first >= 0 and count >= 1, not first={first} and count={count}")
        requests = self._by_arrival()[first : first + count]
        kept = {span.request for span in requests}
        return Timeline([task for task in self.tasks if not kept.isdisjoint(task.requests)], requests)

    def summary(self) -> dict[str, float]:
        """Numbers of the run. Times are seconds, `mean_rows` and `mean_steps` plain means over the tasks.

        Per request: `latency` is arrival to finish, `queueing` arrival to the start of the first task,
        `computation` that start to finish; each with `_p50_s`, `_p90_s` and `_p99_s` (linear interpolation).
        Requests that no task served count in throughput and latency only. `mean_rows_over_time` weights
        each task's rows by how long it ran. Throughput counts from the first arrival to the last finish.

        Raises:
            ValueError: there are no requests, no tasks, none that belong together, or no time passes.
        """
        self._require_requests("summarise")
        if not self.tasks:
            raise ValueError("cannot summarise a timeline without tasks")
        starts = self._first_starts()
        served = [span for span in self.requests if span.request in starts]
        if not served:
            raise ValueError("cannot summarise a timeline whose tasks serve none of its requests")
        elapsed_s = max(r.finish_s for r in self.requests) - min(r.arrival_s for r in self.requests)
        if elapsed_s <= 0:
            raise ValueError("cannot summarise a timeline in which no time passes")
        rows = np.array([task.rows for task in self.tasks], dtype=np.float64)
        mean_rows = float(rows.mean())
        durations_s = np.array([task.end_s - task.start_s for task in self.tasks])
        return {
            "requests": float(len(self.requests)),
            "tasks": float(len(self.tasks)),
            "throughput_per_s": len(self.requests) / elapsed_s,
            **_percentiles("latency", [r.finish_s - r.arrival_s for r in self.requests]),
            **_percentiles("queueing", [starts[r.request] - r.arrival_s for r in served]),
            **_percentiles("computation", [r.finish_s - starts[r.request] for r in served]),
            "mean_rows": mean_rows,
            "mean_rows_over_time": float(np.average(rows, weights=durations_s)) if durations_s.any() else mean_rows,
            "mean_steps": float(np.mean([task.steps for task in self.tasks])),
        }

    def save(self, path: str | Path) -> None:
        """Draw the timeline into an SVG or PNG file; the suffix of `path` says which.

        Above, one strip a worker: a column for each task, as high as its rows, the number written over it
        where there is room (rows times steps where tasks differ in steps). Below, one row a request: a light
        bar from arrival to finish, and a box for every task it took part in. Colours are cell types,
        hatches are workers. Made for 10 to 60 requests: take a `window` of a longer run. In an SVG,
        the groups `task-<worker>`, `life-<request>`, `boxes-<request>-<worker>` and `label-<request>`
        hold the shapes.

        Raises:
            ValueError: there are no requests, or the suffix is neither .svg nor .png.
            ImportError: matplotlib is not installed.
        """
        self._require_requests("draw")
        suffix = Path(path).suffix.lower()
        if suffix not in (".svg", ".png"):
            raise ValueError(f"a picture is written as .svg or .png, not {suffix!r}: {path}")
        _Drawing(self).figure().savefig(path, format=suffix[1:], dpi=150)

    def _by_arrival(self) -> list[RequestSpan]:
        return sorted(self.requests, key=lambda span: (span.arrival_s, span.request))

    def _require_requests(self, verb: str) -> None:
        if not self.requests:
            raise ValueError(f"cannot {verb} a timeline without requests")

    def _first_starts(self) -> dict[int, float]:
        """Request to the start of its first task, in seconds."""
        starts: dict[int, float] = {}
        for task in self.tasks:
            for request in task.requests:
                starts[request] = min(task.start_s, starts.get(request, task.start_s))
        return starts


def to_timeline(simulation: Simulation, cells: Sequence[str]) -> Timeline:
    """The timeline of a simulated run; `cells` names its cell types in order."""
    tasks = [
        TaskSpan(t.task, t.worker - 1, cells[t.cell_type], t.start_s, t.end_s, t.rows, t.steps, t.requests)
        for t in simulation.tasks
    ]
    requests = [RequestSpan(r.request, r.label, r.arrival_s, r.finish_s) for r in simulation.requests]
    return Timeline(tasks, requests)


def _percentiles(name: str, values_s: Sequence[float]) -> dict[str, float]:
    found = np.percentile(np.array(values_s, dtype=np.float64), PERCENTILES)
    return {f"{name}_p{percent}_s": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def _unit(span_s: float) -> tuple[float, str]:
    """The unit in which `span_s` reads well: how many of it make a second, and its name."""
    for scale, name in ((1.0, "s"), (1e3, "ms")):
        if span_s * scale >= 2.0:
            return scale, name
    return 1e6, "µs"


def _lanes(tasks: Iterable[TaskSpan]) -> tuple[dict[int, int], int]:
    """Index of a task to its lane, and the number of lanes: tasks of one lane do not overlap in time."""
    lane_of: dict[int, int] = {}
    ends: list[float] = []
    for index, task in sorted(enumerate(tasks), key=lambda pair: pair[1].start_s):
        slack_s = 1e-6 * (task.end_s - task.start_s)
        free = (lane for lane, end_s in enumerate(ends) if end_s <= task.start_s + slack_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [task.end_s]
        lane_of[index] = lane
    return lane_of, max(1, len(ends))


def _rectangle(left: float, right: float, bottom: float, top: float) -> Corners:
    return ((left, bottom), (right, bottom), (right, top), (left, top))


def _shorten(label: str) -> str:
    """A label on one line, cut where it is too long."""
    line = " ".join(label.split())
    return line if len(line) <= LONGEST_LABEL else line[: LONGEST_LABEL - 1] + "…"


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Plain text (a dollar sign is a dollar sign), centred and small unless the style says otherwise."""
    usual: dict[str, Any] = {"fontsize": 7.0, "color": INK, "ha": "center", "va": "center"}
    axes.text(x, y, text, parse_math=False, **(usual | style))


class _Drawing:
    """The picture of one timeline. Lengths on paper are inches, times are in the unit of the axis."""

    margin = 0.12
    axis_height = 0.45
    strip_height = 0.46
    number_size = 6.0  # points

    def __init__(self, timeline: Timeline) -> None:
        self.requests = timeline._by_arrival()
        self.tasks = sorted(timeline.tasks, key=lambda task: (task.start_s, task.task))
        self.workers = sorted({task.worker for task in self.tasks})
        self.steps = {task.steps for task in self.tasks}
        cells = sorted({task.cell for task in self.tasks})
        self.colours = dict(zip(cells, cycle(CELL_COLOURS), strict=False))
        self.hatches = dict(zip(self.workers, cycle(WORKER_HATCHES), strict=False))

        self.zero_s = min([r.arrival_s for r in self.requests] + [t.start_s for t in self.tasks])
        end_s = max([r.finish_s for r in self.requests] + [t.end_s for t in self.tasks])
        span_s = end_s - self.zero_s or 1e-6
        self.scale, self.unit = _unit(span_s)
        self.span = span_s * self.scale

        busiest = max((sum(t.worker == worker for t in self.tasks) for worker in self.workers), default=0)
        self.width = float(np.clip(0.16 * busiest, 7.5, 16.0))
        self.row_height = min(0.2, 14.0 / len(self.requests))
        longest = max([len(r.label) for r in self.requests] + [len(f"worker {w}") for w in self.workers])
        self.left = max(0.8, 0.07 * min(longest, LONGEST_LABEL) + 0.2)

    def time(self, at_s: float) -> float:
        """Where a moment lies on the time axis."""
        return (at_s - self.zero_s) * self.scale

    def figure(self) -> Figure:
        """The whole picture: legend, one strip a worker, then the requests and the time axis."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing a timeline needs matplotlib: install cellrt[plot]") from error
        handles = self.legend_handles()
        widest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, int((self.width + self.left - 0.4) // (0.075 * widest + 0.7)))
        header = 0.08 + 0.17 * -(-len(handles) // columns)
        rows_height = self.row_height * len(self.requests) + 0.1
        strips_height = self.strip_height * len(self.workers)
        total_width = self.left + self.width + self.margin
        total_height = header + strips_height + rows_height + self.axis_height

        figure = Figure(figsize=(total_width, total_height), facecolor="white")
        legend = figure.legend(
            handles=handles, ncols=columns, loc="upper left", fontsize=7, frameon=False, borderaxespad=0.3
        )
        for text in legend.get_texts():
            text.set_parse_math(False)

        def add_axes(bottom: float, height: float) -> Axes:
            left, width = self.left / total_width, self.width / total_width
            axes = figure.add_axes((left, bottom / total_height, width, height / total_height))
            axes.set_xlim(-0.004 * self.span, 1.004 * self.span)
            axes.spines[["top", "right", "left"]].set_visible(False)
            return axes

        self.draw_requests(add_axes(self.axis_height, rows_height))
        for i, worker in enumerate(reversed(self.workers)):
            bottom = self.axis_height + rows_height + i * self.strip_height
            self.draw_strip(add_axes(bottom, 0.8 * self.strip_height), worker)
        return figure

    def caption(self) -> str:
        """What the time axis shows, and how much work the picture holds."""
        text = f"time since the first arrival ({self.unit});  "
        text += f"requests: {len(self.requests)}, tasks: {len(self.tasks)}"
        if self.tasks:
            text += f", rows per task on average: {np.mean([task.rows for task in self.tasks]):.1f}"
        if self.steps != {1} and len(self.steps) == 1:
            text += f", steps per task: {min(self.steps)}"
        return text

    def legend_handles(self) -> list[Patch]:
        """One entry a cell type, one a worker if there are several, and one for the light bars."""
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=colour, label=cell) for cell, colour in self.colours.items()]
        if len(self.workers) > 1:
            handles += [
                Patch(fc="#9a9da5", ec="white", lw=0, hatch=hatch, hatch_linewidth=0.6, label=f"worker {worker}")
                for worker, hatch in self.hatches.items()
            ]
        return [*handles, Patch(facecolor=LIFE_COLOUR, label="arrival to finish")]

    def draw_strip(self, axes: Axes, worker: int) -> None:
        """A worker's tasks as columns, as high as their rows, with the rows written above where they fit."""
        tasks = [task for task in self.tasks if task.worker == worker]
        most = max(task.rows for task in self.tasks)
        left = [self.time(task.start_s) for task in tasks]
        right = [self.time(task.end_s) for task in tasks]
        boxes = [_rectangle(a, b, 0, task.rows) for a, b, task in zip(left, right, tasks, strict=True)]
        self.add_boxes(axes, tasks, boxes, f"task-{worker}")
        for task, start, end in zip(tasks, left, right, strict=True):
            has_steps = task.steps > 1 and len(self.steps) > 1
            text = f"{task.rows}{TIMES}{task.steps}" if has_steps else str(task.rows)
            if self.fits(text, end - start):
                style = {"va": "bottom", "fontsize": self.number_size, "gid": f"rows-{task.task}"}
                _write(axes, (start + end) / 2, task.rows + 0.04 * most, text, **style)
        axes.set_ylim(0, 1.35 * most)
        axes.set_xticks([])
        label = f"{most} rows" if len(self.workers) == 1 else str(most)
        axes.set_yticks([most], [label], fontsize=6, color=INK)
        axes.tick_params(axis="y", length=2, color=INK)
        axes.spines["bottom"].set_color(INK)
        if len(self.workers) > 1:
            style = {"ha": "right", "va": "bottom", "transform": axes.transAxes}
            _write(axes, -0.07 / self.width, 0.05, f"worker {worker}", **style)

    def draw_requests(self, axes: Axes) -> None:
        """Each request's life and its boxes, the earliest at the top, and the time axis."""
        tasks_of: dict[int, list[TaskSpan]] = {span.request: [] for span in self.requests}
        for task in self.tasks:
            for request in tasks_of.keys() & set(task.requests):
                tasks_of[request].append(task)
        for row, span in enumerate(self.requests):
            self.draw_request(axes, row, span, tasks_of[span.request])
        axes.set_ylim(len(self.requests) + 0.1, -0.1 - 0.1 / self.row_height)
        axes.set_yticks([])
        axes.set_xlabel(self.caption(), fontsize=7, color=INK)
        axes.tick_params(axis="x", labelsize=7, color=INK, labelcolor=INK)
        axes.grid(axis="x", color="#eef0f3", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_color(INK)

    def draw_request(self, axes: Axes, row: int, span: RequestSpan, tasks: list[TaskSpan]) -> None:
        """One row: label, light bar, tick at arrival, and boxes; tasks at the same time share the height."""
        from matplotlib.patches import Polygon

        arrival, finish = self.time(span.arrival_s), self.time(span.finish_s)
        life = _rectangle(arrival, finish, row + 0.12, row + 0.88)
        axes.add_patch(Polygon(life, facecolor=LIFE_COLOUR, linewidth=0, gid=f"life-{span.request}"))
        axes.plot([arrival, arrival], [row + 0.04, row + 0.96], color=INK, linewidth=1.0)

        lane_of, num_lanes = _lanes(tasks)
        height = 0.76 / num_lanes
        for worker in self.workers:
            mine, boxes = [], []
            for i, task in enumerate(tasks):
                if task.worker == worker:
                    left, right = self.time(task.start_s), self.time(task.end_s)
                    top = row + 0.12 + lane_of[i] * height
                    mine.append(task)
                    boxes.append(_rectangle(left, right, top, top + height))
            self.add_boxes(axes, mine, boxes, f"boxes-{span.request}-{worker}")
            for task, box in zip(mine, boxes, strict=True):
                self.write_nodes(axes, task.requests.count(span.request), box, num_lanes)
        if self.row_height >= 0.1:
            style = {"fontsize": min(7.0, 55 * self.row_height), "gid": f"label-{span.request}"}
            style |= {"ha": "right", "transform": axes.get_yaxis_transform()}
            _write(axes, -0.07 / self.width, row + 0.5, _shorten(span.label), **style)

    def write_nodes(self, axes: Axes, count: int, box: Corners, num_lanes: int) -> None:
        """How many nodes a request has in a task, into its box, if more than one and if there is room."""
        (left, top), (right, bottom) = box[0], box[2]
        if count > 1 and self.fits(str(count), right - left) and self.row_height / num_lanes >= 0.12:
            style = {"va": "center_baseline", "fontsize": self.number_size, "color": "white"}
            _write(axes, (left + right) / 2, (top + bottom) / 2, str(count), **style)

    def add_boxes(self, axes: Axes, tasks: list[TaskSpan], boxes: Sequence[Corners], gid: str) -> None:
        """One group of boxes for tasks of one worker: coloured by cell type, hatched by worker."""
        from matplotlib.collections import PolyCollection

        if not tasks:
            return
        typical = float(np.median([box[1][0] - box[0][0] for box in boxes])) / self.span * self.width * 72
        group = PolyCollection(
            boxes,
            facecolors=[self.colours[task.cell] for task in tasks],
            edgecolors="white",
            linewidths=float(np.clip(0.08 * typical, 0.1, 0.7)),
            hatch=self.hatches[tasks[0].worker] or None,
        )
        group.set_hatch_linewidth(0.6)
        group.set_gid(gid)
        axes.add_collection(group, autolim=False)

    def fits(self, text: str, width: float) -> bool:
        """Whether a number may be written into `width` on the time axis."""
        return (0.62 * len(text) + 0.25) * self.number_size <= width / self.span * self.width * 72
