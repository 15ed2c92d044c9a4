"""The LSTM of the GPU benchmarks: the fused kernel behind the runtime's door for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.lstm_step import lstm_step, pack_weights
from cellrt.worker.placement import Rows


class State(NamedTuple):
    """``h`` and ``c`` ``[rows, hidden]``."""

    h: Tensor
    c: Tensor


class FusedLSTM(nn.Module):
    """An LSTM cell: ``forward`` in plain torch, ``run_rows`` by ``lstm_step``.

    Args:
        hidden: size of inputs and state.
        dtype: of weights, inputs and state.
        precision: how float32 is multiplied.
    """

    weight_ih: nn.Parameter
    weight_hh: nn.Parameter

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32, precision: Precision = "tf32") -> None:
        super().__init__()
        bound = hidden**-0.5
        for name in ("weight_ih", "weight_hh"):
            weight = torch.empty(4 * hidden, hidden).uniform_(-bound, bound)
            self.register_parameter(name, nn.Parameter(weight.to(dtype)))
        self.bias = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound).to(dtype))
        self.precision: Precision = precision
        self._packed: dict[str, PackedWeights] = {}

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        """One step."""
        sums = linear(x, self.weight_ih, self.bias) + linear(h, self.weight_hh)
        i, f, g, o = sums.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return State(torch.sigmoid(o) * torch.tanh(c), c)

    def run_rows(self, inputs: Mapping[str, Rows], outputs: Mapping[str, Rows]) -> None:
        """One step, rows of arenas to rows of arenas."""
        x, h, c = (ArenaRows(*inputs[name]) for name in ("x", "h", "c"))
        h_out, c_out = (ArenaRows(*outputs[name]) for name in ("h", "c"))
        lstm_step(self.packed(), x=x, h=h, c=c, h_out=h_out, c_out=c_out, precision=self.precision)

    def packed(self) -> PackedWeights:
        """The weights as the kernel reads them, packed once for each device."""
        device = str(self.weight_hh.device)
        if device not in self._packed:
            self._packed[device] = pack_weights(self.weight_hh, self.bias, self.weight_ih)
        return self._packed[device]
