"""Cells that fail and workers that die: only what they touched fails, and nothing hangs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.errors import CellError, DeviceError, EngineClosedError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import (
    DIE,
    NOT_FINITE,
    RAISE,
    WIDTH,
    WRONG_SHAPE,
    Gate,
    chain_model,
    let_rows_kill,
    loop_model,
    make_cells,
)

FAULTS = [RAISE, WRONG_SHAPE, NOT_FINITE]
PLAIN, WITH_STEPS, COUNT = make_cells()
CELLS = {"chain": PLAIN, "runs": WITH_STEPS, "loop": COUNT}
MODELS = {
    "chain": chain_model("chain", PLAIN),
    "runs": chain_model("runs", WITH_STEPS),
    "loop": loop_model("loop", COUNT),
}


def request_of(model: str, length: int, fault: float, at: int) -> object:
    """A request of a model, with a fault at step ``at``; no fault if that is 0."""
    if model == "loop":
        row = torch.full((WIDTH,), 1.0)
        row[0] = fault if fault else 1.0
        return row, at
    steps = torch.ones(length, WIDTH)
    if fault:
        steps[min(at, length - 1), 0] = fault
    return steps


def test_of_two_models_in_one_failed_task_each_client_is_told_its_own() -> None:
    engine, gate = small_engine(trace=True), Gate(WAIT_S)
    models = [chain_model(name, PLAIN) for name in ("one", "other")]
    for model in (gate.unfolder, *models):
        engine.register(model, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    futures = [engine.submit(model.name, request_of("chain", 1, RAISE, 0)) for model in models]
    gate.open.set()
    held.result(WAIT_S)
    for model, error in zip(models, map(error_of, futures)):
        assert (
            str(error).startswith(f"model {model.name!r}: cell {PLAIN.name!r} raised") and error.__cause__ is not None
        )
    assert [task.rows for task in engine.timeline().tasks] == [1, 2]
    close_and_check(engine)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", MODELS)
def test_only_the_guilty_requests_fail(model, fault):
    engine = small_engine()
    engine.register(MODELS[model], warm_up=False)
    guilty = {3, 4, 11}
    requests = [request_of(model, 1 + k % 6, fault if k in guilty else 0.0, 1 + k % 5) for k in range(16)]
    futures = engine.submit_many(model, requests)
    for k, (request, future) in enumerate(zip(requests, futures)):
        if k in guilty:
            error = error_of(future)
            assert type(error) is CellError
            assert str(error).startswith(f"model {model!r}: cell {CELLS[model].name!r}")
        else:
            assert_same(future.result(WAIT_S), run_one_by_one(MODELS[model], request))
    assert engine.statistics()["errors"] == {"CellError": len(guilty)}
    close_and_check(engine)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(25))
@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from(sorted(MODELS)), st.integers(1, 7), st.sampled_from([0.0, 0.0, *FAULTS]), st.integers(0, 7)
        ),
        min_size=1,
        max_size=20,
    ),
    workers=st.integers(1, 3),
    max_batch=st.sampled_from([1, 2, 5, 64]),
    runs=st.booleans(),
    early_release=st.booleans(),
    join_budget_s=st.sampled_from([1e-6, 1.0]),
)
def test_failures_are_those_of_the_reference(drawn, workers, max_batch, runs, early_release, join_budget_s):
    plain, with_steps, count = make_cells(max_batch)
    models = [chain_model("chain", plain), chain_model("runs", with_steps), loop_model("loop", count)]
    by_name = {model.name: model for model in models}
    chosen = SchedulerSettings(runs=runs, early_release=early_release, join_budget_s=join_budget_s)
    engine = small_engine(workers, settings=chosen)
    try:
        for model in models:
            engine.register(model, warm_up=False)
        requests = [request_of(*request) for request in drawn]
        futures = [engine.submit(model, request) for (model, *_), request in zip(drawn, requests)]
        for (model, *_), request, future in zip(drawn, requests, futures):
            try:
                expected = run_one_by_one(by_name[model], request)
            except CellError:
                assert type(error_of(future)) is CellError
            else:
                assert_same(future.result(WAIT_S), expected)
        engine.check()
    finally:
        close_and_check(engine)


def test_a_value_that_is_not_finite_at_an_inner_step_of_a_loop_is_found_in_any_run():
    def unfold(graph, request):
        return {"n": graph.loop(COUNT, max_steps=9, until="stop", x=request, at=2).last.n}

    model = type(MODELS["loop"])("inner", unfold, torch.zeros(WIDTH))
    for runs in (True, False):
        engine = small_engine(settings=SchedulerSettings(runs=runs, join_budget_s=1.0))
        engine.register(model, warm_up=False)
        row = torch.tensor([NOT_FINITE, 0.0])
        assert type(engine.submit("inner", row).exception(WAIT_S)) is CellError
        close_and_check(engine)


@pytest.mark.parametrize("workers", [1, ["dry"]], ids=["cpu", "device"])
def test_a_cell_that_cannot_take_a_batch_is_counted_and_told_once(workers, caplog):
    def few(x):
        return x[:4] + 1 if x.device.type == "cpu" else x + 1

    made = cell(few, {"x": (WIDTH,)})
    engine = small_engine(workers)
    engine.register(Unfolder("few", lambda graph, x: {"y": made(x=x).output}, torch.zeros(WIDTH)), warm_up=False)
    for _ in range(2):
        rows = [torch.full((WIDTH,), float(k)) for k in range(10)]
        for row, future in zip(rows, engine.submit_many("few", rows), strict=True):
            assert_same(future.result(WAIT_S), {"y": row + 1})
    counts = engine.statistics()["cells"]["few"]
    assert 2 <= counts["retried"] <= counts["tasks"]
    told = [record.getMessage() for record in caplog.records if record.name == "cellrt"]
    told = [text for text in told if not text.startswith("a task was not captured")]
    assert len(told) == 1 and "cell 'few' fails on a batch but not on its rows alone" in told[0]
    close_and_check(engine)


def test_a_guilty_row_splits_its_task_without_a_word_in_the_log(caplog):
    engine = small_engine()
    engine.register(MODELS["chain"], warm_up=False)
    requests = [request_of("chain", 1, RAISE if k == 3 else 0.0, 0) for k in range(8)]
    for future in engine.submit_many("chain", requests):
        error_of(future)
    assert engine.statistics()["cells"]["add"]["retried"] >= 1
    assert not [record for record in caplog.records if record.name == "cellrt"]
    close_and_check(engine)


@pytest.mark.parametrize("workers", [1, ["dry"]], ids=["cpu", "device"])
@pytest.mark.parametrize("model", MODELS)
def test_the_error_names_the_output_that_is_not_finite(model, workers):
    engine = small_engine(workers)
    engine.register(MODELS[model], warm_up=False)
    error = engine.submit(model, request_of(model, 3, NOT_FINITE, 1)).exception(WAIT_S)
    assert "returned a value that is not finite in output 'h'" in str(error)
    close_and_check(engine)


def test_of_several_outputs_the_one_that_is_not_finite_is_named():
    made = cell(lambda x: {"log": x.log(), "root": x.sqrt(), "one": x}, {"x": (1,)}, finite=["log", "root", "one"])
    engine = small_engine()
    engine.register(Unfolder("m", lambda graph, x: {"y": made(x=x).one}, torch.ones(1)), warm_up=False)
    for x, output in ((0.0, "log"), (-1.0, "log"), (torch.inf, "log"), (1.0, None)):
        error = engine.submit("m", torch.tensor([x])).exception(WAIT_S)
        assert error is None if output is None else f"in output {output!r}" in str(error)
    close_and_check(engine)


def test_the_error_keeps_its_cause():
    engine = small_engine()
    engine.register(MODELS["chain"], warm_up=False)
    error = engine.submit("chain", request_of("chain", 3, RAISE, 1)).exception(WAIT_S)
    assert isinstance(error.__cause__, ValueError)
    assert "add" in str(error) and "a row this cell cannot take" in str(error)
    close_and_check(engine)


def test_a_dead_worker_fails_what_was_on_it_and_the_others_go_on(monkeypatch):
    let_rows_kill(monkeypatch, forever=True)
    gate = Gate(WAIT_S)
    engine = small_engine(2, queue_depth=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(MODELS["chain"], warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))  # keeps one worker busy
    assert gate.entered.wait(WAIT_S)
    error = engine.submit("chain", request_of("chain", 4, DIE, 1)).exception(WAIT_S)
    assert type(error) is DeviceError and isinstance(error.__cause__, SystemExit)
    gate.open.set()
    assert_same(held.result(WAIT_S), {"output": torch.full((WIDTH,), 2.0)})
    requests = [request_of("chain", 1 + k % 6, 0.0, 0) for k in range(20)]
    for request, future in zip(requests, engine.submit_many("chain", requests)):
        assert_same(future.result(WAIT_S), run_one_by_one(MODELS["chain"], request))
    engine.check()
    close_and_check(engine)


def test_the_engine_says_that_it_stopped_when_its_last_worker_dies(monkeypatch):
    let_rows_kill(monkeypatch, forever=True)
    engine = small_engine(2)
    engine.register(MODELS["chain"], warm_up=False)
    healthy = request_of("chain", 5, 0.0, 0)
    for future in engine.submit_many("chain", [healthy] * 10):
        assert_same(future.result(WAIT_S), run_one_by_one(MODELS["chain"], healthy))
    for _ in range(2):  # each kills one worker
        assert type(error_of(engine.submit("chain", request_of("chain", 1, DIE, 0)))) is DeviceError
    with pytest.raises(EngineClosedError, match="no worker left"):
        engine.submit("chain", healthy)
    assert engine.drain(WAIT_S)
    close_and_check(engine)


def test_a_request_that_waits_for_room_ends_when_the_last_worker_dies(monkeypatch):
    let_rows_kill(monkeypatch, forever=True)
    gate = Gate(WAIT_S)
    engine = small_engine(1, arena_bytes=1)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(MODELS["chain"], warm_up=False)
    gate_future = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    deadly = engine.submit("chain", request_of("chain", 2, DIE, 0))
    waiting = [engine.submit("chain", request_of("chain", 20, 0.0, 0)) for _ in range(12)]
    gate.open.set()
    gate_future.result(WAIT_S)
    assert type(error_of(deadly)) is DeviceError
    for future in waiting:
        assert type(error_of(future)) is DeviceError
    close_and_check(engine)
