"""Under overload the scheduler does what a loop in plain Python does; what a late client measures is no figure."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch

from benchmarks import overload
from benchmarks.overload import serve_in_time
from benchmarks.overload_played import LOOPED, STEP_S, WAYS, Shares, Way, Work, draw_work, loop, play, shares
from benchmarks.record import Recorder
from cellrt.core.state.settings import SchedulerSettings
from tools.policies import overload_table

BY_NAME = {way.name: way for way in WAYS}
STEP_BY_STEP = SchedulerSettings(1, runs=False)


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
@pytest.mark.parametrize("way", [way for way in WAYS if way.policy in LOOPED], ids=lambda way: way.name)
def test_step_by_step_the_scheduler_does_what_a_loop_in_its_order_does(way: Way) -> None:
    work = draw_work(1.5, STEP_S, 3.0, seed=0)
    played, expected = play(way, work, STEP_BY_STEP), loop(way, work, fair_every=STEP_BY_STEP.fair_every)
    assert played == pytest.approx(expected, abs=0.003)
    assert played.sentences < 0.95


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
def test_what_can_be_done_is_done_under_utility_and_most_of_it_in_vain_by_arrival() -> None:
    work = draw_work(1.5, STEP_S, 6.0, seed=1)
    found = {name: play(BY_NAME[name], work) for name in ("first come", "utility (DAS)", "shortest")}
    assert found["utility (DAS)"].words > 0.95 / 1.5
    assert found["utility (DAS)"].sentences > 1.5 * found["first come"].sentences
    assert found["utility (DAS)"].worth >= found["shortest"].worth > 2 * found["first come"].worth


def test_shares_are_of_sentences_of_their_worth_and_of_their_words() -> None:
    ones = np.ones(2)
    work = Work(np.array([1, 3]), ones, ones, ones)
    assert shares(work, np.array([2.0, np.inf])) == Shares(0.5, 0.75, 0.25)
    assert shares(work, np.array([2.1, 2.0])) == Shares(0.5, 0.25, 0.75)


def test_a_client_that_is_always_late_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Way] = []

    def late(engine: Any, way: Way, work: Work, sentences: Any) -> Shares:
        tried.append(way)
        return Shares(1.0, 1.0, 1.0, client_late=0.5)

    monkeypatch.setattr(overload, "serve", late)
    engine: Any = None
    with pytest.raises(RuntimeError, match="the client is late"):
        serve_in_time(engine, WAYS[0], draw_work(1.0, STEP_S, 0.1, seed=0), [])
    assert len(tried) == overload.TRIES


def test_how_late_the_client_hands_in_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock says a tenth of a second more each time: of sentences that are due at once the last are late."""
    now, work = iter(np.arange(0.0, 1e3, 0.1).tolist()), draw_work(1.0, STEP_S, 0.01, seed=0)
    work = Work(work.lengths, np.zeros(len(work.lengths)), np.ones(len(work.lengths)), work.begin_s)
    monkeypatch.setattr(overload, "time", SimpleNamespace(perf_counter=lambda: next(now), sleep=lambda seconds: None))

    def submit(model: str, sentence: torch.Tensor, deadline: float) -> Future[None]:
        assert deadline > 0
        future: Future[None] = Future()
        future.set_result(None)
        return future

    engine: Any = SimpleNamespace(submit=submit)
    found = overload.serve(engine, BY_NAME["first come"], work, [torch.zeros(1, 1)] * len(work.lengths))
    assert found.client_late > 1 and found.sentences < 1


def test_of_rounds_the_medians_are_recorded() -> None:
    recorder = Recorder("overload")
    overload.record(recorder, "engines", WAYS[0], 1.5, [Shares(each, each / 2, 0.5) for each in (0.1, 0.5, 0.2)])
    assert [(row["metric"], row["value"]) for row in recorder.rows] == [
        ("done in time", 20.0),
        ("their worth", 10.0),
        ("their words", 50.0),
    ]
    assert recorder.rows[0]["spread"] == pytest.approx(40.0)


def test_a_bar_stands_beside_the_name_of_its_way_also_where_a_case_lacks_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    recorder = Recorder("overload")
    for case, way, share in (("simulated", WAYS[0], 0.1), ("simulated", WAYS[1], 0.2), ("engines", WAYS[1], 0.3)):
        overload.record(recorder, case, way, overload.LOADS[-1], [Shares(share, share, share)])
    overload.draw(recorder.rows, tmp_path / "overload.png")
    engines, simulated = drawn[0].axes
    assert [text.get_text() for text in engines.get_yticklabels()] == [WAYS[0].name, WAYS[1].name]
    at = [
        [(round(bar.get_y() + bar.get_height() / 2), bar.get_width()) for bar in axes.patches]
        for axes in (engines, simulated)
    ]
    assert set(at[0]) == {(1, 30.0)} and set(at[1]) == {(0, 10.0), (1, 20.0)}


def test_the_table_of_the_docs_has_a_row_for_each_order_and_a_column_for_each_case() -> None:
    recorder = Recorder("overload")
    for case, way, share in (("simulated", WAYS[0], 0.1), ("simulated", WAYS[1], 0.2), ("engines", WAYS[0], 0.3)):
        overload.record(recorder, case, way, overload.LOADS[-1], [Shares(share, share, share)])
    overload.record(recorder, "engines", WAYS[2], overload.LOADS[0], [Shares(1.0, 1.0, 1.0)])
    head, _, *rows = overload_table(recorder.rows).splitlines()
    assert head.startswith("| order | simulated: done in time |") and head.endswith("| engines: their words |")
    assert rows == [
        f"| {WAYS[0].name} | 10% | 10% | 10% | 30% | 30% | 30% |",
        f"| {WAYS[1].name} | 20% | 20% | 20% |  |  |  |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_in_processes_of_their_own_take_turns_and_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(overload, "WAYS", [BY_NAME["shortest"], BY_NAME["earliest deadline, must begin"], WAYS[0]])
    monkeypatch.setattr(overload, "MODEL", "light")
    monkeypatch.setattr(overload, "MOST_LATE", math.inf)  # with so small a model the client is
    recorder = Recorder("overload")
    overload.run_engines(recorder, overload.Plan({1.5: 1}, 0.05))
    ways = {row["way"] for row in recorder.rows if row["metric"] == "their worth"}
    assert ways == {"shortest", "first come, nothing is dropped"}
    assert all(0 <= row["value"] <= 100 for row in recorder.rows if row["unit"] == "%")
    overload.draw(recorder.rows, tmp_path / "overload.png")
    assert (tmp_path / "overload.png").stat().st_size > 1000
