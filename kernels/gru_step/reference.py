"""The GRU step in plain torch: what the kernel must give."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from cellrt.kernels.arena_rows import ArenaRows


def gru_step(
    weight_hh: Tensor,
    bias_hh: Tensor,
    bias_ih: Tensor,
    *,
    h: ArenaRows,
    h_out: ArenaRows,
    weight_ih: Tensor | None = None,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
) -> None:
    """Compute the operation with weights in torch's layout; everything in float32, results rounded."""
    old_h = h.gather()
    hidden = linear(old_h, weight_hh.float(), bias_hh.float())
    inputs = bias_ih.float().expand_as(hidden)
    if x is not None and weight_ih is not None:
        inputs = inputs + linear(x.gather(), weight_ih.float())
    if gates is not None:
        inputs = inputs + gates.gather()
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, dim=1)
    input_r, input_z, input_n = inputs.chunk(3, dim=1)
    z = torch.sigmoid(input_z + hidden_z)
    n = torch.tanh(input_n + torch.sigmoid(input_r + hidden_r) * hidden_n)
    h_out.scatter((1 - z) * n + z * old_h)
