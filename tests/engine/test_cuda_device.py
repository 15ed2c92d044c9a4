"""What ``CudaDevice`` asks of torch is right as far as that shows without a GPU: on a stand-in for ``torch.cuda`` that
notes which operations are ordered, and refuses what torch refuses."""

from __future__ import annotations

import functools
import gc
import weakref
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stub_cuda import StubCuda
from benchmarks.stub_driver import StubCounter
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.fused import reads_spans
from cellrt.definition.spec import rows
from cellrt.errors import DeviceError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.cuda import CudaDevice
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.placement import Forms, PlacedCell, Placements
from cellrt.worker.step_measurement import measure_steps
from tests.effort import quickly
from tests.engine.author import OPERATIONS, make_unfolder
from tests.engine.helpers import WAIT_S, close_and_check
from tests.engine.models import WIDTH, chain_model
from tests.engine.test_cuda_worker import device_engine, serve
from tests.engine.zoo import make_zoo

LARGE = 1 << 17


@pytest.fixture
def stub():
    with StubCuda().installed() as stub:
        yield stub


def open_device(name: str = "cpu") -> CudaDevice:
    """The CPU plays a device; operations on it are noted while it is entered."""
    return CudaDevice(name, "copy")


@pytest.fixture
def stub_engines(stub, monkeypatch):
    """Engines with the workers "dry" have CUDA devices over the stand-in instead."""

    def open_device_over_stub(name: str, options: DeviceOptions) -> CudaDevice:
        device = CudaDevice("cpu", "copy", options.direct)
        device.placements = Placements(device.torch_device, options.forms)
        return device

    monkeypatch.setattr("cellrt.engine.engine.open_device", open_device_over_stub)
    return stub


class Halved(NamedTuple):
    h: Tensor


def halve(x: Tensor, h: Tensor) -> Halved:
    return Halved(x + 0.5 * h)


class HalvesRows(nn.Module):
    """The same for rows of arenas."""

    def forward(self, x: Tensor, h: Tensor) -> Halved:
        return halve(x, h)

    def run_rows(self, inputs, outputs):
        x, h, out = inputs["x"], inputs["h"], outputs["h"]
        value = x.values.index_select(0, x.rows) + 0.5 * h.values.index_select(0, h.rows)
        out.values.index_copy_(0, torch.where(out.rows < 0, len(out.values) - 1, out.rows), value)


class CountsSpans(nn.Module):
    """Rows of arenas, however many the device says."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    @reads_spans
    def run_rows(self, inputs, outputs):
        (given,), (made,) = inputs.values(), outputs.values()
        made.values.index_copy_(0, made.rows, given.values.index_select(0, given.rows) + 1)


class CountsRows(nn.Module):
    """A loop's cell for rows of arenas."""

    def forward(self, n: Tensor, seen: Tensor) -> Countdown:
        return count_down(n, seen)

    def run_rows(self, inputs, outputs):
        n, seen = (rows.values.index_select(0, rows.rows) for rows in (inputs["n"], inputs["seen"]))
        for name, value in count_down(n, seen)._asdict().items():
            values, numbers = outputs[name]
            values.index_copy_(0, torch.where(numbers < 0, len(values) - 1, numbers), value)


class Countdown(NamedTuple):
    n: Tensor
    seen: Tensor
    stop: Tensor


def count_down(n: Tensor, seen: Tensor) -> Countdown:
    return Countdown(n - 1, seen + n, n == 0)


def every_step(graph, counting, request):
    loop = graph.loop(counting, until="stop", max_steps=9, n=request)
    return {"every": loop.seen, "last": loop.last.seen}


@pytest.mark.parametrize(
    ("ring_bytes", "direct"),
    quickly([(2048, True)], of=product([2048, 1 << 16], [False, True])),
)
def test_tasks_that_compiled_code_launches_give_what_their_nodes_give(stub_engines, direct, ring_bytes):
    """Chains and runs, fused and plain, loops, results of some steps and of all; without a race between streams."""
    options = DeviceOptions(ring_bytes=ring_bytes, capture_after=1, direct=direct)
    state = {"x": (WIDTH,), "h": (WIDTH,)}
    number = rows(dtype=torch.int64)
    counting = cell(count_down, {"n": number, "seen": number}, max_batch=8)
    fused = cell(CountsRows(), {"n": number, "seen": number}, max_batch=8)
    models = [
        chain_model("plain", cell(halve, state, max_batch=8)),
        chain_model("fused", cell(HalvesRows(), state, max_batch=8, finite=["h"])),
        Unfolder("loop", lambda graph, request: every_step(graph, counting, request), 1),
        Unfolder("fused loop", lambda graph, request: every_step(graph, fused, request), 1),
    ]
    engine = device_engine("dry", 2, options, settings=SchedulerSettings(join_budget_s=1.0, min_run_s=1.0))
    for model in models:
        engine.register(model, warm_up=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        serve(engine, models[0], [torch.randn(1 + k % 5, WIDTH, generator=generator) for k in range(8)])
        serve(engine, models[1], [torch.randn(1 + k % 5, WIDTH, generator=generator) for k in range(8)])
        serve(engine, models[2], [k % 5 for k in range(8)])
        serve(engine, models[3], [k % 5 for k in range(8)])
    counts = [worker.counts() for worker in engine._manager.workers]
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct
    assert sum(each["replayed"] for each in counts) > 0, counts


def halve_by_chance(x: Tensor, h: Tensor) -> Halved:
    """Draws random numbers, which compiled code does not launch."""
    return Halved(x + 0.5 * h + 0 * torch.rand_like(x))


@pytest.mark.parametrize(
    ("function", "ring_bytes", "is_fused"),
    [(halve, 1 << 13, False), (halve_by_chance, 1 << 16, False), (HalvesRows(), 1 << 13, True)],
)
def test_each_task_is_counted_once_however_often_it_found_no_room(stub_engines, function, ring_bytes, is_fused):
    options = DeviceOptions(ring_bytes=ring_bytes, capture_after=1, fused=is_fused)
    model = chain_model("chain", cell(function, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=64))
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    for _ in range(4):
        for future in engine.submit_many("chain", [torch.zeros(24, WIDTH) for _ in range(64)]):
            future.result(WAIT_S)
    (worker,) = engine._manager.workers
    counts, tasks = worker.counts(), worker.num_tasks
    close_and_check(engine)
    assert tasks > 90 and counts["replayed"] + counts["eager"] == tasks, (counts, tasks)


def run(device: CudaDevice, work) -> None:
    with device.entered():
        device.submit(work, False)


def test_rows_of_another_worker_on_the_same_device_are_there_when_they_are_read(stub):
    device, arena = open_device(), torch.arange(40.0).view(10, 4)
    made: list[Tensor] = []
    run(device, lambda: made.append(device.fetch(arena, torch.tensor([1, 5])) + 1))
    assert torch.equal(made[0], arena[[1, 5]] + 1)
    assert stub.races == []


def test_rows_of_another_device_are_there_when_they_are_read(stub):
    device, arena = open_device("cpu:1"), torch.arange(40.0).view(10, 4)
    made: list[Tensor] = []
    run(device, lambda: made.append(device.fetch(arena, torch.tensor([1, 5])) + 1))
    assert torch.equal(made[0], arena[[1, 5]] + 1)
    assert stub.races == []


def test_the_stand_in_repeats_what_is_no_view(stub):
    """``to`` and ``reshape`` may return a view, and copy otherwise."""
    device, values, made = open_device(), torch.arange(6.0).view(2, 3), []
    with device.entered():
        captured = device.capture(lambda: made.append((values.to(torch.int32) + 1, values.t().reshape(6) + 1)))
        values.add_(10)
        captured.replay()
    whole, turned = made[-1]
    assert torch.equal(whole, values.to(torch.int32) + 1) and torch.equal(turned, values.t().reshape(6) + 1)


def test_the_stand_in_sees_a_race(stub):
    device, values = open_device(), torch.zeros(8)

    def work() -> None:
        with torch.cuda.stream(device._down):
            values.add_(1)
        values.mul_(2)

    run(device, work)
    assert any("not ordered" in race for race in stub.races)


@pytest.mark.parametrize("num_bytes", [256, LARGE])
def test_uploads_and_downloads_are_ordered_with_what_is_computed(stub, num_bytes):
    device = open_device()
    source, result = device.pinned(num_bytes), device.pinned(num_bytes)
    target = torch.zeros(num_bytes, dtype=torch.uint8)

    def work() -> None:
        device.upload(target, source)
        device.download(result, target + 1)

    with device.entered():
        source.fill_(3)
        device.synchronize()
        torch.cuda.current_stream().synchronize()
        device.submit(work, True)
        while device.num_completed() < 1:
            pass
    assert (result == 4).all()
    assert stub.races == []


def looks(values: Tensor) -> None:
    if bool((values > 0).all()):
        values.add_(1)


def test_work_that_looks_at_values_is_refused_before_a_capture_begins(stub):
    device, values = open_device(), torch.ones(4)
    with device.entered(), torch.inference_mode(), pytest.raises(RuntimeError, match="hands values to the host"):
        device.capture(lambda: looks(values))
    assert not stub.recording


def test_after_a_capture_that_failed_others_are_captured(stub):
    """Torch 2.11 goes on recording to the pool of a capture that failed."""
    device, values = open_device(), torch.ones(4)

    def looks_when_captured() -> None:
        if stub.is_capturing:
            looks(values)

    with device.entered(), torch.inference_mode():
        with pytest.raises(RuntimeError):
            device.capture(looks_when_captured)
        replay = device.capture(lambda: values.add_(1))
        values.fill_(1)
        replay.replay()
    assert stub.num_captured == 1
    assert (values == 2).all()
    assert not stub.recording


def test_no_garbage_is_collected_during_a_capture(stub):
    device, seen = open_device(), []
    with device.entered(), torch.inference_mode():
        device.capture(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False]  # it ran once before
    assert gc.isenabled()


class Keeper:
    """Of a tensor that captured work reads."""

    values = torch.arange(3)


def test_what_captured_work_reads_lives_as_long_as_the_capture(stub):
    device, keeper = open_device(), Keeper()
    seen, result = weakref.ref(keeper), torch.zeros(3, dtype=torch.int64)
    work = functools.partial(lambda kept: result.copy_(kept.values), keeper)
    with device.entered():
        captured = device.capture(work)
    del work, keeper
    gc.collect()
    assert seen() is not None
    del captured
    gc.collect()
    assert seen() is None


def streams_of(device: CudaDevice) -> set[int]:
    return {stream.cuda_stream for stream in (device._compute, device._up, device._down)}


def test_live_devices_share_no_stream():
    with StubCuda(num_streams=8).installed():
        first, second = open_device(), open_device()
        assert len(streams_of(first) | streams_of(second)) == 6
        with pytest.raises(DeviceError, match="no stream"):
            open_device()
        first.close()
        third = open_device()
        assert streams_of(third).isdisjoint(streams_of(second))


def test_closing_a_device_that_is_lost_says_nothing_more_of_it(stub, monkeypatch):
    device = open_device()
    device.note_launched(False)
    monkeypatch.setattr(device, "num_completed", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error")))
    device.close()


def test_a_device_that_is_gone_has_no_stream():
    with StubCuda(num_streams=8).installed():
        first, second = open_device(), open_device()
        first.itself = first  # only a collection takes it away
        del first
        assert streams_of(open_device()).isdisjoint(streams_of(second))


def test_steps_are_measured_with_their_own_device_current(stub, monkeypatch):
    """A kernel of Triton's goes to the current device, whatever its tensors are on."""
    seen = []

    def example_step(placed: PlacedCell, rows: int):
        return lambda: seen.append(torch.cuda.current_device())

    monkeypatch.setattr(PlacedCell, "example_step", example_step)
    device = open_device()
    device.torch_device = torch.device("meta", 1)  # any that is not the CPU, where nothing is measured
    device.placements = Placements(torch.device("cpu"), Forms())
    assert set(measure_steps(cell(torch.neg, {"input": (3,)}, max_batch=8), None, device, 1)) == {1, 8}
    assert set(seen) == {1}


def test_without_a_compiler_for_the_signal_tasks_are_counted_by_copies(stub, monkeypatch, caplog):
    def refuse(device: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("cellrt.kernels.signal.Signal", refuse)
    device = CudaDevice("cpu")
    assert all(isinstance(counter, StubCounter) for counter in device._counters)
    assert "Failed to find C compiler" in caplog.text


def test_memory_that_torch_does_not_know_of_counts(stub):
    device = open_device()
    before = device.memory_in_use()
    stub.driver_bytes += 1 << 20
    assert device.memory_in_use() == before + (1 << 20)


@pytest.mark.parametrize("direct", [False, True])
def test_two_workers_of_one_device_pass_rows_to_each_other_without_a_race(stub_engines, direct):
    model = make_unfolder(make_zoo(3))
    options = DeviceOptions(ring_bytes=1 << 14, capture_after=1, direct=direct)
    engine = device_engine("dry", 2, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    names = sorted(OPERATIONS)
    serve(engine, model, [[(name, 1), (other, 2)] for name, other in zip(names, names[1:] + names[:1])])
    close_and_check(engine)
    assert stub_engines.races == []


def test_a_step_that_is_timed_brings_nothing_from_the_host(monkeypatch):
    """That would wait for the device, whose time would then be that of the host's calls."""
    made = cell(CountsSpans(), {"x": (WIDTH,)}, max_batch=8)
    step = PlacedCell(made, torch.device("cpu"), Forms(fused=True)).fused_step(4)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor came from the host"))
    step()
