"""Attention over ragged rows in plain torch, node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, on_host

if TYPE_CHECKING:
    from cellrt.kernels.ragged_attention import Memory


def ragged_attention(query: ArenaRows | Tensor, memory: Memory, span: Tensor | None) -> Tensor:
    """Compute the operation in plain torch; arguments are not checked."""
    values, offsets, keys, score = memory
    given = query if isinstance(query, Tensor) else on_host(query, query).gather()
    made, ends = values.new_zeros(len(offsets) - 1, values.shape[1]), offsets.tolist()
    for node in range(len(given) if span is None else int(span[1])):
        rows = slice(ends[node], ends[node + 1])
        key = (values if keys is None else keys)[rows].float()
        q = given[node].float()
        scores = key @ q if score is None else torch.tanh(q + key) @ score.float()
        made[node] = (scores.softmax(0) @ values[rows].float()).to(made.dtype)
    return made
