"""Cells of plain torch through ``torch.compile``, gather and scatter included, give what they give as they are.

Backends that only trace stand for the one that makes kernels, which takes seconds a cell; it has the slow test.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.placement import PlacedCell
from cellrt.worker.device.torch_compile import CompiledStep
from tests.engine.helpers import WAIT_S, assert_same, close_and_check
from tests.engine.paged_models import make_cells, make_request, sums
from tests.engine.test_cuda_worker import device_engine, serve

SIZE, TOKENS = 6, 11
NUMBER = rows(dtype=torch.int64)
GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
DEVICES = ["dry", GPU]
needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Gated(NamedTuple):
    h: Tensor
    c: Tensor
    norm: Tensor


class MinimalGate(nn.Module):
    """Several outputs; two of them are state, in rows of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Linear(2 * SIZE, 2 * SIZE)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Gated:
        f, g = self.sums(torch.cat([x, h], 1)).chunk(2, 1)
        c = torch.sigmoid(f) * c + torch.tanh(g)
        return Gated(torch.tanh(c), c, c.norm(dim=1))


class Counted(NamedTuple):
    h: Tensor
    count: Tensor
    stop: Tensor


class CountTokens(nn.Module):
    """Integer inputs, integer state, and an output that is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, SIZE)

    def forward(self, token: Tensor, count: Tensor, h: Tensor) -> Counted:
        return Counted(0.5 * h + self.table(token), count + token, count > 9)


STATE = {"h": (SIZE,), "c": (SIZE,)}


def gated_model() -> Unfolder:
    made = cell(MinimalGate(), {"x": (SIZE,), **STATE}, max_batch=8)

    def unfold(graph: Graph, request: Tensor) -> dict[str, object]:
        chain = graph.chain(made, x=request)
        again = made(x=chain.last.c, h=chain.last.h, c=chain.last.c)  # its input lies in the arena
        return {"every": chain.norm, "last": chain.last.c, "again": again.h}

    return Unfolder("gated", unfold, torch.zeros(2, SIZE))


def tokens_model() -> Unfolder:
    made = cell(CountTokens(), {"token": NUMBER, "count": NUMBER, "h": (SIZE,)}, max_batch=8)

    def unfold(graph: Graph, request: Tensor) -> dict[str, object]:
        chain = graph.chain(made, token=request)
        loop = graph.loop(made, until="stop", max_steps=5, token=request[0], count=chain.last.count, h=chain.last.h)
        return {"every": chain.count, "h": chain.last.h, "stop": chain.last.stop, "count": loop.last.count}

    return Unfolder("tokens", unfold, torch.zeros(2, dtype=torch.int64))


def inputs_of(model: Unfolder, count: int) -> list[object]:
    lengths = [1 + k % 5 for k in range(count)]
    if model.name == "tokens":
        return [torch.randint(TOKENS, (length,)) for length in lengths]
    return [torch.randn(length, SIZE) for length in lengths]


def compiled_engine(device: str, backend: str, runs: bool = True) -> Engine:
    options = DeviceOptions(ring_bytes=1 << 16, compiled=True, compile_backend=backend)
    return device_engine(device, 1, options, settings=SchedulerSettings(runs=runs, join_budget_s=1.0))


def placed_cells(engine: Engine) -> list[PlacedCell]:
    return list(engine._manager.workers[0]._device.placements._placed.values())


def graphs() -> list[tuple[str, str | None]]:
    """What was compiled, by name, each with why it was not for the first time."""
    return [(made.co_name, made.recompile_reason) for made in torch._dynamo.utils.get_compilation_metrics()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [gated_model, tokens_model])
@pytest.mark.parametrize(("backend", "runs"), [("eager", False), ("aot_eager", True)])
def test_compiled_cells_give_what_they_give_as_they_are(device, make, backend, runs):
    model, engine = make(), compiled_engine(device, backend, runs)
    engine.register(model)
    assert all(placed.run_rows is not None for placed in placed_cells(engine))
    for count in (1, 1, 2, 13):
        serve(engine, model, inputs_of(model, count))
    close_and_check(engine)


MODES = {"none": nullcontext, "autocast": lambda: torch.autocast("cpu"), "device": lambda: torch.device("meta")}


def check_any_number_of_rows(mode: str) -> None:
    model, engine = gated_model(), compiled_engine("dry", "eager", runs=False)
    torch._dynamo.utils.clear_compilation_metrics()
    with MODES[mode]():
        engine.register(model)
    made = graphs()
    assert len(made) == 4, made  # with its input from the arena or the host; its plain form, which has one for one row
    for count in (1, 1, 1, 2, 3, 7, 20):
        serve(engine, model, inputs_of(model, count))
    assert graphs() == made
    assert engine._manager.workers[0]._device.num_captured > 0
    close_and_check(engine)


@pytest.mark.slow
def test_a_cell_is_compiled_when_its_model_is_registered_and_for_any_number_of_rows():
    """In a process of its own: what other tests left of torch's state counts in the guards of what is compiled."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        for done in [own.submit(check_any_number_of_rows, mode) for mode in MODES]:
            done.result(100)


WEIGHT = torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE)


def times_global(x: Tensor) -> Tensor:
    return x @ WEIGHT


def make_closure() -> Callable[[Tensor], Tensor]:
    inner, scale, ones = nn.Linear(SIZE, SIZE), torch.tensor(3.0), torch.ones(SIZE)

    def closure(x: Tensor, *, bias: Tensor = ones) -> Tensor:
        return inner(times_global(x)) * scale + bias

    return closure


def make_list() -> Callable[[Tensor], Tensor]:
    steps = {"first": times_global, "then": [make_closure()]}
    return lambda x: steps["then"][0](steps["first"](x))


def single_model(made: Cell) -> Unfolder:
    return Unfolder("single", lambda graph, request: {"out": made(x=request).output}, torch.zeros(SIZE))


@pytest.mark.parametrize("function", [times_global, make_closure(), make_list()])
def test_functions_with_tensors_of_their_own_are_compiled_too(function):
    model, engine = single_model(cell(function, {"x": (SIZE,)})), compiled_engine("dry", "eager")
    engine.register(model)
    assert [placed.run_rows is not None for placed in placed_cells(engine)] == [True]
    serve(engine, model, [torch.randn(SIZE) for _ in range(5)])
    close_and_check(engine)


def looks_at_values(x: Tensor) -> Tensor:
    return 2 * x if x.device.type == "meta" or float(x.sum()) < 1e9 else x


@pytest.mark.parametrize(("function", "backend"), [(looks_at_values, "eager"), (torch.tanh, "no such backend")])
def test_what_cannot_be_compiled_runs_as_it_is_with_a_warning(function, backend):
    made = cell(lambda x: function(x), {"x": (SIZE,)}, name="plain")
    model, engine = single_model(made), compiled_engine("dry", backend)
    with pytest.warns(RuntimeWarning, match="cell 'plain' is not compiled and runs as it is, because of"):
        engine.register(model)
    assert [placed.run_rows for placed in placed_cells(engine)] == [None]
    serve(engine, model, [torch.randn(SIZE) for _ in range(5)])
    close_and_check(engine)


def test_what_fails_only_later_runs_as_it_is_from_then_on():
    made = cell(MinimalGate(), {"x": (SIZE,), **STATE})
    step = CompiledStep(made, "eager")
    arena, other = torch.randn(20, SIZE), torch.zeros(5)

    def fails(*arguments: object) -> None:
        raise RuntimeError("no compiler today")

    inputs = {name: IndexedRows(arena, torch.tensor([k, 9 + k])) for k, name in enumerate(made.inputs)}
    outputs = {name: IndexedRows(arena, torch.tensor([3 + k, 13 + k])) for k, name in enumerate(STATE)}
    outputs["norm"] = IndexedRows(other, torch.tensor([1, -1]))
    expected = made.run(*(arena[given.rows] for given in inputs.values()))
    step.compile(inputs, outputs)
    (function,) = step._functions.values()
    function.compiled = fails
    with pytest.warns(RuntimeWarning, match="no compiler today"):
        step.run_rows(inputs, outputs)
    step.run_rows(inputs, outputs)
    assert_same(
        {"h": arena[outputs["h"].rows], "c": arena[outputs["c"].rows], "norm": other[1]},
        {"h": expected[0], "c": expected[1], "norm": expected[2][0]},
    )


class HasSteps(MinimalGate):
    """Its author's form for runs says that it ran."""

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor, c: Tensor) -> Gated:
        count = sum(batch_sizes)
        return Gated(torch.full((count, SIZE), 7.0), torch.full((count, SIZE), 7.0), torch.full((count,), 7.0))


def test_runs_go_through_the_authors_form_of_them():
    made = cell(HasSteps(), {"x": (SIZE,), **STATE})
    model = Unfolder("steps", lambda graph, x: {"every": graph.chain(made, x=x).norm}, torch.zeros(2, SIZE))
    engine = compiled_engine("dry", "eager")
    engine.register(model)
    single = [torch.randn(1, SIZE)]
    serve(engine, model, single)
    every = engine.submit("steps", torch.zeros(4, SIZE)).result(WAIT_S)["every"]
    assert torch.equal(every, torch.full((4,), 7.0))
    close_and_check(engine)


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("dry", marks=needs_cpp), GPU])
@pytest.mark.parametrize("make", [gated_model, tokens_model])
def test_compiled_kernels_give_what_cells_give_as_they_are(device, make):
    model, engine = make(), compiled_engine(device, "inductor")
    engine.register(model)
    assert all(placed.run_rows is not None for placed in placed_cells(engine))
    for count in (1, 2, 13):
        serve(engine, model, inputs_of(model, count))
    close_and_check(engine)


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_cpp), GPU])
def test_compiled_kernels_write_only_the_rows_they_are_given(device):
    """The function that torch makes has no copy of an arena in it."""
    from torch._inductor.utils import run_and_get_code

    placed = PlacedCell(cell(MinimalGate(), {"x": (SIZE,), **STATE}), torch.device(device))
    step = CompiledStep(placed.cell, "inductor")
    inputs, outputs = placed._example_rows(4, False)
    _, codes = run_and_get_code(step.compile, inputs, outputs)
    assert len(codes) == 1
    assert "index_copy" in codes[0]
    assert "copy_(" not in codes[0] and "clone" not in codes[0]


class Blend(NamedTuple):
    h: Tensor


def blend(x: Tensor, h: Tensor) -> Blend:
    return Blend(torch.tanh(2 * x + 0.5 * h))


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_cpp), GPU])
def test_gather_cell_and_scatter_are_one_kernel(device):
    """Where a cell has no product, which is a library's: nothing that was gathered is ever in memory."""
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    placed = PlacedCell(cell(blend, {"x": (SIZE,), "h": (SIZE,)}), torch.device(device))
    metrics.reset()
    _, codes = run_and_get_code(CompiledStep(placed.cell, "inductor").compile, *placed._example_rows(4, False))
    assert len(codes) == 1 and metrics.generated_kernel_count == 1
    lines = codes[0].split("def call")[-1].splitlines()
    called = "\n".join(line for line in lines if not line.lstrip().startswith("#"))  # torch says there what it fused
    assert "extern_kernels" not in called and "aten.index" not in called


def test_one_function_serves_arenas_of_any_size_and_any_number_of_rows():
    """Recompiling is refused: the arenas, the rings and the rows are dynamic."""
    made = cell(MinimalGate(), {"x": (SIZE,), **STATE})
    placed = PlacedCell(made, torch.device("cpu"))
    step = CompiledStep(made, "eager")
    step.compile(*placed._example_rows(8, False))
    (function,) = step._functions.values()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for rows_there, count in ((40, 1), (40, 2), (64, 3), (1000, 7), (17, 5), (4096, 300)):
            with torch.inference_mode(False):  # as arenas are made
                arena, norms = torch.randn(3 * rows_there, SIZE), torch.zeros(rows_there)
            taken = torch.randperm(rows_there - 1)[:count] if count < rows_there else torch.arange(count)
            given = {name: IndexedRows(arena, taken + k * rows_there) for k, name in enumerate(made.inputs)}
            free = torch.tensor([n for n in range(rows_there - 1) if n not in taken.tolist()][: 2 * count])
            free = free if len(free) == 2 * count else torch.full((2 * count,), -1)
            outputs = {"h": IndexedRows(arena, free[:count]), "c": IndexedRows(arena, free[count:])}
            outputs["norm"] = IndexedRows(norms, taken)
            expected = made.run(*(arena[value.rows] for value in given.values()))
            step.run_rows(given, outputs)
            torch.testing.assert_close(norms[taken], expected[2])
    assert list(step._functions.values()) == [function]


def test_a_cell_with_pages_is_refused_by_name_and_says_why():
    model, engine = sums(make_cells()), compiled_engine("dry", "eager")
    with pytest.warns(RuntimeWarning, match="cell '(centre|memorise|generate)' is not compiled") as said:
        engine.register(model)
    assert len(said) == 3
    request = make_request(1, 5, 3, 4)
    assert_same(engine.submit("sums", request).result(WAIT_S), run_one_by_one(model, request))
    placed = placed_cells(engine)
    assert engine.statistics()["workers"][1]["not_compiled"] == len(placed) == 3
    assert all("attention over pages and spans is no operator on a device" in repr(each) for each in placed)
    close_and_check(engine)
