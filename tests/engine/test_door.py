"""Requests that compiled code admits and answers are as those that Python does, and may become these at any time."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch

from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import MAX_SUBMISSIONS
from cellrt.errors import CancelledError, CellError, EngineClosedError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import SMALL, WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import RAISE, WIDTH, Gate, chain_model, loop_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)


def steps(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + value


def gated(**options):
    """An engine whose worker waits in a gate: what is submitted now, one turn admits."""
    engine, gate = small_engine(1, **options), Gate(WAIT_S)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    return engine, gate, held


@pytest.mark.parametrize("most", [1, 3, 64])
def test_what_finds_no_room_waits_for_it_and_those_behind_it_too(most):
    engine, gate, _ = gated(limits=Limits(**{**vars(SMALL), "max_requests": most}))
    requests = [steps(1 + k % 4, k) for k in range(40)]
    futures = [engine.submit("chain", request) for request in requests[:20]]
    futures += engine.submit_many("chain", requests[20:])
    gate.open.set()
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, request))
    again = engine.submit("chain", steps(3)).result(WAIT_S)
    assert_same(again, run_one_by_one(CHAIN, steps(3)))
    close_and_check(engine)


def test_more_than_it_has_places_for_are_all_answered():
    engine, gate, _ = gated(max_queue=2 * MAX_SUBMISSIONS)
    futures = [engine.submit("chain", steps(1, k % 7)) for k in range(MAX_SUBMISSIONS + 100)]
    gate.open.set()
    for k, future in enumerate(futures):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(1, k % 7)))
    close_and_check(engine)


def test_who_is_cancelled_among_many_ends_alone_wherever_it_is():
    engine, gate, _ = gated(limits=Limits(**{**vars(SMALL), "max_requests": 5}))
    requests = [steps(1 + k % 4, k) for k in range(16)]
    futures = engine.submit_many("chain", requests)
    engine.check()  # a turn: some of them are admitted
    cancelled = {1, 2, 9, 15}
    for k in cancelled:
        assert futures[k].cancel()
    gate.open.set()
    for k, (request, future) in enumerate(zip(requests, futures)):
        if k in cancelled:
            assert type(error_of(future)) is CancelledError
        else:
            assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, request))
    close_and_check(engine)


def test_who_fails_among_many_ends_alone():
    engine = small_engine(1)
    engine.register(CHAIN, warm_up=False)
    requests = [steps(1 + k % 4, k) for k in range(16)]
    for k in (0, 7):
        requests[k][-1, 0] = RAISE
    for futures in (engine.submit_many("chain", requests), [engine.submit("chain", one) for one in requests]):
        for k, (request, future) in enumerate(zip(requests, futures)):
            if k in (0, 7):
                assert type(error_of(future)) is CellError
            else:
                assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, request))
    close_and_check(engine)


def test_those_that_run_when_it_closes_are_told():
    engine, gate, held = gated()
    futures = [engine.submit("chain", steps(2)), *engine.submit_many("chain", [steps(3), steps(1)])]
    closing = threading.Thread(target=engine.close, args=(WAIT_S,))
    closing.start()
    for future in futures:
        assert type(error_of(future)) is EngineClosedError
    gate.open.set()
    closing.join()
    assert held.done()
    close_and_check(engine)


def test_a_result_owns_its_memory():
    engine = small_engine(1)
    engine.register(CHAIN, warm_up=False)
    results = engine.submit_many("chain", [steps(2)] * 9).results(WAIT_S)
    results += [engine.submit("chain", steps(2)).result(WAIT_S) for _ in range(2)]
    expected = run_one_by_one(CHAIN, steps(2))
    for result in results:
        assert len(pickle.dumps(result)) < 2 * len(pickle.dumps(expected))
        assert_same(result, expected)
        for value in result.values():
            value.zero_()
    close_and_check(engine)


@pytest.mark.parametrize("make", ["strided", "read-only", "numpy", "list", "empty"])
def test_whatever_memory_a_tensor_has_is_read_as_it_is(make):
    def last(graph, request):
        h = graph.chain(PLAIN, x=request["x"]).last.h if len(request["x"]) else torch.zeros(WIDTH)
        return {"h": PLAIN(x=request["y"], h=h).h}

    model = Unfolder("last", last, {"x": torch.ones(2, WIDTH), "y": torch.ones(WIDTH)})
    x, y = torch.randn(5, 2 * WIDTH), torch.randn(WIDTH)
    given = {
        "strided": x[::2, ::2],
        "read-only": np.frombuffer(x[:, :WIDTH].contiguous().numpy().tobytes(), np.float32).reshape(5, WIDTH),
        "numpy": np.asfortranarray(x[:, :WIDTH].numpy()),
        "list": [x[0, :WIDTH], x[1, :WIDTH]],
        "empty": x[:0, :WIDTH],
    }[make]
    engine = small_engine(1)
    engine.register(model, warm_up=False)
    request = {"x": given, "y": y}
    expected = run_one_by_one(model, request)
    assert_same(engine.submit("last", request).result(WAIT_S), expected)
    for result in engine.submit_many("last", [request] * 3).results(WAIT_S):
        assert_same(result, expected)
    close_and_check(engine)


def test_of_a_loop_the_steps_that_it_took_are_there():
    model, engine = loop_model("loop", make_cells()[2]), small_engine(1)
    engine.register(model, warm_up=False)
    requests = [(torch.randn(WIDTH), k) for k in range(1, 7)]
    results = engine.submit_many("loop", requests).results(WAIT_S)
    results += [engine.submit("loop", request).result(WAIT_S) for request in requests]
    for request, result in zip(requests * 2, results):
        assert_same(result, run_one_by_one(model, request))
        assert len(result["every"]) == 6
    close_and_check(engine)


def test_statistics_count_them():
    engine = small_engine(1, max_queue=64)
    engine.register(CHAIN, warm_up=False)
    for future in [engine.submit("chain", steps(2)), *engine.submit_many("chain", [steps(3)] * 5)]:
        future.result(WAIT_S)
    counts = engine.statistics()
    assert (counts["done"], counts["unfinished"], counts["models"]["chain"]["done"]) == (6, 0, 6)
    assert counts["latency_s"]["p99"] >= counts["computation_s"]["p50"] > 0
    close_and_check(engine)
