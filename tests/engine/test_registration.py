"""Models are registered while others are served: neither is refused for it, and no turn waits for memory."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.engine import registration
from cellrt.engine.registration import cost_of
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.arenas import Arenas
from cellrt.worker.step_measurement import measure_steps, rows_that_pay
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, add

LARGE = 4096
"""A batch that needs larger task buffers than an engine starts with."""


def large_model(name: str, width: int) -> Unfolder:
    made = cell(add, {"x": (width,), "h": (width,)}, name=f"add {width}", max_batch=LARGE)
    return Unfolder(name, lambda graph, request: {"last": graph.chain(made, x=request).last.h}, torch.zeros(2, width))


def test_models_with_large_batches_and_new_rows_are_registered_while_a_task_runs():
    gate = Gate(WAIT_S)
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    engine.register(large_model("same rows", WIDTH), warm_up=False)
    engine.register(large_model("other rows", WIDTH + 1), warm_up=False)
    later = [
        engine.submit(name, torch.ones(2, width)) for name, width in (("same rows", WIDTH), ("other rows", WIDTH + 1))
    ]
    gate.open.set()
    assert held.result(WAIT_S)
    for future, width in zip(later, (WIDTH, WIDTH + 1)):
        torch.testing.assert_close(future.result(WAIT_S)["last"], torch.full((width,), 1.5))
    close_and_check(engine)


def test_memory_is_allocated_before_the_turn_that_adds_a_model(monkeypatch: pytest.MonkeyPatch):
    engine, allocated, allocate = small_engine(), [], Arenas.allocate
    is_in_turn = False
    run_in_turn = engine._registrar._run_in_turn

    def noting_turns(function):
        def in_turn():
            nonlocal is_in_turn
            is_in_turn = True
            made = function()
            is_in_turn = False
            return made

        return run_in_turn(in_turn)

    def noting_memory(arenas, spec, num_rows):
        allocated.append(is_in_turn)
        return allocate(arenas, spec, num_rows)

    monkeypatch.setattr(engine._registrar, "_run_in_turn", noting_turns)
    monkeypatch.setattr(Arenas, "allocate", noting_memory)
    engine.register(large_model("large", WIDTH), warm_up=False)
    assert allocated == [False, False], "one kind of rows, at the host and at the worker"
    close_and_check(engine)


def test_registration_says_what_a_node_costs_and_whether_its_grain_is_too_fine(caplog):
    small = cell(add, {"x": (1,), "h": (1,)}, name="small", max_batch=8)
    fine = cost_of(small, {1: 1e-5, 8: 2e-5})
    assert fine.startswith("cell 'small': one call of it takes, in microseconds by rows: 10 with 1, 20 with 8; ")
    assert "that is 2.50 a row with 8. What the engine adds" in fine and "make several such cells one" in fine
    assert cost_of(small, {1: 1e-4, 8: 8e-4}).endswith("that is 100.00 a row with 8")
    engine = small_engine()
    with caplog.at_level("INFO", "cellrt"):
        engine.register(large_model("said", WIDTH + 2))
    assert any(f"cell 'add {WIDTH + 2}': one call of it takes" in line for line in caplog.messages)
    close_and_check(engine)


@pytest.mark.parametrize(
    ("step_us", "expected"),
    [
        ({}, None),
        ({1: 0.0}, None),  # it refuses zeros
        ({1: 50.0, 8: 60.0, 64: 100.0, 512: 400.0}, None),
        ({1: 20.0, 8: 60.0, 64: 433.0, 512: 3900.0}, None),  # 7.8 us a row beside 8.3
        ({1: 20.0, 8: 60.0, 64: 433.0, 512: 5522.0}, 64),
        ({1: 20.0, 32: 220.0, 64: 433.0, 128: 900.0, 512: 5522.0}, 64),
        ({1: 10.0, 8: 5000.0}, 1),
    ],
)
def test_tasks_have_as_few_rows_as_take_about_the_least_time_each(step_us, expected):
    assert rows_that_pay({rows: 1e-6 * each for rows, each in step_us.items()}) == expected


def crowded(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Takes the longer a row the more there are."""
    if x.device.type != "meta":
        time.sleep(4e-8 * len(x) ** 2)
    return {"y": x + 1}


def test_cells_of_one_name_have_each_their_own_most_rows():
    slow, fast = cell(crowded, {"x": (2,)}, name="same"), cell(lambda x: {"y": x - 1}, {"x": (2,)}, name="same")
    for first, second in ((slow, fast), (fast, slow)):
        model = Unfolder(
            "model",
            lambda graph, x, a=first, b=second: {"y": graph.chain(b, x=graph.chain(a, x=x).y).y},
            torch.zeros(2, 2),
        )
        with small_engine(1) as engine:
            engine.register(model)
            most = engine._processor.tables.types["max_batch"]
            types = {made.cell.identity: most[made.id] for made in engine._registry.types.values()}
        assert types[slow.identity] <= 128 and types[fast.identity] == 512


@pytest.mark.parametrize("chosen", [{}, {"crowded": 512}])
def test_a_cell_whose_large_steps_take_longer_a_row_gets_smaller_tasks_unless_they_are_asked_for(chosen, caplog):
    made = cell(crowded, {"x": (2,)}, name="crowded")
    model = Unfolder("model", lambda graph, x: {"y": graph.chain(made, x=x).y}, torch.zeros(2, 2))
    with caplog.at_level("INFO", "cellrt"), small_engine(1) as engine:
        engine.register(model, max_batch=chosen)
        engine.submit("model", torch.zeros(700, 2)).result(WAIT_S)
        most = engine.statistics()["cells"]["crowded"]["nodes"] / engine.statistics()["cells"]["crowded"]["tasks"]
    assert "the most that its tasks have" in caplog.text
    assert (most > 128) == bool(chosen)


def test_cells_with_other_weights_are_not_measured_again(monkeypatch) -> None:
    measured: list[str] = []

    def measure(made, *how):
        measured.append(made.name)
        return measure_steps(made, *how)

    monkeypatch.setattr(registration, "measure_steps", measure)
    with small_engine() as engine:
        for version, width in enumerate((3, 3, 3, 4)):
            step = cell(nn.Linear(width, width), {"input": (width,)}, name=f"wide {width}")
            model = Unfolder("m", lambda graph, x, step=step: {"y": step(input=x).output}, torch.zeros(width))
            engine.register(model, replace=version > 0)
            assert engine.submit("m", torch.zeros(width)).result(WAIT_S)
        times = engine._processor.tables.step_ns
        assert (times.max(1) > 0).sum() >= 2, "what was measured of one is known of the others"
    assert measured == ["wide 3", "wide 4"]
