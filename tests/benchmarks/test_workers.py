"""The workers' benchmark: what it makes a table of, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks import workers
from benchmarks.options import Options
from benchmarks.record import Recorder


def test_the_table_has_a_line_a_case_and_a_column_a_form():
    recorder = Recorder("workers")
    for form, value in ((workers.THREADS, 40.0), (workers.PROCESSES, 9.5)):
        recorder.add("small", f"{form}: task", value, "us", workers=1, client="idle")
    for form, value in ((workers.THREADS, 4000.0), (workers.PROCESSES, 950.0)):
        for metric, factor in (("rate", 1), ("p50", 0.001), ("p99", 0.01)):
            recorder.add("small", f"{form}: {metric}", factor * value, "", workers=2, client="busy")
    assert workers.markdown(recorder)[2:] == [
        "| small | 1 | idle | task, us | 40 | 9.5 |",
        "| small | 2 | busy | requests/s; p50, p99 ms | 4,000; 4, 40 | 950; 0.95, 9.5 |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", workers.PARTS)
def test_part_runs(part):
    recorder = Recorder("workers")
    workers.run(recorder, Options(quick=True, only=(part,)))
    assert recorder.rows
    assert all(row["value"] > 0 for row in recorder.rows)
