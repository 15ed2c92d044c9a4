"""Loops that go ahead of their stop on a device: who has stopped is masked there, and nobody is any the wiser."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.errors import CellError, DefinitionError, DeviceError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.dry import DryDeviceError
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, assert_same, assert_streamed, close_and_check, error_of, small_engine
from tests.engine.test_cuda_limits import Walks
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, serve

MOST_STEPS = 12
NUMBER = rows(dtype=torch.int64)
LATE = DeviceOptions(ring_bytes=1 << 16, graph_bytes=0, dry_delay_s=5e-4)


class State(NamedTuple):
    h: Tensor
    stop: Tensor


class Counted(NamedTuple):
    n: Tensor
    h: Tensor
    stop: Tensor


class FailingError(DryDeviceError):
    """Loses the device."""


def count_to(n: Tensor, h: Tensor, end: Tensor) -> Counted:
    """Counts up to ``end``, which says stop. On a number beyond it the device is lost."""
    if n.device.type != "meta" and (n > end).any():
        raise FailingError("a row that has stopped goes on")
    return Counted(n + 1, 0.5 * h + end[:, None], n + 1 > end)


def count_freely(n: Tensor, h: Tensor, end: Tensor) -> Counted:
    """As ``count_to``, without a look at any number, so that it can be captured."""
    return Counted(n + 1, 0.5 * h + end[:, None], n + 1 > end)


def make_cell(function: object = count_to, **others: object) -> Cell:
    inputs = {"n": NUMBER, "h": (2,), "end": NUMBER}
    return cell(function, inputs, **{"max_batch": 8, **others})


def counter(made: Cell) -> Unfolder:
    """Requests are numbers to count to; results: all steps of one output, the last of the others, and what is after."""

    def unfold(graph, request):
        loop = graph.loop(made, max_steps=MOST_STEPS, until="stop", end=request)
        return {"every": loop.h, "n": loop.last.n, "again": made(n=0, h=loop.last.h, end=request).h}

    return Unfolder("count", unfold, 3)


def ahead(count: int | None, **others: object) -> SchedulerSettings:
    return SchedulerSettings(loops_ahead=count, **others)  # type: ignore[arg-type]


def note_in_flight(engine: Engine) -> list[int]:
    """Of each task that its worker collects from now on, how many are behind it at the device."""
    worker = engine._manager.workers[0]
    collect, behind = worker._executor.collect, list[int]()

    def note(task):
        behind.append(len(worker._in_flight))
        return collect(task)

    worker._executor.collect = note
    return behind


@FEW
@given(
    requests=st.lists(st.integers(0, MOST_STEPS + 2), min_size=1, max_size=12),
    count=st.integers(0, 3),
    workers=st.integers(1, 2),
    runs=st.booleans(),
    min_run_s=st.sampled_from([1e-6, 2e-4, 5e-4, 1.0]),
    options=OPTIONS,
    looks=st.booleans(),
    batch_sizes=st.sampled_from([None, [4, 8]]),
)
def test_loops_that_go_ahead_give_what_their_steps_give_one_by_one(
    requests, count, workers, runs, min_run_s, options, looks, batch_sizes
):
    model = counter(make_cell(count_to if looks else count_freely, batch_sizes=batch_sizes))
    chosen = ahead(count, runs=runs, min_run_s=min_run_s, join_budget_s=1.0)
    engine = device_engine("dry", workers, options, settings=chosen)
    try:
        engine.register(model, warm_up=runs)
        for _ in range(2):  # the second time what was captured is repeated
            serve(engine, model, requests)
        engine.check()
    finally:
        close_and_check(engine)


def test_while_a_task_of_a_loop_runs_the_next_is_at_the_device():
    options = replace(LATE, dry_delay_s=2e-2)  # so long that the host of a busy machine has its turn meanwhile
    engine = device_engine("dry", 1, options, settings=ahead(None, runs=False))
    engine.register(counter(make_cell()), warm_up=False)
    behind, steps = note_in_flight(engine), 10
    engine.submit("count", steps - 1).result(WAIT_S)
    engine.drain(WAIT_S)
    assert behind[: steps - 1] == [1] * (steps - 1)
    close_and_check(engine)


def test_loops_wait_where_a_worker_has_one_task_at_a_time_and_on_a_cpu():
    for engine in (device_engine("dry", 1, queue_depth=1), small_engine(1)):
        assert engine._processor.settings.loops_ahead == 0
        close_and_check(engine)
    with pytest.raises(DefinitionError, match="loops_ahead: expected 0 or None with CPU workers, got 2"):
        small_engine(1, settings=ahead(2))


BAD = 100


class Spoils(nn.Module):
    """Counts; a row that counts to BAD goes wrong at its sixth step. ``seen``: what was seen of it, call by call."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises, self.seen = raises, list[bool]()

    def __deepcopy__(self, memo: object) -> Spoils:
        return self

    def forward(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        made = count_freely(n, h, end)
        if n.device.type == "meta":
            return made
        is_now = (end == BAD) & (n == 5)
        if (end == BAD).any():
            self.seen.append(bool(is_now.any()))
        if self.raises and is_now.any():
            raise ValueError("a row this cell cannot take")
        return made._replace(h=made.h.masked_fill(is_now[:, None], torch.nan))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("raises", "said"), [(True, "a row this cell cannot take"), (False, "not finite")])
def test_a_row_that_fails_ahead_costs_its_own_request_and_is_seen_no_more(count, raises, said):
    module = Spoils(raises)
    model = counter(make_cell(module, finite=["h"]))
    engine = device_engine("dry", 1, LATE, settings=ahead(count, runs=False))
    engine.register(model, warm_up=False)
    futures = engine.submit_many("count", [4, BAD, 9])
    error = error_of(futures[1])
    assert type(error) is CellError and said in str(error)
    for request, future in ((4, futures[0]), (9, futures[2])):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert engine.drain(WAIT_S)
    assert module.seen.index(True) == 5 and module.seen[-1]
    close_and_check(engine)


def test_padding_says_nothing_of_the_row_that_it_repeats():
    """Five rows are padded to six. A run has two steps, at the second of which the fifth stops; padding takes one."""
    model = counter(make_cell())
    options = DeviceOptions(ring_bytes=1 << 16, dry_delay_s=5e-4)
    engine = device_engine("dry", 1, options, settings=ahead(1, join_budget_s=0.1, min_run_s=2e-3))
    engine.register(model, warm_up=False)
    engine._processor.set_step_time(0, 1, 1e-3)
    engine._processor.set_step_time(0, 5, 1e-3)
    serve(engine, model, [9, 9, 9, 9, 1])
    assert engine.drain(WAIT_S)
    close_and_check(engine)


def test_what_a_row_that_stopped_would_read_is_not_looked_at():
    made = cell(Walks(last=6), {"token": NUMBER}, max_batch=8)

    def unfold(graph, request):
        return {"last": graph.loop(made, until="stop", max_steps=9, token=request).last.token}

    engine = device_engine("dry", 1, LATE, settings=ahead(2, runs=False))
    engine.register(Unfolder("walk", unfold, 1), warm_up=False)
    executor = engine._manager.workers[0]._executor
    collect, failures = executor.collect, []

    def note(task):
        failures.append(collect(task))
        return failures[-1]

    executor.collect = note
    for tasks in range(6, 61, 6):  # a slow host may learn of each stop before it sends the next task
        assert [future.result(WAIT_S)["last"].item() for future in engine.submit_many("walk", [1, 4])] == [7, 7]
        assert engine.drain(WAIT_S)
        if len(failures) > tasks:
            break
    assert len(failures) > tasks and not any(failures)
    close_and_check(engine)


def test_a_device_that_is_lost_with_tasks_ahead_leaves_nothing():
    def lose(n: Tensor, h: Tensor, end: Tensor) -> Counted:
        if n.device.type != "meta" and (n == 5).any():
            raise FailingError("lost")
        return count_freely(n, h, end)

    engine = device_engine("dry", 1, LATE, settings=ahead(3, runs=False))
    engine.register(counter(make_cell(lose)), warm_up=False)
    for future in engine.submit_many("count", [9, 9, 9]):
        assert isinstance(error_of(future), DeviceError)
    close_and_check(engine)


def test_streamed_steps_are_those_before_the_stop():
    model = counter(make_cell())
    engine = device_engine("dry", 1, LATE, settings=ahead(3, runs=False))
    engine.register(model, warm_up=False)
    assert_streamed(engine, model, "every", (0, 3, 8))
    close_and_check(engine)


@FEW
@given(turns=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5), count=st.integers(1, 3))
def test_a_session_goes_on_from_the_step_that_stopped(turns, count):
    """Each turn counts on from where the last one stopped; some are given up meanwhile, then it is where it got to."""
    made = make_cell(count_freely)

    def unfold(graph, request):
        loop = graph.loop(made, max_steps=MOST_STEPS, until="stop", keep=["h"], end=request)
        return {"every": loop.h}

    def follow(h: Tensor, end: int) -> list[Tensor]:
        steps = [0.5 * h + end]
        while len(steps) < min(end + 1, MOST_STEPS):
            steps.append(0.5 * steps[-1] + end)
        return steps

    engine = device_engine("dry", 1, LATE, settings=ahead(count, runs=False))
    engine.register(Unfolder("turns", unfold, 3), warm_up=False)
    possible = [torch.zeros(2)]
    with engine.session("turns") as session:
        for end, gives_up in turns:
            future = session.submit(end)
            if gives_up and future.cancel():
                possible += [step for h in possible for step in follow(h, end)]
                continue
            every = future.result(WAIT_S)["every"]
            found = [steps for h in possible if same(torch.stack(steps := follow(h, end)), every)]
            assert found
            possible = [found[0][-1]]
    close_and_check(engine)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b)


def test_loops_that_begin_at_different_times_share_tasks():
    """Four tasks may be on the device at once; loops would go on in groups if they did not wait for each other."""
    steps = 60
    made = cell(lambda h: State(h + 1, h[:, 0] > 1e9), {"h": (2,)}, name="adds", max_batch=16)
    model = Unfolder(
        "adds", lambda graph, h: {"h": graph.loop(made, h=h, until="stop", max_steps=steps).h}, torch.zeros(2)
    )
    options = DeviceOptions(ring_bytes=1 << 16, dry_delay_s=2e-3)
    engine = device_engine("dry", 1, options, queue_depth=4, settings=ahead(1, runs=False))
    try:
        engine.register(model, warm_up=False)
        futures = []
        for _ in range(8):
            futures.append(engine.submit("adds", torch.zeros(2)))
            time.sleep(0.002)  # about as long as a step
        for future in futures:
            future.result(WAIT_S)
        num_tasks = engine._manager.workers[0].num_tasks
    finally:
        close_and_check(engine)
    assert steps <= num_tasks < 2 * steps
