"""Attention over ragged rows in Triton: a program has a node, and some of its rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_tiles import span_of, tanh

if TYPE_CHECKING:
    from cellrt.kernels.ragged_attention import Memory

BLOCK_NUMBERS = 8192
"""The numbers of rows and their keys that a program holds at once."""


@triton.jit(do_not_specialize_on_alignment=["p_query_rows", "p_span", "p_offsets"])
def ragged_attention_kernel(
    p_query,
    QUERY_STRIDE: tl.constexpr,
    p_query_rows,
    p_span,
    p_keys,
    p_values,
    p_offsets,
    p_score,
    p_out,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One node. Without ``p_keys`` they are the rows; without ``p_score`` scores are dot products."""
    node = tl.program_id(0)
    _, num_nodes = span_of(p_span, node + 1)
    if node >= num_nodes:
        return
    at = node.to(tl.int64)
    if p_query_rows is not None:
        at = tl.load(p_query_rows + node).to(tl.int64)
        if at < 0:
            return
    o_key, o_rows = tl.arange(0, BLOCK_KEY), tl.arange(0, ROWS)
    b_is_key = o_key < KEY_SIZE
    b_query = tl.load(p_query + at * QUERY_STRIDE + o_key, mask=b_is_key, other=0.0).to(tl.float32)
    o_value = tl.arange(0, BLOCK)
    b_is_value = o_value < SIZE
    begin, end = tl.load(p_offsets + node), tl.load(p_offsets + node + 1)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    b_out = tl.zeros([BLOCK], tl.float32)
    start = begin
    while start < end:
        b_at = start + o_rows
        b_is_row = b_at < end
        p_block = p_values + b_at[:, None] * SIZE + o_value[None, :]
        b_values = tl.load(p_block, mask=b_is_row[:, None] & b_is_value[None, :], other=0.0).to(tl.float32)
        b_key = b_values
        if p_keys is not None:
            p_block = p_keys + b_at[:, None] * KEY_SIZE + o_key[None, :]
            b_key = tl.load(p_block, mask=b_is_row[:, None] & b_is_key[None, :], other=0.0).to(tl.float32)
        if p_score is not None:
            b_score = tl.load(p_score + o_key, mask=b_is_key, other=0.0).to(tl.float32)
            b_scores = tl.sum(tanh(b_query[None, :] + b_key) * b_score[None, :], axis=1)
        else:
            b_scores = tl.sum(b_query[None, :] * b_key, axis=1)
        b_scores = tl.where(b_is_row, b_scores, float("-inf"))
        now = tl.maximum(highest, tl.max(b_scores, axis=0))
        b_weights = tl.exp(b_scores - now)
        shrinks = tl.exp(highest - now)
        total = total * shrinks + tl.sum(b_weights, axis=0)
        b_out = b_out * shrinks + tl.sum(b_weights[:, None] * b_values, axis=0)
        highest = now
        start += ROWS
    b_out = b_out / tl.where(begin < end, total, 1.0)
    p_row = p_out + node.to(tl.int64) * SIZE + o_value
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=b_is_value)


def ragged_attention(query: ArenaRows | Tensor, memory: Memory, span: Tensor | None) -> Tensor:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    values, rows = (query, None) if isinstance(query, Tensor) else query[:2]
    nodes, size, key_size = len(memory.offsets) - 1, memory.values.shape[1], values.shape[1]
    made = torch.empty(nodes, size, dtype=memory.values.dtype, device=memory.values.device)
    if nodes == 0:
        return made
    block, block_key = (max(16, triton.next_power_of_2(width)) for width in (size, key_size))
    most_rows = BLOCK_NUMBERS // (block if memory.keys is None else block + block_key)
    ragged_attention_kernel[(nodes,)](
        values,
        values.stride(0),
        rows,
        span,
        memory.keys,
        memory.values,
        memory.offsets,
        memory.score,
        made,
        KEY_SIZE=key_size,
        SIZE=size,
        ROWS=min(16, 1 << (most_rows.bit_length() - 1)),
        BLOCK_KEY=block_key,
        BLOCK=block,
        num_warps=8 if max(block, block_key) >= 512 else 4,
    )
    return made
