"""Projection and sampling in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_sample.draw import Draw
from cellrt.kernels.projection import Projection, plain_logits, put_tokens

WORD = 0xFFFFFFFF


def project_sample(h: ArenaRows, projection: Projection, draw: Draw, tokens: Tensor, stops: Tensor) -> None:
    """As the operation; arguments are not checked."""
    is_row = h.rows >= 0
    if not is_row.any():
        return
    rows = select_rows(draw, is_row)
    logits = plain_logits(h.values[h.rows[is_row].long()], projection)
    noise = gumbel(rows.seeds, rows.steps, logits.shape[1])
    scores = logits + rows.temperatures[:, None] * noise
    chosen = scores.masked_fill(~kept_tokens(logits, rows), -torch.inf).argmax(dim=1)
    put_tokens(is_row, chosen, projection, tokens, stops)


def select_rows(draw: Draw, rows: Tensor) -> Draw:
    """The values of some rows, by mask or by number."""
    temperatures, seeds, steps, top_k, top_p = draw
    return Draw(
        temperatures[rows],
        seeds[rows],
        steps[rows],
        None if top_k is None else top_k[rows],
        None if top_p is None else top_p[rows],
    )


def kept_tokens(logits: Tensor, draw: Draw) -> Tensor:
    """Which tokens ``[rows, vocabulary]`` may be drawn."""
    is_kept = torch.ones_like(logits, dtype=torch.bool)
    if draw.top_k is not None:
        size = logits.shape[1]
        k = torch.where(draw.top_k <= 0, size, draw.top_k.clamp(max=size)).long()
        is_kept &= logits >= logits.sort(dim=1, descending=True).values.gather(1, k[:, None] - 1)
    if draw.top_p is not None:
        ordered = logits.masked_fill(~is_kept, -torch.inf).sort(dim=1, descending=True).values
        warm = draw.temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        likely = torch.softmax((ordered - ordered[:, :1]) / warm, dim=1)
        is_inside = likely.cumsum(dim=1) - likely < draw.top_p[:, None]
        last = (is_inside.sum(dim=1, keepdim=True) - 1).clamp(min=0)
        least = torch.where(draw.top_p[:, None] < 1, ordered.gather(1, last), -torch.inf)
        is_kept &= logits >= least
    return is_kept


def gumbel(seeds: Tensor, steps: Tensor, vocabulary: int) -> Tensor:
    """Noise ``[rows, vocabulary]`` of Gumbel's distribution, float32.

    A token's random word is one of the four that Philox gives for the counter (token // 4, step, 0, 0) and the seed.
    The word w stands for the probability (w + 1/2) / 2**32, exact to 24 bits however small it is; the largest noise,
    which decides, comes from the smallest.
    """
    tokens = torch.arange(vocabulary, device=seeds.device)
    quads, zero = tokens[None, ::4] // 4, torch.zeros_like(tokens[:1])
    words = philox(seeds[:, None], quads, steps[:, None].long() & WORD, zero, zero)
    small = (torch.stack(words, dim=2).flatten(1)[:, :vocabulary].float() + 0.5) * 2.0**-32
    series = small * (1 + small * (0.5 + small * (1 / 3)))
    return -torch.log(torch.where(small < 2.0**-8, series, -torch.log(1 - small.clamp(max=1 - 2.0**-24))))


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011) of a counter of four words: four words as int64, of the broadcast shape."""
    k0, k1, c0, c1, c2, c3 = torch.broadcast_tensors(seeds & WORD, (seeds >> 32) & WORD, c0, c1, c2, c3)
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c2 = ((right >> 32) & WORD) ^ c1 ^ k0, ((left >> 32) & WORD) ^ c3 ^ k1
        c1, c3 = right & WORD, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
