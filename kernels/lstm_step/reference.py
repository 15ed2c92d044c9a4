"""The LSTM step in plain torch: what the kernel must give."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from cellrt.kernels.arena_rows import ArenaRows


def lstm_step(
    weight_hh: Tensor,
    bias: Tensor,
    *,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    weight_ih: Tensor | None = None,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
) -> None:
    """Compute the operation with weights in torch's layout and one bias; everything in float32, results rounded."""
    sums = linear(h.gather(), weight_hh.float(), bias.float())
    if x is not None and weight_ih is not None:
        sums = sums + linear(x.gather(), weight_ih.float())
    if gates is not None:
        sums = sums + gates.gather()
    i, f, g, o = sums.chunk(4, dim=1)
    new_c = torch.sigmoid(f) * c.gather() + torch.sigmoid(i) * torch.tanh(g)
    h_out.scatter(torch.sigmoid(o) * torch.tanh(new_c))
    c_out.scatter(new_c)
