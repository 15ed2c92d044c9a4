"""What a module computes is its ``forward``: neither its class's steps nor its weights stand for a changed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt import cells, unfolders
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine

SIZE = 3


class Halving(cells.GRUCell):
    """Another ``forward`` than the class has that brings ``steps``."""

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Half of the state."""
        return {"h": 0.5 * super().forward(x, h).h}


class Renamed(cells.GRUCell):
    """Nothing is changed."""


def hooked() -> nn.Module:
    made = cells.GRUCell(SIZE, SIZE)
    made.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    return made


def with_another_forward() -> nn.Module:
    made = cells.GRUCell(SIZE, SIZE)
    usual = made.forward
    made.forward = lambda x, h: usual(2 * x, h)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    "make", [lambda: Halving(SIZE, SIZE), hooked, with_another_forward, lambda: Renamed(SIZE, SIZE)]
)
def test_several_steps_are_those_of_forward(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    made = cellrt.cell(make(), {"x": (SIZE,), "h": (SIZE,)})
    model = cellrt.unfold("chain", example=torch.zeros(2, SIZE))(lambda graph, x: {"h": graph.chain(made, x=x).h})
    engine = small_engine()
    engine.register(model)
    x, h = torch.randn(5, SIZE), torch.zeros(1, SIZE)
    rows = []
    for row in x:
        (h,) = made.run(row[None], h)
        rows.append(h[0])
    assert_same(engine.submit("chain", x).result(WAIT_S), {"h": torch.stack(rows)})
    assert_same(run_one_by_one(model, x), {"h": torch.stack(rows)})
    close_and_check(engine)


class Residual(nn.GRU):
    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """With the input added."""
        y, h = super().forward(x, h)
        return y + x, h


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        """Twice the rows."""
        return 2 * super().forward(input)


def listened_to(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: unfolders.from_torch(Residual(SIZE, SIZE)),
        lambda: unfolders.from_torch(listened_to(nn.LSTM(SIZE, SIZE))),
        lambda: unfolders.from_torch(nn.LSTM(SIZE, SIZE), embedding=Scaled(9, SIZE)),
        lambda: cells.EmbeddingGRUCell.from_torch(listened_to(nn.Embedding(9, SIZE)), nn.GRU(SIZE, SIZE), fold=False),
        lambda: cells.Projection.from_torch(listened_to(nn.Linear(SIZE, 9))),
    ],
)
def test_weights_of_a_changed_layer_are_not_copied(make: Callable[[], object]) -> None:
    with pytest.raises(cellrt.DefinitionError, match="of its own, which a copy of its weights leaves out"):
        make()


def test_weights_of_a_parametrized_layer_are() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.GRUCell(SIZE, SIZE), "weight_hh")
    assert torch.equal(cells.GRUCell.from_torch(layer).weight_hh, layer.weight_hh)
