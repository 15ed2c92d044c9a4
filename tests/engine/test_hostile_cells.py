"""Whatever a cell raises or returns costs its own requests, and nobody else's; its worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from cellrt.core.processor import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, close_and_check, small_engine

WIDTH, MARK = 2, 100.0
"""A row whose first number is MARK + k does what FAULTS has at place k."""
SMALL_RINGS = DeviceOptions(ring_bytes=1 << 16)
on_every_worker = pytest.mark.parametrize("workers", [1, ["dry"]], ids=["cpu", "device"])


class OwnError(BaseException):
    """No Exception, and not of Python's own."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("never printed")

    __repr__ = __str__


class UntrueError(Exception):
    def __bool__(self) -> bool:
        raise OwnError("never asked")


class Refusing(Tensor):
    """A tensor that nothing can be done with."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise OwnError("not for you")


class UntrueList(list):
    def __bool__(self) -> bool:
        raise OwnError("never asked")


def raising(error: BaseException) -> Callable[[Tensor, Tensor], Tensor]:
    def fail(out: Tensor, given: Tensor) -> Tensor:
        raise error

    return fail


def recurse(out: Tensor, given: Tensor) -> Tensor:
    return recurse(out, given)


def spoil(out: Tensor, given: Tensor) -> Tensor:
    given.fill_(-1.0)
    raise ValueError("after writing to its input")


def shrink(out: Tensor, given: Tensor) -> Tensor:
    given.resize_(0)
    raise ValueError("after shrinking its input")


def with_gradients(out: Tensor, given: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return out.clone().requires_grad_() * 1


FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SystemExit": raising(SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "StopIteration": raising(StopIteration()),
    "CancelledError": raising(asyncio.CancelledError()),
    "MemoryError": raising(MemoryError()),
    "a group": raising(BaseExceptionGroup("several", [SystemExit(1), ValueError()])),
    "an error of its own": raising(OwnError("mine")),
    "an error that cannot be printed": raising(UnprintableError()),
    "an error that is neither true nor false": raising(UntrueError()),
    "a CellError that cannot be printed": raising(CellError(UnprintableError())),
    "endless recursion": recurse,
    "a written input": spoil,
    "an input of another size": shrink,
    "nothing": lambda out, given: None,
    "text": lambda out, given: "a row",
    "another shape": lambda out, given: out[:, :1],
    "another dtype": lambda out, given: out.double(),
    "too many rows": lambda out, given: torch.cat([out, out]),
    "a meta tensor": lambda out, given: out.to("meta"),
    "a sparse tensor": lambda out, given: out.to_sparse(),
    "a tensor that refuses": lambda out, given: out.as_subclass(Refusing),
    "a list that is neither true nor false": lambda out, given: UntrueList([out, out]),
    "two outputs": lambda out, given: {"h": out, "other": out},
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with gradients": with_gradients,
    "not contiguous": lambda out, given: torch.stack([out, out], 2)[:, :, 0],
    "expanded": lambda out, given: out[:, None, :].expand(len(out), 3, WIDTH)[:, 1],
    "a parameter": lambda out, given: nn.Parameter(out.clone()),
}
PLACES = {name: MARK + k for k, name in enumerate([*HARMLESS, *FAULTS])}


class State(NamedTuple):
    h: Tensor


class Step(NamedTuple):
    h: Tensor
    n: Tensor
    stop: Tensor


def behave(out: Tensor, given: Tensor) -> object:
    """``out``, unless a row of what was given is marked otherwise."""
    made: object = out
    if out.device.type != "meta":
        for name, mark in PLACES.items():
            if bool((given[:, 0] == mark).any()):
                made = (FAULTS | HARMLESS)[name](out, given)
    return made


class Add(nn.Module):
    """``x + h / 2``."""

    def forward(self, x: Tensor, h: Tensor) -> object:
        out = behave(x + 0.5 * h, x)
        return {"h": out} if isinstance(out, Tensor) else out


class AddRuns(Add):
    def forward(self, x: Tensor, h: Tensor) -> object:
        return super().forward(x, h)

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor) -> object:
        taken, states = 0, []
        for size in batch_sizes:
            h = x[taken : taken + size] + 0.5 * h[:size]
            states.append(h)
            taken += size
        out = behave(torch.cat(states), x)
        return {"h": out} if isinstance(out, Tensor) else out


def count(x: Tensor, h: Tensor, n: Tensor, at: Tensor) -> object:
    """A step of a loop of four: takes ``x`` at step ``at``, zeros at the others."""
    now = torch.where((n == at)[:, None], x, torch.zeros_like(x))
    out = behave(now + 0.5 * h, now)
    return Step(out, n + 1, n + 1 >= 4) if isinstance(out, Tensor) else out


def add_up(x: RaggedRows) -> object:
    """The sum of each node's rows."""
    owners = torch.repeat_interleave(torch.arange(len(x.offsets) - 1, device=x.values.device), x.offsets.diff())
    sums = torch.zeros(len(x.offsets) - 1, WIDTH, device=x.values.device).index_add(0, owners, x.values)
    out = behave(sums, x.values)
    return {"h": out} if isinstance(out, Tensor) else out


ROW, NUMBER = (WIDTH,), rows(dtype=torch.int64)


def make_models(max_batch: int = 64) -> dict[str, tuple[Unfolder, Cell]]:
    """Models by name, each with the cell that does it; a request is ``[steps, WIDTH]``."""
    both = {"x": ROW, "h": ROW}
    add, runs = cell(Add(), both, max_batch=max_batch), cell(AddRuns(), both, max_batch=max_batch)
    loop = cell(count, {**both, "n": NUMBER, "at": NUMBER}, max_batch=max_batch)
    together = cell(add_up, {"x": ragged(WIDTH)}, max_batch=max_batch)

    def decode(graph, request):
        at = int(request[:, 0].argmax())
        made = graph.loop(loop, until="stop", max_steps=9, x=request[at], at=at)
        return {"every": made.h, "last": made.last.h}

    return {
        "chain": (Unfolder("chain", lambda graph, x: {"every": graph.chain(add, x=x).h}, torch.zeros(2, WIDTH)), add),
        "runs": (Unfolder("runs", lambda graph, x: {"every": graph.chain(runs, x=x).h}, torch.zeros(2, WIDTH)), runs),
        "loop": (Unfolder("loop", decode, torch.zeros(2, WIDTH)), loop),
        "ragged": (
            Unfolder("ragged", lambda graph, x: {"sum": together(x=list(x)).h}, torch.zeros(2, WIDTH)),
            together,
        ),
    }


MODELS = make_models()


def expected(model: str, request: Tensor) -> dict[str, Tensor]:
    """What a model gives for a request without faults, computed by hand."""
    if model == "ragged":
        return {"sum": request.sum(0)}
    if model == "loop":
        at = int(request[:, 0].argmax())
        given = torch.zeros(4, WIDTH)
        given[at] = request[at]
    else:
        given = request
    states, state = [], torch.zeros(WIDTH)
    for x in given:
        state = x + 0.5 * state
        states.append(state)
    return {"every": torch.stack(states)} | ({"last": state} if model == "loop" else {})


def request_of(length: int, number: int, fault: str | None) -> Tensor:
    """A request of ``length`` steps, one of which has a fault."""
    request = torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + number
    if fault is not None:
        request[number % length, 0] = PLACES[fault]
    return request


def assert_ends(model: str, request: Tensor, fault: str | None, future) -> None:
    """A request ends by its own fault, or as computed by hand."""
    error = future.exception(WAIT_S)
    if fault in FAULTS:
        assert type(error) is CellError, error
        assert repr(MODELS[model][1].name) in str(error)
    else:
        assert error is None, error
        wanted = expected(model, request)
        result = future.result()
        assert result.keys() == wanted.keys()
        for name, value in result.items():
            torch.testing.assert_close(value, wanted[name])


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
    assert type(error) is CellError and "expected 1 rows of float32[1], got float64[1, 1]" in str(error)
    assert_ends("chain", request, None, future)
    close_and_check(engine)


FAULTY = st.sampled_from([None, None, None, *FAULTS, *HARMLESS])


@settings(suppress_health_check=list(HealthCheck), max_examples=60)
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
