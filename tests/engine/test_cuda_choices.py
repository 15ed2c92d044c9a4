"""Of a cell's fused and plain form all tasks use the one that measured faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stub_cuda import StubCuda
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.choose_form import NUM_SAMPLES, choose_form, choose_runs
from cellrt.worker.device.cuda import CudaDevice
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.placement import Forms, PlacedCell
from tests.engine.helpers import WAIT_S, close_and_check
from tests.engine.models import WIDTH
from tests.engine.test_cuda_chains import RUNS
from tests.engine.test_cuda_ragged import Spanned
from tests.engine.test_cuda_worker import FusedAdd, add_twice, device_engine, devices_of, serve

CPU = torch.device("cpu")
INPUTS = {"x": (WIDTH,), "h": (WIDTH,)}


class Clock:
    """Tells of each step what a form takes by rows; it knows by what is written which of them ran."""

    def __init__(self, fused_s: Callable[[int], float], plain_s: Callable[[int], float]) -> None:
        self.told: list[tuple[str, float]] = []
        self._fused_s, self._plain_s = fused_s, plain_s
        self.placed: PlacedCell | None = None

    def watch(self, placed: PlacedCell) -> None:
        """Every form of the cell says that it runs, and with how many rows."""
        run_rows, call = placed.run_rows, placed.call
        self._ran = ("", 0)

        def run(inputs, outputs):
            self._ran = ("fused", len(next(iter(inputs.values())).rows))
            run_rows(inputs, outputs)

        def plain(inputs):
            self._ran = ("plain", len(inputs[0]))
            return call(inputs)

        placed.run_rows, placed.call = run, plain

    def elapsed(self, work: Callable[[], None]) -> float:
        work()
        form, rows = self._ran
        seconds = (self._fused_s if form == "fused" else self._plain_s)(rows)
        self.told.append((form, seconds))
        return seconds


def measured(clock: Clock, forms: Forms = Forms(), module: object = None) -> PlacedCell:  # noqa: B008 - immutable
    placed = PlacedCell(cell(module or FusedAdd(), INPUTS, max_batch=512), CPU, forms)
    if placed.run_rows is not None:
        clock.watch(placed)
    choose_form(placed, [1, 8, 64, 512], clock.elapsed)
    return placed


@pytest.mark.parametrize(("fused_s", "is_plain"), [(10e-6, False), (30e-6, True)])
def test_the_form_is_taken_that_is_faster_in_the_geometric_mean(fused_s, is_plain):
    """That of 1, 8, 64 and 512 is 22.6."""
    clock = Clock(lambda rows: fused_s, lambda rows: 1e-6 * rows)
    placed = measured(clock)
    assert len(clock.told) == 2 * 4 * (1 + NUM_SAMPLES)
    assert placed.prefers_plain == is_plain
    assert f"8 rows: fused {1e6 * fused_s:.1f} us, plain 8.0 us" in repr(placed)


def test_a_choice_stays_when_another_model_brings_the_cell():
    placed = measured(Clock(lambda rows: 1e-6, lambda rows: 2e-6))
    again = Clock(lambda rows: 2e-6, lambda rows: 1e-6)
    choose_form(placed, [1, 8, 64, 512], again.elapsed)
    assert not placed.prefers_plain and not again.told


def test_the_first_time_of_a_form_does_not_count():
    first: set[tuple[str, int]] = set()

    def slow_at_first(rows: int) -> float:
        is_first = ("fused", rows) not in first
        first.add(("fused", rows))
        return 1.0 if is_first else 1e-6

    assert not measured(Clock(slow_at_first, lambda rows: 1e-3)).prefers_plain


@pytest.mark.parametrize("fused", [True, False])
def test_options_decide_beforehand(fused):
    clock = Clock(lambda rows: 1.0, lambda rows: 0.5)
    placed = measured(clock, Forms(fused=fused))
    assert not clock.told and not placed.prefers_plain
    assert (placed.run_rows is not None) == fused


def test_of_a_cell_with_one_form_nothing_is_measured():
    clock = Clock(lambda rows: 1.0, lambda rows: 0.5)
    assert measured(clock, module=add_twice).run_rows is None and not clock.told


class Refuses(FusedAdd):
    def run_rows(self, inputs, outputs):
        raise ValueError("zeros")


def test_what_raises_is_left_as_it_is():
    assert not measured(Clock(lambda rows: 1.0, lambda rows: 0.5), module=Refuses()).prefers_plain


@pytest.mark.parametrize("is_plain", [True, False])
def test_tasks_of_any_number_of_rows_use_the_faster_form_and_are_counted(is_plain):
    """The fused one adds 100 at every step."""
    made = cell(Spanned(), INPUTS, max_batch=64)
    model = Unfolder("one", lambda graph, x: {"h": graph.chain(made, x=x).last.h}, torch.zeros(1, WIDTH))
    settings = SchedulerSettings(runs=False)
    engine = device_engine("dry", 1, DeviceOptions(ring_bytes=1 << 18), settings=settings)
    engine.register(model, warm_up=False)
    placed = devices_of(engine)[0].placements.of(made)
    placed.keep_times({8: 2e-5, 64: 2e-5}, {8: 1e-5, 64: 3e-5 if is_plain else 5e-5})
    for count in (3, 20):
        requests = [torch.full((1, WIDTH), float(k)) for k in range(count)]
        for k, future in enumerate(engine.submit_many("one", requests)):
            torch.testing.assert_close(
                future.result(WAIT_S)["h"], torch.full((WIDTH,), k + (0.0 if is_plain else 100.0))
            )
    (counts,) = [found.get("counts", found) for found in engine.statistics()["workers"].values()]
    assert (counts["plain_faster"] >= 1) == is_plain and counts["unfused"] == 0
    close_and_check(engine)


def test_a_device_is_busy_until_all_is_launched(monkeypatch):
    """So events tell what the device takes, not what launching does."""
    stub, order = StubCuda(), []
    with stub.installed():
        device = CudaDevice("cpu", "copy")
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"), raising=False)
        record = type(torch.cuda.Event()).record
        monkeypatch.setattr(
            type(torch.cuda.Event()), "record", lambda event, *given: (order.append("event"), record(event, *given))
        )
        assert device.elapsed(lambda: order.append("work")) == 1e-3
    assert order == ["sleep", "event", "work", "event"]


class Sum(NamedTuple):
    h: Tensor


class AddsRuns(nn.Module):
    """With a form of its own for runs; ``calls``: how often that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.raises = 0, False

    def __deepcopy__(self, memo: object) -> AddsRuns:
        return self

    def forward(self, x: Tensor, h: Tensor) -> Sum:
        return Sum(x + 0.5 * h)

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor) -> Sum:
        self.calls += 1
        if self.raises:
            raise ValueError("no run")
        made, start = [], 0
        for size in batch_sizes:
            h = x[start : start + size] + 0.5 * h[:size]
            made.append(h)
            start += size
        return Sum(torch.cat(made))


@pytest.mark.parametrize(("step_s", "by_steps"), [(1e-9, True), (10.0, False)])
def test_runs_go_over_captured_steps_where_the_authors_own_form_of_them_takes_longer(step_s, by_steps):
    module = AddsRuns()
    placed, waits = PlacedCell(cell(module, INPUTS, max_batch=512), CPU), []
    module.calls = 0

    def elapsed(work: Callable[[], None]) -> float:
        work()
        return step_s

    choose_runs(placed, elapsed, lambda: waits.append(module.calls))
    assert placed.goes_by_steps is by_steps
    assert module.calls == 1 + NUM_SAMPLES and waits == [0, 1, 1, 2, 2, 3, 3, 4]
    choose_runs(placed, lambda work: pytest.fail("measured again"), lambda: None)


@pytest.mark.parametrize("module", [AddsRuns(), FusedAdd()])
def test_a_cell_that_has_no_such_form_or_refuses_zeros_is_left_as_it_is(module):
    placed = PlacedCell(cell(module, INPUTS, max_batch=512), CPU)
    module.raises = True
    choose_runs(placed, lambda work: work() or 1.0, lambda: None)
    assert placed.goes_by_steps is None


@pytest.mark.parametrize("by_steps", [True, False])
def test_ragged_runs_of_a_cell_with_a_form_of_its_own_share_captures_of_steps(by_steps):
    """Otherwise each is a layout of its own, and hardly any of them comes again."""
    module, draw = AddsRuns(), random.Random(2)
    made = cell(module, INPUTS, max_batch=16)
    model = Unfolder("chain", lambda graph, x: {"every": graph.chain(made, x=x).h}, torch.zeros(2, WIDTH))
    options = DeviceOptions(ring_bytes=1 << 18, capture_after=1)
    engine = device_engine("dry", 1, options, settings=RUNS, arena_bytes=1 << 20)
    engine.register(model, warm_up=False)
    serve(engine, model, [torch.randn(1, WIDTH)])
    engine._manager.workers[0]._device.placements.of(made).goes_by_steps = by_steps
    module.calls = 0
    for _ in range(25):
        serve(engine, model, [torch.randn(draw.randint(1, 9), WIDTH) for _ in range(draw.randint(2, 9))])
    counts = engine._manager.workers[0].counts()
    close_and_check(engine)
    assert (counts["captures"] <= 14) == by_steps
    assert (module.calls == 0) == by_steps
