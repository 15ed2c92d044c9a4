"""Sessions whose growing states two workers share, with more of them than one worker has pages for."""

from __future__ import annotations

import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import grows
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
