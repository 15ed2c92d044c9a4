"""A cell's weights are copies, in evaluation mode and without gradients, wherever a function finds them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.worker.device.moved import move
from tests.api.models import SIZE

WEIGHT = torch.eye(SIZE, requires_grad=True)
TABLE = {"layer": {"weight": WEIGHT}}
LAYERS = [nn.Linear(SIZE, SIZE, bias=False), nn.Dropout(0.5)]
HELD = SimpleNamespace(layers=LAYERS)
X = torch.ones(2, SIZE)


def of_a_table(x: Tensor) -> Tensor:
    return x @ TABLE["layer"]["weight"]


def of_a_list(x: Tensor) -> Tensor:
    for layer in LAYERS:
        x = layer(x)
    return x


def of_an_object(x: Tensor) -> Tensor:
    return HELD.layers[1](HELD.layers[0](x))


def of_a_helper(x: Tensor) -> Tensor:
    return of_a_table(x) + of_a_list(x)


def of_a_closure() -> Callable[[Tensor], Tensor]:
    held, apply = {"layers": LAYERS}, functools.partial(torch.matmul, other=WEIGHT)

    def step(x: Tensor) -> Tensor:
        return held["layers"][1](held["layers"][0](x)) @ apply.keywords["other"]

    return step


def of_functions_in_a_list() -> Callable[[Tensor], Tensor]:
    steps = [of_a_table, lambda x: LAYERS[1](LAYERS[0](x))]
    return lambda x: steps[1](steps[0](x))


def of_functions_by_default() -> Callable[[Tensor], Tensor]:
    def step(x: Tensor, steps: dict[str, Any] = {"first": of_a_list, "then": [of_a_table]}) -> Tensor:  # noqa: B006
        return steps["then"][0](steps["first"](x))

    return step


def of_a_function_that_is_given() -> Callable[[Tensor], Tensor]:
    return functools.partial(lambda step, x: step(x), of_a_helper)


class Calls(nn.Module):
    """A module whose attribute is a function with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.steps = of_a_table, [of_a_list]

    def forward(self, x: Tensor) -> Tensor:
        return self.steps[0](self.step(x))


class Keeps(nn.Module):
    """A module with weights in what is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"weights": [WEIGHT], "layers": (LAYERS,)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.kept["layers"][0]:
            x = layer(x)
        return x @ self.kept["weights"][0]


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: of_a_table, lambda: of_a_list, lambda: of_an_object, lambda: of_a_helper, of_a_closure, Keeps),
        *(of_functions_in_a_list, of_functions_by_default, of_a_function_that_is_given, Calls),
    ],
)
def test_training_does_not_reach_a_cell(make: Callable[[], Callable[..., Any]]) -> None:
    made = cellrt.cell(make(), {"x": (SIZE,)})
    (before,) = made.run(X)
    assert not before.requires_grad
    assert all(torch.equal(made.run(X)[0], before) for _ in range(3))  # no dropout
    weights = [WEIGHT, LAYERS[0].weight]
    kept = copy.deepcopy(weights)
    try:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(7)
        assert torch.equal(made.run(X)[0], before)
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, kept):
                weight.copy_(value)
    assert LAYERS[1].training and WEIGHT.requires_grad


def test_a_function_may_close_over_a_module_of_code() -> None:
    import math

    made = cellrt.cell(lambda x: x * math.pi + WEIGHT[0], {"x": (SIZE,)})
    torch.testing.assert_close(made.run(X)[0], (X * math.pi + WEIGHT[0]).detach())


@pytest.mark.parametrize("make", [of_functions_in_a_list, of_functions_by_default, Calls])
def test_functions_that_lie_in_something_move_with_their_weights(make: Callable[[], Callable[..., Any]]) -> None:
    moved = move(cellrt.cell(make(), {"x": (SIZE,)}).module, torch.device("meta"))
    assert moved(X.to("meta")).device.type == "meta"


def test_a_function_that_is_found_by_import_goes_to_other_processes_with_its_weights() -> None:
    made = cellrt.cell(of_a_helper, {"x": (SIZE,)})
    sent = pickle.loads(pickle.dumps(made.module))
    assert torch.equal(sent(X), made.run(X)[0])
