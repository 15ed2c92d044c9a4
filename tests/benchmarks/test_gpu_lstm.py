"""What the LSTM's figures on a GPU compare is the same work: words are embedded, runs are as long as by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu, gpu_kernels
from benchmarks.gpu_cells import FusedLSTM
from benchmarks.gpu_kernels import COSTS, Floors, measure_kernels
from benchmarks.record import Recorder
from cellrt.core.state.settings import SchedulerSettings
from cellrt.kernels.tuning_cases import OPERATIONS

TINY = gpu.Size(8, 3, 2, 1)


class Lookups(TorchDispatchMode):
    """Counts rows that are looked up in a table as large as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.index_select and len(args[0]) == gpu.VOCABULARY:
            self.count += len(args[2])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["ideal", "cudnn"])
def test_what_is_timed_embeds_its_words(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def once(work: Callable[[], object], device: torch.device) -> float:
        with Lookups() as seen:
            work()
        looked_up.append(seen.count)
        return 1.0

    monkeypatch.setattr(gpu, "time_captured", once)
    monkeypatch.setattr(gpu, "time_calls", once)
    if way == "ideal":
        gpu._ideal(FusedLSTM(TINY.hidden), "dry", TINY)
    else:
        gpu._cudnn("dry", TINY, torch.float32)
    assert looked_up == [TINY.steps * TINY.batch]


@pytest.mark.slow
def test_runs_are_measured_as_long_as_they_are_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(gpu, "_ideal", lambda *given: 1.0)
    monkeypatch.setattr(gpu, "_cudnn", lambda *given: 1.0)
    monkeypatch.setattr(gpu, "_measure_engine", lambda *given: seen.update({given[-1]: given[5]}))
    gpu.measure_lstm(Recorder("gpu"), "dry", TINY, torch.float32)
    assert seen == {"runs": SchedulerSettings(), "step by step": SchedulerSettings(runs=False)}


def test_every_step_is_measured_against_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "time_captured", lambda work, device: 1.0)
    recorder, cpu = Recorder("gpu"), torch.device("cpu")
    measure_kernels(recorder, cpu, Floors(1.0, {torch.float32: 1e9, torch.bfloat16: 1e9}))
    ratios = {row["case"]: row["value"] for row in recorder.rows if row["metric"] == "floor / time"}
    for operation in OPERATIONS:
        rows, squares = COSTS[operation]
        assert ratios[f"{operation} torch.float32"] == pytest.approx(4 * (rows * 4 * 8 + squares * 64))
