"""Engines on a GPU: a fused LSTM, two engines on one device, and a soak with cancellations.

CELLRT_SOAK_S is how long the soak lasts, in seconds; ``make gpu-soak`` makes it ten minutes.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.engine import Engine
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.author import OPERATIONS, make_unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of
from tests.engine.test_cuda_worker import device_engine, serve
from tests.engine.zoo import make_zoo
from tests.kernels.tolerances import KINDS, served_tolerance

HIDDEN = 64
MOST_STEPS = 7
DEVICES = ["dry", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.slow
def test_the_fused_lstm_gives_what_the_plain_one_gives(device, runs, dtype, precision):
    from benchmarks.gpu_cells import FusedLSTM

    torch.manual_seed(3)
    row = RowSpec((HIDDEN,), dtype)
    lstm = cell(FusedLSTM(HIDDEN, dtype, precision), {"x": row, "h": row, "c": row}, max_batch=32)

    def unfold(graph, request):
        chain = graph.chain(lstm, x=request)
        return {"every": chain.h, "last": chain.last.c}

    model = Unfolder("lstm", unfold, torch.zeros(2, HIDDEN, dtype=dtype))
    with Engine(
        [device], settings=SchedulerSettings(runs=runs, join_budget_s=1.0, min_run_s=1.0), arena_bytes=1 << 20
    ) as engine:
        engine.register(model, warm_up=False)
        requests = [torch.randn(1 + k % MOST_STEPS, HIDDEN).to(dtype) for k in range(40)]
        for request, future in zip(requests, engine.submit_many("lstm", requests)):
            expected, actual = run_one_by_one(model, request), future.result(WAIT_S)
            tolerance = served_tolerance((dtype, precision), 2 * HIDDEN, MOST_STEPS)
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_two_engines_share_a_device():
    model = make_unfolder(make_zoo(8))
    engines = [device_engine("cuda:0") for _ in range(2)]
    for engine in engines:
        engine.register(model)
    requests = [[(name, seed)] for name in OPERATIONS for seed in range(4)]
    for engine in engines:
        serve(engine, model, requests)
    for engine in engines:
        close_and_check(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_a_soak_with_cancellations_leaves_nothing_behind(device):
    seconds = float(os.environ.get("CELLRT_SOAK_S", "20" if device != "dry" else "1"))
    draw, model = random.Random(1), make_unfolder(make_zoo(16))
    engine = device_engine(device, 2, DeviceOptions(ring_bytes=1 << 16))
    engine.register(model, warm_up=False)
    end_s, num_compared = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        requests = [
            [(draw.choice(sorted(OPERATIONS)), draw.randrange(1 << 16)) for _ in range(draw.randint(1, 3))]
            for _ in range(16)
        ]
        futures = [engine.submit(model.name, request) for request in requests]
        cancelled = [future for future in futures if draw.random() < 0.3]
        for future in cancelled:
            if draw.random() < 0.5:  # else while it still waits
                time.sleep(draw.uniform(0.0, 2e-3))
            future.cancel()
        for request, future in zip(requests, futures):
            error = error_of(future)
            assert error is None or (type(error).__name__ == "CancelledError" and future in cancelled)
            if error is None and draw.random() < 0.2:
                assert_same(future.result(), run_one_by_one(model, request))
                num_compared += 1
    assert num_compared
    close_and_check(engine)


@pytest.mark.gpu
def test_random_delays_on_every_stream_change_nothing(monkeypatch):
    """Two workers of one device, whose streams stand still for up to a millisecond before any task."""
    from cellrt.worker.device.cuda import CudaDevice

    draw, note_launched = random.Random(2), CudaDevice.note_launched

    def launch_late(device: CudaDevice, has_download: bool) -> None:
        for stream in (device._compute, device._up, device._down):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw.randrange(1, 2_000_000))
        note_launched(device, has_download)

    monkeypatch.setattr(CudaDevice, "note_launched", launch_late)
    model = make_unfolder(make_zoo(8))
    engine = device_engine("cuda:0", 2, DeviceOptions(ring_bytes=1 << 16, capture_after=1))
    engine.register(model, warm_up=False)
    for seed in range(10):
        serve(engine, model, [[(name, seed), (other, seed)] for name in OPERATIONS for other in OPERATIONS])
    close_and_check(engine)
