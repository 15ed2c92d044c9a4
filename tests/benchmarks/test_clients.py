"""The clients' benchmark: its loads, what it makes of rounds, and that each part runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import clients
from benchmarks.client_load import Load
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.wake import round_trips


def test_a_load_has_its_rate_and_the_same_times_for_the_same_seed():
    load = Load(200.0, 50.0, 3, False)
    times = load.times()
    assert len(times) == 10_000
    assert (np.diff(times) > 0).all()
    assert times[-1] == pytest.approx(50.0, rel=0.05)
    assert (load.times() == times).all()
    assert [each.is_busy for each in clients.loads_of(4, 100.0, 1.0, True)] == [True, False, False, False]
    assert sum(each.rate for each in clients.loads_of(4, 100.0, 1.0, False)) == 100.0


def test_of_rounds_the_medians_are_kept_and_the_longest_of_all():
    recorder = Recorder("clients")
    rounds = [{"p50": k, "p90": 2 * k, "p99": 3 * k, "max": 10 * k} for k in (1.0, 5.0, 2.0)]
    clients.record_open(recorder, "open", clients.OWN, clients.loads_of(2, 100.0, 1.0, True), rounds)
    values = {row["metric"]: row["value"] for row in recorder.rows}
    assert values == {"own process: p50": 2, "own process: p90": 4, "own process: p99": 6, "own process: longest": 50}
    assert {(row["clients"], row["client"], row["rate"]) for row in recorder.rows} == {(2, "one busy", 100.0)}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_each_way_to_wake_another_process_is_measured():
    for pause_s in (0.0, 0.0001):
        found = round_trips(20, pause_s)
        assert len(found) == 3
        assert all(value > 0 for value in found.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", clients.PARTS)
def test_part_runs(part, monkeypatch):
    monkeypatch.setattr(clients, "NUM_CLIENTS", (1, 2))
    monkeypatch.setattr(clients, "RATE", 100.0)
    monkeypatch.setattr(clients, "FAST_RATE", 200.0)
    recorder = Recorder("clients")
    clients.run(recorder, Options(quick=True, only=(part,)))
    assert recorder.rows
    assert all(row["value"] > 0 for row in recorder.rows)
