"""The binary TreeLSTM step in plain torch: what the kernel must give."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from cellrt.kernels.arena_rows import ArenaRows


def tree_lstm_step(
    weight_hh: Tensor,
    bias: Tensor,
    *,
    h_left: ArenaRows,
    h_right: ArenaRows,
    c_left: ArenaRows,
    c_right: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    weight_ih: Tensor | None = None,
    x: ArenaRows | None = None,
) -> None:
    """Compute the operation with plain weights; everything in float32, results rounded."""
    sums = linear(torch.cat([h_left.gather(), h_right.gather()], dim=1), weight_hh.float(), bias.float())
    if x is not None and weight_ih is not None:
        sums = sums + linear(x.gather(), weight_ih.float())
    i, f_left, f_right, o, g = sums.chunk(5, dim=1)
    kept = torch.sigmoid(f_left) * c_left.gather() + torch.sigmoid(f_right) * c_right.gather()
    new_c = kept + torch.sigmoid(i) * torch.tanh(g)
    h_out.scatter(torch.sigmoid(o) * torch.tanh(new_c))
    c_out.scatter(new_c)
