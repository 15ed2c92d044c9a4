"""Projection and sampling in Triton: without the logits, or with them where top-k or top-p need a second look.

The bisections run over the integers in the order of the logits (``projection_tiles.ordered``), so they end at an exact
logit, after 32 steps at most, and at once where a count is met.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_sample.draw import Draw
from cellrt.kernels.projection import Projection, choose_tile
from cellrt.kernels.projection_tiles import (
    best_of_row_kernel,
    best_of_tile,
    logits_tile,
    ordered,
    store_token,
    token_of,
)

CHUNK = 2048
DRAWS = ("p_temperatures", "p_seeds", "p_steps")
FILTERS = ("p_top_k", "p_top_p")


@triton.jit
def gumbel_tile(b_seeds, b_steps, first_token, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Noise ``[ROWS, TOKENS]`` of the tokens from ``first_token`` on, a multiple of 4; see ``reference.gumbel``."""
    b_quads = (first_token // 4 + tl.arange(0, TOKENS // 4))[None, :] + tl.zeros((ROWS, 1), dtype=tl.int32)
    b_zeros = tl.zeros_like(b_quads)
    w0, w1, w2, w3 = tl.philox(b_seeds[:, None], b_quads, b_steps[:, None] + b_zeros, b_zeros, b_zeros)
    b_words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, TOKENS))
    b_small = (b_words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    b_series = b_small * (1 + b_small * (0.5 + b_small * 0.3333333333333333))
    b_large = -tl.log(1 - tl.minimum(b_small, 0.99999994))  # 1 - 2**-24
    return -tl.log(tl.where(b_small < 0.00390625, b_series, b_large))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_rows", *DRAWS])
def sample_kernel(
    p_arena,
    arena_stride,
    p_rows,
    num_rows,
    p_weight,
    p_bias,
    p_temperatures,
    p_seeds,
    p_steps,
    p_best,
    p_logits,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Writes logits to ``p_logits``, or without it the best token of each row's part, noise added, to ``p_best``."""
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    b_index = tl.load(p_rows + o_rows, mask=o_rows < num_rows, other=-1).to(tl.int64)
    b_is_row = b_index >= 0
    b_logits = logits_tile(
        p_arena,
        arena_stride,
        b_index,
        p_weight,
        p_bias,
        o_tokens,
        VOCABULARY,
        HIDDEN,
        p_bias is not None,
        DEPTH,
        PRECISION,
    )
    if p_logits is not None:
        p_row = p_logits + o_rows.to(tl.int64) * VOCABULARY
        tl.store(
            p_row[:, None] + o_tokens[None, :], b_logits, mask=b_is_row[:, None] & (o_tokens < VOCABULARY)[None, :]
        )
    else:
        b_temperatures = tl.load(p_temperatures + o_rows, mask=b_is_row, other=0.0)
        b_seeds = tl.load(p_seeds + o_rows, mask=b_is_row, other=0)
        b_steps = tl.load(p_steps + o_rows, mask=b_is_row, other=0)
        b_noise = gumbel_tile(b_seeds, b_steps, tl.program_id(1) * TOKENS, ROWS, TOKENS)
        b_best = best_of_tile(b_logits + b_temperatures[:, None] * b_noise, o_tokens, VOCABULARY)
        tl.store(p_best + o_rows * tl.num_programs(1) + tl.program_id(1), b_best, mask=b_is_row)


@triton.jit
def load_chunk(p_logits, start, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of a row's logits; -inf behind the vocabulary."""
    o_tokens = start + tl.arange(0, CHUNK)
    return tl.load(p_logits + o_tokens, mask=o_tokens < VOCABULARY, other=float("-inf"))


@triton.jit
def top_k_least(p_logits, most, k, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    """The least integer (see ``ordered``) that the k best logits of a row reach; ``most`` is the best one's."""
    low = most * 0 - 0x80000000
    high = most
    while low < high:
        middle = low + (high - low + 1) // 2
        b_counts = tl.zeros((CHUNK,), dtype=tl.int32)
        for start in range(0, VOCABULARY, CHUNK):
            b_order = ordered(load_chunk(p_logits, start, VOCABULARY, CHUNK)).to(tl.int64)
            b_is_token = start + tl.arange(0, CHUNK) < VOCABULARY
            b_counts += ((b_order >= middle) & b_is_token).to(tl.int32)
        count = tl.sum(b_counts, axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low


@triton.jit
def mass_from(p_logits, least, largest, temperature, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of ``exp((logit - largest) / temperature)`` over the logits whose integers reach ``least``."""
    b_sums = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, VOCABULARY, CHUNK):
        b_logits = load_chunk(p_logits, start, VOCABULARY, CHUNK)
        b_is_kept = ordered(b_logits).to(tl.int64) >= least
        b_sums += tl.where(b_is_kept, tl.exp((b_logits - largest) / temperature), 0.0)
    return tl.sum(b_sums, axis=0)


@triton.jit
def top_p_least(p_logits, least, most, largest, temperature, p, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    """Of the logits that reach ``least``, the least integer that those with the share p of their mass reach."""
    needed = p * mass_from(p_logits, least, largest, temperature, VOCABULARY, CHUNK)
    low = least
    high = most
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = mass_from(p_logits, middle, largest, temperature, VOCABULARY, CHUNK) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit(
    do_not_specialize=["stop_token"], do_not_specialize_on_alignment=["p_rows", "p_tokens", "p_stops", *DRAWS, *FILTERS]
)
def draw_kernel(
    p_rows,
    p_logits,
    p_temperatures,
    p_seeds,
    p_steps,
    p_top_k,
    p_top_p,
    p_tokens,
    p_stops,
    stop_token,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program draws one row's token from its logits."""
    row = tl.program_id(0)
    if tl.load(p_rows + row) >= 0:
        p_logits += row.to(tl.int64) * VOCABULARY
        temperature = tl.load(p_temperatures + row)
        b_largest = tl.full((CHUNK,), float("-inf"), dtype=tl.float32)
        for start in range(0, VOCABULARY, CHUNK):
            b_largest = tl.maximum(b_largest, load_chunk(p_logits, start, VOCABULARY, CHUNK))
        largest = tl.max(b_largest, axis=0)
        most = ordered(largest).to(tl.int64)
        least = most * 0 - 0x80000000
        if p_top_k is not None:
            k = tl.load(p_top_k + row)
            if (k > 0) & (k < VOCABULARY) & (temperature > 0):
                least = top_k_least(p_logits, most, k, VOCABULARY, CHUNK)
        if p_top_p is not None:
            p = tl.load(p_top_p + row)
            if (p < 1) & (temperature > 0):
                least = top_p_least(p_logits, least, most, largest, temperature, p, VOCABULARY, CHUNK)

        seed = tl.load(p_seeds + row + tl.zeros((1,), dtype=tl.int32))
        step = tl.load(p_steps + row + tl.zeros((1,), dtype=tl.int32))
        best = tl.full((1,), -(2**63), dtype=tl.int64)
        for start in range(0, VOCABULARY, CHUNK):
            b_logits = load_chunk(p_logits, start, VOCABULARY, CHUNK)[None, :]
            b_scores = b_logits + temperature * gumbel_tile(seed, step, start, 1, CHUNK)
            b_scores = tl.where(ordered(b_logits).to(tl.int64) >= least, b_scores, float("-inf"))
            best = tl.maximum(best, best_of_tile(b_scores, start + tl.arange(0, CHUNK), VOCABULARY))
        store_token(p_tokens, p_stops, row, token_of(tl.max(best, axis=0)), stop_token)


def project_sample(h: ArenaRows, projection: Projection, draw: Draw, tokens: Tensor, stops: Tensor) -> None:
    """Launches both stages; arguments are as in the operation, and are not checked."""
    num_rows, (vocabulary, hidden) = len(h.rows), projection.weight.shape
    if num_rows == 0:
        return
    is_filtered = draw.top_k is not None or draw.top_p is not None
    # Half as many tokens as for argmax alone: the noise, or the addresses of the logits, need registers too.
    tile = choose_tile(num_rows, projection)._replace(tokens=64)
    num_parts = triton.cdiv(vocabulary, tile.tokens)
    logits = torch.empty(num_rows, vocabulary, device=tokens.device) if is_filtered else None
    best = None if is_filtered else torch.empty(num_rows, num_parts, dtype=torch.int64, device=tokens.device)
    sample_kernel[(triton.cdiv(num_rows, tile.rows), num_parts)](
        h.values,
        h.values.stride(0),
        h.rows,
        num_rows,
        projection.weight,
        projection.bias,
        draw.temperatures,
        draw.seeds,
        draw.steps,
        best,
        logits,
        VOCABULARY=vocabulary,
        HIDDEN=hidden,
        PRECISION=projection.precision if h.values.dtype == torch.float32 else "ieee",
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    stop_token = -1 if projection.stop_token is None else projection.stop_token
    if logits is None:
        parts = triton.next_power_of_2(num_parts)
        best_of_row_kernel[(num_rows,)](h.rows, best, tokens, stops, num_parts, stop_token, PARTS=parts)
        return
    draw_kernel[(num_rows,)](
        h.rows,
        logits,
        draw.temperatures,
        draw.seeds,
        draw.steps,
        draw.top_k,
        draw.top_p,
        tokens,
        stops,
        stop_token,
        VOCABULARY=vocabulary,
        CHUNK=min(CHUNK, max(16, triton.next_power_of_2(vocabulary))),
        num_warps=8,
    )
