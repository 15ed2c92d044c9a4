"""Attention over keys and values in pages, for any number of query rows a node (ORCA section 4, Pensieve 3.4.4).

One operation for three uses. A decoder: each node has the rows of a prompt's chunk or of one step, its keys grow in
pages that need not lie together, and a row sees no key after it. An encoder: keys are the ragged rows themselves
(``Pages.of_rows``), all seen. Cross-attention: rows of one span look at all keys of another, which were made once.

    a_j = exp(scale q . k_j + bias(j - p)) / sum over seen k,   out = sum_j a_j v_j       for a query at position p

Heads are grouped (Ainslie et al. 2023): neighbouring heads of the query share a head of the keys.
"""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.choose import uses_triton
from cellrt.kernels.paged_attention import reference
from cellrt.kernels.paged_attention.pages import CAUSAL, Mask, Pages, Spans, check, check_appended

__all__ = ["Mask", "Pages", "Spans", "append_pages", "paged_attention"]


def paged_attention(
    query: Tensor, pages: Pages, spans: Spans, mask: Mask = CAUSAL, *, scale: float | None = None
) -> Tensor:
    """Return the attention of each query row: ``[rows, heads, head_dim]``, shaped and typed as ``query``.

    ``query`` has the dtype of the keys (float32, bfloat16 or float16) and ``heads``, a multiple of their ``kv_heads``;
    scores and sums are float32. ``scale`` is 1 / sqrt(head_dim) unless it is given. A row that sees no key gives zeros.

    Tables, lengths and offsets must be right, which is not checked. Raise ValueError for shapes and types that do not
    fit.
    """
    check(query, pages, spans, mask)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if uses_triton(query):
        from cellrt.kernels.paged_attention import triton

        return triton.paged_attention(query, pages, spans, mask, scale)
    return reference.paged_attention(query, pages, spans, mask, scale)


def append_pages(pages: Pages, spans: Spans, key: Tensor, value: Tensor) -> None:
    """Write rows ``[rows, kv_heads, head_dim]`` to the slots of their positions, in place.

    No two rows of a call may have one slot. Raise ValueError for shapes and types that do not fit.
    """
    check_appended(pages, spans, key, value)
    if uses_triton(key):
        from cellrt.kernels.paged_attention import triton

        triton.append_pages(pages, spans, key, value)
    else:
        reference.append_pages(pages, spans, key, value)
