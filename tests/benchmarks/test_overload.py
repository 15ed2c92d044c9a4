"""Under overload the scheduler does what a loop in plain Python does; what a late client measures is no figure."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch

from benchmarks import overload
from benchmarks.overload import STEP_S, WAYS, Shares, Way, draw_work, loop, play, serve_in_time, shares

BY_NAME = {way.name: way for way in WAYS}


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("first come, nothing is dropped", 0.0),
        ("first come", 0.0),
        ("first come, must begin", 0.0),
        ("shortest", 0.04),  # a sixteenth of the tasks begins with the oldest, whatever the policy
    ],
)
def test_the_scheduler_does_what_a_loop_in_its_order_does(name: str, less: float) -> None:
    work = draw_work(1.5, STEP_S, 3.0, seed=0)
    played, expected = play(BY_NAME[name], work), loop(BY_NAME[name], work)
    assert played.sentences == pytest.approx(expected.sentences - less / 2, abs=0.01 + less / 2)
    assert played.words == pytest.approx(expected.words - less / 2, abs=0.01 + less / 2)


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="half a minute")
def test_what_can_be_done_is_done_under_utility_and_most_of_it_in_vain_by_arrival() -> None:
    work = draw_work(1.5, STEP_S, 6.0, seed=1)
    found = {name: play(BY_NAME[name], work) for name in ("first come", "utility (DAS)", "shortest")}
    assert found["utility (DAS)"].words > 0.95 / 1.5
    assert found["utility (DAS)"].sentences > 1.5 * found["first come"].sentences
    assert found["utility (DAS)"].worth >= found["shortest"].worth > 2 * found["first come"].worth


def test_shares_are_of_sentences_of_their_worth_and_of_their_words() -> None:
    ones = np.ones(2)
    work = overload.Work(np.array([1, 3]), ones, ones, ones)
    assert shares(work, np.array([2.0, np.inf])) == Shares(0.5, 0.75, 0.25)
    assert shares(work, np.array([2.1, 2.0])) == Shares(0.5, 0.25, 0.75)


def test_a_client_that_is_always_late_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Way] = []

    def late(server: Any, way: Way, work: overload.Work, sentences: Any) -> Shares:
        tried.append(way)
        return Shares(1.0, 1.0, 1.0, client_late=0.5)

    monkeypatch.setattr(overload, "serve", late)
    server: Any = None
    with pytest.raises(RuntimeError, match="the client is late"):
        serve_in_time(server, WAYS[0], draw_work(1.0, STEP_S, 0.1, seed=0), [])
    assert len(tried) == overload.TRIES


def test_how_late_the_client_hands_in_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock says a tenth of a second more each time: of sentences that are due at once the last are late."""
    now, work = iter(np.arange(0.0, 1e3, 0.1).tolist()), draw_work(1.0, STEP_S, 0.01, seed=0)
    work = overload.Work(work.lengths, np.zeros(len(work.lengths)), np.ones(len(work.lengths)), work.begin_s)
    monkeypatch.setattr(overload, "time", SimpleNamespace(perf_counter=lambda: next(now), sleep=lambda seconds: None))

    def submit(model: str, sentence: torch.Tensor, deadline: float) -> Future[None]:
        assert deadline > 0
        future: Future[None] = Future()
        future.set_result(None)
        return future

    server: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit))
    found = overload.serve(server, BY_NAME["first come"], work, [torch.zeros(1, 1)] * len(work.lengths))
    assert found.client_late > 1 and found.sentences < 1
