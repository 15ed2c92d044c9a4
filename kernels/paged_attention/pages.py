"""The arguments of attention beside its queries: pages of keys and values, and the nodes that query rows belong to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Pages(NamedTuple):
    """The keys and values that each node looks at, where they lie.

    Key number j of a node lies in slot ``(start + j) % page_size`` of page ``table[(start + j) // page_size]``, with
    the node's row of ``tables`` and its number in ``starts`` (0 without). So a growing sequence has a list of pages, in
    any order, and may share them with others. The ragged rows of an encoder are one page that holds all nodes' rows, in
    which each node starts at its offset (``of_rows``).

    Attributes:
        keys, values: ``[pages, page_size, kv_heads, head_dim]``; float32, bfloat16 or float16. A page is contiguous;
            the step from page to page is free, the same for both: they may be a layer's part of larger pages.
        tables: int32 ``[nodes, pages of the longest]``, contiguous; what lies behind a node's last page is not read.
        lengths: int32 ``[nodes]``, how many keys there are.
        starts: int32 ``[nodes]``, where key 0 lies, counted from the first slot of the first page; None: there.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.keys.shape[1]

    @classmethod
    def of_rows(cls, key: Tensor, value: Tensor, offsets: Tensor) -> Pages:
        """Return ragged rows as they are, without a copy: ``key`` and ``value`` ``[rows, kv_heads, head_dim]``, of
        node n those from ``offsets[n]`` to ``offsets[n + 1]``.
        """
        tables = offsets.new_zeros(offsets.shape[0] - 1, 1)
        return cls(key[None], value[None], tables, offsets.diff(), offsets[:-1])

    def slots(self, nodes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page and the slot of each of these keys: int64, shaped as ``nodes`` and ``positions``."""
        at = positions.long() if self.starts is None else positions.long() + self.starts.long()[nodes]
        return self.tables.long()[nodes, at // self.page_size], at % self.page_size


class Spans(NamedTuple):
    """The node of each query row, and its position in the node's sequence.

    Attributes:
        offsets: int32 ``[nodes + 1]``: node n has the rows from ``offsets[n]`` to ``offsets[n + 1]``, maybe none.
        positions: int32 ``[rows]``, in any order and with gaps: a request whose first keys were dropped recomputes them
            together with its new rows (Pensieve section 3.4.3.4).
    """

    offsets: Tensor
    positions: Tensor

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> Spans:
        """Return the spans of whole sequences of these lengths, int32 ``[nodes]``: positions start at 0 in each."""
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        rows = torch.arange(int(offsets[-1]), dtype=torch.int32, device=lengths.device)
        return cls(offsets, rows - offsets[:-1].repeat_interleave(lengths))

    def nodes(self) -> Tensor:
        """Return the node of each row: int64 ``[rows]``."""
        nodes = torch.arange(self.offsets.shape[0] - 1, device=self.offsets.device)
        return nodes.repeat_interleave(self.offsets.diff(), output_size=self.positions.shape[0])


class Mask(NamedTuple):
    """The keys that a query sees, and a bias that is added to their scores.

    Attributes:
        causal: keys at positions after the query's own are not seen.
        window: only keys less than this far away are seen; 0: however far.
        bias: float32 ``[heads, 2 * reach + 1]``, contiguous: entry ``reach + d`` is added to the score of a key d
            positions after the query; distances beyond the reach have the bias of its end. T5's relative positions.
    """

    causal: bool = True
    window: int = 0
    bias: Tensor | None = None


CAUSAL = Mask()


def check(query: Tensor, pages: Pages, spans: Spans, mask: Mask) -> None:
    """Raise ValueError for shapes, types or layouts that do not fit. No number inside a tensor is looked at."""
    check_pages(query, pages, spans)
    heads, kv_heads = query.shape[1], pages.keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"query must have a multiple of the {kv_heads} heads of the keys, got {heads}")
    if mask.window < 0:
        raise ValueError(f"window must be at least 1, or 0 for none, got {mask.window}")
    bias = mask.bias
    if bias is not None and (bias.ndim != 2 or bias.shape[0] != heads or bias.shape[1] % 2 == 0):
        raise ValueError(f"bias must be [{heads} heads, 2 * reach + 1], got {tuple(bias.shape)}")
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous float32, got {bias.dtype}")


def check_pages(rows: Tensor, pages: Pages, spans: Spans) -> None:
    """Check as ``check`` does, for rows ``[rows, heads, head_dim]`` that belong to these pages."""
    keys, nodes = pages.keys, pages.tables.shape[0]
    if keys.ndim != 4 or keys.dtype not in DTYPES or not keys[:1].is_contiguous():
        raise ValueError(
            "keys must be contiguous pages [pages, page_size, kv_heads, head_dim] of float32, bfloat16 or float16, "
            f"got {keys.dtype} {tuple(keys.shape)} with strides {keys.stride()}"
        )
    values = pages.values
    is_alike = values.shape == keys.shape and values.dtype == keys.dtype and values[:1].is_contiguous()
    if not is_alike or (len(keys) > 1 and values.stride(0) != keys.stride(0)):
        raise ValueError(f"values must be as the keys, got {values.dtype} {tuple(values.shape)}")
    if rows.ndim != 3 or rows.shape[2] != keys.shape[3] or rows.dtype != keys.dtype:
        raise ValueError(
            f"rows must be {keys.dtype} [rows, heads, {keys.shape[3]}] as the keys are, "
            f"got {rows.dtype} {tuple(rows.shape)}"
        )
    shapes = {"tables": (nodes, None), "lengths": (nodes,), "offsets": (nodes + 1,), "positions": (rows.shape[0],)}
    given = {"tables": pages.tables, "lengths": pages.lengths, **spans._asdict()}
    if pages.starts is not None:
        shapes["starts"], given["starts"] = (nodes,), pages.starts
    for name, tensor in given.items():
        check_numbers(name, tensor, shapes[name], keys)


def check_appended(pages: Pages, spans: Spans, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless these rows can be written to these pages."""
    check_pages(key, pages, spans)
    heads, head_dim = pages.keys.shape[2:]
    if key.shape != value.shape or key.dtype != value.dtype or key.shape[1] != heads:
        raise ValueError(
            f"key and value must be {pages.keys.dtype} [rows, {heads}, {head_dim}], "
            f"got {tuple(key.shape)} and {value.dtype} {tuple(value.shape)}"
        )


def check_numbers(name: str, tensor: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous int32 of this shape (None: any size) beside ``like``."""
    fits = tensor.ndim == len(shape) and all(size in (None, have) for size, have in zip(shape, tensor.shape))
    if not fits or tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device != like.device:
        raise ValueError(
            f"{name} must be contiguous int32 {list(shape)} on {like.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
