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
    "make", [lambda: of_a_table, lambda: of_a_list, lambda: of_an_object, lambda: of_a_helper, of_a_closure, Keeps]
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


def test_a_function_that_is_found_by_import_goes_to_other_processes_with_its_weights() -> None:
    made = cellrt.cell(of_a_helper, {"x": (SIZE,)})
    sent = pickle.loads(pickle.dumps(made.module))
    assert torch.equal(sent(X), made.run(X)[0])
