"""Profiles: what is measured is kept, read between and beyond, and chosen from as the paper does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.errors import DefinitionError
from cellrt.planning.measuring import measure, sizes_of
from cellrt.planning.profile import CellProfile, HostCosts, Profile, best_batch, read_profile
from tests.serve import models

CELL = CellProfile("step", (1, 2, 4), (1e-3, 1.5e-3, 2e-3), 4)


@pytest.mark.parametrize("host", [HostCosts(5e-5, 1e-4), None], ids=["now", "before hosts were measured"])
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, host: HostCosts | None) -> None:
    profile = Profile("cpu", {"id": CELL}, host)
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 99}',
        '{"format": 1, "device": "cpu", "cells": {"a": 1}}',
        '{"format": 1, "device": "cpu", "cells": {}, "host": {"task_s": 1}}',
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DefinitionError, match="is no profile"):
        read_profile(path)


@pytest.mark.parametrize(("rows", "expected"), [(1, 1e-3), (2, 1.5e-3), (3, 1.75e-3), (4, 2e-3), (8, 4e-3)])
def test_steps_between_and_beyond_what_was_measured(rows: int, expected: float) -> None:
    assert CELL.seconds(rows) == pytest.approx(expected)


def test_the_best_batch_is_the_smallest_that_is_nearly_as_fast_as_any() -> None:
    rows, step_s = (1, 2, 4, 8), (1.0, 1.0, 1.0, 1.98)
    assert best_batch(rows, step_s, None) == 4  # 8 rows are but 1% more a second
    assert best_batch(rows, (1.0, 1.0, 1.0, 1.0), None) == 8
    assert best_batch(rows, (1.0, 1.0, 1.5, 1.6), 1.2) == 2
    assert best_batch(rows, step_s, 0.1) == 1


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8), st.floats(1e-6, 1.0))
def test_no_chosen_batch_takes_longer_than_the_bound(step_s: list[float], bound_s: float) -> None:
    rows = tuple(1 << power for power in range(len(step_s)))
    chosen = best_batch(rows, tuple(step_s), bound_s)
    took = dict(zip(rows, step_s))[chosen]
    assert took <= bound_s or (chosen == 1 and min(step_s) > bound_s)


def test_every_cell_of_a_model_is_measured_at_every_size() -> None:
    heard: list[str] = []
    profile = measure(models.two, None, heard.append, seconds_each=0.0)
    (cell,) = profile.cells.values()
    assert cell.rows == tuple(sizes_of(models.STEP)) == (1, 2, 4, 8)
    assert all(seconds > 0 for seconds in cell.step_s) and len(heard) == 5
    assert set(profile.cells) == {models.STEP.identity}
    assert profile.host is not None and min(profile.host.request_s, profile.host.task_s) >= 0.0
    assert profile.host.request_s + profile.host.task_s > 1e-5  # no request is served in less
