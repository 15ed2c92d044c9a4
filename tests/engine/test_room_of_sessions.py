"""What sessions keep gives way to requests that need its room, whichever room that is; what never fits is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import PagedRows, grows
from cellrt.errors import CellError, RequestTooLargeError
from cellrt.graph.unfolder import Unfolder
from tests.engine import models
from tests.engine.helpers import SMALL, WAIT_S, close_and_check, error_of, small_engine
from tests.engine.paged_models import NAPPING, WIDTH


def append(x: torch.Tensor, total: PagedRows) -> dict[str, torch.Tensor]:
    total.append(x)
    return {"x": x + 1, "stop": x[:, 0] > 1}


def appending(page_size: int, *, keep: bool, **limits: int) -> Unfolder:
    """Reads a request's rows; or, of a number, makes rows until the second, and so many at most."""
    made = cell(append, {"x": (WIDTH,), "total": grows(WIDTH, page_size=page_size)}, name="append", **limits)

    def unfold(graph, request):
        total = graph.pages(made, keep=keep)
        if isinstance(request, int):
            loop = graph.loop(made, x=torch.ones(WIDTH), total=total, until="stop", max_steps=request)
            return {"x": loop.last.x}
        return {"x": graph.chain(made, x=request, total=total).x}

    return Unfolder("append", unfold, torch.ones(3, WIDTH))


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_state_that_comes_back_finds_room_where_idle_sessions_hold_the_pages(is_busy):
    """64 pages at each worker and at the host, of which two sessions hold 104; others may run meanwhile."""
    engine = small_engine(3 if is_busy else 2, page_bytes=1, debug=True)
    gate = models.Gate(WAIT_S)
    try:
        engine.register(appending(1, keep=True, max_batch=8, max_batch_rows=8), warm_up=False)
        engine.register(gate.unfolder, warm_up=False)
        if is_busy:
            held = engine.submit("gate", torch.ones(models.WIDTH))
            assert gate.entered.wait(WAIT_S)
        with engine.session("append", "c") as moved:
            moved.submit(torch.ones(30, WIDTH)).result(WAIT_S)
            state = moved.export()
        kept = [engine.session("append", str(k)) for k in range(3 if is_busy else 2)]
        for future in [session.submit(torch.ones(52, WIDTH)) for session in kept]:
            future.result(WAIT_S)
        with engine.session("append", "c", state=state) as back:
            assert back.submit(torch.ones(1, WIDTH)).result(WAIT_S)["x"].shape == (1, WIDTH)
        assert engine.statistics()["sessions"]["evictions"] > 0
        gate.open.set()
        if is_busy:
            held.result(WAIT_S)
    finally:
        gate.open.set()
        close_and_check(engine)


def test_lists_of_pages_of_idle_sessions_give_way():
    """Each session's list is as long as its request might have become."""
    engine = small_engine(1, page_bytes=1 << 18, limits=replace(SMALL, max_places=1024), debug=True)
    try:
        engine.register(appending(4, keep=True), warm_up=False)
        for k in range(12):
            assert engine.session("append", str(k)).submit(1024).result(WAIT_S)["x"][0] == 3
    finally:
        close_and_check(engine)


def test_a_list_of_pages_that_never_fits_is_refused_at_once():
    engine = small_engine(1, page_bytes=1 << 18, limits=replace(SMALL, max_places=512), debug=True)
    try:
        engine.register(appending(1, keep=False), warm_up=False)
        with pytest.raises(RequestTooLargeError, match="and pages, the tables hold 512"):
            engine.submit("append", 600)
        assert engine.submit("append", 4).result(WAIT_S)["x"][0] == 3
    finally:
        close_and_check(engine)


def test_a_state_of_more_pages_than_a_task_can_list_costs_its_own_request():
    engine = small_engine(1, page_bytes=1 << 22, limits=replace(SMALL, max_places=1 << 18, max_nodes=1 << 17))
    try:
        engine.register(appending(1, keep=False), warm_up=False)
        told = error_of(engine.submit("append", 65_000))
        assert type(told) is RequestTooLargeError and "or a task can list" in str(told)
        assert engine.submit("append", 4).result(WAIT_S)["x"][0] == 3
    finally:
        close_and_check(engine)


def test_a_request_that_fails_leaves_all_states_of_its_session_as_they_were():
    """One that a chain carries, which is ahead, and one that grows."""

    def append_or_fail(x: torch.Tensor, total: PagedRows) -> torch.Tensor:
        if x.device.type != "meta" and bool((x == 20).any()):
            raise ValueError("20")
        total.append(x)
        return x + 1

    rnn = cell(lambda x, h: {"h": h + x}, {"x": (WIDTH,), "h": (WIDTH,)}, carry={"h": "h"}, name="rnn", max_batch=1)
    kept = cell(append_or_fail, {"x": (WIDTH,), "total": grows(WIDTH, page_size=4)}, name="append", max_batch_rows=1)

    def unfold(graph, request):
        sums = graph.chain(rnn, x=request, keep=True)
        return {"x": graph.chain(kept, x=sums.h, total=graph.pages(kept, keep=True)).output}

    engine = small_engine(1, debug=True)
    try:
        engine.register(Unfolder("both", unfold, torch.ones(2, WIDTH)), warm_up=False)
        with engine.session("both") as session:
            session.submit(torch.ones(2, WIDTH)).result(WAIT_S)
            before = session.export()
            assert type(error_of(session.submit(torch.ones(40, WIDTH)))) is CellError
            assert session.export() == before
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("rows", [57, 58, 60, 62])
def test_a_state_that_comes_back_may_fill_what_is_kept_for_those_that_run(rows):
    engine = small_engine(1, page_bytes=1, debug=True)  # 64 pages
    try:
        engine.register(appending(1, keep=True, max_batch=8, max_batch_rows=64), warm_up=False)
        with engine.session("append") as session:
            session.submit(torch.ones(rows, WIDTH)).result(WAIT_S)
            state = session.export()
        with engine.session("append", state=state) as back:
            assert back.submit(torch.ones(1, WIDTH)).result(WAIT_S)["x"].shape == (1, WIDTH)
    finally:
        close_and_check(engine)


def test_pages_of_idle_sessions_go_to_a_request_though_another_model_keeps_the_worker_busy():
    engine = small_engine(1, page_bytes=1, debug=True)
    try:
        engine.register(appending(1, keep=True, max_batch=8, max_batch_rows=8), warm_up=False)
        engine.register(NAPPING, warm_up=False)
        engine.session("append", "idle").submit(torch.ones(58, WIDTH)).result(WAIT_S)  # of 64 pages
        naps = engine.submit("naps", 5_000)
        with engine.session("append", "new") as new:
            assert new.submit(torch.ones(20, WIDTH)).result(WAIT_S)["x"].shape == (20, WIDTH)
        assert not naps.done()
        naps.cancel()
    finally:
        close_and_check(engine)
