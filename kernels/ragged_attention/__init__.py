"""Attention of one query a node over any number of rows of its own, with dot or additive scores, in one launch.

For the query q of a node and its rows m_1 ... m_n, whose keys are k_1 ... k_n (for dot scores the rows themselves):

    s_j = q . k_j   or   v . tanh(q + k_j),      out = sum_j exp(s_j) m_j / sum_k exp(s_k)

So Luong et al. (2015) and Bahdanau et al. (2015) attend. A row is as wide as a decoder's state, of one head, and read
once; ``paged_attention`` is for heads, pages and many queries a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import TYPES
from cellrt.kernels.ragged_attention import reference

__all__ = ["MOST_NUMBERS", "Memory", "ragged_attention"]

MOST_NUMBERS = 4096
"""The most numbers of a row or a key: a program has some of them at once."""


class Memory(NamedTuple):
    """The memory that nodes attend to; all of one dtype, float32, bfloat16 or float16.

    Attributes:
        values: ``[total, size]`` contiguous; of node n the rows from ``offsets[n]`` to ``offsets[n + 1]``, maybe none.
        offsets: int64 ``[nodes + 1]``.
        keys: ``[total, key_size]`` contiguous; None: the rows.
        score: v, ``[key_size]``, of additive scores; None: dot scores.
    """

    values: Tensor
    offsets: Tensor
    keys: Tensor | None = None
    score: Tensor | None = None


def ragged_attention(query: ArenaRows | Tensor, memory: Memory, span: Tensor | None = None) -> Tensor:
    """Return the attention of each node: ``[nodes, size]``, zeros where it has no rows; sums are float32.

    ``query`` names rows of an arena, a node's each, or is a contiguous tensor ``[nodes, key_size]``. With a ``span`` as
    of ``ArenaRows``, which must begin at 0, only as many nodes are computed. Of nodes whose query has a negative index
    nothing is written, so what is there is anything. Other indices and offsets must be right, which is not checked.
    Raise ValueError.
    """
    values, offsets, keys, score = memory
    keys = values if keys is None else keys
    given = query if isinstance(query, Tensor) else query.values
    for name, tensor, width in (("values", values, values.shape[-1]), ("keys", keys, given.shape[-1])):
        if tensor.ndim != 2 or tensor.shape != (len(values), width) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{len(values)}, {width}], got {tuple(tensor.shape)}")
        if tensor.dtype not in TYPES or tensor.dtype != given.dtype or not 0 < width <= MOST_NUMBERS:
            raise ValueError(
                f"{name} must have 1 to {MOST_NUMBERS} numbers a row of the query's dtype, float32, bfloat16 or "
                f"float16, got {tensor.dtype} {tuple(tensor.shape)} and {given.dtype}"
            )
    nodes = len(offsets) - 1
    if offsets.ndim != 1 or nodes < 0 or offsets.dtype != torch.int64 or not offsets.is_contiguous():
        raise ValueError(f"offsets must be contiguous int64 [nodes + 1], got {offsets.dtype} {tuple(offsets.shape)}")
    if score is not None and (score.shape != (given.shape[-1],) or score.dtype != given.dtype):
        raise ValueError(f"score must be {given.dtype} [{given.shape[-1]}], got {score.dtype} {tuple(score.shape)}")
    if isinstance(query, ArenaRows):
        check_rows("query", query, query, query.values.shape[-1], values)
    num_queries = len(query) if isinstance(query, Tensor) else query.most_rows
    if num_queries != nodes or given.ndim != 2:
        raise ValueError(f"query must have a row for each of {nodes} nodes, got {num_queries}")
    if uses_triton(values):
        from cellrt.kernels.ragged_attention import triton

        return triton.ragged_attention(query, memory, span)
    return reference.ragged_attention(query, memory, span)
