"""What a device's worker captures within its budget, and what it counts."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, close_and_check
from tests.engine.models import WIDTH, chain_model
from tests.engine.test_cuda_worker import FusedAdd, State, add_twice, device_engine, devices_of, serve


def test_nothing_is_captured_beyond_the_budget():
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=64))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, graph_bytes=2000)
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    for count in (1, 2, 4, 8, 16, 32):
        serve(engine, model, [torch.randn(3, WIDTH) for _ in range(count)])
    assert 1 <= devices_of(engine)[0].num_captured <= 2  # each is taken to cost 1,024 bytes
    close_and_check(engine)


def test_a_capture_that_nobody_used_for_long_gives_way_where_memory_is_short(monkeypatch):
    monkeypatch.setattr("cellrt.worker.device.captures.STALE_AFTER", 8)
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=64))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, graph_bytes=1024)  # room for one: each costs so much
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    captures = engine._manager.workers[0]._executor._captures
    for count in (1, 1, 8, 8, 8, 8, 8, 8):
        serve(engine, model, [torch.randn(3, WIDTH) for _ in range(count)])
    assert captures.counts["captures"] > 1
    assert captures.counts["captures_evicted"] == captures.counts["captures"] - 1
    assert captures.used_bytes == 1024
    close_and_check(engine)


def test_runs_by_steps_take_the_room_of_what_nobody_used_for_long(monkeypatch):
    monkeypatch.setattr("cellrt.worker.device.captures.STALE_AFTER", 8)
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=64))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, graph_bytes=2048)
    engine = device_engine(
        "dry", 1, options, settings=SchedulerSettings(join_budget_s=1e6, max_run_s=1e6, min_run_s=1e6)
    )
    engine.register(model, warm_up=False)
    captures = engine._manager.workers[0]._executor._captures
    for count in (1, 1, *[16] * 24):  # first and later steps of each
        serve(engine, model, [torch.randn(3, WIDTH) for _ in range(count)])
    assert captures.counts["captures_evicted"] > 0 and captures.counts["replayed"] > 8
    close_and_check(engine)


def test_statistics_say_what_became_of_tasks_on_a_device(monkeypatch):
    """Of a fused cell whose scratch rows do not suffice, and of what cannot be captured."""
    monkeypatch.setattr("cellrt.worker.device.device_arenas.MAX_SCRATCH_ROWS", 4)
    model = chain_model("chain", cell(FusedAdd(), {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=64))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(join_budget_s=60.0, min_run_s=60.0))
    engine.register(model, warm_up=False)
    for _ in range(3):
        for future in engine.submit_many("chain", [torch.zeros(5, WIDTH) for _ in range(16)]):
            future.result(WAIT_S)
    counts = engine.statistics()["workers"][1]
    assert counts["unfused"] > 0 and counts["captures"] > 0 and counts["replayed"] > 0 and counts["eager"] > 0
    assert counts["captures_refused"] == counts["captures_failed"] == counts["compilations"] == 0
    close_and_check(engine)


def test_what_cannot_be_captured_is_counted():
    def looks(x: Tensor, h: Tensor) -> State:
        return State(x + h if x.device.type == "meta" or bool((x == x).all()) else h)

    model = chain_model("chain", cell(looks, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(runs=False))
    engine.register(model, warm_up=False)
    serve(engine, model, [torch.randn(3, WIDTH)])
    assert engine.statistics()["workers"][1]["captures_refused"] > 0
    close_and_check(engine)


def test_scratch_rows_suffice_for_every_step_of_512_rows_and_24_steps():
    arenas = DeviceArenas(torch.device("cpu"))
    arenas.add(rows(1024), arenas.allocate(rows(1024), 4))
    assert arenas.scratch_rows(0)[1] >= 2 * 512 * 24 + 4 * 512  # of h and c, which are of one kind


def test_a_task_with_results_of_a_fused_cell_is_read_once_for_its_layout():
    model = chain_model("chain", cell(FusedAdd(), {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8))
    engine = device_engine("dry", 1, settings=SchedulerSettings(join_budget_s=60.0, min_run_s=60.0))
    engine.register(model, warm_up=False)
    for future in engine.submit_many("chain", [torch.zeros(3, WIDTH) for _ in range(4)]):
        future.result(WAIT_S)
    plans = list(engine._manager.workers[0]._executor._plans._known.values())
    assert any(plan.packing.signature.fused and plan.packing.downloads for plan in plans)
    close_and_check(engine)


def test_equal_signatures_of_different_plans_are_one():
    """Runs of other numbers of positions, whose steps are captured once: what they share is found by what it is."""
    model = chain_model("chain", cell(add_twice, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8))
    engine = device_engine("dry", 1, settings=SchedulerSettings(join_budget_s=60.0, min_run_s=60.0))
    engine.register(model, warm_up=False)
    for steps in (3, 9, 30):
        for future in engine.submit_many("chain", [torch.zeros(steps, WIDTH) for _ in range(4)]):
            future.result(WAIT_S)
    plans = list(engine._manager.workers[0]._executor._plans._known.values())
    close_and_check(engine)
    firsts = [plan.packing.steps.first for plan in plans if plan is not None and plan.packing.steps is not None]
    assert len(firsts) > len(set(firsts))
    assert len({id(first) for first in firsts}) == len(set(firsts))
