"""Attention for a Transformer of your own: over what its cell has in pages, and over whole spans.

    query, key, value = self.qkv(x).view(len(x), 3, heads, size).unbind(1)
    read = cached_attention(query, key, value, kv)            # with an input kv: key_values(heads, size)

The module says what its queries, keys and values are. Prompts, chunks of them and single steps of many requests are
rows of one call, and nothing is padded (ORCA section 3.2, selective batching). Heads are grouped where the queries have
more than the keys (Ainslie et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

import cellrt
from cellrt import PagedRows, RowSpec
from cellrt.cells import _attention_operators  # noqa: F401 - computes what saved cells call
from cellrt.cells._paged_attention import append_task, attend_task
from cellrt.cells.paged_attention import (
    Mask,
    Pages,
    Spans,
    append_and_attend,
    append_pages,
    attend_rows,
    paged_attention,
)
from cellrt.definition.compiled_form import APPEND, ATTEND, KERNELS, TracedPages

KERNELS.update({ATTEND: attend_task, APPEND: append_task})


def key_values(
    kv_heads: int,
    head_dim: int,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    only_read: bool = False,
) -> RowSpec:
    """Return the input of a cell for keys and values: a state that grows by those of each row.

    Args:
        kv_heads, head_dim: the number and the size of the heads of keys and values.
        layers: the number of layers of one state, each of which is named by its number; None: for one.
        dtype: float32, bfloat16 or float16.
        page_size: rows of a page.
        only_read: for a cell that only reads what another one appends (``cross_attention``).
    """
    kind, before = (cellrt.pages if only_read else cellrt.grows), () if layers is None else (layers,)
    return kind(*before, 2, kv_heads, head_dim, dtype=dtype, page_size=page_size, page_dim=1 + len(before))


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: PagedRows,
    *,
    layer: int | None = None,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Append the rows' keys and values to a state, then reads: each row what its node has up to itself.

    Positions, for rotary embeddings say, are ``state.positions``.

    Args:
        query: ``[rows, heads, head_dim]``, in the dtype of the state; ``heads`` a multiple of ``kv_heads``.
        key, value: ``[rows, kv_heads, head_dim]``.
        state: the state, of an input that ``key_values`` made.
        layer: which of its layers, if it has layers.
        window: how many rows back, the row's own included; 0: to the beginning.
        scale: the factor of the scores; None: ``1 / sqrt(head_dim)``.

    Return ``[rows, heads, head_dim]``. Raise ValueError for shapes and types that do not fit.
    """
    if isinstance(state, TracedPages):
        return state.append_and_attend(query, key, value, layer, window, scale)
    pages, spans = _pages_of(state, layer), Spans(state.offsets, state.positions)
    return append_and_attend(query, key, value, pages, spans, Mask(window=window), scale=scale)


def append_key_values(key: Tensor, value: Tensor, state: PagedRows, *, layer: int | None = None) -> None:
    """Append the rows' keys and values to a state, for another cell's ``cross_attention``; as ``cached_attention``."""
    if isinstance(state, TracedPages):
        return state.append_rows(key, value, layer)
    append_pages(_pages_of(state, layer), Spans(state.offsets, state.positions), key, value)


def cross_attention(query: Tensor, state: PagedRows, *, layer: int | None = None, scale: float | None = None) -> Tensor:
    """Return each row's attention to all that its node has in a state, such as what an encoder appended; as
    ``cached_attention``.
    """
    if isinstance(state, TracedPages):
        return state.attend(query, layer, False, 0, None, scale)
    spans = Spans(state.offsets, state.positions)
    return paged_attention(query, _pages_of(state, layer), spans, Mask(causal=False), scale=scale)


def span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: cellrt.Spans,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Return each row's attention to its own node's rows in this batch, with ``cellrt.span(whole=True)``: an
    encoder.

    ``causal``: only those up to itself; the rest: see ``cached_attention``.
    """
    spans = Spans(span.offsets, span.positions)
    return attend_rows(query, key, value, spans, Mask(causal, window), scale=scale)


def _pages_of(state: PagedRows, layer: int | None) -> Pages:
    """Return the keys and values of a layer. Raise ValueError for another state than ``key_values`` makes."""
    pages, has_layers = state.pages, state.page_dim == 2
    if state.page_dim not in (1, 2) or pages.ndim != 4 + state.page_dim or pages.shape[state.page_dim] != 2:
        shape = list(state.by_row.shape[2:])
        raise ValueError(f"expected a state as key_values makes it, got rows {shape} with page_dim={state.page_dim}")
    if has_layers != (layer is not None):
        expected = f"layer= below {pages.shape[1]}" if has_layers else "no layer"
        raise ValueError(f"expected {expected} for this state, got layer={layer}")
    if layer is not None:
        if not 0 <= layer < pages.shape[1]:
            raise ValueError(f"expected layer= below {pages.shape[1]} for this state, got layer={layer}")
        pages = pages.select(1, layer)
    return Pages(pages[:, 0], pages[:, 1], state.tables, state.lengths)
