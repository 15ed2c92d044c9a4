"""Loops of cells that read and write arena rows themselves run in that form, and give what their steps give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows, SpannedRows, reads_spans
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of
from tests.engine.test_cuda_chains import read, write
from tests.engine.test_cuda_loops import MOST_STEPS, NUMBER, Counted, ahead, count_freely, counter
from tests.engine.test_cuda_ragged import taken
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, serve

LONG_RUNS = SchedulerSettings(loops_ahead=1, join_budget_s=60.0, min_run_s=60.0)
BAD = 100


class Counts(nn.Module):
    """Counts up to ``end``, which says stop. ``plain``: how often the form ran that none of these tests should need."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.fused = 0, 0

    def __deepcopy__(self, memo: object) -> Counts:
        return self

    def forward(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        self.plain += n.device.type != "meta"
        return count_freely(n, h, end)

    def run_rows(self, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> None:
        self.fused += 1
        made = self.step(*(read(inputs[name]) for name in ("n", "h", "end")))
        for name, value in made._asdict().items():
            write(outputs[name], value)

    def step(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        return count_freely(n, h, end)


class CountsSpans(Counts):
    """The same, told by the device how many rows there are."""

    def forward(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        return super().forward(n, h, end)

    @reads_spans
    def run_rows(self, inputs: dict[str, SpannedRows], outputs: dict[str, SpannedRows]) -> None:
        if isinstance(inputs["n"], IndexedRows):  # where a cell names numbers of rows
            super().run_rows(inputs, outputs)
            return
        self.fused += 1
        given = {name: taken(value) for name, value in inputs.items()}
        h = {name: values[numbers.clamp(min=0)] for name, (values, numbers) in given.items()}
        for name, value in self.step(**h)._asdict().items():
            write(taken(outputs[name]), value)


class Breaks(CountsSpans):
    """Not a number from the sixth step on for rows that count to BAD; a row is looked at no more behind its stop."""

    def forward(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        return super().forward(n, h, end)

    @reads_spans
    def run_rows(self, inputs: dict[str, SpannedRows], outputs: dict[str, SpannedRows]) -> None:
        super().run_rows(inputs, outputs)

    def step(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        made = count_freely(n, h, end)
        return made._replace(h=made.h.masked_fill(((end == BAD) & (n == 5))[:, None], torch.nan))


class Raises(Counts):
    """Its fused form cannot take rows that count to BAD; nor can the other from the fourth step on."""

    def forward(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        if n.device.type != "meta" and ((end == BAD) & (n == 3)).any():
            raise ValueError("a row this cell cannot take")
        return super().forward(n, h, end)

    def run_rows(self, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> None:
        super().run_rows(inputs, outputs)

    def step(self, n: Tensor, h: Tensor, end: Tensor) -> Counted:
        if (end == BAD).any():
            raise ValueError("not by this form")
        return count_freely(n, h, end)


def make(module: nn.Module, **others: object) -> Cell:
    return cell(module, {"n": NUMBER, "h": (2,), "end": NUMBER}, **{"max_batch": 8, **others})


def place(engine: Engine, made: Cell) -> None:
    """Now, as a cell is run on zeros then, to see what it indexes with its inputs."""
    for worker in engine._manager.workers:
        worker._device.placements.of(made)


@contextmanager
def serving(model: Unfolder, settings: SchedulerSettings = LONG_RUNS, **options: Any) -> Iterator[Engine]:
    chosen = DeviceOptions(**{"ring_bytes": 1 << 16, "capture_after": 1, "fused": True, **options})
    engine = device_engine("dry", 1, chosen, settings=settings)
    engine.register(model, warm_up=False)
    yield engine
    assert engine.drain(WAIT_S)
    close_and_check(engine)


@FEW
@given(
    requests=st.lists(st.integers(0, MOST_STEPS + 2), min_size=1, max_size=12),
    count=st.integers(0, 3),
    workers=st.integers(1, 2),
    runs=st.booleans(),
    min_run_s=st.sampled_from([1e-6, 2e-4, 1.0]),
    options=OPTIONS,
    kind=st.sampled_from([Counts, CountsSpans]),
    others=st.sampled_from([{}, {"batch_sizes": [4, 8]}, {"finite": ["h"]}]),
)
def test_fused_loops_give_what_their_steps_give_one_by_one(
    requests, count, workers, runs, min_run_s, options, kind, others
):
    module = kind()
    made = make(module, **others)
    model = counter(made)
    chosen = ahead(count, runs=runs, min_run_s=min_run_s, join_budget_s=1.0)
    engine = device_engine("dry", workers, options, settings=chosen)
    expected = [run_one_by_one(model, request) for request in requests]
    try:
        engine.register(model, warm_up=runs)
        place(engine, made)
        module.plain = module.fused = 0
        for _ in range(2):  # the second time what was captured is repeated
            for result, future in zip(expected, engine.submit_many(model.name, requests)):
                assert_same(future.result(WAIT_S), result)
        engine.check()
        counts = [each["unfused"] for each in engine.statistics()["workers"].values()]
    finally:
        close_and_check(engine)
    assert module.fused > 0
    if workers == 1:  # rows of another worker go through the plain form
        assert module.plain == 0 and sum(counts) == 0


@pytest.mark.parametrize("runs", [False, True])
def test_a_loop_that_comes_from_the_host_and_stops_in_a_task_before_is_what_it_was(runs):
    """Its state is a request's, so it lies elsewhere at the first step than at the later ones."""
    made = make(CountsSpans())

    def unfold(graph, request):
        start, end, h = request
        loop = graph.loop(made, until="stop", max_steps=MOST_STEPS, keep=["n", "h"], n=start, h=h, end=end)
        return {"every": loop.h, "n": loop.last.n, "stop": loop.last.stop}

    model = Unfolder("from", unfold, (0, 3, torch.zeros(2)))
    settings = ahead(2, runs=runs, join_budget_s=60.0, min_run_s=60.0)
    with serving(model, settings, dry_delay_s=5e-4) as engine:
        for _ in range(3):
            serve(engine, model, [(start, 4, torch.randn(2)) for start in range(6)])


def test_ragged_loops_share_captures():
    module = CountsSpans()
    made = make(module, max_batch=40)
    model = counter(made)
    expected = [run_one_by_one(model, request) for request in range(MOST_STEPS)]
    with serving(model, ahead(1, runs=False), ring_bytes=1 << 18) as engine:
        place(engine, made)
        module.plain = 0
        for count in range(1, MOST_STEPS + 1):
            for result, future in zip(expected, engine.submit_many("count", list(range(count)))):
                assert_same(future.result(WAIT_S), result)
        counts = engine.statistics()["workers"][1]
    assert counts["captures"] <= 4 and counts["replayed"] > 10 * counts["captures"] and module.plain == 0


@pytest.mark.parametrize("settings", [LONG_RUNS, ahead(3, runs=False)])
def test_only_a_row_that_is_not_finite_fails(settings):
    model = counter(make(Breaks(), finite=["h"]))
    with serving(model, settings, dry_delay_s=5e-4) as engine:
        for _ in range(2):
            futures = engine.submit_many("count", [4, BAD, 9])
            error = error_of(futures[1])
            assert type(error) is CellError and "not finite" in str(error)
            for request, future in ((4, futures[0]), (9, futures[2])):
                assert_same(future.result(WAIT_S), run_one_by_one(model, request))
        for requests in ([9, 1, 1], [1, 1, 1]):  # what lies behind their stop is of the one that failed
            serve(engine, model, requests)


def test_what_the_fused_form_does_not_take_the_plain_form_does():
    module = Raises()
    model = counter(make(module))
    with serving(model) as engine:
        futures = engine.submit_many("count", [4, BAD, 9])
        error = error_of(futures[1])
        assert type(error) is CellError and "a row this cell cannot take" in str(error)
        for request, future in ((4, futures[0]), (9, futures[2])):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert module.plain > 0


def test_loops_go_through_the_plain_form_where_scratch_rows_do_not_suffice(monkeypatch):
    monkeypatch.setattr("cellrt.worker.device.device_arenas.MAX_SCRATCH_ROWS", 8)
    module = Counts()
    made = make(module)
    model = Unfolder(
        "all", lambda graph, n: {"every": graph.loop(made, max_steps=MOST_STEPS, until="stop", end=n).h}, 3
    )
    expected = {request: run_one_by_one(model, request) for request in (9, 8, 7, 6)}
    with serving(model) as engine:
        place(engine, made)
        module.plain = 0
        for result, future in zip(expected.values(), engine.submit_many("all", list(expected))):
            assert_same(future.result(WAIT_S), result)
        counts = engine.statistics()["workers"][1]
    assert counts["unfused"] > 0 and module.plain > 0


class Walk(NamedTuple):
    token: Tensor
    stop: Tensor


class Walks(nn.Module):
    """The next token is read from a table, and is outside of it behind the largest; token ``last`` says stop."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last
        self.register_buffer("table", torch.arange(1, 8))

    def forward(self, token: Tensor) -> Walk:
        return Walk(self.table[token], token == self.last)

    def run_rows(self, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> None:
        token = read(inputs["token"])
        write(outputs["token"], self.table[token.clamp(0, 6)])
        write(outputs["stop"], token == self.last)


@pytest.mark.parametrize("settings", [LONG_RUNS, ahead(2, runs=False)])
@pytest.mark.parametrize(("last", "outside"), [(2, 1 << 40), (2, 4), (6, None)])
def test_a_token_outside_an_embedding_costs_its_own_request(settings, last, outside):
    """One that a request brings, one that the loop comes to; none where the loop stops before it would read it."""
    made = cell(Walks(last), {"token": NUMBER}, max_batch=8)

    def unfold(graph, request):
        return {"last": graph.loop(made, until="stop", max_steps=9, token=request).last.token}

    requests = [1, 0] if outside is None else [1, outside, 0]
    with serving(Unfolder("walk", unfold, 1), settings, dry_delay_s=5e-4) as engine:
        for _ in range(2):
            for request, future in zip(requests, engine.submit_many("walk", requests)):
                if request == outside:
                    assert "outside what the cell indexes" in str(error_of(future))
                else:
                    assert future.result(WAIT_S)["last"].item() == last + 1


class Ends(nn.Module):
    """A row of arenas says stop where its state is large."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0

    def __deepcopy__(self, memo: object) -> Ends:
        return self

    def forward(self, h: Tensor) -> Walk:
        return Walk(h[:, 0].long(), h[:, 0] > 5)

    def run_rows(self, inputs: dict[str, IndexedRows], outputs: dict[str, IndexedRows]) -> None:
        self.fused += 1
        for name, value in self(read(inputs["h"]))._asdict().items():
            write(outputs[name], value)


def test_in_a_loop_of_several_cells_the_one_that_says_stop_runs_fused():
    ends = Ends()
    adds = cell(lambda h: h + 1, {"h": (2,)}, name="adds", max_batch=8)
    chooses = cell(ends, {"h": (2,)}, max_batch=8)

    def unfold(graph, request):
        def step(body, state):
            made = adds(h=state.h)
            chosen = chooses(h=made)
            return {"h": made, "token": chosen.token, "stop": chosen.stop}

        loop = graph.loop(step, h=request, until="stop", max_steps=MOST_STEPS)
        return {"tokens": loop.token, "h": loop.last.h}

    model = Unfolder("body", unfold, torch.zeros(2))
    expected = {start: run_one_by_one(model, torch.full((2,), float(start))) for start in range(6)}
    with serving(model) as engine:
        ends.fused = 0
        for _ in range(2):
            futures = engine.submit_many("body", [torch.full((2,), float(start)) for start in expected])
            for result, future in zip(expected.values(), futures):
                assert_same(future.result(WAIT_S), result)
        assert engine.statistics()["workers"][1]["unfused"] == 0
    assert ends.fused > 0
