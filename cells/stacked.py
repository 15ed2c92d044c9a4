"""Connections between layers of recurrent cells where the layer below runs in both directions.

Such a layer has two outputs for a step, from nodes far apart in the graph. No node joins them: the cell above reads
both, as inputs ``left`` (of the direction that runs from the first step on) and ``right`` (from the last step on). Its
weight multiplies them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cellrt.cells.gru import GRUInput
from cellrt.cells.lstm import LSTMInput


class BothGates(NamedTuple):
    """The input halves of both directions: ``gates`` and ``gates_reverse``, each ``[rows, gates * hidden_size]``."""

    gates: Tensor
    gates_reverse: Tensor


class BothInputs(nn.Module):
    """The input halves of the two directions of a layer in one cell: ``x`` ``[rows, input_size]`` -> ``BothGates``."""

    def __init__(self, ahead: LSTMInput | GRUInput, reverse: LSTMInput | GRUInput) -> None:
        super().__init__()
        self.ahead, self.reverse = ahead, reverse

    def forward(self, x: Tensor) -> BothGates:
        """Return both sums over the input, their biases included."""
        return BothGates(self.ahead(x).gates, self.reverse(x).gates)


class Joined(nn.Module):
    """A module of one input that reads it in two parts: ``left`` and ``right``, ``[rows, size]`` each, side by side."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, left: Tensor, right: Tensor) -> Any:
        """Return the module's result for both inputs side by side."""
        return self.module(torch.cat((left, right), dim=-1))


class JoinedCell(nn.Module):
    """A cell of one input ``x`` and states that reads ``x`` in two parts: ``left``, ``right``, then the states in
    order.

    Such as ``LSTMCell`` and ``GRUCell``, with ``input_size`` the sum of both.
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, left: Tensor, right: Tensor, *states: Tensor) -> Any:
        """Run one step of the cell."""
        return self.cell(torch.cat((left, right), dim=-1), *states)

    def steps(self, batch_sizes: Sequence[int], *, left: Tensor, right: Tensor, **states: Tensor) -> Any:
        """Return the steps-first form of the cell."""
        steps: Any = self.cell.steps
        return steps(batch_sizes, x=torch.cat((left, right), dim=-1), **states)
