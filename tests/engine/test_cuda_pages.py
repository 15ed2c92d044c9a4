"""States that grow in pages, and spans, on a device: each answer is that of its request alone, captured or not."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.cells.language_models import language_model, layered_language_model
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import grows, token
from cellrt.errors import CellError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.unfolders.completion import complete
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, watch_suspensions
from tests.engine.paged_models import (
    POISON,
    WIDTH,
    PagedCells,
    SumSoFar,
    make_cells,
    make_request,
    serve_in_company,
    sums,
)
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, on_every_device
from tests.unfolders.language_models import draw_prompt, small_cell, small_layers
from tests.unfolders.test_completion_sampling import EVERYTHING, sampling_model

CELLS = {1: 5, 2: 64, 3: 7}
"""The most rows of a task, by the size of a page."""
LEADING = st.one_of(st.just(0), st.integers(1, 40))
REQUEST = st.tuples(st.integers(0, 99), st.integers(1, 12), st.integers(1, 30), st.integers(1, 20), LEADING)
CAPTURED = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
STEPS = 60
MODELS = {"one cell": small_cell, "layers": small_layers}


@cache
def cells_of(page_size: int) -> PagedCells:
    return make_cells(page_size, CELLS[page_size])


class Total(NamedTuple):
    x: Tensor
    stop: Tensor


class Totals(nn.Module):
    """The mean of all rows so far, without a look at any number, so that it can be captured."""

    def forward(self, x: Tensor, total: PagedRows) -> Total:
        total.append(x)
        grown = total.by_row[total.tables].flatten(1, 2)[total.nodes]
        places = torch.arange(grown.shape[1], device=x.device)
        seen = places <= total.positions[:, None]
        mean = torch.where(seen[:, :, None], grown, 0).sum(1) / (total.positions + 1)[:, None]
        return Total(0.9 * mean + 0.1, mean[:, 0] > 2)


TOTALS = {
    page_size: cell(Totals(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=page_size)}, name="totals", max_batch=6)
    for page_size in (1, 4)
}


def totals(page_size: int, *, keep: bool = False) -> Unfolder:
    """Reads rows, then makes others."""
    made = TOTALS[page_size]

    def unfold(graph, request):
        state = graph.pages(made, keep=keep)
        read = graph.chain(made, x=request["x"], total=state)
        loop = graph.loop(made, x=read.last.x, total=state, until="stop", max_steps=request["steps"])
        return {"read": read.x, "made": loop.x}

    return Unfolder("totals", unfold, {"x": torch.zeros(2, WIDTH), "steps": 2})


def request_of(seed: int, length: int, steps: int) -> dict[str, object]:
    return {"x": torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)), "steps": steps}


def counts_of(engine) -> dict[str, int]:
    return engine._manager.workers[0].counts()


@FEW
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    page_size=st.sampled_from(list(CELLS)),
    workers=st.integers(1, 2),
    options=OPTIONS,
    queue_depth=st.integers(1, 4),
    count=st.integers(0, 3),
    poisoned=st.sets(st.integers(0, 11), max_size=3),
    cancelled=st.sets(st.integers(0, 11), max_size=3),
)
def test_whatever_the_company_and_the_room_each_result_is_that_of_its_request_alone(
    requests, page_size, workers, options, queue_depth, count, poisoned, cancelled
):
    model, chosen = sums(cells_of(page_size)), SchedulerSettings(loops_ahead=count)
    engine = device_engine("dry", workers, options, page_bytes=1, debug=True, queue_depth=queue_depth, settings=chosen)
    serve_in_company(engine, model, requests, poisoned, cancelled)


@FEW
@given(
    requests=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=12),
    page_size=st.sampled_from(list(TOTALS)),
    workers=st.integers(1, 2),
    options=OPTIONS,
)
def test_what_can_be_captured_gives_the_same_with_further_nodes_beside(requests, page_size, workers, options):
    model = totals(page_size)
    engine = device_engine("dry", workers, options, page_bytes=1, debug=True)
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("totals", request_of(*drawn)) for drawn in requests]
        for drawn, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request_of(*drawn)))
    finally:
        close_and_check(engine)


@on_every_device
def test_steps_of_loops_are_captured(device):
    model = totals(4)
    engine = device_engine(device, 1, CAPTURED, debug=True)
    try:
        engine.register(model, warm_up=False)
        for seed in range(6):
            requests = [request_of(10 * seed + k, 1 + k, 12) for k in range(5)]  # 5 nodes: a sixth is added
            futures = [engine.submit("totals", request) for request in requests]
            for request, future in zip(requests, futures):
                assert_same(future.result(WAIT_S), run_one_by_one(model, request))
        assert counts_of(engine)["replayed"] > 0
        assert counts_of(engine)["captures_refused"] == 0
    finally:
        close_and_check(engine)


READS = cell(Totals(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=4)}, name="reads", max_batch=6, max_batch_rows=8)


def read_only() -> Unfolder:
    """Rows that are read in pieces of 8."""

    def unfold(graph, request):
        return {"read": graph.chain(READS, x=request, total=graph.pages(READS)).x}

    return Unfolder("reads", unfold, torch.zeros(2, WIDTH))


def read_twice(engine) -> dict[str, int]:
    """What the device counts of reading rows once more, of numbers that were there before: alone, and all at once."""
    model = read_only()
    engine.register(model, warm_up=False)
    before: dict[str, int] = {}
    for lengths in (range(2, 20), range(2, 20), range(3, 19, 2)):
        before = counts_of(engine)
        given = [request_of(length, length, 0)["x"] for length in lengths]
        for together in (1, len(given)):
            for first in range(0, len(given), together):
                some = given[first : first + together]
                for rows, future in zip(some, engine.submit_many("reads", some)):
                    assert_same(future.result(WAIT_S), run_one_by_one(model, rows))
    return {name: count - before[name] for name, count in counts_of(engine).items()}


@on_every_device
@pytest.mark.slow
def test_pieces_of_longer_inputs_are_captured(device):
    engine = device_engine(device, 1, CAPTURED, debug=True)
    try:
        counts = read_twice(engine)
    finally:
        close_and_check(engine)
    assert counts["captures_refused"] == counts["captures_failed"] == 0
    assert counts["replayed"] > 15
    assert counts["eager"] <= 5  # of all at once who is with whom is a matter of time


@pytest.mark.slow
def test_pieces_that_are_captured_race_with_nothing(stub_engines):  # noqa: F811
    engine = device_engine("dry", 1, CAPTURED, debug=True)
    counts = read_twice(engine)
    close_and_check(engine)
    assert stub_engines.races == []
    assert counts["replayed"] > 15 and counts["eager"] <= 5, counts


SAMPLING = {"one cell": language_model, "layers": layered_language_model}


@on_every_device
@pytest.mark.parametrize("kind", SAMPLING)
def test_a_language_model_samples_what_it_samples_on_a_cpu(device, kind):
    model = sampling_model(4, 16, SAMPLING[kind])
    engine = device_engine(device, 1, CAPTURED, debug=True, arena_bytes=1 << 20, page_bytes=1 << 18)
    asked = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, EVERYTHING]
    try:
        engine.register(model)
        requests = [
            {**asked[seed % 4], "seed": seed, "prompt": draw_prompt(seed, 1 + 3 * seed), "max_tokens": 12}
            for seed in range(12)
        ]
        futures = [engine.submit("lm", request) for request in requests]
        for request, future in zip(requests, futures):
            wanted, made = run_one_by_one(model, request), future.result(WAIT_S)
            assert made["token"].tolist() == wanted["token"].tolist()
            for name in wanted.keys() - {"token"}:
                torch.testing.assert_close(made[name], wanted[name], rtol=1e-4, atol=1e-4)
    finally:
        close_and_check(engine)


@on_every_device
@pytest.mark.parametrize("kind", MODELS)
def test_a_language_model_says_what_it_says_on_a_cpu(device, kind):
    model = complete("lm", MODELS[kind](4, 16))
    engine = device_engine(device, 1, CAPTURED, debug=True, arena_bytes=1 << 19, page_bytes=1 << 18)
    try:
        engine.register(model)
        requests = [{"prompt": draw_prompt(seed, 1 + 3 * seed), "max_tokens": 12} for seed in range(12)]
        futures = [engine.submit("lm", request) for request in requests]
        for request, future in zip(requests, futures):
            wanted, made = run_one_by_one(model, request), future.result(WAIT_S)
            assert made["token"].tolist() == wanted["token"].tolist()
            torch.testing.assert_close(made["logprob"], wanted["logprob"], rtol=1e-4, atol=1e-4)
    finally:
        close_and_check(engine)


def test_pages_that_run_out_are_lent_and_come_back():
    model = sums(cells_of(1))
    engine = device_engine("dry", 1, DeviceOptions(dry_delay_s=2e-4), page_bytes=1, debug=True)
    suspended = watch_suspensions(engine)
    requests = [make_request(seed, 3, 8, 40) for seed in range(12)]
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("sums", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
        assert any(suspended)
    finally:
        close_and_check(engine)


def test_pages_that_run_out_are_dropped_and_computed_again():
    model, settings = complete("lm", small_cell(1, 8), max_tokens=40), SchedulerSettings(suspension="recompute")
    options = {"page_bytes": 12_288, "arena_bytes": 1 << 19, "settings": settings, "debug": True}
    engine = device_engine("dry", 1, DeviceOptions(dry_delay_s=2e-4), **options)
    suspended = watch_suspensions(engine)
    requests = [{"prompt": draw_prompt(seed, 1 + 2 * seed), "max_tokens": 30} for seed in range(10)]
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("lm", request) for request in requests]
        for request, future in zip(requests, futures):
            wanted, made = run_one_by_one(model, request), future.result(WAIT_S)
            assert made["token"].tolist() == wanted["token"].tolist()
            torch.testing.assert_close(made["logprob"], wanted["logprob"], rtol=1e-4, atol=1e-4)
        assert any(suspended)
        assert engine._processor.tables.settings["page_ns"][0] == 0  # nothing was copied
    finally:
        close_and_check(engine)


@pytest.mark.slow
def test_sessions_are_kept_evicted_exported_and_restored():
    model = totals(1, keep=True)
    engine = device_engine("dry", 2, CAPTURED, page_bytes=1, debug=True)
    states: list[list[Tensor]] = [[] for _ in range(8)]
    try:
        engine.register(model, warm_up=False)
        sessions = [engine.session("totals", str(k)) for k in range(8)]
        for turn in range(4):
            for k, session in enumerate(sessions):
                request = request_of(10 * turn + k, 4, 5)
                assert_same(session.submit(request).result(WAIT_S), run_one_by_one(model, request, states[k]))
                if turn == 2:
                    exported = session.export()
                    session.reset()
                    session.restore(exported)
        assert engine.statistics()["sessions"]["evictions"] > 0
    finally:
        close_and_check(engine)


def test_a_failed_request_leaves_its_session_the_rows_before_the_task_that_failed():
    accumulate = cell(SumSoFar(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=2)}, name="sum", max_batch_rows=4)

    def unfold(graph, request):
        return {"x": graph.chain(accumulate, x=request, total=graph.pages(accumulate, keep=True)).x}

    model, given_rows, state = Unfolder("sum", unfold, torch.zeros(2, WIDTH)), torch.randn(12, WIDTH), []
    engine = device_engine("dry", debug=True)
    try:
        engine.register(model, warm_up=False)
        with engine.session("sum") as session:
            assert_same(session.submit(given_rows[:3]).result(WAIT_S), run_one_by_one(model, given_rows[:3], state))
            bad = given_rows[3:9].clone()
            bad[5, 0] = POISON
            assert isinstance(error_of(session.submit(bad)), CellError)
            run_one_by_one(model, bad[:4], state)
            assert_same(session.submit(given_rows[9:]).result(WAIT_S), run_one_by_one(model, given_rows[9:], state))
    finally:
        close_and_check(engine)


class Looked(NamedTuple):
    x: Tensor


class Looks(nn.Module):
    """An embedding, and how many tokens there were."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)

    def forward(self, token: Tensor, seen: PagedRows) -> Looked:
        x = self.embedding(token)
        seen.append(x)
        return Looked(x + seen.positions[:, None])


@on_every_device
def test_a_token_outside_the_embedding_fails_its_request_alone(device):
    made = cell(Looks(), {"token": token, "seen": grows(WIDTH)}, name="looks")

    def unfold(graph, request):
        return {"x": graph.chain(made, token=request, seen=graph.pages(made)).x}

    model = Unfolder("looks", unfold, [0, 0])
    engine = device_engine(device, debug=True)
    try:
        engine.register(model, warm_up=False)
        requests = [[1, 2], [3, 7, 4], [5], [6, 0, 0]]
        futures = engine.submit_many("looks", requests)
        assert [type(error_of(future)) for future in futures] == [type(None), RequestError, type(None), type(None)]
        for k in (0, 2, 3):
            assert_same(futures[k].result(), run_one_by_one(model, requests[k]))
    finally:
        close_and_check(engine)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.slow
def test_captured_tasks_and_copies_of_pages_race_with_nothing(stub_engines, direct, monkeypatch):  # noqa: F811
    monkeypatch.setattr(DeviceArenas, "settle", lambda arenas: torch.cuda.current_stream(arenas.device).synchronize())
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, direct=direct)
    engine = device_engine("dry", 2, options, page_bytes=1, debug=True)
    model = totals(1)
    engine.register(model, warm_up=False)
    for turn in range(3):
        requests = [request_of(10 * turn + k, 6, 20) for k in range(8)]
        futures = engine.submit_many("totals", requests)
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    counts = [worker.counts() for worker in engine._manager.workers]
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct
    assert sum(each["replayed"] for each in counts) > 0, counts


def test_loops_that_begin_at_different_times_step_together():
    """Four tasks may be on the device at once; loops would take turns in four, if they did not wait for each other."""
    made = cell(Totals(), {"x": (WIDTH,), "total": grows(WIDTH)}, name="totals", max_batch=16)

    def unfold(graph, request):
        loop = graph.loop(made, x=request, total=graph.pages(made), max_steps=STEPS)
        return {"made": loop.x}

    engine = device_engine("dry", 1, DeviceOptions(dry_delay_s=2e-3), queue_depth=4)
    try:
        engine.register(Unfolder("totals", unfold, torch.zeros(WIDTH)), warm_up=False)
        futures = []
        for _ in range(8):
            futures.append(engine.submit("totals", torch.randn(WIDTH)))
            time.sleep(0.002)  # about as long as a step
        for future in futures:
            future.result(WAIT_S)
        num_tasks = engine._manager.workers[0].num_tasks
    finally:
        close_and_check(engine)
    assert STEPS <= num_tasks < 2 * STEPS
