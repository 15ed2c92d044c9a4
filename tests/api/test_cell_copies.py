"""A cell's weights are copies, in evaluation mode and without gradients, wherever a function finds them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.definition.aot.step_program import plain_attributes
from cellrt.errors import DefinitionError
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


class FindsItself(nn.Module):
    """An attribute is a function that finds the module it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYERS[0]
        self.step = lambda x: self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class Hooked(nn.Module):
    """What a hook has seen is read later; another hook has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.layer.register_forward_hook(lambda module, inputs, output: setattr(self, "seen", output))
        self.layer.register_forward_pre_hook(lambda module, inputs: of_a_table(inputs[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.seen


def of_another_forward() -> nn.Module:
    module = nn.Sequential(nn.Identity(), nn.Identity())
    module[0].forward = lambda x: x @ WEIGHT
    module[1].forward = MethodType(lambda self, x: LAYERS[0](x), module[1])
    return module


def of_a_bound_method() -> Callable[..., Any]:
    bound = WEIGHT[0].mul
    return lambda x: bound(x)


@pytest.mark.parametrize(
    "make",
    [
        *(FindsItself, Hooked, of_another_forward),
        *(lambda: of_a_table, lambda: of_a_list, lambda: of_an_object, lambda: of_a_helper, of_a_closure, Keeps),
        *(of_functions_in_a_list, of_functions_by_default, of_a_function_that_is_given, Calls),
        *(lambda: WEIGHT[0].mul, of_a_bound_method),
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


def test_what_hooks_write_stays_in_the_copy() -> None:
    module = Hooked()
    made = cellrt.cell(module, {"x": (SIZE,)})
    made.run(X)
    assert not hasattr(module, "seen")
    module(X)
    with pytest.raises(DefinitionError, match=r"own \['seen'\].*delete what each call makes anew"):
        cellrt.cell(module, {"x": (SIZE,)})


def test_what_is_made_once_is_to_be_made_before() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None)

        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.ones(SIZE) if self.table is None else self.table
            return x * self.table

    module = Lazy()
    with pytest.raises(DefinitionError, match=r"own \['table'\].*or call the module before"):
        cellrt.cell(module, {"x": (SIZE,)})
    module(X)
    assert torch.equal(cellrt.cell(module, {"x": (SIZE,)}).run(X)[0], X)


def test_classes_that_exec_made_differ_in_the_globals_of_their_code() -> None:
    def made(factor: float) -> cellrt.Cell:
        names: dict[str, Any] = {"Module": nn.Module}
        exec(f"K = {factor}\nclass Of(Module):\n    def forward(self, x): return x * K", names)
        return cellrt.cell(names["Of"](), {"x": (SIZE,)})

    assert made(2.0).identity == made(2.0).identity != made(3.0).identity


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


SETTINGS = """
import enum, torch
from types import SimpleNamespace
class Config:
    def __init__(self, scale): self.scale = scale
class Mode(enum.Enum):
    TWICE = 2.0
    THRICE = 3.0
scale, kind, nothing, mode, calls, log = 2.0, "twice", None, Mode.TWICE, 0, []
pair, listed, nested = (1.0, 2.0), [2.0], {"deep": {"er": 2.0}}
space, config = SimpleNamespace(scale=2.0), Config(2.0)
def scaled(x): return x * scale
def again(x, n=1): return x * scale if n == 0 else again(x, n - 1)
def there(x, n=1): return x * scale if n == 0 else back(x, n)
def back(x, n): return there(x, n - 1)
def counted(x):
    global calls
    calls += 1
    log.append(calls)
    return x * scale
functions = {
    "number": lambda x: x * scale,
    "text": lambda x: x * (2.0 if kind == "twice" else 3.0),
    "None": lambda x: x * (2.0 if nothing is None else 3.0),
    "enum": lambda x: x * mode.value,
    "tuple": lambda x: x * pair[1],
    "list": lambda x: x * listed[0],
    "dict": lambda x: x * nested["deep"]["er"],
    "namespace": lambda x: x * space.scale,
    "object": lambda x: x * config.scale,
    "called": lambda x: scaled(x),
    "inner": lambda x: (lambda y: y * scale)(x),
    "itself": again,
    "each other": there,
    "default": lambda x, by=listed: x * by[0],
    "counted": counted,
}
"""
LATER = """
scale, kind, nothing, mode, pair = 3.0, "thrice", 1, Mode.THRICE, (1.0, 3.0)
listed[0] = nested["deep"]["er"] = space.scale = config.scale = 3.0
"""


def test_what_a_function_finds_as_data_is_what_it_was_when_the_cell_was_made() -> None:
    space: dict[str, Any] = {"__name__": "settings_of_a_notebook"}
    exec(SETTINGS, space)
    made = {name: cellrt.cell(function, {"x": (SIZE,)}) for name, function in space["functions"].items()}
    exec(LATER, space)
    anew = {name: cellrt.cell(function, {"x": (SIZE,)}) for name, function in space["functions"].items()}
    for name, cell in made.items():
        for each in (cell, cell.replica(), copy.deepcopy(cell)):
            assert torch.equal(each.run(X)[0], 2 * X), name
        assert torch.equal(anew[name].run(X)[0], 3 * X), name
        assert cell.identity != anew[name].identity


def test_what_a_function_notes_in_globals_is_everybodys() -> None:
    space: dict[str, Any] = {"__name__": "settings_of_a_notebook"}
    exec(SETTINGS, space)
    made = cellrt.cell(space["counted"], {"x": (SIZE,)})
    before = space["calls"]
    made.run(X)
    assert space["calls"] == before + 1 == len(space["log"])


def of_a_size(x: Tensor) -> Tensor:
    return x * SIZE


def test_a_first_call_leaves_nothing_that_a_function_would_keep_between_calls() -> None:
    made = cellrt.cell(of_a_size, {"x": SIZE})
    before = plain_attributes(made.module)
    made.run(X)
    assert plain_attributes(made.module) == before
