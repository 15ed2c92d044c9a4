"""Products with a weight in a user's own module run on the weight packed once, and give what the module gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cellrt
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.step_program import export_step
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.cell import Cell
from cellrt.definition.examples import random_inputs
from cellrt.definition.spec import plain

WIDTH, COLUMNS = 24, 70
"""Columns that fill no panel."""
ROWS = (1, 2, 5, 33, 130)


class Own(nn.Module):
    """A module of one function of its weight ``[COLUMNS, WIDTH]``, of another as large, and of rows."""

    def __init__(self, function: Callable[[Own, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, COLUMNS))
        self.bias = nn.Parameter(torch.randn(COLUMNS))
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


class Recurrent(nn.Module):
    """A step of a recurrent cell."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if isinstance(self.cell, nn.LSTMCell):
            h, c = self.cell(x, (h, 2 * h))
            return h + c
        made: Tensor = self.cell(x, h)
        return made


def rows_of(module: nn.Module, *shape: int) -> Cell:
    return cellrt.cell(module, {"x": shape})


def own(function: Callable[[Own, Tensor], Tensor], *shape: int) -> Callable[[], Cell]:
    return lambda: rows_of(Own(function), *(shape or (WIDTH,)))


def recurrent(cell: nn.RNNCellBase) -> Callable[[], Cell]:
    return lambda: cellrt.cell(Recurrent(cell), {"x": (WIDTH,), "h": (COLUMNS,)})


def rolled(module: Own, x: Tensor) -> Tensor:
    """Rows that do not lie one behind the other."""
    return functional.linear(x[:, 1], module.weight, module.bias)


PACKED: dict[str, tuple[Callable[[], Cell], int]] = {
    "linear": (own(lambda m, x: functional.linear(x, m.weight, m.bias)), 1),
    "linear without a bias": (own(lambda m, x: functional.linear(x, m.weight)), 1),
    "twice": (own(lambda m, x: functional.linear(x, m.weight) * functional.linear(-x, m.weight, m.bias)), 1),
    "matmul": (own(lambda m, x: x @ m.transposed), 1),
    "more dimensions": (own(lambda m, x: functional.linear(x, m.weight, m.bias), 3, 2, WIDTH), 1),
    "a part of the rows": (own(rolled, 3, WIDTH), 1),
    "turned rows": (own(lambda m, x: functional.linear(x.transpose(1, 2), m.weight), WIDTH, 3), 1),
    "two weights": (own(lambda m, x: functional.linear(x, m.weight) + x @ m.transposed), 2),
    "GRUCell": (recurrent(nn.GRUCell(WIDTH, COLUMNS)), 2),
    "GRUCell without biases": (recurrent(nn.GRUCell(WIDTH, COLUMNS, bias=False)), 2),
    "LSTMCell": (recurrent(nn.LSTMCell(WIDTH, COLUMNS)), 2),
    "LSTMCell without biases": (recurrent(nn.LSTMCell(WIDTH, COLUMNS, bias=False)), 2),
    "a weight with another use": (own(lambda m, x: functional.linear(x, m.weight) + m.weight.sum()), 1),
    "a tied embedding": (
        lambda: cellrt.cell(Own(lambda m, x: functional.linear(m.weight[x], m.weight)), {"x": cellrt.token}),
        1,
    ),
}
PLAIN: dict[str, Callable[[], Cell]] = {
    "both ways round": own(lambda m, x: functional.linear(functional.linear(x, m.weight), m.transposed) @ m.transposed),
    "a bias for all columns": own(lambda m, x: functional.linear(x, m.weight, m.bias[:1])),
    "a bias that does not lie in one piece": own(
        lambda m, x: functional.linear(x, m.weight, m.bias[:1].expand(COLUMNS))
    ),
    "float64": lambda: cellrt.cell(
        nn.Linear(WIDTH, COLUMNS).double(), {"input": cellrt.rows(WIDTH, dtype=torch.float64)}
    ),
    "bfloat16": lambda: cellrt.cell(
        nn.Linear(WIDTH, COLUMNS).bfloat16(), {"input": cellrt.rows(WIDTH, dtype=torch.bfloat16)}
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LibraryStore:
    return LibraryStore(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", PACKED)
def test_a_product_with_a_weight_takes_it_packed(name: str) -> None:
    make, count = PACKED[name]
    assert len(export_step(make()).packed) == count


def test_a_tied_weight_is_taken_once_more() -> None:
    step = export_step(PACKED["a tied embedding"][0]())
    assert len(step.weights) == 4 and step.weights[3] is step.weights[step.tied[0]] and list(step.packed) == [3]


@pytest.mark.parametrize("name", PLAIN)
def test_other_uses_of_a_weight_leave_it_as_it_is(name: str) -> None:
    packed = export_step(PLAIN[name]()).packed
    assert len(packed) == (1 if name == "both ways round" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_the_form_gives_what_the_module_gives_with_rows_that_keep_their_bits(store: LibraryStore, name: str) -> None:
    torch.manual_seed(0)
    made = PACKED[name][0]()
    form = compile_cell(made, store)
    assert form.is_batch_invariant
    for rows in ROWS:
        inputs = random_inputs(made.inputs.values(), rows, torch.Generator().manual_seed(rows))
        outputs = form.run(rows, dict(zip(made.inputs, map(plain, inputs))))
        assert outputs is not None
        for given, expected in zip(outputs.values(), made.run(*inputs)):
            torch.testing.assert_close(given, expected, atol=2e-4, rtol=2e-4)
