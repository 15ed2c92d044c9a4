"""Constants are what the unfolder gives at each request, whatever tensor it has them in and whatever becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from tests.api.models import model, serve
from tests.engine.helpers import WAIT_S

SAME = cell(lambda x: x.clone(), {"x": (2,)}, name="same")


def constant_model(value: Any):
    """Its result is the constant; the request is not read."""
    return model(lambda graph, _: {"x": SAME(x=graph.constant(value)).output})


def fill(tensor: torch.Tensor) -> None:
    tensor.fill_(5)


def fill_data(tensor: torch.Tensor) -> None:
    tensor.data.fill_(5)  # tensor._version stays what it was


def fill_memory(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] = 5


def replace_storage(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((2,), 5.0)


@pytest.mark.parametrize("change", [fill, fill_data, fill_memory, replace_storage])
@pytest.mark.parametrize("inference", [False, True])
def test_a_constant_that_was_changed_in_place_is_the_new_one(engine: Engine, change, inference: bool) -> None:
    with torch.inference_mode(inference):
        value = torch.ones(2)
        (before,) = serve(engine, constant_model(value))
        change(value)
    after = engine.submit("m", None).result(WAIT_S)
    assert before["x"].tolist() == [1, 1] and after["x"].tolist() == [5, 5]


def test_a_numpy_constant_that_was_changed_in_place_is_the_new_one(engine: Engine) -> None:
    value = np.ones(2, np.float32)
    (before,) = serve(engine, constant_model(value))
    value[:] = 5
    assert before["x"].tolist() == [1, 1] and engine.submit("m", None).result(WAIT_S)["x"].tolist() == [5, 5]


def test_a_constant_changed_while_the_graph_is_written_is_what_it_was_at_each_call(engine: Engine) -> None:
    scratch = torch.zeros(2)

    def function(graph: Graph, request: object) -> object:
        made = [SAME(x=graph.constant(scratch.fill_(k))).output for k in (1, 2, 3)]
        return {"x": made}

    engine.register(model(function), warm_up=False)
    assert engine.submit("m", None).result(WAIT_S)["x"].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_a_new_constant_may_be_changed_once_it_is_submitted(engine: Engine) -> None:
    """It has no row at the workers and travels with the request."""
    value = torch.ones(2)
    engine.register(constant_model(value), warm_up=False)
    value.fill_(2)
    future = engine.submit("m", None)
    value.fill_(3)
    assert future.result(WAIT_S)["x"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, torch.int64),
        (-0.0, torch.float32),
        (0.0, torch.float32),
        (True, torch.bool),
        (np.float64(0.1), torch.float64),
        (np.array([1, 2], np.int16), torch.int16),
        (torch.tensor([0.5, -0.0], dtype=torch.bfloat16), torch.bfloat16),
    ],
)
def test_a_constant_has_the_dtype_and_the_bits_of_its_value(engine: Engine, value: Any, dtype: torch.dtype) -> None:
    expected = torch.as_tensor(value) if not isinstance(value, float) or dtype != torch.float32 else torch.tensor(value)
    spec = rows(*expected.shape, dtype=dtype)
    same = cell(lambda x: x.clone(), {"x": spec}, name="same")

    def function(graph: Graph, request: object) -> object:
        graph.constant(0.0)  # is not -0.0
        return {"x": same(x=graph.constant(value)).output}

    (result,) = serve(engine, model(function))
    assert result["x"].dtype == dtype and torch.equal(result["x"], expected)
    assert torch.equal(result["x"].signbit(), expected.signbit()) or dtype in (torch.bool,)


def test_a_float_constant_is_converted_to_the_float_dtype_that_is_asked_for() -> None:
    half = cell(lambda x: x.clone(), {"x": rows(2, dtype=torch.float16)}, name="half")

    def function(graph: Graph, request: object) -> object:
        return {"x": half(x=graph.constant(torch.tensor([0.5, 2.0]), half.inputs["x"])).output}

    assert run_one_by_one(model(function), None)["x"].tolist() == [0.5, 2.0]


def test_models_share_constants_and_keep_their_own(engine: Engine) -> None:
    tokens = cell(lambda x: x.clone(), {"x": rows(dtype=torch.int64)}, name="tokens")

    def constants(*values: int):
        def function(graph: Graph, request: object) -> object:
            floats = [SAME(x=graph.constant(torch.full((2,), float(value)))).output for value in values]
            return {"f": floats, "i": [tokens(x=graph.constant(value)).output for value in values]}

        return function

    given = {"first": (1, 2), "second": (3, 2), "third": (2, 4, 1, 3)}
    for name, values in given.items():
        engine.register(model(constants(*values), name=name), warm_up=False)
    for name, values in given.items():
        result = engine.submit(name, None).result(WAIT_S)
        assert result["i"].tolist() == list(values) and result["f"][:, 0].tolist() == list(values)


def test_more_constants_than_there_are_rows_travel_with_the_request(engine: Engine) -> None:
    token = cell(lambda x: x.clone(), {"x": rows(dtype=torch.int64)}, name="token")

    def function(graph: Graph, first: int) -> object:
        return {"x": [token(x=graph.constant(first + k)).output for k in range(100)]}

    first, second = serve(engine, model(function, 0), 0, 50)
    assert first["x"].tolist() == list(range(100)) and second["x"].tolist() == list(range(50, 150))
