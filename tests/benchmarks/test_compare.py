"""A comparison checks, drives and records every server, and leaves out loads that one cannot carry."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bare_loop import BareLoop, Batches
from benchmarks.compare import Plan, Point, closed, compare, draw, loops_per_second
from benchmarks.record import Recorder
from benchmarks.server import BatchServer, InOrder

PLAN = Plan(rounds=1, sample_s=0.01, loads=(0.5,), open_s=0.01, concurrencies=(4, 8))


class Doubling(BatchServer):
    """Doubles numbers, after an optional pause."""

    def __init__(self, pause_s: float = 0.0) -> None:
        never = threading.Event()

        def run(batch: Sequence[int]) -> Iterable[tuple[int, int]]:
            never.wait(pause_s)
            return ((k, 2 * number) for k, number in enumerate(batch))

        super().__init__(lambda threads: run, max_batch=4, threads=1)


def doubling_loop() -> BareLoop:
    """The same in a bare loop."""
    return BareLoop(Batches(lambda batch: ((k, 2 * number) for k, number in enumerate(batch)), InOrder(), 4), threads=1)


def check(name: str, answers: Sequence[int]) -> None:
    if answers != [2, 4, 6]:
        raise AssertionError(name)


def test_every_server_is_measured() -> None:
    recorder = Recorder("compare")
    makers = {name: lambda: Doubling(pause_s=0.005) for name in ("cellrt", "other")}  # so that none is much faster
    comparison = compare(recorder, "case", makers, [1, 2, 3], PLAN, check)
    metrics = [str(row["metric"]) for row in recorder.rows]
    for name in ("cellrt", "other"):
        assert [metric for metric in metrics if metric.startswith(name)] == [
            f"{name}: closed loop of 4",
            f"{name}: closed loop of 8",
            *(f"{name}: {quantile} at 50% of the best peer's peak" for quantile in ("p50", "p90", "p99")),
        ]
    rates = [row["value"] for row in recorder.rows if str(row["metric"]).startswith("other: closed")]
    assert comparison.peaks["other"] == max(rates)
    assert [point.server for point in comparison.points] == ["cellrt", "other"]


def test_a_bare_loop_is_measured_beside_servers() -> None:
    recorder = Recorder("compare")
    plan = replace(PLAN, loads=(0.01,))  # a loop's peak is far above a server's
    comparison = compare(recorder, "case", {"server": Doubling, "loop": doubling_loop}, [1, 2, 3], plan, check)
    metrics = [str(row["metric"]) for row in recorder.rows]
    of = {
        name: [metric.partition(": ")[2] for metric in metrics if metric.startswith(name)] for name in comparison.peaks
    }
    assert of["loop"] == ["computing", *of["server"]]
    assert [point.server for point in comparison.points] == ["server", "loop"]
    with pytest.raises(AssertionError, match="loop"):
        compare(recorder, "case", {"loop": doubling_loop}, [1, 2, 4], PLAN, check)


def test_a_load_is_not_put_on_a_server_that_cannot_carry_it(capsys: pytest.CaptureFixture[str]) -> None:
    makers = {"slow": lambda: Doubling(pause_s=0.05), "fast": Doubling}
    comparison = compare(Recorder("compare"), "case", makers, [1, 2, 3], PLAN, check)
    assert [point.server for point in comparison.points] == ["fast"]
    assert "slow cannot carry" in capsys.readouterr().out


def test_a_wrong_answer_ends_the_comparison() -> None:
    with pytest.raises(AssertionError, match="other"):
        compare(Recorder("compare"), "case", {"other": Doubling}, [1, 2, 4], PLAN, check)


def test_requests_are_used_again_where_they_do_not_suffice() -> None:
    server = Doubling()
    try:
        assert len(closed(server, [1, 2], count=7, concurrency=3).latencies_s) == 7
    finally:
        server.close()


def test_a_sample_is_bounded_for_slow_servers() -> None:
    plan = Plan(rounds=1, sample_s=2.0, loads=(), open_s=1.0)
    assert plan.sample_size(rate=1000, concurrency=512) == 2000
    assert plan.sample_size(rate=100, concurrency=512) == 512
    assert plan.sample_size(rate=10, concurrency=512) == 100
    assert plan.sample_size(rate=0.1, concurrency=512) == 16


def test_loops_run_until_the_time_is_over() -> None:
    assert loops_per_second(lambda: None, 0.01) > 0
    assert loops_per_second(lambda: None, 0.0) > 0


def test_the_figure_has_a_panel_a_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [Point(case, "cellrt", rate, 2.0) for case in ("one", "two") for rate in (1.0, 2.0)]
    draw(points, tmp_path / "folder" / "figure.svg")
    text = (tmp_path / "folder" / "figure.svg").read_text()
    assert text.count('id="axes_') == 2
    draw([], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
