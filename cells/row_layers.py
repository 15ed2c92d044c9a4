"""Row-by-row layers of a Transformer beside its products, compiled for a CPU.

A row's bits do not depend on the other rows of its batch. With torch's own layers they do: these cut a batch into
vectors wherever they fall. Torch's own are used with gradients, in other dtypes, on other devices, and while something
is compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from cellrt.cells._row_kernels import choose_likeliest, gate_rows, norm_rows
from cellrt.cells._weights import is_fusable


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> the same."""
        if self.weight is None or self.eps is None or not is_fusable(x, self.weight):
            return super().forward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // width
        norm_rows(x.data_ptr(), self.weight.data_ptr(), rows, width, self.eps, out.data_ptr())
        return out


def gate_with_silu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[rows, size]`` each: what is inside SwiGLU (Shazeer 2020)."""
    if not is_fusable(gate, up):
        return silu(gate) * up
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    gate_rows(gate.data_ptr(), up.data_ptr(), *gate.shape, out.data_ptr())
    return out


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest token of each row of ``[rows, tokens]``, int64 (the first of equals), and its
    log-probability.
    """
    if not is_fusable(logits):
        wide = logits.float()
        best, token = wide.max(1)
        # Not torch's logsumexp, which asks whether there are rows, and so cannot be traced without knowing.
        return token, -(wide - best[:, None]).exp().sum(1).log()
    logits = logits.contiguous()
    tokens, logprobs = logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
    choose_likeliest(logits.data_ptr(), *logits.shape, tokens.data_ptr(), logprobs.data_ptr())
    return tokens, logprobs
