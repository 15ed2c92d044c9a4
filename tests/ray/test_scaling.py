"""How many replicas there should be, and what they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.ray.scaling import BUSY, QUEUEING, Load, QueueingPolicy, wanted


@pytest.mark.parametrize(
    ("num", "queueing_s", "busy", "expected"),
    [
        (2, [0.1, 0.0], [1.0, 1.0], 4),  # one waits too long: at most twice as many
        (2, [0.06, 0.0], [1.0, 1.0], 2.4),
        (3, [0.0, 0.0, 0.0], [0.5, 0.5, 0.3], 2),  # the other two have time for the third's work
        (3, [0.0, 0.0, 0.0], [0.5, 0.5, 0.5], 3),
        (1, [0.0], [0.0], 1),
        (3, [0.0], [0.1], 3),  # not all have reported
    ],
)
def test_there_are_more_when_requests_wait_and_fewer_when_workers_rest(
    num: int, queueing_s: list[float], busy: list[float], expected: float
) -> None:
    assert wanted(num, queueing_s, busy, 0.05) == pytest.approx(expected)


@given(st.integers(1, 50), st.lists(st.floats(0, 1e6), max_size=5), st.lists(st.floats(0, 1), max_size=5))
def test_they_never_more_than_double_nor_go_by_more_than_one(
    num: int, queueing_s: list[float], busy: list[float]
) -> None:
    assert num - 1 <= wanted(num, queueing_s, busy, 0.05) <= 2 * num


def test_the_policy_reads_what_replicas_report() -> None:
    context = SimpleNamespace(
        current_num_replicas=2, aggregated_metrics={QUEUEING: {"a": 0.2, "b": 0.0}, BUSY: {"a": 1.0, "b": 0.2}}
    )
    assert QueueingPolicy(0.05)(context) == (4, {})


def counts(waited_s: float, done: int, busy_s: float, ready: int = 0) -> dict[str, Any]:
    return {
        "unfinished": ready,
        "models": {"m": {"histograms": {"queueing": {"sum_s": waited_s, "counts": [done, 0]}}}},
        "cells": {"c": {"ready": ready}},
        "workers": {1: {"busy_s": busy_s}, 2: {"busy_s": busy_s}},
    }


def test_a_replica_reports_the_time_since_it_was_asked_last() -> None:
    load = Load()
    load.look(counts(10.0, 100, 50.0), now_s=1000.0)
    assert load.look(counts(10.3, 103, 51.0), now_s=1002.0) == pytest.approx({QUEUEING: 0.1, BUSY: 0.5})


def test_requests_that_wait_while_none_is_done_have_waited_since() -> None:
    load = Load()
    load.look(counts(10.0, 100, 50.0), now_s=1000.0)
    assert load.look(counts(10.0, 100, 52.0, ready=5), now_s=1002.0)[QUEUEING] == pytest.approx(2.0)
    assert load.look(counts(10.0, 100, 52.0), now_s=1004.0)[QUEUEING] == 0.0
