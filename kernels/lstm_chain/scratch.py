"""The device memory that the chain kernels keep between steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cellrt.kernels.gate_weights import PackedWeights, padded

ROW_MULTIPLE = 64
MAX_GROUPS = 32


@dataclass(frozen=True)
class ChainScratch:
    """Memory of chains of up to ``max_rows`` rows; one launch at a time may use it. Made by ``make_scratch``.

    ``h`` is ``[2, rows, padded hidden]`` and ``c`` ``[rows, padded hidden]``, in the type of the weights; ``arrivals``
    counts, for each group of programs, how often one came to a barrier; ``error`` is 1 once a program gave up
    waiting, which on a device is an error of the device too. Both are int32. Only ``error`` must be zero at first.
    """

    max_rows: int
    h: Tensor
    c: Tensor
    arrivals: Tensor
    error: Tensor

    def has_failed(self) -> bool:
        """Return whether a program of any launch so far gave up, so that outputs are missing; wait for the device."""
        return bool(self.error.item())


def make_scratch(weights: PackedWeights, max_rows: int) -> ChainScratch:
    """Return scratch memory for chains of up to ``max_rows`` rows with these weights, on their device."""
    rows, width = padded(max_rows, ROW_MULTIPLE), weights.weight_hh.shape[1]
    return ChainScratch(
        max_rows=max_rows,
        h=weights.weight_hh.new_empty(2, rows, width),
        c=weights.weight_hh.new_empty(rows, width),
        arrivals=weights.weight_hh.new_empty(MAX_GROUPS, dtype=torch.int32),
        error=weights.weight_hh.new_zeros(1, dtype=torch.int32),
    )
