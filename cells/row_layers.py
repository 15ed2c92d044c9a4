"""Layers that work row by row, compiled for a CPU: there a row's bits do not depend on its company.

A library's product of few rows lays the weights out anew each time, and its order of additions depends on how many
rows there are. Ours (`_gemm.py`) packs them once and adds in one order. With gradients, in other dtypes, on other
devices and while something is compiled these are torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from cellrt.cells._gemm import PackedWeight
from cellrt.cells._row_kernels import choose_likeliest, gate_rows, norm_rows
from cellrt.cells._weights import Derived, is_fusable, pack_with_bias, packed_linear


class Linear(nn.Linear):
    """`nn.Linear` with its weight packed when it is first used."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._packed = Derived(pack_with_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in_features]` -> `[rows, out_features]`."""
        return multiply_rows(x, self._packed, self.weight, self.bias)


def multiply_rows(
    x: Tensor, packed: Derived[tuple[PackedWeight, Tensor]], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`; `packed` keeps the packed weight."""
    if not is_fusable(x, weight) or x.dim() != 2 or not len(x):
        return linear(x, weight, bias)
    return packed_linear(x, *packed.of(weight, bias))


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same."""
        if self.weight is None or self.eps is None or not is_fusable(x, self.weight):
            return super().forward(x)
        x, out = x.contiguous(), torch.empty(x.shape)
        width = x.shape[-1]
        rows = x.numel() // width
        norm_rows(x.data_ptr(), self.weight.data_ptr(), rows, width, self.eps, out.data_ptr())
        return out


def gate_with_silu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[rows, size]` each: what is inside SwiGLU (Shazeer 2020)."""
    if not is_fusable(gate, up):
        return silu(gate) * up
    gate, up, out = gate.contiguous(), up.contiguous(), torch.empty(gate.shape)
    gate_rows(gate.data_ptr(), up.data_ptr(), *gate.shape, out.data_ptr())
    return out


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of `[rows, tokens]`, int64 (the first of equals), and its log-probability."""
    if not is_fusable(logits):
        best, token = logits.float().max(1)
        return token, best - logits.float().logsumexp(1)
    logits = logits.contiguous()
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    choose_likeliest(logits.data_ptr(), *logits.shape, tokens.data_ptr(), logprobs.data_ptr())
    return tokens, logprobs
