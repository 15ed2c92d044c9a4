"""Runs of users' own cells go step by step over captured steps, which compiled code launches, without a race."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.fused import reads_spans
from cellrt.definition.spec import rows
from cellrt.errors import CellError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device import executor
from cellrt.worker.device.executor import DeviceOptions
from tests.effort import quickly
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of
from tests.engine.models import WIDTH
from tests.engine.test_cuda_chains import RUNS, write
from tests.engine.test_cuda_device import HalvesRows, halve, stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_ragged import taken
from tests.engine.test_cuda_worker import device_engine, serve

STATE = {"x": (WIDTH,), "h": (WIDTH,)}


def two_layers(graph, made, x):
    """Of the first nothing is shown."""
    return {"h": graph.chain(made, x=graph.chain(made, x=x).h).last.h}


MODELS = {
    "all": lambda graph, made, x: {"every": graph.chain(made, x=x).h},
    "last": lambda graph, made, x: {"last": graph.chain(made, x=x).last.h},
    "state": lambda graph, made, x: {"h": graph.chain(made, x=x, h=x[0]).last.h},
    "layers": two_layers,
}


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What compiled code says of each run that it is asked to launch from now on."""
    codes: list[int] = []
    launch = executor.compiled.launch_run

    def note(*arguments):
        codes.append(launch(*arguments))
        return codes[-1]

    monkeypatch.setattr(executor.compiled, "launch_run", note)
    return codes


class HalvesSpans(HalvesRows):
    """The same, told by the device how many rows there are."""

    @reads_spans
    def run_rows(self, inputs, outputs):
        x, h, out = taken(inputs["x"]), taken(inputs["h"]), taken(outputs["h"])
        write(out, x.values[x.rows] + 0.5 * h.values[h.rows])


FORMS = {
    "plain": (HalvesRows, {"fused": False}),
    "fused": (HalvesRows, {"fused": True}),
    "spans": (HalvesSpans, {"fused": True}),
    "spans, then whole": (HalvesSpans, {"fused": True, "whole_runs_after": 2}),
}


@pytest.mark.parametrize(
    ("form", "ring_bytes", "direct"),
    quickly(
        [("plain", 1 << 18, False), ("fused", 4096, True), ("spans", 4096, True), ("spans, then whole", 1 << 18, True)],
        of=product(FORMS, [4096, 1 << 18], [False, True]),
    ),
)
def test_captured_steps_give_what_their_nodes_give(stub_engines, monkeypatch, direct, ring_bytes, form):  # noqa: F811
    """Also where the first state comes from the host, and where nothing is brought back."""
    module, chosen = FORMS[form]
    options = DeviceOptions(ring_bytes=ring_bytes, capture_after=1, direct=direct, **chosen)
    made = cell(module(), STATE, max_batch=16)
    engine = device_engine("dry", 1, options, settings=RUNS)
    launched = watch_launches(monkeypatch)
    models = [
        Unfolder(name, lambda graph, x, unfold=unfold: unfold(graph, made, x), torch.zeros(2, WIDTH))
        for name, unfold in MODELS.items()
    ]
    for model in models:
        engine.register(model, warm_up=False)
        serve(engine, model, [torch.randn(1, WIDTH)])  # so that the scheduler knows how long a step takes
    draw = random.Random(1)
    for _ in range(8):
        for model in models:
            serve(engine, model, [torch.randn(draw.randint(1, 6), WIDTH) for _ in range(draw.randint(1, 9))])
    counts = engine._manager.workers[0].counts()
    close_and_check(engine)
    assert stub_engines.races == []
    assert launched.count(0) > 10 if direct else not launched
    assert counts["captures_failed"] == counts["captures_refused"] == 0 and counts["replayed"] > 10


class Told(NamedTuple):
    h: Tensor


class Words(nn.Module):
    """A cell that fails on a number, has limits, and whose state must be finite."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, token: Tensor, scale: Tensor, h: Tensor) -> Told:
        if token.device.type != "meta" and bool((scale[:, 0] == 7).any()):
            raise ValueError("seven")
        return Told(self.table(token) * scale + 0.5 * h)


class Quiet(Words):
    """The same without looking at a value: it can be captured."""

    def forward(self, token: Tensor, scale: Tensor, h: Tensor) -> Told:
        return Told(self.table(token) * scale + 0.5 * h)


@pytest.mark.parametrize(("module", "bad"), [(Words, "seven"), (Quiet, "inf"), (Quiet, "token")])
def test_only_the_guilty_requests_fail_in_the_middle_of_a_run(module, bad):
    made = cell(
        module(), {"token": rows(dtype=torch.int64), "scale": (WIDTH,), "h": (WIDTH,)}, max_batch=16, finite=["h"]
    )

    def unfold(graph, request):
        chain = graph.chain(made, token=request["token"], scale=request["scale"])
        return {"every": chain.h, "last": chain.last.h}

    def draw(length: int) -> dict[str, Tensor]:
        return {"token": torch.randint(5, (length,)), "scale": torch.randn(length, WIDTH)}

    model = Unfolder("words", unfold, draw(2))
    engine = device_engine("dry", 1, DeviceOptions(ring_bytes=1 << 18, capture_after=1), settings=RUNS)
    engine.register(model, warm_up=False)
    serve(engine, model, [draw(1)])
    for _ in range(3):
        requests = [draw(2 + k % 4) for k in range(9)]
        if bad == "token":
            requests[3]["token"][1] = 5
        else:
            requests[3]["scale"][1] = 7.0 if bad == "seven" else torch.inf
        futures = engine.submit_many("words", requests)
        assert type(error_of(futures[3])) is (RequestError if bad == "token" else CellError)
        for k, future in enumerate(futures):
            if k != 3:
                assert_same(future.result(WAIT_S), run_one_by_one(model, requests[k]))
    close_and_check(engine)


def test_what_steps_take_counts_in_the_budget():
    made = cell(halve, STATE, max_batch=64)
    model = Unfolder("last", lambda graph, x: {"h": graph.chain(made, x=x).last.h}, torch.zeros(2, WIDTH))
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, graph_bytes=3000)
    engine = device_engine("dry", 1, options, settings=SchedulerSettings(join_budget_s=60.0, min_run_s=60.0))
    engine.register(model, warm_up=False)
    for count in (1, 1, 2, 4, 8, 16, 32):
        serve(engine, model, [torch.randn(3, WIDTH) for _ in range(count)])
    captures = engine._manager.workers[0]._executor._captures
    assert 1 <= captures.counts["captures"] <= 3  # each is taken to cost 1,024 bytes
    assert captures.used_bytes == 1024 * captures.counts["captures"]
    close_and_check(engine)
