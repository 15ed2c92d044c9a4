"""The operators of attention where a program runs in Python: what a saved cell calls (``definition/exported.py``)."""

from __future__ import annotations

from torch import Tensor

from cellrt.cells.paged_attention import Mask, Pages, Spans, append_pages, attend_rows, paged_attention
from cellrt.definition.compiled_form import implement

# Each takes what the operator does (``definition/attention_operator.py``); ``after`` only says what came before.


def _pages_of(pages: Tensor, tables: Tensor, lengths: Tensor, layer: int) -> Pages:
    own = pages if layer < 0 else pages.select(1, layer)
    return Pages(own[:, 0], own[:, 1], tables, lengths)


def _mask_of(bias: Tensor, causal: int, window: int) -> Mask:
    """Return the mask of an operator's arguments; an integer ``bias`` stands for none."""
    return Mask(bool(causal), window, bias if bias.is_floating_point() else None)


def _append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    positions: Tensor,
    after: Tensor,
    layer: int,
    bias: Tensor,
    causal: int,
    window: int,
    scale: float,
) -> Tensor:
    own, spans = _pages_of(pages, tables, lengths, layer), Spans(offsets, positions)
    append_pages(own, spans, key, value)
    return paged_attention(query, own, spans, _mask_of(bias, causal, window), scale=scale)


def _attend_pages(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    positions: Tensor,
    after: Tensor,
    layer: int,
    bias: Tensor,
    causal: int,
    window: int,
    scale: float,
) -> Tensor:
    own, spans = _pages_of(pages, tables, lengths, layer), Spans(offsets, positions)
    return paged_attention(query, own, spans, _mask_of(bias, causal, window), scale=scale)


def _append_pages(
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    positions: Tensor,
    after: Tensor,
    layer: int,
) -> Tensor:
    append_pages(_pages_of(pages, tables, lengths, layer), Spans(offsets, positions), key, value)
    return key.new_zeros(1)


def _attend_span(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    positions: Tensor,
    bias: Tensor,
    causal: int,
    window: int,
    scale: float,
) -> Tensor:
    mask = _mask_of(bias, causal, window)
    return attend_rows(query, key, value, Spans(offsets, positions), mask, scale=scale)


def _made_after(value: Tensor, after: Tensor) -> Tensor:
    return value.clone()


implement(
    append_and_attend=_append_and_attend,
    attend_pages=_attend_pages,
    append_pages=_append_pages,
    attend_span=_attend_span,
    made_after=_made_after,
)
