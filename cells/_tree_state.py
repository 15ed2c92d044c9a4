"""The parts that Tree-LSTM cells share: a node's state, initial weights, and their packing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cellrt import RowSpec, rows
from cellrt.cells._tree import pack_padded, pad_gates
from cellrt.cells._weights import check_float32_on_cpu
from cellrt.products.packed import PackedWeight


class TreeState(NamedTuple):
    """The state of a node: ``h`` and ``c``, each ``[rows, hidden_size]``."""

    h: Tensor
    c: Tensor


def state_rows(units: int) -> dict[str, RowSpec]:
    return {"h": rows(units), "c": rows(units)}


def new_parameter(hidden_size: int, *shape: int) -> nn.Parameter:
    """Return initial weights, uniform in +-1/sqrt(hidden_size), as in torch's recurrent cells."""
    bound = 1 / math.sqrt(hidden_size)
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def pack(weight: Tensor, bias: Tensor | None, units: int) -> tuple[PackedWeight, Tensor]:
    """Return a weight and its bias (None: zeros) for the steps of ``_tree.py``."""
    check_float32_on_cpu("the weight", weight)
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    check_float32_on_cpu("the bias", bias)
    return pack_padded(weight, units), pad_gates(bias, units).clone()


def finish(i: Tensor, o: Tensor, u: Tensor, kept: Tensor | float) -> TreeState:
    """Return the pointwise half in plain torch, from the sums of gates and what the forget gates ``kept`` of the
    children.
    """
    c = torch.sigmoid(i) * torch.tanh(u) + kept
    return TreeState(torch.sigmoid(o) * torch.tanh(c), c)
