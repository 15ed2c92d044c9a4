"""The picture of a timeline: each request is a row, each task a column, as in Figure 2.5 of the BatchMaker paper.

Drawing needs matplotlib, which the extra ``plot`` brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon

from cellrt.view.paper import CELL_COLOURS, DOTS_PER_INCH, INK, shorten, write
from cellrt.view.timeline_spans import RequestSpan, TaskSpan

Corners = tuple[tuple[float, float], ...]  # of one box
WORKER_HATCHES = ("", "////", "....", "xxxx", "||||", "oooo", "----", "++++")
LIFE_COLOUR = "#e3e5ea"
TIMES = "\N{MULTIPLICATION SIGN}"
LONGEST_LABEL = 28  # characters
AXIS_HEIGHT, NOTE_HEIGHT = 0.45, 0.13  # inches: the time axis with its line, and each line below that


def save_drawing(tasks: Sequence[TaskSpan], requests: Sequence[RequestSpan], path: Path, caption: str) -> None:
    """Draw requests (at least one) and all tasks to a file; the lines of ``caption`` stand below."""
    drawing = TimelineDrawing(tasks, requests, caption)
    drawing.figure().savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


class TimelineDrawing:
    """The picture of one timeline. Lengths on paper are inches, times are in the unit of the axis."""

    margin = 0.12
    strip_height = 0.46
    number_size = 6.0  # points

    def __init__(self, tasks: Sequence[TaskSpan], requests: Sequence[RequestSpan], caption: str = "") -> None:
        self.requests = sorted(requests, key=lambda span: (span.arrival_s, span.request))
        self.tasks = sorted(tasks, key=lambda task: (task.start_s, task.task))
        self.notes = caption.splitlines()
        self.axis_height = AXIS_HEIGHT + NOTE_HEIGHT * len(self.notes)
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
        """Return the position of a moment on the time axis."""
        return (at_s - self.zero_s) * self.scale

    def figure(self) -> Figure:
        """Return the whole picture: legend, one strip a worker, then the requests and the time axis."""
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
        """Return the caption of the time axis, with the numbers of requests and tasks in the picture."""
        text = f"time since the first arrival ({self.unit});  "
        text += f"requests: {len(self.requests)}, tasks: {len(self.tasks)}"
        if self.tasks:
            text += f", rows per task on average: {np.mean([task.rows for task in self.tasks]):.1f}"
        if self.steps != {1} and len(self.steps) == 1:
            text += f", steps per task: {min(self.steps)}"
        return "\n".join([text, *self.notes])

    def legend_handles(self) -> list[Patch]:
        """Return the legend: one entry a cell type, one a worker if there are several, and one for the light bars."""
        handles = [Patch(facecolor=colour, label=cell) for cell, colour in self.colours.items()]
        if len(self.workers) > 1:
            handles += [
                Patch(fc="#9a9da5", ec="white", lw=0, hatch=hatch, hatch_linewidth=0.6, label=f"worker {worker}")
                for worker, hatch in self.hatches.items()
            ]
        return [*handles, Patch(facecolor=LIFE_COLOUR, label="arrival to finish")]

    def draw_strip(self, axes: Axes, worker: int) -> None:
        """Draw a worker's tasks as columns, as high as their rows, with the number of rows above where it fits."""
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
                write(axes, (start + end) / 2, task.rows + 0.04 * most, text, **style)
        axes.set_ylim(0, 1.35 * most)
        axes.set_xticks([])
        axes.set_yticks([most], [f"{most} rows" if most > 1 else "1 row"], fontsize=6, color=INK)
        axes.tick_params(axis="y", length=2, color=INK)
        axes.spines["bottom"].set_color(INK)
        if len(self.workers) > 1:
            style = {"ha": "right", "va": "bottom", "transform": axes.transAxes}
            write(axes, -0.07 / self.width, 0.05, f"worker {worker}", **style)

    def draw_requests(self, axes: Axes) -> None:
        """Draw a row for each request, with the earliest at the top, and the time axis."""
        tasks_of: dict[int, list[TaskSpan]] = {span.request: [] for span in self.requests}
        for task in self.tasks:
            for request in tasks_of.keys() & set(task.requests):
                tasks_of[request].append(task)
        for row, span in enumerate(self.requests):
            self.draw_request(axes, row, span, tasks_of[span.request])
        axes.set_ylim(len(self.requests) + 0.1, -0.1 - 0.1 / self.row_height)
        axes.set_yticks([])
        axes.set_xlabel(self.caption(), fontsize=7, color=INK, parse_math=False)
        axes.tick_params(axis="x", labelsize=7, color=INK, labelcolor=INK)
        axes.grid(axis="x", color="#eef0f3", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_color(INK)

    def draw_request(self, axes: Axes, row: int, span: RequestSpan, tasks: list[TaskSpan]) -> None:
        """Draw a request's row: label, bar, tick at arrival, and boxes; tasks at the same time share the height."""
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
            write(axes, -0.07 / self.width, row + 0.5, shorten(span.label, LONGEST_LABEL), **style)

    def write_nodes(self, axes: Axes, count: int, box: Corners, num_lanes: int) -> None:
        """Write a request's number of nodes in a task into its box, if it is more than one and there is room."""
        (left, top), (right, bottom) = box[0], box[2]
        if count > 1 and self.fits(str(count), right - left) and self.row_height / num_lanes >= 0.12:
            style = {"va": "center_baseline", "fontsize": self.number_size, "color": "white"}
            write(axes, (left + right) / 2, (top + bottom) / 2, str(count), **style)

    def add_boxes(self, axes: Axes, tasks: list[TaskSpan], boxes: Sequence[Corners], gid: str) -> None:
        """Add boxes for tasks of one worker, coloured by cell type and hatched by worker."""
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
        """Return whether a number may be written into ``width`` on the time axis."""
        return (0.62 * len(text) + 0.25) * self.number_size <= width / self.span * self.width * 72


def _unit(span_s: float) -> tuple[float, str]:
    """Return the unit that suits a length of ``span_s``: the number of units in a second, and the unit's name."""
    for scale, name in ((1.0, "s"), (1e3, "ms")):
        if span_s * scale >= 2.0:
            return scale, name
    return 1e6, "µs"


def _lanes(tasks: Iterable[TaskSpan]) -> tuple[dict[int, int], int]:
    """Return the lane of each task, by the task's index, and their number; tasks of one lane do not overlap in time."""
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
