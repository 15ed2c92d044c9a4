"""Loops of several cells that go ahead of their stop on a device: the members' rows behind it are masked there."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.errors import CellError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, assert_same, assert_streamed, close_and_check, error_of
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_fused_loops import Counts, CountsSpans
from tests.engine.test_cuda_loops import (
    BAD,
    LATE,
    MOST_STEPS,
    NUMBER,
    FailingError,
    Spoils,
    ahead,
    count_freely,
    count_to,
    note_in_flight,
)
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, serve


class Halved(NamedTuple):
    h: Tensor


class Follows(nn.Module):
    """Has half of what it had, and a little of the number. On a number beyond the last the device is lost."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, n: Tensor, end: Tensor, h: Tensor) -> Halved:
        if self.looks and n.device.type != "meta" and (n > end + 1).any():
            raise FailingError("a row that has stopped goes on")
        return Halved(0.5 * h + n[:, None])


def counting(module: object, **others: object) -> Cell:
    return cell(module, {"n": NUMBER, "h": (2,), "end": NUMBER}, **{"max_batch": 8, **others})


def counter(counts: Cell, looks: bool = False) -> Unfolder:
    """Requests are numbers to count to; another cell follows, which the first reads a step later."""
    follows = cell(Follows(looks), {"n": NUMBER, "end": NUMBER, "h": (2,)}, name="follows", max_batch=8)

    def unfold(graph, request):
        def step(body, state):
            made = counts(n=state.n, h=state.other, end=request)
            other = follows(n=made.n, end=request, h=made.h)
            return {"n": made.n, "h": made.h, "stop": made.stop, "other": other.h}

        loop = graph.loop(step, n=0, other=torch.zeros(2), until="stop", max_steps=MOST_STEPS)
        return {"n": loop.n, "other": loop.other, "h": loop.last.h, "again": counts(n=0, h=loop.last.other, end=2).h}

    return Unfolder("count", unfold, 3)


@FEW
@given(
    requests=st.lists(st.integers(0, MOST_STEPS + 2), min_size=1, max_size=12),
    count=st.integers(0, 3),
    workers=st.integers(1, 2),
    options=OPTIONS,
    kind=st.sampled_from([count_to, count_freely, Counts, CountsSpans]),
    batch_sizes=st.sampled_from([None, [4, 8]]),
)
def test_bodies_that_go_ahead_give_what_their_steps_give_one_by_one(
    requests, count, workers, options, kind, batch_sizes
):
    is_fused, looks = isinstance(kind, type), kind is count_to
    model = counter(counting(kind() if is_fused else kind, batch_sizes=batch_sizes), looks)
    options = replace(options, fused=True) if is_fused else options
    engine = device_engine("dry", workers, options, settings=ahead(count), debug=True)
    try:
        engine.register(model, warm_up=False)
        for _ in range(2):  # the second time what was captured is repeated
            serve(engine, model, requests)
        engine.check()
    finally:
        close_and_check(engine)


def test_a_next_step_is_at_the_device_before_the_stop_of_this_one_is_known():
    options = replace(LATE, dry_delay_s=1e-2)
    engine = device_engine("dry", 1, options, settings=ahead(None))
    engine.register(counter(counting(count_to)), warm_up=False)
    behind = note_in_flight(engine)
    engine.submit("count", 8).result(WAIT_S)
    assert engine.drain(WAIT_S)
    close_and_check(engine)
    assert min(behind[:14]) > 0


@pytest.mark.parametrize(("raises", "said"), [(True, "a row this cell cannot take"), (False, "not finite")])
def test_a_row_that_fails_ahead_costs_its_own_request_and_is_seen_no_more(raises, said):
    module = Spoils(raises)
    model = counter(counting(module, finite=["h"]))
    engine = device_engine("dry", 1, LATE, settings=ahead(2))
    engine.register(model, warm_up=False)
    futures = engine.submit_many("count", [4, BAD, 9])
    error = error_of(futures[1])
    assert type(error) is CellError and said in str(error)
    for request, future in ((4, futures[0]), (9, futures[2])):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert engine.drain(WAIT_S)
    assert module.seen.index(True) == 5
    close_and_check(engine)


def test_streamed_steps_are_those_before_the_stop():
    model = counter(counting(count_freely))
    engine = device_engine("dry", 1, LATE, settings=ahead(3))
    engine.register(model, warm_up=False)
    assert_streamed(engine, model, "other", (0, 3, 8))
    close_and_check(engine)


@FEW
@given(requests=st.lists(st.integers(0, 9), min_size=1, max_size=8), count=st.integers(0, 3), workers=st.integers(1, 2))
def test_a_list_of_cells_goes_ahead_to_the_next_of_its_cells(requests, count, workers):
    layers = [counting(lambda n, h, end: count_freely(n, h, end), name=f"layer {k}") for k in range(3)]

    def unfold(graph, request):
        loop = graph.loop([*layers, *layers], n=0, h=torch.ones(2), end=request, until="stop")
        return {"h": loop.h, "n": loop.last.n}

    model = Unfolder("layers", unfold, 3)
    engine = device_engine("dry", workers, LATE, settings=ahead(count), debug=True)
    try:
        engine.register(model, warm_up=False)
        serve(engine, model, requests)
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.slow
def test_captured_tasks_of_bodies_that_go_ahead_race_with_nothing(stub_engines, direct):  # noqa: F811
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, direct=direct)
    engine = device_engine("dry", 2, options, settings=ahead(2), debug=True)
    model = counter(counting(count_freely))
    engine.register(model, warm_up=False)
    for _ in range(3):
        serve(engine, model, [3, 0, 7, 11, 2, 5, 9])
    counts = [worker.counts() for worker in engine._manager.workers]
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct
    assert sum(each["replayed"] for each in counts) > 0, counts
