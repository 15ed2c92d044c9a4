"""Workers of devices give what running the nodes one by one gives, whatever the device's delay, rings and captures.

The device "dry" runs tasks late, on threads of the CPU; the tests marked ``gpu`` repeat the others on a real one.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.errors import CellError, DefinitionError, DeviceError, EngineClosedError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.dry import DryDevice, DryDeviceError
from cellrt.worker.device.executor import DeviceExecutor, DeviceOptions
from tests.effort import examples
from tests.engine.author import make_unfolder
from tests.engine.helpers import SMALL, WAIT_S, assert_same, close_and_check, error_of
from tests.engine.models import DIE, NOT_FINITE, RAISE, WIDTH, WRONG_SHAPE, chain_model, loop_model, make_cells
from tests.engine.test_engine_properties import REQUESTS
from tests.engine.zoo import make_zoo
from tests.waiting import until

DEVICES = ["dry", pytest.param("cuda:0", marks=pytest.mark.gpu)]
on_every_device = pytest.mark.parametrize("device", DEVICES)
FEW = settings(suppress_health_check=list(HealthCheck), max_examples=examples(10))
PLAIN, WITH_STEPS, COUNT = make_cells()
OPTIONS = st.builds(
    DeviceOptions,
    # The smallest ring holds less than one large task, so some tasks get memory of their own.
    ring_bytes=st.sampled_from([2048, 16_384, 1 << 20]),
    graph_bytes=st.sampled_from([0, 2048, 1 << 30]),
    capture_after=st.integers(1, 3),
    dry_delay_s=st.sampled_from([0.0, 2e-4]),
)


STAND_IN = os.environ.get("CELLRT_STAND_IN", "dry")
"""With "cuda:0", what is written for the stand-in runs on a GPU: what only a stand-in can show fails there."""


def device_engine(device: str, workers: int = 1, options: DeviceOptions | None = None, **others: object) -> Engine:
    device = STAND_IN if device == "dry" else device
    others.setdefault("limits", SMALL)
    others.setdefault("arena_bytes", 1 << 16)
    return Engine([device] * workers, device_options=options or DeviceOptions(ring_bytes=1 << 16), **others)


def devices_of(engine: Engine) -> list[object]:
    return [worker._device for worker in engine._manager.workers]


def serve(engine: Engine, model: Unfolder, requests: list[object]) -> None:
    """Every answer is the reference's."""
    futures = engine.submit_many(model.name, requests)
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))


@FEW
@given(
    requests=REQUESTS,
    workers=st.integers(1, 3),
    options=OPTIONS,
    queue_depth=st.integers(1, 4),
    max_batch=st.sampled_from([1, 3, 64]),
    padded=st.booleans(),
    runs=st.booleans(),
)
def test_random_graphs_give_what_their_nodes_give_one_by_one(
    requests, workers, options, queue_depth, max_batch, padded, runs
):
    model = make_unfolder(make_zoo(max_batch, padded))
    chosen = SchedulerSettings(runs=runs, join_budget_s=1.0)
    engine = device_engine("dry", workers, options, queue_depth=queue_depth, settings=chosen)
    try:
        engine.register(model, warm_up=False)
        serve(engine, model, requests)
        engine.check()
    finally:
        close_and_check(engine)


@pytest.mark.gpu
@FEW
@given(requests=REQUESTS, options=OPTIONS, max_batch=st.sampled_from([3, 64]), padded=st.booleans())
def test_random_graphs_on_a_gpu(requests, options, max_batch, padded):
    model = make_unfolder(make_zoo(max_batch, padded))
    engine = device_engine("cuda:0", 2, options)  # two workers of one device: rows move between them
    try:
        engine.register(model, warm_up=False)
        serve(engine, model, requests)
        engine.check()
    finally:
        close_and_check(engine)


@on_every_device
def test_tasks_of_equal_layout_are_captured_and_give_the_same(device):
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
    engine = device_engine(device, 1, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    for seed in range(4):
        torch.manual_seed(seed)
        serve(engine, model, [torch.randn(4, WIDTH) for _ in range(6)])
    captures = engine._manager.workers[0]._executor._captures
    assert sum(capture is not None for capture in captures._known.values()) > 0
    close_and_check(engine)


class State(NamedTuple):
    h: Tensor


def add_twice(x: Tensor, h: Tensor) -> State:
    return State(2 * x + 0.5 * h)


def subtract(x: Tensor, h: Tensor) -> State:
    return State(x - 0.5 * h)


@on_every_device
def test_a_cell_that_takes_the_place_of_another_is_not_run_by_what_was_captured_of_that(device):
    inputs = {"x": (WIDTH,), "h": (WIDTH,)}
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
    engine = device_engine(device, 1, options, settings=SchedulerSettings(runs=False))
    executor = engine._manager.workers[0]._executor
    for made in (cell(add_twice, inputs, max_batch=8), cell(subtract, inputs, max_batch=4, finite=["h"])):
        model = chain_model("chain", made)
        engine.register(model, warm_up=False)
        for _ in range(4):
            serve(engine, model, [torch.randn(4, WIDTH) for _ in range(6)])
        assert any(capture is not None for capture in executor._captures._known.values())
        engine.unregister("chain")
        assert engine.drain(WAIT_S)
        engine.check()
        assert not executor._captures._known and not executor.device.placements._placed
        assert executor._captures.used_bytes == 0
    close_and_check(engine)


@on_every_device
def test_a_cell_that_was_measured_and_had_no_task_leaves_no_weights_on_its_device(device):
    engine = device_engine(device)
    placements = engine._manager.workers[0]._device.placements
    for factor in (1.0, 2.0, 3.0):
        step = FusedAdd()
        torch.nn.init.constant_(step.scale, factor)
        engine.register(chain_model("chain", cell(step, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=4)), replace=True)
        until(lambda: len(placements._placed) == 1, "the weights before are given up")
    engine.unregister("chain")
    until(lambda: not placements._placed, "the last weights are given up")
    close_and_check(engine)


class FusedAdd(nn.Module):
    """A cell that reads and writes arena rows itself; its plain form gives something else, so that one can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, h: Tensor) -> State:
        return State(self.scale * x + 0.5 * h)

    def run_rows(self, inputs, outputs):
        assert set(inputs) == {"x", "h"} and set(outputs) == {"h"}
        x, h, out = inputs["x"], inputs["h"], outputs["h"]
        written = out.rows[out.rows >= 0]
        assert len(written.unique()) == len(written)
        value = self.scale * x.values[x.rows] + 0.5 * h.values[h.rows] + 100.0
        out.values[written] = value[out.rows >= 0]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("finite", [[], ["h"]])
def test_a_cell_may_read_and_write_rows_itself(runs, finite):
    fused = cell(FusedAdd(), {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8, finite=finite)
    model = chain_model("chain", fused)
    chosen = SchedulerSettings(runs=runs, join_budget_s=1.0)
    engine = device_engine("dry", 1, settings=chosen)
    engine.register(model, warm_up=False)
    requests = [torch.randn(1 + k % 5, WIDTH) for k in range(20)]
    for request, future in zip(requests, engine.submit_many("chain", requests)):
        result, state = future.result(WAIT_S), torch.zeros(WIDTH)
        for step, x in enumerate(request):
            state = 2 * x + 0.5 * state + 100.0
            torch.testing.assert_close(result["every"][step], state)
        torch.testing.assert_close(result["last"], state)
    close_and_check(engine)


def test_a_switch_turns_fused_cells_off():
    model = chain_model("chain", cell(FusedAdd(), {"x": (WIDTH,), "h": (WIDTH,)}))
    engine = device_engine("dry", 1, DeviceOptions(ring_bytes=1 << 16, fused=False))
    engine.register(model, warm_up=False)
    serve(engine, model, [torch.randn(3, WIDTH)])
    close_and_check(engine)


@on_every_device
@pytest.mark.parametrize("fault", [RAISE, WRONG_SHAPE, NOT_FINITE])
@pytest.mark.parametrize("name", ["chain", "runs", "loop"])
def test_only_the_guilty_requests_fail(device, fault, name):
    made = {"chain": PLAIN, "runs": WITH_STEPS, "loop": COUNT}[name]
    model = loop_model(name, made) if name == "loop" else chain_model(name, made)
    engine = device_engine(device)
    engine.register(model, warm_up=False)
    requests: list[object] = []
    for k in range(12):
        mark = fault if k in (2, 3, 9) else 1.0
        steps = torch.ones(1 + k % 5, WIDTH)
        steps[-1, 0] = mark
        requests.append((torch.tensor([mark, 1.0]), 1 + k % 5) if name == "loop" else steps)
    for k, (request, future) in enumerate(zip(requests, engine.submit_many(name, requests))):
        if k in (2, 3, 9):
            assert type(error_of(future)) is CellError
        else:
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


class Countdown(NamedTuple):
    n: Tensor
    seen: Tensor
    stop: Tensor


def test_a_row_past_its_stop_never_shows_the_cell_what_it_would_not_have_come_to():
    def count_down(n: Tensor, seen: Tensor) -> Countdown:
        if n.device.type != "meta" and bool((n < 0).any()):
            raise ValueError("below zero")
        return Countdown(n - 1, seen + n, n == 0)

    number = rows(dtype=torch.int64)
    made = cell(count_down, {"n": number, "seen": number})

    def unfold(graph, request):
        loop = graph.loop(made, until="stop", max_steps=9, n=request)
        return {"every": loop.seen, "last": loop.last.seen, "n": loop.last.n}

    model = Unfolder("countdown", unfold, 1)
    engine = device_engine("dry", settings=SchedulerSettings(join_budget_s=1.0))
    engine.register(model, warm_up=False)
    serve(engine, model, [0, 5, 3, 1, 8])
    close_and_check(engine)


def test_requests_are_cancelled_at_any_moment():
    model = chain_model("chain", PLAIN)
    engine = device_engine("dry", 2, DeviceOptions(ring_bytes=4096, dry_delay_s=2e-4))
    engine.register(model, warm_up=False)
    futures = [engine.submit("chain", torch.ones(1 + k % 9, WIDTH)) for k in range(40)]
    for future in futures[::3]:
        future.cancel()
    for k, future in enumerate(futures):
        error = error_of(future)
        assert error is None or (k % 3 == 0 and type(error).__name__ == "CancelledError")
    close_and_check(engine)


@pytest.mark.parametrize("how", ["device", "thread"])
def test_a_dead_device_fails_what_was_on_it_and_the_others_go_on(how, monkeypatch):
    def touch(x: Tensor, h: Tensor) -> State:
        if how == "device" and x.device.type != "meta" and bool((x[:, 0] == DIE).any()):
            raise DryDeviceError("unplugged")
        return State(x + h)

    def download_or_end(device, target, source):
        if how == "thread" and (source.view(torch.float32) == DIE).any():
            raise SystemExit("gone")
        download(device, target, source)

    download = DryDevice.download
    monkeypatch.setattr(DryDevice, "download", download_or_end)

    model = chain_model("chain", cell(touch, {"x": (WIDTH,), "h": (WIDTH,)}))
    engine = device_engine("dry", 2)
    engine.register(model, warm_up=False)
    deadly = torch.full((2, WIDTH), DIE)
    error = engine.submit("chain", deadly).exception(WAIT_S)
    assert type(error) is DeviceError
    assert ("unplugged" if how == "device" else "gone") in str(error)
    serve(engine, model, [torch.randn(3, WIDTH) for _ in range(5)])
    assert type(engine.submit("chain", deadly).exception(WAIT_S)) is DeviceError
    with pytest.raises(EngineClosedError, match="no worker left"):
        engine.submit("chain", torch.ones(2, WIDTH))
    close_and_check(engine)


@pytest.mark.parametrize("ring_bytes", [512, 1 << 16])  # with the small one, others wait for the hung task's room
def test_a_hung_task_loses_its_device(ring_bytes):
    is_over = threading.Event()

    class Hang(nn.Module):
        def __deepcopy__(self, memo):
            return self

        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "meta" and (x == 7).any():
                is_over.wait(WAIT_S)
            return x + 1

    made = cell(Hang(), {"x": (WIDTH,)})
    model = Unfolder("hang", lambda graph, request: made(x=request), torch.zeros(WIDTH))
    engine = device_engine("dry", 2, DeviceOptions(ring_bytes=ring_bytes, hang_s=0.2))
    engine.register(model, warm_up=False)
    serve(engine, model, [torch.zeros(WIDTH)])
    hung = engine.submit("hang", torch.full((WIDTH,), 7.0))
    others = [engine.submit("hang", torch.ones(WIDTH)) for _ in range(40)]
    error = error_of(hung)
    assert type(error) is DeviceError
    assert "HungError" in str(error)
    for other in others:  # those at the other device are served
        if error_of(other) is None:
            assert_same(other.result(), {"output": torch.full((WIDTH,), 2.0)})
        else:
            assert type(error_of(other)) is DeviceError
    serve(engine, model, [torch.ones(WIDTH)])
    is_over.set()
    close_and_check(engine)


@on_every_device
def test_the_device_is_given_tasks_before_it_is_done_with_those_it_has(device):
    most = []
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=2))
    engine = device_engine(device, 1, DeviceOptions(ring_bytes=1 << 16, dry_delay_s=1e-3))
    engine.register(model, warm_up=False)
    worker = engine._manager.workers[0]
    futures = engine.submit_many("chain", [torch.ones(8, WIDTH) for _ in range(12)])
    end_s = time.monotonic() + WAIT_S
    while not all(future.done() for future in futures) and time.monotonic() < end_s:
        most.append(worker.num_outstanding)
        time.sleep(1e-4)
    assert all(future.done() for future in futures)
    assert max(most) > 1
    close_and_check(engine)


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(DefinitionError, match=r"'cpu:process' was removed: use cellrt\.EngineProcess"):
        Engine(["cpu:process"])
    with pytest.raises(DefinitionError, match="expected 'cpu', 'cuda:0' or so, got 'tpu'"):
        Engine(["tpu"])
    with pytest.raises(DefinitionError, match="no 'cuda:99' here"):
        Engine(["cuda:99"])
    with pytest.raises(DefinitionError, match="devices of one kind"):
        Engine(["cpu", "dry"])


def test_a_task_larger_than_the_rings_gets_memory_of_its_own():
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}))
    engine = device_engine("dry", 1, DeviceOptions(ring_bytes=256))
    engine.register(model, warm_up=False)
    serve(engine, model, [torch.randn(1 + k % 9, WIDTH) for k in range(30)])
    close_and_check(engine)


def test_a_thread_that_is_stuck_in_submitting_loses_its_device(monkeypatch):
    monkeypatch.setattr("cellrt.worker.device.cuda_worker.BEGIN_FACTOR", 1)
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}))
    engine = device_engine("dry", 2, DeviceOptions(ring_bytes=1 << 16, hang_s=0.2))
    engine.register(model, warm_up=False)
    is_over, stuck = threading.Event(), []

    def begin_late(executor, launch):
        if not stuck:
            stuck.append(executor)
            is_over.wait(WAIT_S)
        return begin(executor, launch)

    begin = DeviceExecutor.begin
    monkeypatch.setattr(DeviceExecutor, "begin", begin_late)
    error = engine.submit("chain", torch.ones(2, WIDTH)).exception(WAIT_S)
    assert type(error) is DeviceError and "does not take a task" in str(error)
    serve(engine, model, [torch.ones(2, WIDTH)])
    is_over.set()
    close_and_check(engine)
