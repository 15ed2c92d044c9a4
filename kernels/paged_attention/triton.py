"""Attention over pages in Triton: a program a tile of one node's query rows, a head of the keys, and a part of them.

How many rows each node has is known on the device alone, so the grid is as large as it can get, and a program finds its
node: the tiles of node n begin at number ``offsets[n] // rows of a tile + n``, which leaves room for one begun tile a
node. The query heads that share a head of the keys are rows of one tile.

Long contexts are cut into parts of ``split_keys`` keys, whose sums a second kernel puts together (Dao et al. 2023,
"Flash-Decoding"): a step of few rows alone would leave most of a device idle. With one ``split_keys`` for all launches
a row's result depends on what else is in its own only by the size of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.gate_weights import Precision
from cellrt.kernels.paged_attention.pages import Mask, Pages, Spans
from cellrt.kernels.tiles import device_limits

LOG2_E = 1.4426950408889634
LEAST_SPLIT = 256
"""Fewer keys are not worth a program of their own."""
WORDS = ("p_tables", "p_lengths", "p_starts", "p_offsets", "p_positions")


@triton.jit
def find_node(p_offsets, nodes, number, ROWS: tl.constexpr):
    """Return the last node whose first tile, of ``ROWS`` rows, is not behind tile ``number``; 0: tiles are rows."""
    low = 0
    high = nodes - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(p_offsets + middle)
        if ROWS > 0:
            first = first // ROWS + middle
        if first <= number:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def key_places(p_table, o_keys, b_is_key, start, page_size, page_stride, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return where each key begins; a key with all its heads has ``SIZE`` numbers."""
    size = page_size
    if PAGE_SIZE > 0:
        size = PAGE_SIZE
    o_slots = start + o_keys
    b_page = tl.load(p_table + o_slots // size, mask=b_is_key, other=0).to(tl.int64)
    return b_page * page_stride + (o_slots % size) * SIZE


@triton.jit(
    do_not_specialize=["nodes", "page_size", "table_width", "window", "reach", "split_keys", "num_rows"],
    do_not_specialize_on_alignment=WORDS,
)
def attend_kernel(
    p_query,
    p_keys,
    p_values,
    p_tables,
    p_lengths,
    p_starts,
    p_offsets,
    p_positions,
    p_bias,
    p_out,
    p_part,
    p_highest,
    p_total,
    nodes,
    page_size,
    page_stride,
    table_width,
    window,
    reach,
    split_keys,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Compute a tile; the package and this file explain the arguments. ``scale`` includes the logarithm's base."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = BLOCK_QUERIES // GROUP
    head = tl.program_id(1)
    part = tl.program_id(2)
    node = find_node(p_offsets, nodes, tl.program_id(0), ROWS)
    begin = tl.load(p_offsets + node)
    end = tl.load(p_offsets + node + 1)
    first = begin + (tl.program_id(0) - (begin // ROWS + node)) * ROWS
    if first >= end:
        return
    o_queries = tl.arange(0, BLOCK_QUERIES)
    o_rows = first + o_queries // GROUP
    o_heads = head * GROUP + o_queries % GROUP
    b_is_row = (o_queries < ROWS * GROUP) & (o_rows < end)
    o_dim = tl.arange(0, BLOCK_DIM)
    b_is_dim = o_dim < HEAD_DIM
    o_flat = o_rows.to(tl.int64) * HEADS + o_heads
    b_mask = b_is_row[:, None] & b_is_dim[None, :]
    b_query = tl.load(p_query + o_flat[:, None] * HEAD_DIM + o_dim[None, :], mask=b_mask, other=0.0)

    length = tl.load(p_lengths + node)
    b_position = tl.load(p_positions + o_rows, mask=b_is_row, other=0)
    b_low = tl.zeros_like(b_position)
    b_high = b_low + length
    if CAUSAL:
        b_high = tl.minimum(b_high, b_position + 1)
    if WINDOW:
        b_low = tl.maximum(b_low, b_position - window + 1)
        b_high = tl.minimum(b_high, b_position + window)
    low = tl.min(tl.where(b_is_row, b_low, length))
    high = tl.max(tl.where(b_is_row, b_high, 0))
    low = (low // BLOCK_KEYS) * BLOCK_KEYS
    if SPLIT:
        low = tl.maximum(low, part * split_keys)
        high = tl.minimum(high, (part + 1) * split_keys)
    start = 0
    if p_starts is not None:
        start = tl.load(p_starts + node)
    p_table = p_tables + node.to(tl.int64) * table_width

    b_highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_QUERIES], tl.float32)
    b_sums = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for block in range(low, high, BLOCK_KEYS):
        o_keys = block + tl.arange(0, BLOCK_KEYS)
        b_is_key = o_keys < length
        o_place = head * HEAD_DIM + key_places(
            p_table, o_keys, b_is_key, start, page_size, page_stride, KV_HEADS * HEAD_DIM, PAGE_SIZE
        )
        b_key_mask = b_is_key[:, None] & b_is_dim[None, :]
        b_key = tl.load(p_keys + o_place[:, None] + o_dim[None, :], mask=b_key_mask, other=0.0)
        b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale
        if p_bias is not None:
            b_distance = tl.minimum(tl.maximum(o_keys[None, :] - b_position[:, None], -reach), reach)
            p_entry = p_bias + o_heads[:, None] * (2 * reach + 1) + reach + b_distance
            b_scores += tl.load(p_entry, mask=b_is_row[:, None], other=0.0) * 1.4426950408889634
        b_seen = (o_keys[None, :] >= b_low[:, None]) & (o_keys[None, :] < b_high[:, None])
        b_scores = tl.where(b_seen, b_scores, float("-inf"))
        b_next = tl.maximum(b_highest, tl.max(b_scores, 1))
        # Where nothing was seen so far, there is nothing to subtract.
        b_reference = tl.where(b_next > float("-inf"), b_next, 0.0)
        b_factor = tl.exp2(b_highest - b_reference)
        b_weights = tl.exp2(b_scores - b_reference[:, None])
        b_total = b_total * b_factor + tl.sum(b_weights, 1)
        b_value = tl.load(p_values + o_place[:, None] + o_dim[None, :], mask=b_key_mask, other=0.0)
        b_sums = b_sums * b_factor[:, None]
        b_sums = tl.dot(b_weights.to(b_value.dtype), b_value, b_sums, input_precision=PRECISION)
        b_highest = b_next

    if SPLIT:
        o_part = part.to(tl.int64) * num_rows * HEADS + o_flat
        tl.store(p_highest + o_part, b_highest, mask=b_is_row)
        tl.store(p_total + o_part, b_total, mask=b_is_row)
        # Nobody reads the sums of what saw no key.
        b_mask = b_mask & (b_highest > float("-inf"))[:, None]
        tl.store(p_part + o_part[:, None] * HEAD_DIM + o_dim[None, :], b_sums, mask=b_mask)
    else:
        b_out = b_sums / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
        tl.store(p_out + o_flat[:, None] * HEAD_DIM + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=b_mask)


@triton.jit(do_not_specialize=["num_queries", "parts"])
def join_parts_kernel(
    p_part,
    p_highest,
    p_total,
    p_out,
    num_queries,
    parts,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Run the second stage: add up the sums of all parts of some queries, each scaled to the highest score of all."""
    o_queries = tl.program_id(0).to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    o_dim = tl.arange(0, BLOCK_DIM)
    b_is_query = o_queries < num_queries
    b_highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_QUERIES], tl.float32)
    b_sums = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for part in range(parts):
        o_part = part * num_queries + o_queries
        b_own = tl.load(p_highest + o_part, mask=b_is_query, other=float("-inf"))
        b_next = tl.maximum(b_highest, b_own)
        b_reference = tl.where(b_next > float("-inf"), b_next, 0.0)
        b_old, b_new = tl.exp2(b_highest - b_reference), tl.exp2(b_own - b_reference)
        b_mask = (b_own > float("-inf"))[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_part = tl.load(p_part + o_part[:, None] * HEAD_DIM + o_dim[None, :], mask=b_mask, other=0.0)
        b_sums = b_sums * b_old[:, None] + b_part * b_new[:, None]
        b_total = b_total * b_old + tl.load(p_total + o_part, mask=b_is_query, other=0.0) * b_new
        b_highest = b_next
    b_out = b_sums / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    p_block = p_out + o_queries[:, None] * HEAD_DIM + o_dim[None, :]
    tl.store(p_block, b_out.to(p_out.dtype.element_ty), mask=b_is_query[:, None] & (o_dim < HEAD_DIM)[None, :])


@triton.jit(
    do_not_specialize=["nodes", "page_size", "table_width"],
    do_not_specialize_on_alignment=[word for word in WORDS if word != "p_lengths"],
)
def append_kernel(
    p_keys,
    p_values,
    p_tables,
    p_starts,
    p_offsets,
    p_positions,
    p_key,
    p_value,
    nodes,
    page_size,
    page_stride,
    table_width,
    SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its key and its value, ``SIZE`` numbers each, to the slot of its position."""
    row = tl.program_id(0).to(tl.int64)
    node = find_node(p_offsets, nodes, row, 0)
    start = 0
    if p_starts is not None:
        start = tl.load(p_starts + node)
    p_table = p_tables + node.to(tl.int64) * table_width
    place = key_places(p_table, tl.load(p_positions + row), True, start, page_size, page_stride, SIZE, PAGE_SIZE)
    o_block = tl.arange(0, BLOCK)
    b_mask = o_block < SIZE
    tl.store(p_keys + place + o_block, tl.load(p_key + row * SIZE + o_block, mask=b_mask), mask=b_mask)
    tl.store(p_values + place + o_block, tl.load(p_value + row * SIZE + o_block, mask=b_mask), mask=b_mask)


def paged_attention(
    query: Tensor,
    pages: Pages,
    spans: Spans,
    mask: Mask,
    scale: float,
    *,
    split_keys: int | None = None,
    precision: Precision = "ieee",
) -> Tensor:
    """Launch both stages, or the first alone; arguments are as in the operation, and are not checked.

    ``split_keys``: the keys that a program takes, a multiple of 64; 0: all; None: as many as fill the device.
    ``precision`` is how float32 is multiplied.
    """
    query = query.contiguous()
    out = torch.empty_like(query)
    num_rows, heads, head_dim = query.shape
    nodes, table_width = pages.tables.shape
    kv_heads = pages.keys.shape[2]
    if num_rows == 0:
        return out
    tile = choose_tile(query, heads // kv_heads, nodes)
    tiles = num_rows // (tile.queries // (heads // kv_heads)) + nodes
    most_keys = table_width * pages.page_size
    if split_keys is None:
        split_keys = choose_split(tiles * kv_heads, most_keys, query.device)
    parts = triton.cdiv(most_keys, split_keys) if split_keys else 1
    split: tuple[Tensor | None, ...] = (None, None, None)
    if parts > 1:
        shape, numbers = (parts, num_rows, heads), query.new_empty(0, dtype=torch.float32)
        split = numbers.new_empty(*shape, head_dim), numbers.new_empty(shape), numbers.new_empty(shape)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    attend_kernel[(tiles, kv_heads, parts)](
        query,
        pages.keys,
        pages.values,
        pages.tables,
        pages.lengths,
        pages.starts,
        *spans,
        mask.bias,
        out,
        *split,
        nodes,
        pages.page_size,
        pages.keys.stride(0),
        table_width,
        mask.window,
        0 if mask.bias is None else mask.bias.shape[1] // 2,
        split_keys,
        num_rows,
        scale * LOG2_E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=constant_page_size(pages),
        CAUSAL=mask.causal,
        WINDOW=mask.window > 0,
        SPLIT=parts > 1,
        PRECISION=precision if query.dtype == torch.float32 else "ieee",
        BLOCK_QUERIES=tile.queries,
        BLOCK_KEYS=tile.keys,
        BLOCK_DIM=block_dim,
        num_warps=tile.warps,
        num_stages=2,
        maxnreg=255,  # left alone the assembler spills a few bytes to use fewer
    )
    if parts > 1:
        join_parts_kernel[(triton.cdiv(num_rows * heads, 16),)](
            *split, out, num_rows * heads, parts, HEAD_DIM=head_dim, BLOCK_QUERIES=16, BLOCK_DIM=block_dim
        )
    return out


def append_pages(pages: Pages, spans: Spans, key: Tensor, value: Tensor) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    if key.shape[0] == 0:
        return
    size = key.shape[1] * key.shape[2]
    nodes, table_width = pages.tables.shape
    append_kernel[(key.shape[0],)](
        pages.keys,
        pages.values,
        pages.tables,
        pages.starts,
        *spans,
        key.contiguous(),
        value.contiguous(),
        nodes,
        pages.page_size,
        pages.keys.stride(0),
        table_width,
        SIZE=size,
        PAGE_SIZE=constant_page_size(pages),
        BLOCK=triton.next_power_of_2(size),
    )


class QueryTile(NamedTuple):
    """A program sees ``keys`` keys at a time for ``queries`` queries, both powers of two; ``warps`` of 32 threads."""

    queries: int
    keys: int
    warps: int


def choose_tile(query: Tensor, group: int, nodes: int) -> QueryTile:
    """Return the tile: few queries if most nodes have one row, else as many as registers can hold.

    There is room for a row of every group.
    """
    is_float32, is_wide = query.dtype == torch.float32, query.shape[2] > 64
    if query.shape[0] * group <= 16 * nodes:
        tile = QueryTile(16, 32, 8 if is_wide else 4) if is_float32 else QueryTile(16, 64, 4)
    elif is_float32:
        tile = QueryTile(32, 16, 8) if is_wide else QueryTile(32, 32, 8)
    else:
        tile = QueryTile(64, 64, 8 if is_wide else 4)
    return tile._replace(queries=max(tile.queries, int(triton.next_power_of_2(group))))


def choose_split(programs: int, most_keys: int, device: torch.device) -> int:
    """Return how many keys a program takes, so that each processor has two programs; 0 if one part is enough."""
    processors, _ = device_limits(device)
    parts = min(2 * processors // max(programs, 1), most_keys // LEAST_SPLIT)
    return int(triton.cdiv(most_keys, 64 * parts)) * 64 if parts > 1 else 0


def constant_page_size(pages: Pages) -> int:
    """Return the page size if it is a constant of the kernel; 0 for ragged rows, whose only page is as large as they
    are.
    """
    return 0 if pages.starts is not None else pages.page_size
