"""Models that are unregistered or replaced while they serve: nothing is lost, and what nobody needs is given up."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.errors import DefinitionError, SessionError, UnknownModelError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.waiting import until

PLAIN, *_ = make_cells()
STEPS = torch.ones(3, WIDTH)


def scaled(name: str, factor: float, keep: bool = False) -> Unfolder:
    """A model with its own weight: ``h = factor * (x + h)`` along a chain."""
    weight = torch.nn.Parameter(torch.tensor(factor))

    def step(x, h):
        return {"h": weight * (x + h)}

    made = cell(step, {"x": (WIDTH,), "h": (WIDTH,)})
    return Unfolder(name, lambda graph, x: {"h": graph.chain(made, keep=keep, x=x).h}, torch.zeros(2, WIDTH))


def test_a_replaced_model_serves_the_new_weights_and_ends_what_it_began():
    engine, gate = small_engine(queue_depth=1), Gate(WAIT_S)
    old, new = scaled("scaled", 2.0), scaled("scaled", 3.0)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(old, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    before = engine.submit("scaled", STEPS)
    with pytest.raises(DefinitionError, match="registered already"):
        engine.register(new, warm_up=False)
    engine.register(new, warm_up=False, replace=True)
    after = engine.submit("scaled", STEPS)
    gate.open.set()
    assert_same(before.result(WAIT_S), run_one_by_one(old, STEPS))
    assert_same(after.result(WAIT_S), run_one_by_one(new, STEPS))
    held.result(WAIT_S)
    close_and_check(engine)


def test_an_engine_serves_models_of_a_hundred_shapes():
    engine = small_engine(arena_bytes=1 << 12)
    expected = []
    for width in range(1, 101):
        made = cell(lambda x, h: {"h": x + h}, {"x": (width,), "h": (width,)})

        def unfold(graph, x, made=made):
            return {"h": graph.chain(made, x=x).last.h}

        engine.register(Unfolder(f"wide {width}", unfold, torch.zeros(2, width)), warm_up=False)
        expected.append({"h": torch.full((width,), 2.0 * width)})
    futures = [engine.submit(f"wide {width}", torch.full((2, width), float(width))) for width in range(1, 101)]
    for future, its in zip(futures, expected):
        assert_same(future.result(WAIT_S), its)
    close_and_check(engine)


def test_no_request_is_lost_while_weights_are_swapped_under_load():
    engine = small_engine(2)
    models = [scaled("scaled", float(k)) for k in range(1, 6)]
    engine.register(models[0], warm_up=False)
    allowed = [run_one_by_one(model, STEPS)["h"] for model in models]
    results: list[torch.Tensor] = []
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            results.extend(future.result(WAIT_S)["h"] for future in engine.submit_many("scaled", [STEPS] * 8))

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for model in models[1:]:
        engine.register(model, warm_up=False, replace=True)
    is_over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert results and all(any(torch.equal(result, one) for one in allowed) for result in results)
    assert torch.equal(engine.submit("scaled", STEPS).result(WAIT_S)["h"], allowed[-1])
    close_and_check(engine)


def test_an_open_session_goes_on_with_the_model_it_was_opened_with():
    engine = small_engine()
    old, new = scaled("kept", 2.0, keep=True), scaled("kept", 3.0, keep=True)
    engine.register(old, warm_up=False)
    session, state = engine.session("kept", "a"), []
    assert_same(session.submit(STEPS).result(WAIT_S), run_one_by_one(old, STEPS, state))
    engine.register(new, warm_up=False, replace=True)
    assert_same(session.submit(STEPS).result(WAIT_S), run_one_by_one(old, STEPS, state))
    assert_same(engine.session("kept", "a").submit(STEPS).result(WAIT_S), run_one_by_one(old, STEPS, state))
    assert_same(engine.session("kept", "b").submit(STEPS).result(WAIT_S), run_one_by_one(new, STEPS, []))
    session.close()
    assert_same(engine.session("kept", "a").submit(STEPS).result(WAIT_S), run_one_by_one(new, STEPS, []))
    close_and_check(engine)


def test_unregistering_ends_the_sessions_of_models_that_were_replaced_too():
    engine = small_engine()
    for factor in (2.0, 3.0):
        engine.register(scaled("kept", factor, keep=True), warm_up=False, replace=True)
        engine.session("kept", f"of {factor}").submit(STEPS).result(WAIT_S)
    assert engine.statistics()["sessions"]["open"] == 2
    engine.unregister("kept")
    engine.check()
    assert engine.statistics()["sessions"]["open"] == 0
    close_and_check(engine)


def test_an_unregistered_model_is_unknown_and_its_requests_end():
    engine, gate = small_engine(queue_depth=1), Gate(WAIT_S)
    model = scaled("kept", 2.0, keep=True)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(model, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    session = engine.session("kept", "a")
    before, of_session = engine.submit("kept", STEPS), session.submit(STEPS)
    engine.unregister("kept")
    with pytest.raises(UnknownModelError):
        engine.submit("kept", STEPS)
    with pytest.raises(UnknownModelError):
        engine.unregister("kept")
    gate.open.set()
    for future in (before, of_session):
        assert_same(future.result(WAIT_S), run_one_by_one(model, STEPS))
    held.result(WAIT_S)
    engine.check()
    with pytest.raises(SessionError, match="unregistered"):
        session.submit(STEPS)
    assert engine.statistics()["sessions"]["open"] == 0
    close_and_check(engine)


def test_models_may_come_and_go_more_often_than_there_are_cell_types():
    engine = small_engine()
    engine.register(chain_model("chain", PLAIN), warm_up=False)
    gone = weakref.WeakSet()
    for k in range(300):
        model = scaled("scaled", float(k))
        engine.register(model, warm_up=False, replace=k > 0)
        if k % 50 == 0:
            assert_same(engine.submit("scaled", STEPS).result(WAIT_S), run_one_by_one(model, STEPS))
            assert engine.submit("chain", STEPS).result(WAIT_S)
        gone.add(engine._models["scaled"])
    engine.check()
    del model
    gc.collect()
    assert len(gone) <= 2
    assert list(engine.statistics()["cells"]) == ["add", "step"]
    close_and_check(engine)


def test_a_cell_that_another_model_uses_stays():
    engine = small_engine()
    for name in ("one", "two"):
        engine.register(chain_model(name, PLAIN), warm_up=False)
    engine.unregister("one")
    engine.check()
    assert engine.submit("two", STEPS).result(WAIT_S)
    close_and_check(engine)


def test_statistics_tell_models_apart():
    engine = small_engine()
    for name in ("one", "two"):
        engine.register(chain_model(name, PLAIN), warm_up=False)
    for name in ("one", "one", "two"):
        engine.submit(name, STEPS).result(WAIT_S)
    with pytest.raises(Exception, match="cannot take"):
        engine.submit("two", torch.full((1, WIDTH), 101.0)).result(WAIT_S)
    models = engine.statistics()["models"]
    assert {name: (counts["done"], counts["errors"]) for name, counts in models.items()} == {
        "one": (2, {}),
        "two": (1, {"CellError": 1}),
    }
    for counts in models.values():
        assert counts["unfinished"] == 0
        times = [counts[name]["p50"] for name in ("queueing_s", "computation_s", "latency_s")]
        assert all(time >= 0 for time in times) and times[2] > 0
    close_and_check(engine)


def test_a_client_that_unfolds_keeps_the_cells_of_a_model_that_is_taken_out():
    """Else another model's cells would have their numbers, and the graph be read as if it were of those."""
    entered, go_on = threading.Event(), threading.Event()
    plain = cell(lambda x: x + 1, {"x": (WIDTH,)}, name="plain")
    wide = cell(lambda **rows: sum(rows.values()), {f"x{k}": (WIDTH,) for k in range(10)}, name="wide")

    def unfold(graph, request):
        if request[0] == 7:
            entered.set()
            assert go_on.wait(WAIT_S)
        node = plain(x=request)
        for _ in range(30):
            node = plain(x=node.output)
        return {"x": node.output}

    def unfold_wide(graph, request):
        return {"x": wide(**{f"x{k}": request for k in range(10)}).output}

    engine = small_engine(1)
    engine.register(Unfolder("old", unfold, torch.ones(WIDTH)), warm_up=False)
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            engine.submit("old", torch.full((WIDTH,), 7.0))
        except UnknownModelError as error:
            errors.append(error)

    client = threading.Thread(target=submit)
    client.start()
    assert entered.wait(WAIT_S)
    engine.unregister("old")
    assert engine.drain(WAIT_S)
    engine.register(Unfolder("new", unfold_wide, torch.ones(WIDTH)), warm_up=False)
    assert "plain" in engine.statistics()["cells"]
    go_on.set()
    client.join(WAIT_S)
    assert len(errors) == 1
    assert engine.submit("new", torch.ones(WIDTH)).result(WAIT_S)["x"].tolist() == [10.0] * WIDTH
    until(lambda: "plain" not in engine.statistics()["cells"], "the cells of the old model to be given up")
    close_and_check(engine)
