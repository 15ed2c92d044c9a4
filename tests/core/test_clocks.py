"""Compiled code reads the clocks that Python reads."""

from __future__ import annotations

import time

import numpy as np

from cellrt.native.clocks import now_ns, thread_ns
from cellrt.native.jit import entry
from cellrt.native.row_types import Rows


@entry
def read(times: Rows[int]) -> None:
    times[0], times[1] = now_ns(), thread_ns()


def test_compiled_code_reads_the_time_between_two_looks_of_python() -> None:
    times = np.zeros(2, np.int64)
    read(times)  # compiles it
    before = time.perf_counter_ns(), time.thread_time_ns()
    read(times)
    after = time.perf_counter_ns(), time.thread_time_ns()
    for its, earlier, later in zip(times.tolist(), before, after):
        assert earlier <= its <= later
