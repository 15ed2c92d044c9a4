"""Cells that differ in their weights alone are alike: what was measured of one holds for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from tests.api.models import SIZE, linear_of


class Scaled(nn.Module):
    def __init__(self, scale: float, width: int = SIZE) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(SIZE, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def made(module: Any, **options: Any) -> Any:
    return cell(module, {"x": (SIZE,)}, **options)


def test_of_other_weights() -> None:
    assert made(linear_of(1)).identity != made(linear_of(2)).identity
    assert made(linear_of(1)).likeness == made(linear_of(2)).likeness
    assert made(Scaled(1.0)).likeness == made(Scaled(1.0)).likeness


@pytest.mark.parametrize(
    "other",
    [
        made(Scaled(2.0)),
        made(Scaled(1.0, SIZE + 1)),
        made(Scaled(1.0), max_batch=7),
        made(nn.Sequential(Scaled(1.0))),
    ],
)
def test_not_of_other_code_numbers_shapes_or_sizes(other: Any) -> None:
    assert made(Scaled(1.0)).likeness != other.likeness
