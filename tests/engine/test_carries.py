"""Cells that carry state in other ways than one input from the output of its name."""

from __future__ import annotations

import pytest
import torch

from cellrt.cells import EmbeddingGRUDecoder, Projection
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import unfold
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine

SIZE = 8


@pytest.mark.parametrize("keep", [False, True])
def test_two_inputs_that_carry_the_same_output_give_its_row_back_once(keep: bool) -> None:
    made = cell(
        lambda a, b: {"s": a + 0.5 * b + 1}, {"a": (SIZE,), "b": (SIZE,)}, carry={"a": "s", "b": "s"}, name="two"
    )

    @unfold("loop", example=2)
    def model(graph, steps):
        return {"s": graph.loop(made, max_steps=steps, keep=keep).last.s}

    engine = small_engine(debug=True)
    engine.register(model)
    if keep:
        session, state = engine.session("loop"), []
        for steps in (3, 40, 1, 7):
            expected = run_one_by_one(model, steps, state)
            assert_same(session.submit(steps).result(WAIT_S), expected)
    else:
        answers = engine.submit_many("loop", range(1, 60))
        for steps, future in enumerate(answers, start=1):
            assert_same(future.result(WAIT_S), run_one_by_one(model, steps))
    engine.check()
    close_and_check(engine)


def test_a_compiled_form_is_not_used_for_state_that_it_does_not_know() -> None:
    made = cell(Projection(SIZE, SIZE), {"h": (SIZE,)}, carry={"h": "logits"})
    assert made.compiled_form is None

    @unfold("loop", example=torch.zeros(SIZE))
    def model(graph, start):
        return {"last": graph.loop(made, max_steps=6, h=start).last.logits}

    engine = small_engine()
    engine.register(model)
    start = torch.randn(SIZE)
    assert_same(engine.submit("loop", start).result(WAIT_S), run_one_by_one(model, start))
    close_and_check(engine)


def test_a_loop_may_stop_at_any_number() -> None:
    torch.manual_seed(0)
    tokens = 300
    made = cell(EmbeddingGRUDecoder(tokens, 4, SIZE, 7), {"token": rows(dtype=torch.int64), "h": (SIZE,)})
    with torch.no_grad():
        made.module.projection.bias[256] += 100  # the token chosen: its first byte is zero

    @unfold("loop", example=1)
    def model(graph, start):
        return {"tokens": graph.loop(made, token=start, until="token", max_steps=6).token}

    engine = small_engine()
    engine.register(model)
    for start, future in zip((1, 5, 9), engine.submit_many("loop", [1, 5, 9])):
        result = future.result(WAIT_S)
        assert_same(result, run_one_by_one(model, start))
        assert len(result["tokens"]) == 1
    close_and_check(engine)
