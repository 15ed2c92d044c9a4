"""Tasks of forms that read on the device how many rows there are: a few captures serve all of them, however ragged."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt import cells
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows, RunSizes, SpannedRows, reads_spans
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.captures import Captures
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.signature import Signature
from tests.effort import quickly
from tests.engine.helpers import WAIT_S, close_and_check, error_of
from tests.engine.models import WIDTH
from tests.engine.test_cuda_chains import CHAIN, RUNS, STEP, State, write
from tests.engine.test_cuda_worker import FEW, device_engine, serve
from tests.kernels.interpreter import set_up

MOST_ROWS = 40
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


class Spanned(nn.Module):
    """``x + h / 2``, plus what says who computed it; it may not look at a value."""

    def forward(self, x: Tensor, h: Tensor) -> State:
        return State(x + 0.5 * h)

    @reads_spans
    def run_rows(self, inputs: dict[str, SpannedRows], outputs: dict[str, SpannedRows]) -> None:
        x, h, out = taken(inputs["x"]), taken(inputs["h"]), taken(outputs["h"])
        write(out, x.values[x.rows] + 0.5 * h.values[h.rows] + STEP)

    @reads_spans
    def run_chain_rows(self, sizes: RunSizes, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> bool:
        most, h, first = sizes.numbers[0], inputs["h"].values[inputs["h"].rows], torch.zeros_like(sizes.values[:1])
        for step in range(len(sizes.numbers)):
            span = torch.cat([first, sizes.values[step : step + 1]])
            x, out = (taken(SpannedRows(*given, most, span)) for given in (inputs["x"], outputs["h"]))
            h = x.values[x.rows] + 0.5 * h + CHAIN
            write(out, h)
            first = first + sizes.values[step]
        return True


class Unmarked(Spanned):
    """The same by steps, for numbers of rows that the host knows."""

    def run_rows(self, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> None:
        x, h = inputs["x"], inputs["h"]
        write(outputs["h"], x.values[x.rows] + 0.5 * h.values[h.rows] + STEP)


def taken(given: SpannedRows) -> IndexedRows:
    """A step's rows, and behind them -1, or what may be read: then row 0."""
    numbers = torch.arange(given.most, device=given.span.device)
    index = given.rows[(given.span[0] + numbers).clamp(max=len(given.rows) - 1)]
    return IndexedRows(given.values, torch.where(numbers < given.span[1], index, -1))


def make(module: nn.Module, **options: object) -> Cell:
    return cell(module, {"x": (WIDTH,), "h": (WIDTH,)}, max_batch=MOST_ROWS, **options)


@contextmanager
def serving(
    made: Cell, chains: bool | None, *, runs: bool = True, whole_runs_after: int = 0, **others: int
) -> Iterator[Engine]:
    """An engine that serves the model "chain", in runs; one step was run before (see ``chains_engine``)."""

    def unfold(graph, x):
        chain = graph.chain(made, x=x)
        return {"every": chain.h, "last": chain.last.h}

    given = {"ring_bytes": 1 << 18, "capture_after": 1, "whole_runs_after": whole_runs_after, **others}
    options = DeviceOptions(fused=True, chains=chains, **given)
    settings = RUNS if runs else SchedulerSettings(runs=False)
    engine = device_engine("dry", 1, options, settings=settings, arena_bytes=1 << 20)
    engine.register(Unfolder("chain", unfold, torch.zeros(2, WIDTH)), warm_up=False)
    engine.submit("chain", torch.zeros(1, WIDTH)).result(WAIT_S)
    yield engine
    close_and_check(engine)


def check(engine: Engine, lengths: list[int], who: float) -> None:
    """Chains of these lengths, which become ready together, give what one by one gives."""
    requests = [torch.randn(length, WIDTH) for length in lengths]
    for request, future in zip(requests, engine.submit_many("chain", requests)):
        result, state = future.result(WAIT_S), torch.zeros(WIDTH)
        for x, h in zip(request, result["every"]):
            state = x + 0.5 * state + who
            torch.testing.assert_close(h, state)
        torch.testing.assert_close(result["last"], state)


def captures_of(engine: Engine) -> Captures:
    return engine._manager.workers[0]._executor._captures


@FEW
@given(
    tasks=st.lists(LENGTHS, min_size=1, max_size=4),
    chains=st.booleans(),
    capture_after=st.sampled_from([1, 2]),
    whole_runs_after=st.sampled_from([0, 1, 100]),
    finite=st.sampled_from([[], ["h"]]),
)
def test_ragged_runs_give_what_their_steps_give(tasks, chains, capture_after, whole_runs_after, finite):
    after = {"capture_after": capture_after, "whole_runs_after": whole_runs_after}
    with serving(make(Spanned(), finite=finite), chains, **after) as engine:
        for lengths in tasks + tasks:
            check(engine, lengths, CHAIN if chains and max(lengths) > 1 else STEP)


def count_captures(module: nn.Module, chains: bool, tasks: int) -> tuple[int, int]:
    """Captures and replays after so many ragged runs, of up to 40 rows and 9 steps."""
    draw = random.Random(1)
    with serving(make(module), chains) as engine:
        before = captures_of(engine).counts.copy()
        for _ in range(tasks):
            requests = [torch.randn(draw.randint(2, 9), WIDTH) for _ in range(draw.randint(1, MOST_ROWS))]
            for future in engine.submit_many("chain", requests):
                future.result(WAIT_S)
        counts = captures_of(engine).counts - before
    return counts["captures"], counts["replayed"]


@pytest.mark.slow
@pytest.mark.parametrize("chains", quickly([True], of=[True, False]))
def test_a_few_captures_serve_all_ragged_runs(chains):
    """They are as many as there are sizes that rows, steps and positions are padded to, not as many as runs."""
    captures, replays = count_captures(Spanned(), chains, 180)
    assert captures <= 40 and replays >= 110
    more_captures, more_replays = count_captures(Spanned(), chains, 360)
    assert more_captures - captures <= 10 and more_replays - replays >= 160


def whole_runs_of(engine: Engine) -> int:
    """Runs that were captured as a whole."""
    known = captures_of(engine)._known.items()
    return sum(capture is not None and len(key.sizes) > 1 for key, capture in known)


def test_runs_go_by_few_captured_steps_until_they_recur():
    draw = random.Random(1)
    with serving(make(Spanned()), False, whole_runs_after=5) as engine:
        for count in range(1, MOST_ROWS + 1):
            check(engine, [draw.randint(2, 9) for _ in range(count)], STEP)
        counts = captures_of(engine).counts
        # Steps of 16, 32 and 40 rows, first and later ones, and steps of their own.
        assert whole_runs_of(engine) <= 3 and counts["captures"] <= 12 and counts["replayed"] > 20
        before = whole_runs_of(engine)
        for _ in range(7):
            check(engine, [7, 7, 5], STEP)
        assert whole_runs_of(engine) == before + 1


def eager_after(engine: Engine, repeats: int) -> int:
    """Tasks that were not replayed, the last of so many equal runs apart."""
    for _ in range(repeats):
        check(engine, [7, 7, 5], STEP)
    before = engine._manager.workers[0].counts()["eager"]
    check(engine, [7, 7, 5], STEP)
    return engine._manager.workers[0].counts()["eager"] - before


def test_a_run_for_whose_capture_there_is_no_room_goes_on_by_steps():
    with serving(make(Spanned()), False, whole_runs_after=5, graph_bytes=2048) as engine:
        assert eager_after(engine, 14) == 0 and whole_runs_of(engine) == 0


def test_a_run_that_waits_for_room_in_the_rings_counts_once():
    """It is asked about at each try."""
    with serving(make(Spanned()), False, whole_runs_after=1000) as engine:
        captures, plans, runs = captures_of(engine), engine._manager.workers[0]._executor._plans, []

        def ask_twice(signature: Signature) -> bool:
            runs.append(signature)
            return captures.goes_whole(signature) or captures.goes_whole(signature)

        plans._goes_whole = ask_twice
        for _ in range(3):
            check(engine, [7, 7, 5], STEP)
        assert captures._by_steps.total() == len(runs) > 0


def test_a_run_whose_capture_failed_goes_on_by_steps(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with serving(make(Spanned()), False, whole_runs_after=5) as engine:
        monkeypatch.setattr(Captures, "_side", fail)
        assert eager_after(engine, 14) == 0 and captures_of(engine).counts["captures_failed"] == 1


class Own(nn.Module):
    """A user's cell of plain torch."""

    def forward(self, x: Tensor, h: Tensor) -> State:
        return State(x + 0.5 * h)


@pytest.mark.parametrize("module", [Own, Unmarked])
def test_where_the_host_must_know_the_sizes_steps_are_captured_once_a_padded_size(module):
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and 40 rows: no more of them, whatever the runs."""
    captures, replays = count_captures(module(), False, 60)
    assert captures <= 11 and replays >= 40
    more_captures, more_replays = count_captures(module(), False, 120)
    assert more_captures <= 11 and more_replays - replays >= 55


class TakesRuns(Own):
    """Its author takes runs himself."""

    def steps(self, sizes: list[int], x: Tensor, h: Tensor) -> State:
        made, start = [], 0
        for size in sizes:
            h = x[start : start + size] + 0.5 * h[:size]
            made.append(h)
            start += size
        return State(torch.cat(made))


def test_where_an_author_takes_runs_no_run_is_like_another():
    captures, replays = count_captures(TakesRuns(), False, 30)
    assert captures > 25 > 5 >= replays


OWN_FORMS = {"plain": (Own, 0.0), "fused": (Unmarked, STEP)}


@FEW
@given(
    tasks=st.lists(LENGTHS, min_size=1, max_size=4),
    form=st.sampled_from(sorted(OWN_FORMS)),
    capture_after=st.sampled_from([1, 2]),
    finite=st.sampled_from([[], ["h"]]),
    batch_sizes=st.sampled_from([None, [3, 8, 40]]),
)
def test_runs_of_captured_steps_give_what_their_steps_give(tasks, form, capture_after, finite, batch_sizes):
    module, who = OWN_FORMS[form]
    with serving(make(module(), finite=finite, batch_sizes=batch_sizes), False, capture_after=capture_after) as engine:
        for lengths in tasks + tasks:
            check(engine, lengths, who)


def test_one_capture_serves_every_number_of_rows_of_a_class():
    """Up to 16 rows a tile is not filled."""
    with serving(make(Spanned()), False, runs=False) as engine:
        for count in (16, 1, 2, 3, 5, 7, 11, 13, 15):
            check(engine, [2] * count, STEP)
        signatures = [key for key, capture in captures_of(engine)._known.items() if capture is not None]
    assert {key.sizes for key in signatures} == {(16,)}
    assert len({key._replace(outputs=()) for key in signatures}) <= 3  # x and h from the host, or h from the arena


class Raises(Spanned):
    """Its fused form fails on what a row brings; the plain one finds which."""

    def forward(self, x: Tensor, h: Tensor) -> State:
        if x.device.type != "meta" and bool((x == 7).any()):
            raise ValueError("seven")
        return State(x + 0.5 * h + STEP)

    @reads_spans
    def run_rows(self, inputs: dict[str, SpannedRows], outputs: dict[str, SpannedRows]) -> None:
        x = inputs["x"]
        if bool((taken(x).values == 7).any()):
            raise ValueError("seven")
        super().run_rows(inputs, outputs)


@pytest.mark.parametrize("runs", [True, False])
def test_the_plain_form_finds_the_guilty_request(runs):
    with serving(make(Raises()), False, runs=runs) as engine:
        requests = [torch.randn(1 + k % 4, WIDTH) for k in range(7)]
        requests[3][2, 1] = 7.0
        futures = engine.submit_many("chain", requests)
        assert type(error_of(futures[3])) is CellError
        for k in (0, 1, 2, 4, 5, 6):
            state = torch.zeros(WIDTH)
            for x in requests[k]:
                state = x + 0.5 * state + STEP
            torch.testing.assert_close(futures[k].result(WAIT_S)["last"], state)


READY_MADE = {
    "LSTMCell": (lambda: cells.LSTMCell(3, 9), {"x": (3,)}, ("h", "c")),
    "EmbeddingLSTMCell": (lambda: cells.EmbeddingLSTMCell(5, 3, 9), {"token": rows(dtype=torch.int64)}, ("h", "c")),
    "GRUCell": (lambda: cells.GRUCell(3, 9), {"x": (3,)}, ("h",)),
}


def serve_interpreted(name: str, chains: bool) -> dict[str, int]:
    """Ragged runs by the kernels themselves, captured and replayed, beside their nodes one by one."""
    torch.manual_seed(2)
    module, inputs, states = READY_MADE[name]
    (source,) = inputs
    made = cell(module(), inputs | dict.fromkeys(states, (9,)), max_batch=20, finite=["h"])

    def unfold(graph, given):
        chain = graph.chain(made, **{source: given})
        return {"every": chain.h, "last": chain.last.h}

    def draw(length: int) -> Tensor:
        return torch.randint(5, (length,)) if source == "token" else torch.randn(length, 3)

    options = DeviceOptions(ring_bytes=1 << 18, capture_after=1, chains=chains)
    engine = device_engine("dry", 1, options, settings=RUNS)
    model = Unfolder("ragged", unfold, draw(2))
    engine.register(model, warm_up=False)
    serve(engine, model, [draw(1)])
    for lengths in ([3, 2], [4, 4, 1], [4, 3, 2, 2, 1, 1]):
        serve(engine, model, [draw(length) for length in lengths])
    counts = engine._manager.workers[0]._executor.counts()
    close_and_check(engine)
    return counts


@pytest.mark.slow
def test_ready_made_cells_serve_ragged_runs_by_their_kernels():
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as interpreter:
        cases = [(name, chains) for name in READY_MADE for chains in (True, False) if chains <= (name != "GRUCell")]
        for counts in [interpreter.submit(serve_interpreted, *case) for case in cases]:
            done = counts.result(100)
            assert done["replayed"] > 0 and not done["unfused"] and not done["captures_failed"]
