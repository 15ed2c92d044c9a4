"""Attention over pages in plain torch: node by node, as the formulas say."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from cellrt.kernels.paged_attention.pages import Mask, Pages, Spans


def paged_attention(query: Tensor, pages: Pages, spans: Spans, mask: Mask, scale: float) -> Tensor:
    """Compute the operation in plain torch; arguments are not checked."""
    out = torch.empty_like(query)
    bounds = spans.offsets.tolist()
    for node, (first, last) in enumerate(pairwise(bounds)):
        positions = torch.arange(int(pages.lengths[node]), device=query.device)
        slots = pages.slots(torch.full_like(positions, node), positions)
        key, value = pages.keys[slots].float(), pages.values[slots].float()
        distance = positions - spans.positions[first:last, None]
        out[first:last] = attend(query[first:last].float() * scale, key, value, distance, mask).to(query.dtype)
    return out


def attend(query: Tensor, key: Tensor, value: Tensor, distance: Tensor, mask: Mask) -> Tensor:
    """Return the attention of the rows ``query`` ``[rows, heads, head_dim]`` over the keys of one node, in float32.

    Keys are ``[keys, kv_heads, head_dim]``; ``distance`` ``[rows, keys]`` is how far each key is after each row.

    A row that sees no key gives zeros.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("rhd,khd->hrk", query, key)
    if mask.bias is not None:
        reach = mask.bias.shape[1] // 2
        scores = scores + mask.bias[:, distance.clamp(-reach, reach) + reach]
    scores = scores.masked_fill(~seen(distance, mask), -torch.inf)
    weights = torch.softmax(scores, dim=2).masked_fill(~seen(distance, mask), 0.0)
    return torch.einsum("hrk,khd->rhd", weights, value)


def seen(distance: Tensor, mask: Mask) -> Tensor:
    """Return which keys are seen, given how far they are after the query."""
    is_seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.causal:
        is_seen &= distance <= 0
    if mask.window:
        is_seen &= distance.abs() < mask.window
    return is_seen


def append_pages(pages: Pages, spans: Spans, key: Tensor, value: Tensor) -> None:
    """Append rows in plain torch; arguments are not checked."""
    slots = pages.slots(spans.nodes(), spans.positions)
    pages.keys[slots] = key
    pages.values[slots] = value
