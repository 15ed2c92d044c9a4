"""What a device's work is measured with, as far as that needs no device."""

from __future__ import annotations

import pytest

from benchmarks.device_host import measure
from benchmarks.gpu_busy import covered


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(1, 3), (5, 6)], 3),
        ([(5, 6), (1, 3)], 3),
        ([(1, 4), (2, 3)], 3),
        ([(1, 4), (2, 6), (6, 7)], 6),
        ([(0, 10), (1, 2), (9, 12)], 12),
    ],
)
def test_time_in_which_several_kernels_run_counts_once(spans, expected):
    assert covered(spans) == expected


@pytest.mark.parametrize("is_direct", [False, True])
def test_the_host_time_of_a_task_is_measured(is_direct):
    times = measure(True, is_direct, 10)
    assert set(times) == {"begin", "collect", "begin and collect"}
    assert 0 < times["begin"] <= times["begin and collect"]
