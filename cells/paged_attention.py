"""Attention over pages as the cells here call it: compiled for a CPU, else the operation of ``cellrt.kernels``.

The module's ``forward`` calls these as plain functions, and a compiled form ``attend`` and ``append`` of
``_paged_attention.py``, with the words that ``settings_of`` and ``task_of`` lay out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellrt.cells._paged_attention import append_task, attend_task
from cellrt.cells._weights import is_eager
from cellrt.definition.compiled_form import USES_HAND_WRITTEN, TracedPages, attend_span, is_traced
from cellrt.kernels import paged_attention as plain
from cellrt.kernels.paged_attention import Mask, Pages, Spans
from cellrt.kernels.paged_attention.pages import CAUSAL, check, check_appended
from cellrt.products.vectors import BFLOAT16, FLOAT16, FLOAT32

__all__ = [
    "LayerPages",
    "Mask",
    "Pages",
    "Spans",
    "TracedLayer",
    "TracedLayers",
    "append_and_attend",
    "append_pages",
    "attend_rows",
    "paged_attention",
    "settings_of",
    "task_of",
]

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def paged_attention(
    query: Tensor, pages: Pages | TracedLayer, spans: Spans, mask: Mask = CAUSAL, *, scale: float | None = None
) -> Tensor:
    """Return paged attention as ``cellrt.kernels.paged_attention`` defines it; on a CPU without copying keys and
    values.

    There a row's bits do not depend on other rows of the batch, nor on how its span was cut, nor on the pages
    (``_paged_attention.py`` says why). For gradients it is the plain torch form.
    """
    if isinstance(pages, TracedLayer):
        return pages.state.attend(query, pages.layer, *mask, scale)
    if not _is_compiled(query, *pages[:4], *spans):
        return plain.paged_attention(query, pages, spans, mask, scale=scale)
    query = query.contiguous()
    check(query, pages, spans, mask)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    settings = settings_of(query.shape[1], pages, mask, scale)
    out = torch.empty_like(query)
    task = task_of(pages, spans, query=query, out=out)
    attend_task.call(settings.ctypes.data, task.ctypes.data)
    return out


def append_pages(pages: Pages | TracedLayer, spans: Spans, key: Tensor, value: Tensor) -> None:
    """Append rows as ``cellrt.kernels.paged_attention.append_pages`` does."""
    if isinstance(pages, TracedLayer):
        return pages.state.append_rows(key, value, pages.layer)
    if not _is_compiled(key, value, *pages[:4], *spans):
        return plain.append_pages(pages, spans, key, value)
    key, value = key.contiguous(), value.contiguous()
    check_appended(pages, spans, key, value)
    settings = settings_of(key.shape[1], pages, CAUSAL, 1.0)
    task = task_of(pages, spans, key=key, value=value)
    append_task.call(settings.ctypes.data, task.ctypes.data)


def append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    spans: Spans,
    mask: Mask = CAUSAL,
    *,
    scale: float | None = None,
) -> Tensor:
    """``append_pages``, then ``paged_attention``, checked and laid out once."""
    if not _is_compiled(query, key, value, *pages[:4], *spans):
        append_pages(pages, spans, key, value)
        return paged_attention(query, pages, spans, mask, scale=scale)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    check(query, pages, spans, mask)
    rows = len(query), *pages.keys.shape[2:]
    if key.shape != rows or value.shape != rows or not key.dtype == value.dtype == query.dtype:
        check_appended(pages, spans, key, value)
    settings = settings_of(query.shape[1], pages, mask, query.shape[2] ** -0.5 if scale is None else scale)
    out = torch.empty_like(query)
    task = task_of(pages, spans, query=query, out=out, key=key, value=value)
    words = settings.ctypes.data, task.ctypes.data
    append_task.call(*words)
    attend_task.call(*words)
    return out


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, mask: Mask = CAUSAL, *, scale: float | None = None
) -> Tensor:
    """Return attention as ``paged_attention`` does, over the given rows' own keys and values, contiguous or not."""
    if is_traced(query):
        return attend_span(query, key, value, *spans, mask.causal, mask.window, mask.bias, scale)
    pages = Pages.of_rows(key.contiguous(), value.contiguous(), spans.offsets)
    return paged_attention(query, pages, spans, mask, scale=scale)


class TracedLayer(NamedTuple):
    """A stand-in for a layer's pages while a cell's step is traced."""

    state: TracedPages
    layer: int | None


class TracedLayers(list[TracedLayer]):
    """The keys and values of all layers of a state, while a step is traced."""

    def __init__(self, state: TracedPages) -> None:
        super().__init__(TracedLayer(state, layer) for layer in range(state[0].shape[1]))


class LayerPages(Sequence[Pages]):
    """The pages of each layer, in one tensor that has those of all; they are made on demand.

    ``pages`` ``[pages, layers, 2, page_size, kv_heads, head_dim]``: keys, then values.
    """

    def __init__(self, pages: Tensor, tables: Tensor, lengths: Tensor) -> None:
        self._pages, self._tables, self._lengths = pages, tables, lengths

    def __len__(self) -> int:
        return self._pages.shape[1]

    @overload
    def __getitem__(self, layer: int) -> Pages: ...

    @overload
    def __getitem__(self, layer: slice) -> list[Pages]: ...

    def __getitem__(self, layer: int | slice) -> Pages | list[Pages]:
        if isinstance(layer, slice):
            return [self[each] for each in range(*layer.indices(len(self)))]
        own = self._pages.select(1, layer)
        return Pages(own[:, 0], own[:, 1], self._tables, self._lengths)

    def addresses(self) -> NDArray[np.int64]:
        """Return the addresses of each layer's keys and values, ``[layers, 2]``."""
        size, first = self._pages.element_size(), self._pages.data_ptr()
        layer, value = self._pages.stride(1), self._pages.stride(2)
        of_layers: NDArray[np.int64] = first + size * layer * np.arange(len(self), dtype=np.int64)
        return np.stack([of_layers, of_layers + size * value], axis=1)


def settings_of(heads: int, pages: Pages, mask: Mask, scale: float) -> NDArray[np.int64]:
    """Return the first argument of ``attend`` and ``append``: what stays the same from task to task, without the
    bias.
    """
    kv_heads, head_dim = pages.keys.shape[2:]
    bias, reach = (0, 0) if mask.bias is None else (mask.bias.data_ptr(), mask.bias.shape[1] // 2)
    bits = np.float64(scale).view(np.int64)
    kind = KINDS[pages.keys.dtype]
    return np.array([heads, kv_heads, head_dim, kind, mask.causal, mask.window, bits, bias, reach])


def task_of(
    pages: Pages,
    spans: Spans,
    *,
    query: Tensor | None = None,
    out: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> NDArray[np.int64]:
    """Return the second argument of ``attend`` and ``append``: rows, pages, and the nodes that have them.

    It holds none of the tensors.
    """
    nodes, width = pages.tables.shape
    rows = [0 if tensor is None else tensor.data_ptr() for tensor in (query, out, key, value)]
    starts = 0 if pages.starts is None else pages.starts.data_ptr()
    return np.array(
        [
            *(nodes, spans.offsets.data_ptr(), spans.positions.data_ptr(), *rows),
            *(pages.keys.data_ptr(), pages.values.data_ptr(), pages.page_size, pages.keys.stride(0)),
            *(pages.tables.data_ptr(), width, pages.lengths.data_ptr(), starts),
        ]
    )


def _is_compiled(*tensors: Tensor) -> bool:
    return USES_HAND_WRITTEN and tensors[0].is_cpu and tensors[0].dtype in KINDS and is_eager(*tensors)
