"""Language models, and others that grow a state, go ahead of their stop on a device: they say what they say on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.core.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import grows, rows
from cellrt.errors import CancelledError, CellError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.unfolders.completion import complete
from cellrt.worker.device.arenas import DeviceArenas
from cellrt.worker.device.dry import DryDeviceError
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, on_every_device
from tests.unfolders.language_models import END, draw_prompt, small_cell, small_layers

MODELS = {"one cell": small_cell(4, 16), "layers": small_layers(4, 16)}
MOST = 12
NUMBER = rows(dtype=torch.int64)
LATE = DeviceOptions(ring_bytes=1 << 16, graph_bytes=0, dry_delay_s=5e-4)
CAPTURED = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
SIZES = {"arena_bytes": 1 << 19, "page_bytes": 1 << 18, "debug": True}


def ahead(count: int | None) -> SchedulerSettings:
    return SchedulerSettings(loops_ahead=count)


def prompts(count: int, first: int = 0) -> list[dict[str, object]]:
    return [{"prompt": draw_prompt(first + k, 1 + (3 * k) % 11), "max_tokens": MOST} for k in range(count)]


def assert_says(made, wanted) -> None:
    assert made["token"].tolist() == wanted["token"].tolist()
    torch.testing.assert_close(made["logprob"], wanted["logprob"], rtol=1e-4, atol=1e-4)


@on_every_device
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_language_model_that_goes_ahead_says_what_it_says_on_a_cpu(device, kind, count):
    model = complete("lm", MODELS[kind], max_tokens=MOST)
    engine = device_engine(device, 1, CAPTURED, settings=ahead(count), **SIZES)
    try:
        engine.register(model)
        requests, num_ended = prompts(16), 0
        for _ in range(2):  # the second time what was captured is repeated
            futures = [engine.submit("lm", request) for request in requests]
            for request, future in zip(requests, futures):
                made = future.result(WAIT_S)
                assert_says(made, run_one_by_one(model, request))
                num_ended += made["token"].tolist()[-1] == END
        assert num_ended > 2
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_sessions_go_on_where_the_step_before_the_stop_was(kind, workers):
    model = complete("lm", MODELS[kind], max_tokens=MOST, keep=True)
    engine = device_engine("dry", workers, LATE, settings=ahead(2), **{**SIZES, "page_bytes": 1 << 15})
    states: list[list[Tensor]] = [[] for _ in range(6)]
    try:
        engine.register(model)
        sessions = [engine.session("lm", str(k)) for k in range(6)]
        for turn in range(3):
            requests = prompts(6, 10 * turn)
            futures = [session.submit(request) for session, request in zip(sessions, requests)]
            for request, future, state in zip(requests, futures, states):
                assert_says(future.result(WAIT_S), run_one_by_one(model, request, state))
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_while_a_step_is_on_the_device_the_next_is_there_before_its_stop_is_known(kind):
    model = complete("lm", MODELS[kind], max_tokens=MOST)
    engine = device_engine("dry", 1, replace(LATE, dry_delay_s=1e-2), settings=ahead(None), **SIZES)
    engine.register(model)
    worker = engine._manager.workers[0]
    collect, behind = worker._executor.collect, list[int]()

    def note(task):
        behind.append(len(worker._in_flight))
        return collect(task)

    worker._executor.collect = note
    try:
        made = engine.submit("lm", prompts(1)[0]).result(WAIT_S)
        assert engine.drain(WAIT_S)
    finally:
        close_and_check(engine)
    assert len(made["token"]) > 3
    assert min(behind[:-4]) > 0  # but those of the last step, and what is behind it
