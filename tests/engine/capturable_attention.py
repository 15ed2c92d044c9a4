"""Attention over pages in plain torch that looks at no number, so that the stand-in for a device can capture it.

On a device it is a Triton kernel; the reference, which reads lengths on the host, is what there is without one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cellrt.kernels.paged_attention import reference
from cellrt.kernels.paged_attention.pages import Mask, Pages, Spans


def nodes_of_rows(spans: Spans) -> Tensor:
    """The node of each row: int64 ``[rows]``."""
    rows = torch.arange(len(spans.positions), device=spans.offsets.device)
    nodes = torch.searchsorted(spans.offsets[1:].long(), rows, right=True)
    return nodes.clamp(max=len(spans.offsets) - 2)


def attend(query: Tensor, pages: Pages, spans: Spans, mask: Mask, scale: float) -> Tensor:
    """As ``reference.paged_attention``, all rows at once, each over as many keys as the longest table has room for."""
    nodes, group = nodes_of_rows(spans), query.shape[1] // pages.keys.shape[2]
    places = torch.arange(pages.tables.shape[1] * pages.page_size, device=query.device).expand(len(query), -1)
    slots = pages.slots(nodes[:, None].expand_as(places), places)
    key, value = (rows[slots].float().repeat_interleave(group, 2) for rows in (pages.keys, pages.values))
    is_seen = reference.seen(places - spans.positions[:, None], mask) & (places < pages.lengths[nodes][:, None])
    scores = torch.einsum("rhd,rkhd->rhk", query.float() * scale, key).masked_fill(~is_seen[:, None], -torch.inf)
    weights = torch.softmax(scores, 2).nan_to_num(0.0)
    return torch.einsum("rhk,rkhd->rhd", weights, value.nan_to_num(0.0)).to(query.dtype)


def append(pages: Pages, spans: Spans, key: Tensor, value: Tensor) -> None:
    """As ``reference.append_pages``."""
    slots = pages.slots(nodes_of_rows(spans), spans.positions)
    pages.keys[slots] = key
    pages.values[slots] = value


@pytest.fixture
def capturable_attention(monkeypatch):
    """Takes the place of the reference."""
    monkeypatch.setattr(reference, "paged_attention", attend)
    monkeypatch.setattr(reference, "append_pages", append)
