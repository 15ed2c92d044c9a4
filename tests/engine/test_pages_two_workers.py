"""Growing states at two workers: sessions that share their pages, and requests that find their home late."""

from __future__ import annotations

import time

import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import PagedRows, Spans, grows, span
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import assert_same, close_and_check, small_engine
from tests.engine.paged_models import WIDTH, SumSoFar


def test_sessions_at_two_workers_share_pages_and_all_requests_end():
    """6 sessions of 8 and then 17 rows, where each worker has 64 pages of a row: 102 of 128."""
    accumulate = cell(
        SumSoFar(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=1)}, name="sum", max_batch=8, max_batch_rows=8
    )

    def unfold(graph, request):
        return {"x": graph.chain(accumulate, x=request, total=graph.pages(accumulate, keep=True)).x}

    model = Unfolder("sum", unfold, torch.zeros(2, WIDTH))
    states: list[list[torch.Tensor]] = [[] for _ in range(6)]
    engine = small_engine(2, page_bytes=1, debug=True)
    try:
        engine.register(model, warm_up=False)
        sessions = [engine.session("sum", str(k)) for k in range(6)]
        for length in (8, 9, 3):
            rows = torch.randn(6, length, WIDTH, generator=torch.Generator().manual_seed(length))
            futures = [session.submit(row) for session, row in zip(sessions, rows)]
            for row, future, state in zip(rows, futures, states):
                assert_same(future.result(5), run_one_by_one(model, row, state))
    finally:
        close_and_check(engine)


def add(x: torch.Tensor, bias: torch.Tensor, total: PagedRows) -> torch.Tensor:
    total.append(x + bias)
    rows = zip(total.nodes.tolist(), total.positions.tolist())
    return torch.stack([total.rows_of(node)[: position + 1].sum(0) for node, position in rows])


ADD = cell(add, {"x": (WIDTH,), "bias": (WIDTH,), "total": grows(WIDTH, page_size=4)}, name="paged", priority=0)
NOTHING = torch.zeros(WIDTH)


def late(x: torch.Tensor) -> torch.Tensor:
    """So late that the other worker has begun with the request's pages meanwhile."""
    if x.device.type != "meta":
        time.sleep(0.05)
    return 2 * x + 5


def late_spans(x: torch.Tensor, span: Spans) -> torch.Tensor:
    return late(x)


def assert_is_right_at_two_workers(unfold) -> None:
    model = Unfolder("late", unfold, torch.ones(6, WIDTH))
    engine = small_engine(2, arena_bytes=1 << 18, page_bytes=1 << 16, debug=True)
    try:
        engine.register(model, warm_up=False)
        for k in range(4):
            request = torch.full((6, WIDTH), k + 1.0)
            assert_same(engine.submit("late", request).result(10), run_one_by_one(model, request))
    finally:
        close_and_check(engine)


def test_a_chain_that_reads_what_another_worker_still_makes_does_not_go_home_before():
    first = cell(late, {"x": (WIDTH,)}, name="late", priority=10)

    def unfold(graph, request):
        bias = first(x=request[0]).output
        here = graph.chain(ADD, x=request, bias=NOTHING, total=graph.pages(ADD))
        there = graph.chain(ADD, x=request, bias=bias, total=graph.pages(ADD))
        return {"here": here.output, "there": there.output}

    assert_is_right_at_two_workers(unfold)


def test_a_chain_of_spans_that_runs_at_another_worker_does_not_go_home_before_its_steps_are_done():
    first = cell(late_spans, {"x": (WIDTH,), "span": span()}, name="late", priority=10, max_batch=2, max_batch_rows=2)

    def unfold(graph, request):
        there = graph.chain(first, x=request)
        here = graph.chain(ADD, x=request, bias=NOTHING, total=graph.pages(ADD))
        behind = graph.chain(ADD, x=there.output, bias=NOTHING, total=graph.pages(ADD))
        return {"here": here.output, "behind": behind.output}

    assert_is_right_at_two_workers(unfold)
