"""Each switch changes one thing, tasks show it, and a run gives a row for each switch of the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablate, sweep
from benchmarks.ablate import ON, PARTS, SWITCHES, WORKLOADS
from benchmarks.figures import KINDS, Kind, Scale, Setting, recorder_on
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.sweep import Pace
from cellrt.core.state.settings import SchedulerSettings

PACE = Pace(sample_s=0.001, loads=(), open_s=0.001, most_s=60.0)
SCALE = Scale(4, 20, 20, 4, 2, 3, 2, 1, (2, 4), 6, 1 << 20, 1e-4)
WAIT_S = 60.0
ONE_FIELD = {
    "runs": "runs",
    "early release": "early_release",
    "early ends of runs": "min_run_s",
    "split": "split",
    "gather": "gather",
    "large batches": "large_batches",
    "loops ahead": "loops_ahead",
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little to do as can be."""
    for name in KINDS:
        monkeypatch.setitem(KINDS, name, Kind(SCALE, PACE, PACE))
    monkeypatch.setattr(ablate, "QUICK", PACE)
    monkeypatch.setattr(ablate, "CONCURRENCY", 4)
    monkeypatch.setattr(sweep, "LEAST_REQUESTS", 4)


@pytest.mark.parametrize("name", ONE_FIELD)
def test_a_switch_changes_one_setting_as_algorithm_1_has_it(name: str) -> None:
    plain, field = SchedulerSettings.algorithm_1(), ONE_FIELD[name]
    made = SWITCHES[name].options("dry")["settings"]
    assert getattr(made, field) == getattr(plain, field) != getattr(SchedulerSettings(), field)
    assert replace(made, **{field: getattr(SchedulerSettings(), field)}) == SchedulerSettings()


@pytest.mark.parametrize("name", ["Algorithm 1", "all off"])
def test_all_switches_together_are_algorithm_1(name: str) -> None:
    assert SWITCHES[name].options("cpu")["settings"] == SchedulerSettings.algorithm_1()
    assert SWITCHES[ON].options("cpu")["settings"] == SchedulerSettings()


def test_switches_of_a_gpu_reach_its_workers() -> None:
    assert SWITCHES["captures"].options("cuda:0")["device_options"].graph_bytes == 0
    plain = SWITCHES["compiled forms"].options("cuda:0")["device_options"]
    assert (plain.fused, plain.chains) == (False, False)
    assert SWITCHES[ON].options("cuda:0")["device_options"].graph_bytes > 0


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The engine of the chains on one CPU worker with one switch off, when it has answered."""
    setting = Setting(recorder_on("ablate", "cpu", True), "cpu", SCALE, PACE, None, True)
    workload = WORKLOADS["chains"](setting)
    server = workload.make(**{**setting.engine(1, trace=True), **SWITCHES[request.param].options("cpu")})
    try:
        for future in [server.submit([1] * 20) for _ in range(4)]:
            future.result(WAIT_S)
        yield server.engine
    finally:
        server.close()


@pytest.mark.parametrize("served", ["runs", "Algorithm 1"], indirect=True)
def test_without_runs_every_task_has_one_step(served: Any) -> None:
    assert {task.steps for task in served.timeline().tasks} == {1}


@pytest.mark.parametrize("served", [ON], indirect=True)
def test_with_everything_on_some_tasks_have_several_steps(served: Any) -> None:
    assert max(task.steps for task in served.timeline().tasks) > 1


@pytest.mark.parametrize("served", ["compiled forms", "all off"], indirect=True)
def test_without_compiled_forms_every_cell_runs_as_its_module(served: Any) -> None:
    assert all(cell["form"].startswith("eager") for cell in served.statistics()["cells"].values())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "dry"])
@pytest.mark.parametrize("part", PARTS)
def test_each_switch_of_the_device_has_a_row(part: str, device: str, tmp_path: Path) -> None:
    recorder = Recorder("ablate")
    options = Options(quick=True, only=(part,), device=device, out=tmp_path)
    ablate.run(recorder, options)
    assert [row["metric"] for row in recorder.rows] == [
        name for name, switch in SWITCHES.items() if device == "dry" or not switch.needs
    ]
    assert recorder.rows[0]["value"] == recorder.rows[0]["p90_ratio"] == 1
    assert all(float(str(row["value"])) > 0 for row in recorder.rows)
    lines = (tmp_path / f"ablate-{part}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == recorder.rows
    again = Recorder("ablate")
    ablate.run(again, options)
    assert again.rows == recorder.rows, "they are not measured again"
