"""The timeline: windows and numbers of an example worked out by hand, and the structure of its picture."""

from __future__ import annotations

import builtins
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.view.timeline import MANY, NUM_DRAWN, Timeline
from cellrt.view.timeline_spans import RequestSpan, TaskSpan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline() -> Timeline:
    """Three requests, four tasks on two workers, out of order on purpose.

    request   arrives   first task   finishes
          7         0            1          3
          3         1            3          5
          5         2            3          8
    """
    tasks = [
        TaskSpan(2, 0, "decode", 3.0, 5.0, 2, 1, (3, 5)),
        TaskSpan(0, 0, "encode", 1.0, 2.0, 3, 1, (7,)),
        TaskSpan(1, 1, "decode", 2.0, 3.0, 1, 1, (7,)),
        TaskSpan(3, 1, "decode", 4.0, 8.0, 2, 5, (5, 5)),
    ]
    requests = [
        RequestSpan(5, "third", 2.0, 8.0),
        RequestSpan(7, "first", 0.0, 3.0),
        RequestSpan(3, "second", 1.0, 5.0),
    ]
    return Timeline(tasks, requests)


def test_a_timeline_shows_its_sizes(timeline: Timeline) -> None:
    assert repr(timeline) == "Timeline(4 tasks, 3 requests)"


def groups(path: Path) -> dict[str, ElementTree.Element]:
    """The named groups of an SVG."""
    return {g.get("id", ""): g for g in ElementTree.parse(path).iter(f"{SVG}g")}


def num_shapes(group: ElementTree.Element) -> int:
    """How many shapes a group shows; matplotlib may define a shape once and use it many times."""
    defined = sum(1 for defs in group.iter(f"{SVG}defs") for _ in defs.iter(f"{SVG}path"))
    return sum(1 for _ in group.iter(f"{SVG}path")) - defined + sum(1 for _ in group.iter(f"{SVG}use"))


def test_summary_of_an_example_worked_out_by_hand(timeline: Timeline) -> None:
    found = timeline.summary()
    expected = {
        "requests": 3,
        "tasks": 4,
        "throughput_per_s": 3 / 8,
        "latency_p50_s": 4,  # of 3, 4, 6
        "latency_p90_s": 5.6,
        "latency_p99_s": 5.96,
        "queueing_p50_s": 1,  # of 1, 2, 1
        "queueing_p90_s": 1.8,
        "queueing_p99_s": 1.98,
        "computation_p50_s": 2,  # of 2, 2, 5
        "computation_p90_s": 4.4,
        "computation_p99_s": 4.94,
        "mean_rows": 2,
        "mean_rows_over_time": (2 * 2 + 3 * 1 + 1 * 1 + 2 * 4) / 8,
        "mean_steps": 2,
    }
    assert found == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())


def test_a_request_without_a_task_counts_in_latency_only(timeline: Timeline) -> None:
    found = Timeline(timeline.tasks, [*timeline.requests, RequestSpan(9, "expired", 0.0, 1.0)]).summary()
    assert found["throughput_per_s"] == pytest.approx(4 / 8)
    assert found["latency_p50_s"] == pytest.approx(np.median([3, 4, 6, 1]))
    assert found["queueing_p50_s"] == pytest.approx(1)


def test_tasks_that_take_no_time_weigh_the_same() -> None:
    tasks = [TaskSpan(i, 0, "lstm", 1.0, 1.0, rows, 1, (0,)) for i, rows in enumerate((2, 6))]
    assert Timeline(tasks, [RequestSpan(0, "", 0.0, 1.0)]).summary()["mean_rows_over_time"] == 4.0


@pytest.mark.parametrize(
    ("tasks", "requests", "message"),
    [
        ([], [], "without requests"),
        ([], [RequestSpan(0, "", 0.0, 1.0)], "without tasks"),
        (
            [TaskSpan(0, 0, "lstm", 0.0, 1.0, 1, 1, (1,))],
            [RequestSpan(0, "", 0.0, 1.0)],
            "none of its requests",
        ),
        ([TaskSpan(0, 0, "lstm", 1.0, 1.0, 1, 1, (0,))], [RequestSpan(0, "", 1.0, 1.0)], "no time passes"),
    ],
)
def test_nothing_to_summarise_is_an_error(tasks: list[TaskSpan], requests: list[RequestSpan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline(tasks, requests).summary()


@pytest.mark.parametrize(
    ("first", "count", "requests", "tasks"),
    [
        (0, 3, [7, 3, 5], {0, 1, 2, 3}),
        (0, 1, [7], {0, 1}),
        (1, 1, [3], {2}),
        (1, 9, [3, 5], {2, 3}),
        (2, 1, [5], {2, 3}),
        (3, 1, [], set()),
    ],
)
def test_window_takes_requests_by_arrival_and_their_tasks(
    timeline: Timeline, first: int, count: int, requests: list[int], tasks: set[int]
) -> None:
    window = timeline.window(first, count)
    assert [span.request for span in window.requests] == requests
    assert {task.task for task in window.tasks} == tasks
    assert all(task in timeline.tasks for task in window.tasks), "tasks are kept whole"


def test_window_of_a_window(timeline: Timeline) -> None:
    assert timeline.window(1, 2).window(1, 1).requests == timeline.window(2, 1).requests


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (2, -1)])
def test_window_refuses_what_it_cannot_mean(timeline: Timeline, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="a window needs"):
        timeline.window(first, count)


def test_picture_has_a_row_a_request_and_a_box_a_part_in_a_task(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    timeline.save(path)
    found = groups(path)
    for request in (3, 5, 7):
        assert num_shapes(found[f"life-{request}"]) == 1
        assert f"label-{request}" in found
    boxes = {name: num_shapes(group) for name, group in found.items() if name.startswith("boxes-")}
    assert boxes == {"boxes-7-0": 1, "boxes-7-1": 1, "boxes-3-0": 1, "boxes-5-0": 1, "boxes-5-1": 1}
    assert {name: num_shapes(found[name]) for name in ("task-0", "task-1")} == {"task-0": 2, "task-1": 2}
    assert {name for name in found if name.startswith("rows-")} == {f"rows-{task}" for task in range(4)}


def test_picture_of_a_window_leaves_out_other_requests(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "window.svg"
    timeline.window(1, 1).save(path)
    found = groups(path)
    assert [name for name in found if name.startswith("boxes-")] == ["boxes-3-0"]
    assert num_shapes(found["task-0"]) == 1


def test_picture_of_many_tasks_counts_all_boxes_and_drops_numbers(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    tasks, served = [], dict.fromkeys(range(60), 0)
    for task in range(500):
        requests = tuple(map(int, generator.choice(60, size=4, replace=False)))
        tasks.append(TaskSpan(task, 0, "lstm", task * 1e-3, (task + 1) * 1e-3, 4, 1, requests))
        for request in requests:
            served[request] += 1
    timeline = Timeline(tasks, [RequestSpan(r, f"request {r}", 0.0, 0.5) for r in range(60)])
    path = tmp_path / "many.svg"
    timeline.save(path, count=60)
    found = groups(path)
    assert num_shapes(found["task-0"]) == 500
    assert {r: num_shapes(found[f"boxes-{r}-0"]) for r in range(60)} == served
    assert not any(name.startswith("rows-") for name in found)


def test_picture_without_tasks_and_with_awkward_labels(tmp_path: Path) -> None:
    path = tmp_path / "odd.svg"
    Timeline([], [RequestSpan(0, "$x <&> \\frac$ " + "long " * 50, 1.0, 1.0)]).save(path)
    assert {"life-0", "label-0"} <= groups(path).keys()


def test_picture_as_png(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "timeline.PNG"
    timeline.save(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_refuses_other_formats_and_empty_timelines(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png or \.json, not '\.pdf'"):
        timeline.save(tmp_path / "timeline.pdf")
    with pytest.raises(ValueError, match="without requests"):
        Timeline([], []).save(tmp_path / "empty.svg")
    for count in (0, -3):
        with pytest.raises(ValueError, match="count >= 1"):
            timeline.save(tmp_path / "none.svg", count=count)
    assert list(tmp_path.iterdir()) == []


def test_caption_stands_below_as_it_is(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    timeline.save(path, caption="first $line$\nsecond line")
    text = path.read_text()
    assert "first $line$" in text and "second line" in text


def test_picture_without_matplotlib_says_how_to_install_it(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "cellrt.view.timeline_drawing", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline.save(tmp_path / "timeline.svg")
    timeline.save(tmp_path / "timeline.json")


# --- a moment of a long run ---


def long_run(num_requests: int) -> Timeline:
    """Requests of which each is in three successive tasks of up to nine."""
    tasks = [
        TaskSpan(
            k, k % 2, "lstm", float(k), k + 1.0, 9, 1, tuple(range(max(0, 3 * k - 6), min(num_requests, 3 * k + 3)))
        )
        for k in range(num_requests // 3 + 2)
    ]
    return Timeline(tasks, [RequestSpan(r, f"request {r}", r / 3, r / 3 + 3) for r in range(num_requests)])


@pytest.mark.parametrize(("arguments", "num_drawn"), [({}, NUM_DRAWN), ({"count": 7}, 7)])
def test_picture_of_a_long_run_draws_one_moment_of_it(
    arguments: dict[str, int], num_drawn: int, tmp_path: Path
) -> None:
    path = tmp_path / "long.svg"
    long_run(14_000).save(path, **arguments)
    found = groups(path)
    assert sum(name.startswith("life-") for name in found) == num_drawn
    assert sum(num_shapes(group) for name, group in found.items() if name.startswith("boxes-")) == 3 * num_drawn
    assert num_shapes(ElementTree.parse(path).getroot()) < 20 * num_drawn + 200


def test_last_is_the_end_of_the_run() -> None:
    run = long_run(100)
    assert [span.request for span in run.last(3).requests] == [97, 98, 99]
    assert len(run.last(1000).requests) == 100


@st.composite
def runs(draw: st.DrawFn) -> Timeline:
    num_requests = draw(st.integers(1, 12))
    members = st.lists(st.integers(0, num_requests + 1), min_size=1, max_size=6).map(tuple)
    tasks = [TaskSpan(k, 0, "cell", 0.0, 1.0, 1, 1, members) for k, members in enumerate(draw(st.lists(members)))]
    arrivals = draw(st.lists(st.integers(0, 5), min_size=num_requests, max_size=num_requests))
    return Timeline(tasks, [RequestSpan(r, "", float(at), 9.0) for r, at in enumerate(arrivals)])


@given(runs(), st.integers(1, 14))
def test_busiest_is_the_best_of_all_windows(run: Timeline, count: int) -> None:
    def meetings(window: Timeline) -> tuple[int, int]:
        kept = {span.request for span in window.requests}
        met = [len(kept & set(task.requests)) for task in run.tasks]
        return sum(number >= MANY for number in met), sum(number - 1 for number in met if number)

    windows = [run.window(first, count) for first in range(max(1, len(run.requests) - count + 1))]
    assert run.busiest(count) == max(windows, key=meetings)


# --- for a trace viewer ---


def events_of(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_trace_has_a_complete_event_a_task_in_the_row_of_its_worker(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline.save(path)
    found = {
        (event["args"]["task"], event["name"], event["tid"], event["ts"], event["dur"], event["args"]["rows"])
        for event in events_of(path, "X")
    }
    assert found == {
        (t.task, t.cell, t.worker, t.start_s * 1e6, (t.end_s - t.start_s) * 1e6, t.rows) for t in timeline.tasks
    }
    assert {event["args"]["steps"] for event in events_of(path, "X")} == {1, 5}
    assert [event["args"]["requests"] for event in events_of(path, "X") if event["args"]["task"] == 3] == [[5]]
    rows = {event["args"]["name"] for event in events_of(path, "M")}
    assert rows == {"workers", "requests", "worker 0", "worker 1"}


def test_trace_has_each_request_and_how_long_it_waited(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline.save(path)
    for name, request, arrival_s, start_s, finish_s in (
        ("first", 7, 0, 1, 3),
        ("second", 3, 1, 3, 5),
        ("third", 5, 2, 3, 8),
    ):
        begins = {event["name"]: event["ts"] for event in events_of(path, "b") if event["id"] == request}
        ends = {event["name"]: event["ts"] for event in events_of(path, "e") if event["id"] == request}
        assert begins == {name: arrival_s * 1e6, "queueing": arrival_s * 1e6}
        assert ends == {name: finish_s * 1e6, "queueing": start_s * 1e6}


def test_trace_of_a_long_run_is_whole_unless_a_count_is_given(tmp_path: Path) -> None:
    run, path = long_run(300), tmp_path / "trace.json"
    run.save(path)
    assert len(events_of(path, "X")) == len(run.tasks)
    assert len({event["id"] for event in events_of(path, "b")}) == 300
    run.save(path, count=5)
    assert len({event["id"] for event in events_of(path, "b")}) == 5


def test_trace_without_tasks_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline([], [RequestSpan(4, "", 1.0, 2.0)]).save(path)
    assert [(event["name"], event["ts"]) for event in events_of(path, "b")] == [("request 4", 0.0)]
