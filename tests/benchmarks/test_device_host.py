"""What a device's work is measured with, as far as that needs no device."""

from __future__ import annotations

import ctypes

import pytest
import torch

from benchmarks.device_host import ATTENDING, KINDS, OVER_PAGES, RAGGED, measure, serving
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
    times = measure(KINDS[0], is_direct, 10)
    assert set(times) == {"begin", "collect", "begin and collect"}
    assert 0 < times["begin"] <= times["begin and collect"]


@pytest.mark.parametrize(
    ("kind", "num_calls"),
    [(KINDS[0], 10), (KINDS[1], 7), pytest.param(RAGGED, 10, marks=pytest.mark.slow), (OVER_PAGES, 9), (ATTENDING, 9)],
)
def test_a_task_is_one_compiled_call_with_few_of_the_driver(kind, num_calls):
    """Whatever it is: time cannot be tested, but what it is made of."""
    calls = []
    counted = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)(lambda *_: calls.append(1) or 0)
    with serving(kind, True) as (executor, launches):
        executor.device.direct[:5] = ctypes.cast(counted, ctypes.c_void_p).value
        eager = executor.counts()["eager"]
        with torch.inference_mode():
            for launch in launches[-2:]:
                executor.collect(executor.begin(launch))
        assert executor.counts()["eager"] == eager
    assert len(calls) == 2 * num_calls
