"""Whatever a cell raises or returns costs its own requests, and nobody else's; its worker goes on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from cellrt.core.processor import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.hostile_cells import (
    FAULTS,
    HARMLESS,
    MARK,
    MODELS,
    ROW,
    WIDTH,
    OwnError,
    UnprintableError,
    assert_ends,
    behave,
    expected,
    make_models,
    request_of,
)

SMALL_RINGS = DeviceOptions(ring_bytes=1 << 16)
on_every_worker = pytest.mark.parametrize("workers", [1, ["dry"]], ids=["cpu", "device"])


@pytest.mark.one_in(3)
@on_every_worker
@pytest.mark.parametrize("fault", [*FAULTS, *HARMLESS])
@pytest.mark.parametrize("model", MODELS)
def test_a_fault_costs_its_own_request(model, fault, workers):
    engine = small_engine(workers, device_options=SMALL_RINGS)
    engine.register(MODELS[model][0], warm_up=False)
    requests = [request_of(1 + k % 4, k, fault if k in (2, 5) else None) for k in range(8)]
    futures = engine.submit_many(model, requests)
    for k, (request, future) in enumerate(zip(requests, futures)):
        assert_ends(model, request, fault if k in (2, 5) else None, future)
    engine.check()
    close_and_check(engine)


class AddRows(nn.Module):
    """A fused cell, which fails as a whole; its plain form gives the same."""

    def forward(self, x: Tensor, h: Tensor) -> object:
        return {"h": behave(x + 0.5 * h, x)}

    def run_rows(self, inputs, outputs) -> None:
        x, h, made = inputs["x"], inputs["h"], outputs["h"]
        out = behave(x.values[x.rows] + 0.5 * h.values[h.rows], x.values[x.rows])
        made.values[made.rows[made.rows >= 0]] = out[made.rows >= 0]

    def run_chain_rows(self, sizes, inputs, outputs) -> bool:
        start, h = 0, inputs["h"]
        for size in sizes.numbers:
            x, made = (type(h)(all.values, all.rows[start : start + size]) for all in (inputs["x"], outputs["h"]))
            self.run_rows({"x": x, "h": type(h)(h.values, h.rows[:size])}, {"h": made})
            h, start = made, start + size
        return True


@pytest.mark.parametrize("fault", ["SystemExit", "an error that cannot be printed", "a written input"])
@pytest.mark.parametrize("finite", [[], ["h"]])
@pytest.mark.parametrize("form", ["steps", "chains", "single"])
def test_a_fault_in_a_fused_cell_costs_its_own_request(fault, finite, form):
    made = cell(AddRows(), {"x": ROW, "h": ROW}, finite=finite)
    model = Unfolder("fused", lambda graph, x: {"every": graph.chain(made, x=x).h}, torch.zeros(2, WIDTH))
    chosen = SchedulerSettings(runs=form != "single", join_budget_s=1.0)
    engine = small_engine(
        ["dry"], settings=chosen, device_options=DeviceOptions(ring_bytes=1 << 16, chains=form == "chains")
    )
    engine.register(model, warm_up=False)
    for _ in range(3):  # the first shows how long a step takes: then there are runs
        requests = [request_of(1 + k % 4, k, fault if k in (2, 5) else None) for k in range(8)]
        for k, (request, future) in enumerate(zip(requests, engine.submit_many("fused", requests))):
            error = future.exception(WAIT_S)
            if k in (2, 5):
                assert type(error) is CellError and "cell 'AddRows' raised" in str(error)
            else:
                assert error is None
                torch.testing.assert_close(future.result(), expected("fused", request))
    close_and_check(engine)


class Unplaceable(AddRows):
    def run_rows(self, inputs, outputs) -> None:
        super().run_rows(inputs, outputs)

    def can_run_rows(self, inputs, outputs) -> bool:
        raise SystemExit("on no device")


def test_a_cell_that_no_device_can_place_costs_its_own_requests():
    made = cell(Unplaceable(), {"x": ROW, "h": ROW})
    engine = small_engine(["dry"], device_options=SMALL_RINGS)
    engine.register(
        Unfolder("unplaced", lambda graph, x: {"every": graph.chain(made, x=x).h}, torch.zeros(2, WIDTH)),
        warm_up=False,
    )
    engine.register(MODELS["chain"][0], warm_up=False)
    for _ in range(2):
        error = engine.submit("unplaced", torch.ones(3, WIDTH)).exception(WAIT_S)
        assert type(error) is CellError and isinstance(error.__cause__, SystemExit)
        assert "cell 'Unplaceable' cannot be placed on its device: SystemExit: on no device" in str(error)
    request = request_of(3, 1, None)
    assert_ends("chain", request, None, engine.submit("chain", request))
    close_and_check(engine)


@on_every_worker
def test_outputs_may_be_an_input_or_each_other(workers):
    made = cell(lambda x: {"same": x, "again": x, "part": x[:, :1]}, {"x": ROW})

    def unfold(graph, x):
        first = made(x=x)
        return {"again": made(x=first.again).same, "part": first.part}

    engine = small_engine(workers, device_options=SMALL_RINGS)
    engine.register(Unfolder("same", unfold, torch.zeros(WIDTH)), warm_up=False)
    rows = [torch.full((WIDTH,), float(k)) for k in range(6)]
    for row, future in zip(rows, engine.submit_many("same", rows)):
        result = future.result(WAIT_S)
        assert torch.equal(result["again"], row) and torch.equal(result["part"], row[:1])
    close_and_check(engine)


@on_every_worker
def test_a_cell_that_refuses_zeros_in_any_way_is_registered(workers):
    def refuse_zeros(x: Tensor) -> Tensor:
        if x.device.type != "meta" and not bool(x.any()):
            raise SystemExit("no zeros")
        return x + 1

    made = cell(refuse_zeros, {"x": ROW})
    engine = small_engine(workers, device_options=SMALL_RINGS)
    engine.register(Unfolder("refuses", lambda graph, x: {"y": made(x=x).output}, torch.zeros(WIDTH)))
    result = engine.submit("refuses", torch.ones(WIDTH)).result(WAIT_S)
    assert torch.equal(result["y"], torch.full((WIDTH,), 2.0))
    close_and_check(engine)


@on_every_worker
def test_what_was_raised_is_the_cause(workers):
    engine = small_engine(workers, device_options=SMALL_RINGS)
    engine.register(MODELS["chain"][0], warm_up=False)
    error = engine.submit("chain", request_of(3, 1, "SystemExit")).exception(WAIT_S)
    assert isinstance(error.__cause__, SystemExit) and error.__cause__.code == 3
    error = engine.submit("chain", request_of(3, 1, "an error that cannot be printed")).exception(WAIT_S)
    assert type(error.__cause__) is UnprintableError
    assert "raised UnprintableError, whose text raises SystemExit" in str(error)
    close_and_check(engine)


def leave_gradients(x: Tensor) -> None:
    torch.set_grad_enabled(True)


def leave_inference(x: Tensor) -> None:
    torch.inference_mode(False).__enter__()


def leave_threads(x: Tensor) -> None:
    torch.set_num_threads(3)


def leave_a_default_device(x: Tensor) -> None:
    torch.set_default_device("meta")


def leave_autocast(x: Tensor) -> None:
    torch.autocast("cpu").__enter__()


def leave_a_mode(x: Tensor) -> None:
    TorchDispatchMode().__enter__()


def leave_and_fail(x: Tensor) -> None:
    leave_a_default_device(x)
    leave_threads(x)
    raise OwnError


def state_of(x: Tensor) -> Tensor:
    """What a cell finds: gradients, inference, threads, a default device, autocast, modes, a row."""
    found = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
        *(torch.get_default_device().type == "cpu", torch.is_autocast_enabled("cpu"), _len_torch_dispatch_stack()),
    )
    return x + torch.tensor(found, dtype=x.dtype, device=x.device)


@on_every_worker
@pytest.mark.parametrize(
    "leave",
    [
        *(leave_gradients, leave_inference, leave_threads, leave_a_default_device, leave_autocast, leave_a_mode),
        leave_and_fail,
    ],
)
def test_what_a_cell_leaves_changed_in_its_thread_is_put_back(leave, workers):
    def change(x: Tensor) -> Tensor:
        if x.device.type != "meta" and bool((x == MARK).any()):
            leave(x)
        return x + 0

    changing, looking = cell(change, {"x": ()}), cell(state_of, {"x": (6,)})
    engine = small_engine(workers, device_options=DeviceOptions(ring_bytes=1 << 16, graph_bytes=0))
    engine.register(Unfolder("change", lambda graph, x: {"y": changing(x=x).output}, torch.zeros(())), warm_up=False)
    engine.register(Unfolder("look", lambda graph, x: {"y": looking(x=x).output}, torch.zeros(6)), warm_up=False)
    before = engine.submit("look", torch.zeros(6)).result(WAIT_S)["y"]
    assert before.tolist() == [False, True, 1, True, False, 0]
    engine.submit("change", torch.tensor(MARK)).exception(WAIT_S)
    assert torch.equal(engine.submit("look", torch.zeros(6)).result(WAIT_S)["y"], before)
    close_and_check(engine)


@on_every_worker
def test_a_worker_survives_another_default_dtype(workers):
    """It belongs to the whole process, so it stays; the cell's own rows must have the dtype that it declared."""

    def change(x: Tensor) -> Tensor:
        if x.device.type != "meta" and bool((x == MARK).any()):
            torch.set_default_dtype(torch.float64)
        return x + torch.zeros(1, device=x.device)

    changing = cell(change, {"x": (1,)})
    engine = small_engine(workers, device_options=SMALL_RINGS)
    engine.register(Unfolder("change", lambda graph, x: {"y": changing(x=x).output}, torch.zeros(1)), warm_up=False)
    engine.register(MODELS["chain"][0], warm_up=False)
    request = request_of(3, 1, None)
    try:
        error = engine.submit("change", torch.full((1,), MARK)).exception(WAIT_S)
        future = engine.submit("chain", request)
        future.exception(WAIT_S)
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(error) is CellError
    assert "expected float32[1, 1] (1 row of float32[1]), got float64[1, 1]; use .float()" in str(error)
    assert_ends("chain", request, None, future)
    close_and_check(engine)


@on_every_worker
@pytest.mark.parametrize("model", MODELS)
def test_nobody_asks_whether_an_error_is_true_in_a_run_of_steps_either(model, workers):
    fault = "an error that is neither true nor false"
    chosen = SchedulerSettings(join_budget_s=60.0, min_run_s=60.0)
    engine = small_engine(workers, settings=chosen, device_options=SMALL_RINGS)
    engine.register(MODELS[model][0], warm_up=False)
    faults = [fault, None, fault, None]  # of the third at its third step, after that of the first
    for _ in range(3):  # later runs may run in another way
        requests = [request_of(4, k, its) for k, its in enumerate(faults)]
        for request, its, future in zip(requests, faults, engine.submit_many(model, requests)):
            assert_ends(model, request, its, future)
    close_and_check(engine)


FAULTY = st.sampled_from([None, None, None, *FAULTS, *HARMLESS])


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(25))
@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(sorted(MODELS)), st.integers(1, 4), st.integers(0, 7), FAULTY),
        min_size=1,
        max_size=20,
    ),
    workers=st.sampled_from([1, 2, ["dry"], ["dry", "dry"]]),
    max_batch=st.sampled_from([1, 2, 5, 64]),
    runs=st.booleans(),
    early_release=st.booleans(),
    join_budget_s=st.sampled_from([1e-6, 1.0]),
)
def test_whatever_rows_do_the_innocent_get_their_results(drawn, workers, max_batch, runs, early_release, join_budget_s):
    chosen = SchedulerSettings(runs=runs, early_release=early_release, join_budget_s=join_budget_s)
    engine = small_engine(workers, settings=chosen, device_options=SMALL_RINGS)
    try:
        for model, _ in make_models(max_batch).values():
            engine.register(model, warm_up=False)
        requests = [request_of(length, number, fault) for _, length, number, fault in drawn]
        futures = [engine.submit(model, request) for (model, *_), request in zip(drawn, requests)]
        for (model, _, _, fault), request, future in zip(drawn, requests, futures):
            assert_ends(model, request, fault, future)
        engine.check()
        assert engine.statistics()["done"] == sum(fault not in FAULTS for *_, fault in drawn)
    finally:
        close_and_check(engine)
