"""Runs of several steps in one call give what their steps give, and go so where that was measured to be faster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt import cells
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.dry import DryDevice
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.placement import PlacedCell
from tests.engine.helpers import WAIT_S, close_and_check, error_of
from tests.engine.models import WIDTH
from tests.engine.test_cuda_worker import device_engine, serve
from tests.kernels.interpreter import set_up

RUNS = SchedulerSettings(join_budget_s=1e6, max_run_s=1e6, min_run_s=1e6)
"""However long a first step takes that is compiled, runs are whole."""
STEP, CHAIN = 100.0, 1000.0
"""What each form adds to every state, so that one can tell which of them ran."""
SIZE, HIDDEN, TOKENS = 3, 9, 5


class State(NamedTuple):
    h: Tensor


class Sums(nn.Module):
    """``x + h / 2``, plus what says who computed it."""

    def forward(self, x: Tensor, h: Tensor) -> State:
        return State(x + 0.5 * h)

    def run_rows(self, inputs, outputs):
        write(outputs["h"], read(inputs["x"]) + 0.5 * read(inputs["h"]) + STEP)

    def run_chain_rows(self, sizes, inputs, outputs):
        assert list(sizes.numbers) == sorted(sizes.numbers, reverse=True)
        assert len(inputs["h"].rows) == sizes.numbers[0]
        assert len(inputs["x"].rows) == len(outputs["h"].rows) == sum(sizes.numbers)
        assert sizes.values.dtype == torch.int64 and sizes.values.numpy().tolist() == list(sizes.numbers)
        h, start = read(inputs["h"]), 0
        for size in sizes.numbers:
            h = read(part(inputs["x"], start, size)) + 0.5 * h[:size] + CHAIN
            write(part(outputs["h"], start, size), h)
            start += size
        return True


class Refuses(Sums):
    def run_rows(self, inputs, outputs):
        super().run_rows(inputs, outputs)

    def run_chain_rows(self, sizes, inputs, outputs):
        return False


class Fails(Refuses):
    def run_rows(self, inputs, outputs):
        super().run_rows(inputs, outputs)

    def run_chain_rows(self, sizes, inputs, outputs):
        raise NotImplementedError("not on this device")


def part(given: IndexedRows, start: int, size: int) -> IndexedRows:
    return IndexedRows(given.values, given.rows[start : start + size])


def read(given: IndexedRows) -> Tensor:
    return given.values.index_select(0, given.rows)


def write(made: IndexedRows, value: Tensor) -> None:
    """What is not to be written goes to the arena's last row, which nobody reads: no shape depends on a value."""
    made.values.index_copy_(0, torch.where(made.rows < 0, len(made.values) - 1, made.rows), value)


def make(module: nn.Module, **options: object) -> Cell:
    return cell(module, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=8, **options)


def options(**others: object) -> DeviceOptions:
    """Fused forms are taken, without measuring which form is faster, and runs go whole at once."""
    return DeviceOptions(**{"ring_bytes": 1 << 16, "whole_runs_after": 0, "fused": True, **others})


def chains_engine(made: Cell, chosen: DeviceOptions) -> Engine:
    """Serves the model "chains": a request is the inputs of several chains, which become ready together.

    One step was run before, so that the scheduler knows how long one takes: from then on tasks are whole runs.
    """

    def unfold(graph, request):
        made_chains = [graph.chain(made, x=x) for x in request]
        every = {f"every{k}": chain.h for k, chain in enumerate(made_chains)}
        return every | {f"last{k}": chain.last.h for k, chain in enumerate(made_chains)}

    engine = device_engine("dry", 1, chosen, settings=RUNS)
    engine.register(Unfolder("chains", unfold, [torch.zeros(2, WIDTH)]), warm_up=False)
    engine.submit("chains", [torch.zeros(1, WIDTH)]).result(WAIT_S)
    return engine


def who_ran_in(engine: Engine, lengths: list[int]) -> set[float]:
    """Serves chains of these lengths; returns what was added at any step, after checking that all else is right."""
    request, seen = [torch.randn(length, WIDTH) for length in lengths], set()
    result = engine.submit("chains", request).result(WAIT_S)
    for k, given in enumerate(request):
        state = torch.zeros(WIDTH)
        for x, h in zip(given, result[f"every{k}"]):
            who = float((h - x - 0.5 * state).mean().round())
            torch.testing.assert_close(h, x + 0.5 * state + who)
            seen.add(who)
            state = h
        torch.testing.assert_close(result[f"last{k}"], state)
    return seen


def who_ran(made: Cell, lengths: list[int], **chosen: object) -> set[float]:
    """The same in an engine of its own."""
    engine = chains_engine(made, options(**chosen))
    seen = who_ran_in(engine, lengths)
    close_and_check(engine)
    return seen


@pytest.mark.parametrize("finite", [[], ["h"]])
@pytest.mark.parametrize("lengths", [[4], [5, 5, 5], [7, 2, 6, 3, 3, 2]])
def test_chains_that_shrink_and_show_every_step_go_in_one_call(lengths, finite):
    assert who_ran(make(Sums(), finite=finite), lengths, chains=True) == {CHAIN}


def test_a_switch_turns_it_off():
    assert who_ran(make(Sums()), [4, 3], chains=False) == {STEP}


def test_a_single_step_is_a_step():
    assert who_ran(make(Sums()), [1, 1], chains=True) == {STEP}


def test_a_module_may_refuse_a_run():
    assert who_ran(make(Refuses()), [4, 3], chains=True) == {STEP}


@pytest.mark.filterwarnings("ignore:cell 'Fails' runs step by step")
def test_a_form_that_fails_when_it_is_measured_is_not_used():
    assert who_ran(make(Fails()), [4, 3]) == {STEP}


def test_only_state_is_carried_in_one_call():
    """The form takes state from one step to the next by name: another carry must go step by step."""
    both = {"x": (WIDTH,), "h": (WIDTH,)}
    device = torch.device("cpu")
    assert PlacedCell(cell(Sums(), both), device).chains is not None
    assert PlacedCell(cell(Sums(), both, carry={"x": "h"}), device).chains is None


def test_a_subclass_that_changes_the_step_does_not_keep_the_run():
    class Changed(Sums):
        def run_rows(self, inputs, outputs):
            raise NotImplementedError

    placed = PlacedCell(make(Changed()), torch.device("cpu"))
    assert placed.run_rows is not None
    assert placed.chains is None


def test_an_example_of_a_run_is_one():
    placed = PlacedCell(make(Sums()), torch.device("cpu"))
    run = placed.example_run(3, 2)
    assert run is not None and run()
    assert PlacedCell(make(Refuses()), torch.device("cpu")).example_run(3, 2)() is False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], list[float]]]:
    """``clock(chain_s, step_s)``: the dry device takes so long for a run in one call, and step by step.

    Returns the times that it will have told.
    """

    def set_clock(chain_s: float, step_s: float) -> list[float]:
        told: list[float] = []

        def time(device, program):
            program()
            told.append(chain_s if len(told) % 2 == 0 else step_s)
            return told[-1]

        monkeypatch.setattr(DryDevice, "time", time)
        return told

    yield set_clock


@pytest.mark.parametrize(("chain_s", "step_s", "faster"), [(1e-3, 2e-3, CHAIN), (2e-3, 1e-3, STEP)])
def test_the_faster_way_is_measured_once_and_kept(clock, chain_s, step_s, faster):
    told = clock(chain_s, step_s)
    engine = chains_engine(make(Sums()), options(capture_after=1000))
    for _ in range(3):
        assert who_ran_in(engine, [5, 4]) == {faster}
    assert len(told) == 2
    for lengths in ([2, 2], [3, 1, 1], [4, 3]):  # two or three steps are of one class; four or five were known
        assert who_ran_in(engine, lengths) == {faster}
    assert len(told) == 4
    close_and_check(engine)


@pytest.mark.parametrize("finite", [[], ["h"]])
def test_captured_runs_are_measured_apart_and_give_the_same(clock, finite):
    """Captured, steps cost the host nothing: here they are the faster ones there, and only there."""
    told = clock(1.0, 2.0)
    engine = chains_engine(make(Sums(), finite=finite), options(capture_after=2))
    device, seen = engine._manager.workers[0]._device, []
    for count in range(6):
        seen.append(who_ran_in(engine, [4, 2, 2]))
        if count == 0:
            told.append(0.0)  # from here on the steps are told as the faster ones
    assert seen == [{CHAIN}] + [{STEP}] * 5  # capturing on this device runs the program, so from the second one on
    assert len(told) == 5
    assert device.num_captured == 3  # two to measure
    close_and_check(engine)


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("scratch_rows", [4, 100])
def test_only_requests_with_a_value_that_is_not_finite_fail(chains, scratch_rows, monkeypatch):
    """Also one in the middle of a run that nobody else sees; and where scratch rows are few, the run goes by steps."""
    monkeypatch.setattr("cellrt.worker.device.device_arenas.MAX_SCRATCH_ROWS", scratch_rows)
    scratch = DeviceArenas(torch.device("cpu"))
    scratch.add(rows(WIDTH), scratch.allocate(rows(WIDTH), 4))
    assert scratch.num_scratch == [scratch_rows]
    made = make(Forgets(), finite=["h"])
    model = Unfolder("last", lambda graph, x: {"last": graph.chain(made, x=x).last.h}, torch.zeros(2, WIDTH))
    engine = device_engine("dry", 1, options(chains=chains), settings=RUNS)
    engine.register(model, warm_up=False)
    engine.submit("last", torch.ones(1, WIDTH)).result(WAIT_S)
    requests = [torch.ones(6 - k, WIDTH) for k in range(4)]
    requests[1][2] = torch.nan
    futures = engine.submit_many("last", requests)
    assert type(error_of(futures[1])) is CellError
    for k in (0, 2, 3):
        assert torch.equal(futures[k].result(WAIT_S)["last"], torch.full((WIDTH,), 2.0))
    close_and_check(engine)


class Forgets(Sums):
    """Its state is what it was just given: a value that is not finite is gone at the next step."""

    def forward(self, x: Tensor, h: Tensor) -> State:
        return State(2 * x + torch.zeros_like(h))

    def run_rows(self, inputs, outputs):
        write(outputs["h"], 2 * read(inputs["x"]))

    def run_chain_rows(self, sizes, inputs, outputs):
        write(outputs["h"], 2 * read(inputs["x"]))
        return True


LSTMS = {
    "LSTMCell": (lambda: cells.LSTMCell(SIZE, HIDDEN), {"x": (SIZE,)}),
    "LSTMRecurrent": (lambda: cells.LSTMRecurrent(HIDDEN), {"gates": (4 * HIDDEN,)}),
    "EmbeddingLSTMCell": (lambda: cells.EmbeddingLSTMCell(TOKENS, SIZE, HIDDEN), {"token": rows(dtype=torch.int64)}),
}


def serve_lstm(name: str, device: str, chains: bool | None, lengths: list[int]) -> set[str]:
    """Serves chains of an LSTM, twice over, and compares them with their nodes one by one; returns how they ran."""
    torch.manual_seed(1)
    ran: set[str] = set()
    module, given = LSTMS[name]
    made = cell(module(), {**given, "h": (HIDDEN,), "c": (HIDDEN,)}, max_batch=8, finite=["h", "c"])
    (source,) = given

    def unfold(graph, request):
        made_chains = [graph.chain(made, **{source: given}) for given in request]
        every = {f"every{k}": chain.h for k, chain in enumerate(made_chains)}
        return every | {f"last{k}": chain.last.c for k, chain in enumerate(made_chains)}

    def draw(*lengths: int) -> list[Tensor]:
        shape = () if source == "token" else given[source]
        return [torch.randint(TOKENS, (n,)) if source == "token" else torch.randn(n, *shape) for n in lengths]

    model = Unfolder("lstm", unfold, draw(2))
    engine = device_engine(device, 1, options(chains=chains, capture_after=1), settings=RUNS)
    engine.register(model, warm_up=False)
    placed = engine._manager.workers[0]._device.placements.of(made)
    if placed.chains is not None:
        run = placed.chains.run
        placed.chains.run = lambda *arguments: ran.add("chain") or run(*arguments)
    step = placed.run_rows
    placed.run_rows = lambda *arguments: ran.add("step") or step(*arguments)
    serve(engine, model, [draw(1)])
    ran.clear()
    for _ in range(3):
        serve(engine, model, [draw(*lengths)])
    captures = engine._manager.workers[0]._executor._captures._known
    if any(capture is not None for layout, capture in captures.items() if len(layout.sizes) > 1):
        ran.add("captured")
    close_and_check(engine)
    return ran


@pytest.mark.parametrize("name", LSTMS)
@pytest.mark.parametrize("chains", [True, False, None])
def test_lstms_give_what_running_one_by_one_gives(name, chains, monkeypatch):
    """By the kernels' references, which look at values, so nothing is captured; with None both ways are measured."""
    monkeypatch.setattr("cellrt.cells._fused.uses_triton", lambda weight: True)
    ran = serve_lstm(name, "dry", chains, [6, 4, 4, 2, 3])
    assert ran == {True: {"chain"}, False: {"step"}, None: {"chain", "step"}}[chains]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LSTMS)
@pytest.mark.parametrize("chains", [True, False, None])
def test_lstms_on_a_gpu(name, chains):
    ran = serve_lstm(name, "cuda:0", chains, [6, 4, 4, 2, 3])
    assert ran == {True: {"chain"}, False: {"step"}, None: {"chain", "step"}}[chains] | {"captured"}


def serve_interpreted(name: str) -> None:
    assert serve_lstm(name, "dry", True, [3, 2]) == {"chain", "captured"}


@pytest.mark.slow
def test_lstms_by_the_kernels_themselves_give_the_same():
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as interpreter:
        for done in [interpreter.submit(serve_interpreted, name) for name in LSTMS]:
            done.result(60)
